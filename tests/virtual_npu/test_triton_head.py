"""The PPO head's Ascend backend end to end on a virtual NPU (arithmetic by the CPU), in Triton's interpreter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from references import HeadCase, assert_head_matches, assert_within_nats, head_case, run_head
from torch import Tensor

import npu_backend
from npu_backend import log, triton_interpreter, virtual_npu
from npu_backend.errors import BackendUnavailableError
from npu_backend.head import ascend_launches, backends, rows_ascend, triton_npu, vocab_tiles
from npu_backend.head.ascend_launches import KernelLaunch

if virtual_npu.is_active() and triton_interpreter.why_unusable() is not None:
    pytest.skip(str(triton_interpreter.why_unusable()), allow_module_level=True)
NPU = "npu:0"
OVERFLOW = "ub overflow, requires 8577280 bits while 1572864 bits available! (possible reason: large block)"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(vocab_tiles, "NARROWEST", 256)  # several tiles even here
    triton_npu._trial.cache_clear()
    log.forget_warnings()
    yield
    triton_npu._trial.cache_clear()
    log.forget_warnings()


def head(name: str | None, **options: object) -> Callable[[HeadCase], tuple[Tensor, Tensor | None]]:
    """The head on the NPU, as a function of a case on the CPU."""

    def run(case: HeadCase) -> tuple[Tensor, Tensor | None]:
        there = case.on(NPU)
        output = npu_backend.linear_log_prob(
            there.hidden, there.weight, there.labels, **there.options(), impl_backend=name, **options
        )
        assert output.backend == name
        return output.log_probs.cpu(), None if output.entropy is None else output.entropy.cpu()

    return run


@pytest.mark.parametrize(
    ("dtype", "shape", "fields"),
    [
        (torch.bfloat16, (20,), {"temperature": 0.7}),
        (torch.float16, (2, 9), {"temperature": torch.linspace(0.5, 2.0, 18).reshape(2, 9)}),
        (torch.float32, (7,), {"softcap": 5.0, "bias": torch.linspace(-1.0, 1.0, 901), "logit_scale": 2.0}),
    ],
)
def test_triton_gives_what_torch_gives(dtype: torch.dtype, shape: tuple[int, ...], fields: dict[str, object]) -> None:
    case = head_case(*shape, vocab_size=901, dtype=dtype, **fields)
    labels = case.labels.clone()
    labels.view(-1)[::5] = -100
    case = replace(case, labels=labels)
    got = assert_head_matches(case, head("triton"))
    by_torch = run_head(case, head("torch"))
    rounding = 4 * torch.finfo(dtype).eps
    for name, value in by_torch.items():
        assert torch.allclose(got[name].float(), value.float(), rtol=rounding, atol=rounding), name


def test_strided_inputs_and_a_temperature_on_the_device() -> None:
    """The kernels took elements for neighbours that were not; of one temperature for all there is one element only."""
    fields = {"temperature": torch.linspace(0.5, 2.0, 10), "bias": torch.linspace(-1.0, 1.0, 901)}
    spaced = head_case(2, 5, vocab_size=901, **fields)
    assert_head_matches(spaced, lambda case: head("triton")(case.on(NPU).spaced()))
    assert_head_matches(head_case(6, vocab_size=901, temperature=torch.tensor(0.7)), head("triton"))


@pytest.mark.parametrize("temperature", [1e39, torch.full((6,), 1e39, dtype=torch.float64)])
def test_a_temperature_beyond_float32_makes_every_token_equally_likely(temperature: float | Tensor) -> None:
    bias = torch.zeros(901)
    bias[900:] = -torch.inf
    case = head_case(6, vocab_size=901, temperature=temperature, bias=bias)
    got = assert_head_matches(replace(case, labels=case.labels % 900), head("triton"))
    assert torch.allclose(got["log_probs"], -torch.tensor(900.0).log())


def test_verls_class_and_a_call_without_tokens_or_gradients() -> None:
    case = head_case(2, 6, vocab_size=901, dtype=torch.bfloat16)
    there = [tensor.to(NPU) for tensor in (case.hidden, case.weight, case.labels)]
    module = npu_backend.FusedLinearForPPO(chunk_size=2, impl_backend="triton")
    log_probs, entropy = module.forward(*there, temperature=0.7)
    expected = npu_backend.FusedLinearForPPO(chunk_size=2, impl_backend="torch").forward(*there, temperature=0.7)
    assert torch.allclose(log_probs, expected[0], atol=1e-5)
    assert torch.allclose(entropy, expected[1], atol=1e-5)
    weight = there[1].requires_grad_()
    empty = npu_backend.linear_log_prob(there[0][:, :0], weight, there[2][:, :0], impl_backend="triton")
    (grad,) = torch.autograd.grad(empty.log_probs.sum(), weight)
    assert not grad.any()


def test_the_fused_forward_runs_where_it_is_asked_for_and_no_gradient_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[str] = []
    run = rows_ascend._run
    monkeypatch.setattr(rows_ascend, "_run", lambda launch, *rest: (launched.append(launch.kernel), run(launch, *rest)))
    case = head_case(5, vocab_size=901, dtype=torch.bfloat16)
    head("triton")(case)
    with triton_npu.fused_forward():
        launched.clear()
        log_probs, entropy = head("triton")(case)
        assert launched == ["fused_forward", "label_scores"]
        run_head(case, head("triton"))
        head("triton")(replace(case, softcap=5.0))
        assert launched.count("fused_forward") == 1
    assert_within_nats(case, log_probs, entropy)


def test_auto_takes_torch_here_and_the_kernels_on_a_device_where_they_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = backends.resolve("auto", torch.device(NPU))
    assert here.name == "torch"
    assert "virtual NPU" in here.reason
    monkeypatch.setattr(virtual_npu, "is_active", lambda: False)  # as if this were a device
    there = backends.resolve("auto", torch.device(NPU))
    assert there.name == "triton"
    assert "fewest bytes" in there.reason
    assert "trial" in there.reason


@pytest.mark.case("C01")
@pytest.mark.parametrize("name", ["triton", "auto"])
def test_kernels_that_do_not_compile_fall_back_once_with_the_compilers_words(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if name == "auto":
        monkeypatch.setattr(virtual_npu, "is_active", lambda: False)
    attempts: list[str] = []

    def overflow(launch: KernelLaunch, *arguments: object) -> None:
        attempts.append(launch.name)
        raise RuntimeError(OVERFLOW)

    monkeypatch.setattr(rows_ascend, "_run", overflow)
    case = head_case(6, vocab_size=901, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, logger="npu_backend"):
        outputs = [
            npu_backend.linear_log_prob(
                case.hidden.to(NPU), case.weight.to(NPU), case.labels.to(NPU), impl_backend=name
            )
            for _ in range(3)
        ]
    assert [output.backend for output in outputs] == ["torch"] * 3
    assert torch.equal(outputs[0].log_probs.cpu(), head("torch")(case)[0])
    assert len(attempts) == 1
    assert OVERFLOW in backends.resolve(name, torch.device(NPU), torch.bfloat16).reason
    if name == "triton":
        (record,) = caplog.records
        assert OVERFLOW in record.getMessage()
        monkeypatch.setenv("NPU_BACKEND_STRICT", "1")
        with pytest.raises(BackendUnavailableError, match="ub overflow, requires 8577280 bits"):
            head("triton")(case)


def test_kernels_that_compile_and_are_wrong_are_found_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rows_ascend.rows_backward

    def doubled(logits: Tensor, *rest: object) -> Tensor:
        return right(logits, *rest).mul_(2)  # as an atomic addition from both vector cores would

    monkeypatch.setattr(rows_ascend, "rows_backward", doubled)
    choice = backends.resolve("triton", torch.device(NPU), torch.bfloat16)
    assert choice.name == "torch"
    assert "wrong numbers here: the gradient" in choice.reason


def test_running_out_of_memory_in_the_trial_is_no_verdict_on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*arguments: object) -> None:
        raise torch.OutOfMemoryError("NPU out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(rows_ascend, "_run", exhausted)
        with pytest.raises(torch.OutOfMemoryError):
            backends.resolve("triton", torch.device(NPU))
    assert backends.resolve("triton", torch.device(NPU)).name == "triton"


def test_float64_is_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "float64" in backends.resolve("triton", torch.device(NPU), torch.float64).reason


def test_the_trial_tries_the_kernels_that_calls_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled in the trial is what runs: the same kernels with the same constants."""
    launched: list[tuple[str, tuple[tuple[str, int], ...]]] = []
    run = rows_ascend._run

    def record(launch: KernelLaunch, *rest: object) -> None:
        launched.append((launch.kernel, tuple(launch.constants.items())))
        run(launch, *rest)

    monkeypatch.setattr(rows_ascend, "_run", record)
    case = head_case(6, vocab_size=901, bias=torch.zeros(901), softcap=5.0)
    head("triton")(case)
    tried = set(launched[:4])
    run_head(case, head("triton"))
    run_head(replace(case, grad_entropy=None), head("triton"))
    assert set(launched) == tried
    described = ascend_launches.kernel_launches(
        rows_ascend.chip(torch.device(NPU)), 901, 64, "fp32", bias=True, softcap=True, slices=False
    )
    assert tried == {(launch.kernel, tuple(launch.constants.items())) for launch in described}
