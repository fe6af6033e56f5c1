"""Peak memory of PPO heads on a virtual NPU (arithmetic by the CPU), by torch_npu's own allocator.

It books what tensors a head holds at once, which is the same on a device; what aclnn or Triton-Ascend need besides is
not in it. docs/ascend.md has the figures of the full-size test.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import npu_backend
from npu_backend import triton_interpreter, virtual_npu
from npu_backend.head import inputs, rows_ascend
from npu_backend.virtual_npu import fallback

MIB = 1 << 20
if virtual_npu.is_active() and triton_interpreter.why_unusable() is not None:
    pytest.skip(str(triton_interpreter.why_unusable()), allow_module_level=True)

Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def ours(chunk_rows: int) -> Head:
    head = npu_backend.FusedLinearForPPO(chunk_size=chunk_rows, impl_backend="triton")
    return lambda hidden, weight, labels: head.forward(hidden, weight, labels, temperature=0.7)


def verls(chunk_rows: int) -> Head:
    """verl's chunked head from its file, as it is without anybody's patches."""
    (folder,) = importlib.util.find_spec("verl").submodule_search_locations
    spec = importlib.util.spec_from_file_location("verls_own_head", f"{folder}/utils/experimental/torch_functional.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda hidden, weight, labels: module.FusedLinearForPPOFunction.apply(
        hidden, weight, labels, 0.7, chunk_rows
    )


def ligers(chunk_rows: int) -> Head:
    """What Liger runs on an NPU: its chunked loop in torch."""
    function: ModuleType = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")

    def head(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        assert chunk_rows == function._FALLBACK_CHUNK_SIZE
        with mock.patch.object(function, "_validate_fallback_inputs"):  # it reads values from the device
            return function.LigerFusedLinearScaledCrossEntropyFunction.apply(
                hidden, weight, labels, temperature=0.7, return_entropy=True
            )

    return head


def peak_above_inputs(head: Head, tokens: int, hidden_size: int, vocab_size: int) -> int:
    """Bytes, of one forward and backward in bfloat16 with both gradients."""
    gc.collect()
    torch.npu.empty_cache()  # a cached block that is up to 1 MiB larger than what is asked for counts as a whole
    hidden = torch.randn(tokens, hidden_size, device="npu:0").bfloat16().requires_grad_()
    weight = (torch.randn(vocab_size, hidden_size, device="npu:0") / hidden_size**0.5).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab_size, (tokens,), device="npu:0")
    upstream = torch.ones(tokens, device="npu:0")
    gc.collect()  # what is left in a cycle must not be freed while this is measured
    torch.npu.empty_cache()
    torch.npu.synchronize()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    with inputs.trusted_values():  # nothing is read from a device that computes nothing
        log_probs, entropy = head(hidden, weight, labels)
    torch.autograd.backward([log_probs, entropy], [upstream, upstream.to(entropy.dtype)])
    assert hidden.grad is not None
    assert weight.grad is not None
    return torch.npu.max_memory_allocated() - before


def peers() -> dict[str, Callable[[int], Head]]:
    wanted = {"verl": verls, "liger_kernel": ligers}
    return {name: head for name, head in wanted.items() if importlib.util.find_spec(name) is not None}


@pytest.fixture(scope="module", autouse=True)
def _trial_is_over() -> None:
    """The trial of the kernels allocates too, once."""
    if virtual_npu.is_active():
        peak_above_inputs(ours(4), 4, 16, 300)


@pytest.fixture
def without_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators allocate their results and compute nothing, and our kernels do not run: it would take hours."""
    monkeypatch.setattr(fallback, "to_cpu", _to_meta)
    monkeypatch.setattr(fallback, "from_cpu", _from_meta)
    monkeypatch.setattr(rows_ascend, "_run", lambda *_: None)


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [_to_meta(item) for item in value]
    return torch.device("meta") if isinstance(value, torch.device) else value


def _from_meta(value: Any, device: torch.device, given: dict[int, Tensor] | None = None) -> Any:
    if isinstance(value, Tensor) and given and id(value) in given:
        return given[id(value)]
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, (list, tuple)):
        return type(value)(_from_meta(item, device, given) for item in value)
    return value


@pytest.fixture
def tidy_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter leaves tensors in cycles: no memory of the head's, and freed whenever Python happens to."""
    interpret = rows_ascend._run

    def run(*arguments: Any) -> None:
        interpret(*arguments)
        gc.collect()

    monkeypatch.setattr(rows_ascend, "_run", run)


@pytest.mark.usefixtures("tidy_interpreter")
def test_arithmetic_allocates_nothing_but_its_results(request: pytest.FixtureRequest) -> None:
    sizes = {"tokens": 8, "hidden_size": 64, "vocab_size": 16384}
    with_them = peak_above_inputs(ours(4), **sizes)
    request.getfixturevalue("without_arithmetic")
    # The interpreter itself copies vectors of a few values to the device and back.
    assert abs(with_them - peak_above_inputs(ours(4), **sizes)) <= 8192


@pytest.mark.usefixtures("without_arithmetic")
@pytest.mark.parametrize("name", list(peers()))
def test_the_published_figures(name: str) -> None:
    """docs/ascend.md has what this prints (`pytest -s`)."""
    sizes = {"tokens": 4096, "hidden_size": 1024, "vocab_size": 151936}
    mine = peak_above_inputs(ours(512), **sizes)
    theirs = peak_above_inputs(peers()[name](512), **sizes)
    print(f"\nN=4096 H=1024 V=151936 bfloat16: ours {mine / MIB:.0f} MiB, {name} {theirs / MIB:.0f} MiB")
    assert 3 * mine <= theirs
