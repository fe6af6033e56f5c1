"""The head leaves rows out on an NPU as on the CPU, and waits for the device once in each direction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from references import head_case
from torch.utils._python_dispatch import TorchDispatchMode

from npu_backend import triton_interpreter
from npu_backend.head.inputs import trusted_values
from npu_backend.head.linear_log_prob import in_chunks
from npu_backend.head.selection import row_compaction


class HostReads(TorchDispatchMode):
    """What makes the host wait: numbers and shapes that only the device knows, and copies to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        sources = [value for value in args if isinstance(value, torch.Tensor)]
        copied = name in ("_to_copy", "copy_") and result.device.type == "cpu" and sources[-1].device.type == "npu"
        if copied or name in ("_local_scalar_dense", "nonzero", "masked_select"):
            self.seen.append(name)
        return result


@pytest.mark.parametrize("gib", [0, 1])
@pytest.mark.parametrize(("backend", "invariant"), [("torch", "0"), ("torch", "1"), ("triton", "0")])
def test_rows_are_left_out_with_one_wait_in_each_direction(gib: int, backend: str, invariant: str, monkeypatch) -> None:
    if backend == "triton" and triton_interpreter.why_unusable() is not None:
        pytest.skip(str(triton_interpreter.why_unusable()))
    monkeypatch.setenv("NPU_BACKEND_BATCH_INVARIANT", invariant)
    case = head_case(100)
    silent = torch.rand(100, generator=torch.Generator().manual_seed(3)) < 0.5
    case.labels[::7] = -100
    upstream = [grad.masked_fill(silent, 0.0) for grad in (case.grad_log_probs, case.grad_entropy)]
    results, reads = {}, []
    for device in ("cpu", "npu"):
        there = case.on(device)
        leaves = [there.hidden.requires_grad_(), there.weight.requires_grad_()]
        given = [grad.to(device) for grad in upstream]
        options = {"chunk_rows": 16, "impl_backend": backend if device == "npu" else "torch", "logits_cache_gib": gib}
        in_chunks(*leaves, there.labels, **options)  # the trial of the kernels reads their results
        with row_compaction(True), trusted_values(), HostReads() as forward:
            outputs = in_chunks(*leaves, there.labels, **options)[:2]
        with HostReads() as backward:
            grads = torch.autograd.grad(outputs, leaves, given)
        results[device] = [value.detach().cpu() for value in (*outputs, *grads)]
        reads = [forward.seen, backward.seen]
    for seen in reads:
        assert len(seen) == 1 if backend == "torch" else seen.count("nonzero") == 1  # the interpreter copies a lot
    for got, expected in zip(results["npu"], results["cpu"]):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not results["npu"][2][silent].any()
