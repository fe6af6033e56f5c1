"""The Ascend row kernels of the PPO head in Triton's interpreter, against float64 from the same logits."""

from __future__ import annotations

from pathlib import Path

import interpreted
import pytest
import torch
from interpreted import here
from references import ALLOWED_NATS, assert_close_to
from torch import Tensor

from npu_backend import triton_interpreter
from npu_backend.head import ascend_launches, rows_ascend, rows_eager
from npu_backend.head.chunked import ScoreTransform, _finish
from npu_backend.soc import Soc

if interpreted.INTERPRETED:
    triton_interpreter.activate()
pytestmark = pytest.mark.usefixtures("small_chip")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.timeout(1200)
@interpreted.elsewhere
@interpreted.supported
def test_in_tritons_interpreter() -> None:
    """Both files in one process, whose start costs more than many of the tests."""
    interpreted.run(__file__, Path(__file__).with_name("test_ascend_head.py"))


def row_results(
    kernels, logits: Tensor, labels: Tensor, to_scores: ScoreTransform, upstream: tuple[Tensor | None, Tensor | None]
) -> dict[str, Tensor]:
    """Log-probs, entropy and the gradient of the logits by one module of row kernels."""
    dtype = to_scores.dtype
    g, h = (None if grad is None else grad.to(dtype).masked_fill(labels < 0, 0.0) for grad in upstream)
    found = kernels.rows_statistics(logits, labels, to_scores, calculate_entropy=True)
    log_probs, entropy = _finish(found, labels)
    grad = kernels.rows_backward(logits.clone(), labels, to_scores, log_probs, entropy, found.peak, found.total, g, h)
    return {"log_probs": log_probs, "entropy": entropy, "gradient": grad}


def check_rows(
    vocab_size: int,
    dtype: torch.dtype,
    *,
    rows: int = 3,
    spread: float = 4.0,
    upstream: str = "gh",
    logits: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 0.7,
    **options: float,
) -> dict[str, Tensor]:
    """Compare with float64 from the same logits: absolutely, and with what float32 eager is off."""
    random = torch.Generator().manual_seed(vocab_size)
    if logits is None:
        logits = (spread * torch.randn(rows, vocab_size, generator=random)).to(dtype)
    rows = logits.shape[0]
    labels = torch.randint(0, vocab_size, (rows,), generator=random)
    labels[:4] = torch.tensor([0, vocab_size - 1, -1, vocab_size])[:rows]  # the last: in another rank's part
    grads = torch.randn(2, rows, generator=random)
    given = (grads[0] if "g" in upstream else None, grads[1] if "h" in upstream else None)

    def transform(of: torch.dtype) -> ScoreTransform:
        scale, softcap = options.get("logit_scale", 1.0), options.get("softcap")
        per_row = temperature.to(of) if isinstance(temperature, Tensor) else temperature
        return ScoreTransform(of, None if bias is None else bias.to(of), scale, softcap, per_row)

    got = row_results(rows_ascend, logits, labels, transform(torch.float32), given)
    eager = row_results(rows_eager, logits, labels, transform(torch.float32), given)
    reference = row_results(rows_eager, logits.double(), labels, transform(torch.float64), given)
    assert got["gradient"].dtype == dtype
    for name, value in got.items():
        assert_close_to(value, reference[name], eager[name], what=name)
    for name in ("log_probs", "entropy"):
        assert (got[name] - reference[name]).abs().max() <= ALLOWED_NATS, name
    return got


@here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [97, 1000, 8192, 32000, 49152])
def test_rows_agree_with_float64(vocab_size: int, dtype: torch.dtype) -> None:
    check_rows(vocab_size, dtype, rows=4 if vocab_size < 32000 else 2)


@here
@pytest.mark.parametrize("vocab_size", [129920, 151936, 248320])
def test_rows_of_large_vocabularies_agree_with_float64(vocab_size: int) -> None:
    check_rows(vocab_size, torch.bfloat16, rows=2)


@here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 30.0},
        {"softcap": 3.0, "logit_scale": 0.25},
        {"logit_scale": -0.5},
        {"logit_scale": 0.0},
        {"temperature": torch.tensor([0.1, 1.0, 2.5, 1e4])},
        {"temperature": 1e5},
        {"upstream": "g"},
        {"upstream": "h"},
    ],
    ids=str,
)
def test_options_agree_with_float64(options: dict[str, object], dtype: torch.dtype) -> None:
    check_rows(9001, dtype, rows=4, **options)


@here
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_bias_that_masks_a_padded_vocabulary(softcap: float | None) -> None:
    bias = torch.randn(9001, generator=torch.Generator().manual_seed(1))
    if softcap is None:
        bias[-700:-1] = -torch.inf
    options = {} if softcap is None else {"softcap": softcap}
    got = check_rows(9001, torch.bfloat16, rows=4, bias=bias, **options)
    if softcap is None:
        assert not got["gradient"][:, -700:-1].any()


@here
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_minus_infinity_contribute_nothing_and_nan_stays(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 9001).to(dtype)
    logits[0, 1:9000] = -torch.inf  # whole blocks of them; the label is column 0
    got = check_rows(9001, dtype, logits=logits)
    assert all(value.isfinite().all() for value in got.values())
    logits[0, 5] = torch.nan
    to_scores = ScoreTransform(torch.float32, None, 1.0, None, 1.0)
    found = rows_ascend.rows_statistics(logits, torch.zeros(3, dtype=torch.long), to_scores, calculate_entropy=True)
    assert found.total.isnan().tolist() == [True, False, False]


@here
def test_a_confident_policy_keeps_its_gradient() -> None:
    logits = torch.zeros(1, 9001, dtype=torch.bfloat16)
    logits[0, 0] = 16.0  # 1 - p is 1e-3
    gradient = check_rows(9001, torch.bfloat16, logits=logits, temperature=1.0, upstream="g")["gradient"].double()
    p = torch.softmax(logits.double(), 1)
    at_label = -gradient[0, 1] / p[0, 1] * (1.0 - p[0, 0])
    assert abs(gradient[0, 0] / at_label - 1.0) < 2 * torch.finfo(torch.bfloat16).eps


@here
@pytest.mark.case("C03")
def test_every_row_is_taken_once_by_a_grid_that_does_not_grow(small_chip: Soc) -> None:
    rows = 61
    launch = ascend_launches.rows_backward(small_chip, "fp32", bias=False, softcap=False, entropy=True, slices=False)
    assert rows > 10 * launch.grid[0]
    check_rows(5, torch.float32, rows=rows)  # backward is in place: a row taken twice would be wrong, one left out too


@here
def test_forward_leaves_logits_alone_and_rows_may_have_any_stride() -> None:
    wide = torch.randn(3, 700).bfloat16()
    logits, before = wide[:, :601], wide.clone()
    labels, to_scores = torch.tensor([0, 600, -1]), ScoreTransform(torch.float32, None, 1.0, None, 1.0)
    found = rows_ascend.rows_statistics(logits, labels, to_scores, calculate_entropy=False)
    assert found.weighted is None
    assert torch.equal(wide, before)
    log_probs, _ = _finish(found, labels)
    rest = (log_probs, None, found.peak, found.total, torch.ones(3), None)
    got = rows_ascend.rows_backward(logits, labels, to_scores, *rest)
    assert got.data_ptr() == wide.data_ptr()
    assert torch.equal(wide[:, 601:], before[:, 601:])
    expected = rows_eager.rows_backward(before[:, :601], labels, to_scores, *rest)
    assert torch.allclose(got.float(), expected.float(), rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6)
