"""The PPO head's Ascend backend on a device: the first thing to run on one (docs/ascend.md, the checklist).

    python -m pytest tests/npu -q

On a virtual NPU (arithmetic by the CPU) the same tests run in Triton's interpreter, with few rows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from references import (
    ALLOWED_NATS,
    HeadCase,
    assert_close_to,
    assert_head_matches,
    assert_within_nats,
    head_case,
    run_head,
)
from torch import Tensor

from npu_backend import linear_log_prob, virtual_npu
from npu_backend.head import backends, rows_ascend, rows_eager, triton_npu
from npu_backend.head.chunked import ScoreTransform, _finish

pytestmark = pytest.mark.skipif(
    not (hasattr(torch, "npu") and torch.npu.is_available()), reason="needs an NPU, or a virtual one"
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VIRTUAL = virtual_npu.is_active()
ROWS = 3 if VIRTUAL else 1000
VOCABULARIES = (97, 9001) if VIRTUAL else (97, 1000, 32000, 49152, 129920, 151936, 248320)


def on_npu(case: HeadCase) -> tuple[Tensor, Tensor | None]:
    moved = case.on("npu")
    out = linear_log_prob(moved.hidden, moved.weight, moved.labels, impl_backend="triton", **moved.options())
    assert out.backend == "triton"
    return out.log_probs.cpu(), None if out.entropy is None else out.entropy.cpu()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_compile_and_pass_their_trial(dtype: torch.dtype) -> None:
    choice = backends.resolve("triton", torch.device("npu", 0), dtype)
    assert choice.name == "triton", choice.reason


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"logit_scale": -0.5}, {"bias": True}], ids=str)
def test_rows_agree_with_float64(options: dict[str, object], vocab_size: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(vocab_size)
    logits = (4.0 * torch.randn(ROWS, vocab_size, generator=random)).to(dtype)
    labels = torch.randint(0, vocab_size, (ROWS,), generator=random)
    labels[:3] = torch.tensor([0, vocab_size - 1, -1])
    bias = torch.randn(vocab_size, generator=random) if options.get("bias") else None
    temperature = torch.rand(ROWS, generator=random) + 0.5
    upstream = torch.randn(2, ROWS, generator=random).masked_fill(labels < 0, 0.0)

    def results(kernels: object, device: str, of: torch.dtype) -> dict[str, Tensor]:
        to_scores = ScoreTransform(
            dtype=of,
            bias=None if bias is None else bias.to(device, of),
            logit_scale=options.get("logit_scale", 1.0),
            softcap=options.get("softcap"),
            temperature=temperature.to(device, of),
        )
        there = logits.to(device, torch.float64 if of == torch.float64 else dtype, copy=True)
        found = kernels.rows_statistics(there, labels.to(device), to_scores, calculate_entropy=True)
        log_probs, entropy = _finish(found, labels.to(device))
        grads = (grad.to(device, of) for grad in upstream)
        rest = (labels.to(device), to_scores, log_probs, entropy, found.peak, found.total, *grads)
        gradient = kernels.rows_backward(there, *rest)
        return {"log_probs": log_probs.cpu(), "entropy": entropy.cpu(), "gradient": gradient.cpu()}

    assert triton_npu.why_unusable(torch.device("npu", 0), dtype) is None  # starts the interpreter on a virtual NPU
    got = results(rows_ascend, "npu", torch.float32)
    eager = results(rows_eager, "cpu", torch.float32)
    reference = results(rows_eager, "cpu", torch.float64)
    for name, value in got.items():
        assert_close_to(value, reference[name], eager[name], what=name)
    for name in ("log_probs", "entropy"):
        assert (got[name] - reference[name]).abs().max() <= ALLOWED_NATS, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_agrees_with_full_logits(dtype: torch.dtype) -> None:
    case = head_case(7 if VIRTUAL else 1000, hidden_size=64, vocab_size=901 if VIRTUAL else 49152, dtype=dtype)
    case.labels[::5] = -100
    assert_head_matches(case, on_npu)
    run_head(replace(case, grad_entropy=None), on_npu)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_forward_agrees_with_float64(dtype: torch.dtype) -> None:
    sizes = {"vocab_size": 701, "hidden_size": 72} if VIRTUAL else {"vocab_size": 49153, "hidden_size": 1000}
    case = head_case(5 if VIRTUAL else 1000, dtype=dtype, **sizes)
    with torch.no_grad(), triton_npu.fused_forward():
        log_probs, entropy = on_npu(case)
    assert_within_nats(case, log_probs, entropy)
