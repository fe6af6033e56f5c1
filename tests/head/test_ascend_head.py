"""The head around the Ascend row kernels: tiles of the vocabulary, and the fused forward, against float64.

`test_rows_ascend.py` starts what needs the kernels, in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gloo_ranks
import interpreted
import pytest
import torch
from interpreted import here
from references import HeadCase, assert_head_matches, assert_within_nats, head_case, run_head
from torch import Tensor

from npu_backend import triton_interpreter
from npu_backend.errors import NPUBackendError
from npu_backend.head import ascend_launches, inputs, rows_ascend, rows_eager, triton_npu, vocab_tiles
from npu_backend.head.chunked import Plan, RowStatistics
from npu_backend.soc import Soc

if interpreted.INTERPRETED:
    triton_interpreter.activate()
pytestmark = pytest.mark.usefixtures("small_chip")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tiled_head(*, kernels=rows_ascend, cache_bytes: int = 0, calculate_entropy: bool = True, chunk_rows: int = 1):
    def head(case: HeadCase) -> tuple[Tensor, Tensor | None]:
        given = prepared(case)
        plan = plan_of(given, case, kernels=kernels, cache_bytes=cache_bytes, chunk_rows=chunk_rows)
        log_probs, entropy = vocab_tiles.VocabTiledHead.apply(
            given.hidden, given.weight, given.bias, given.labels, given.temperatures,
            replace(plan, calculate_entropy=calculate_entropy),
        )  # fmt: skip
        return log_probs.reshape(given.shape), None if entropy is None else entropy.reshape(given.shape)

    return head


def prepared(case: HeadCase) -> inputs.HeadInputs:
    return inputs.prepare(case.hidden, case.weight, case.labels, **case.options())


def plan_of(given: inputs.HeadInputs, case: HeadCase, **fields: object) -> Plan:
    return Plan(
        compute_dtype=torch.promote_types(case.hidden.dtype, case.weight.dtype),
        logit_scale=given.logit_scale,
        softcap=given.softcap,
        temperature=given.temperature,
        calculate_entropy=True,
        **fields,
    )


@pytest.fixture
def narrow_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_tiles, "NARROWEST", 256)


def with_ignored(case: HeadCase) -> HeadCase:
    labels, hidden = case.labels.clone(), case.hidden.clone()
    labels.view(-1)[::3] = -100
    hidden.view(-1, hidden.shape[-1])[::3] = torch.nan
    return replace(case, labels=labels, hidden=hidden)


@pytest.mark.usefixtures("narrow_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        ((7,), {"temperature": 0.7}),
        ((1,), {}),
        ((2, 5), {"temperature": torch.linspace(0.5, 2.0, 10).reshape(2, 5), "softcap": 4.0, "logit_scale": 0.5}),
        ((6,), {"bias": torch.linspace(-2.0, 2.0, 901), "grad_entropy": None}),
        ((6,), {"grad_log_probs": None}),
    ],
    ids=["temperature", "one row", "per row, softcap, scale", "bias, log-probs only", "entropy only"],
)
@pytest.mark.parametrize("kernels", [rows_eager, pytest.param(rows_ascend, marks=here)], ids=["eager", "ascend"])
def test_tiles_of_the_vocabulary_agree_with_full_logits(kernels, shape, fields, dtype: torch.dtype) -> None:
    case = head_case(*shape, vocab_size=901, dtype=dtype, **fields)
    got = assert_head_matches(case, tiled_head(kernels=kernels))
    assert got["log_probs"].dtype == torch.float32
    assert got["grad_weight"].dtype == dtype


@pytest.mark.usefixtures("narrow_tiles")
@pytest.mark.parametrize("kernels", [rows_eager, pytest.param(rows_ascend, marks=here)], ids=["eager", "ascend"])
def test_ignored_rows_give_zeros_and_their_padding_reaches_nothing(kernels) -> None:
    case = head_case(7, vocab_size=901)
    got = run_head(with_ignored(case), tiled_head(kernels=kernels))
    quiet = with_ignored(case)
    clean = run_head(replace(quiet, hidden=quiet.hidden.nan_to_num(5.0)), tiled_head(kernels=kernels))
    for name, value in got.items():
        assert value.isfinite().all(), name
        assert torch.equal(value, clean[name]), name
    assert not got["log_probs"][::3].any()
    assert not got["grad_hidden"][::3].any()


@here
@pytest.mark.usefixtures("narrow_tiles")
@pytest.mark.parametrize("tiles", [2, 9])  # 2: the last tile, which is narrower, would fit as well
def test_kept_logits_change_no_bit_and_a_second_backward_recomputes_them(tiles: int) -> None:
    case = head_case(5, vocab_size=901, dtype=torch.bfloat16)
    expected = run_head(case, tiled_head())
    cache_bytes = tiles * 5 * 256 * 2
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    log_probs, entropy = tiled_head(cache_bytes=cache_bytes)(replace(case, hidden=hidden, weight=weight))
    for _ in range(2):
        upstream = [case.grad_log_probs, case.grad_entropy]
        grads = torch.autograd.grad([log_probs, entropy], [hidden, weight], upstream, retain_graph=True)
        assert torch.equal(grads[0], expected["grad_hidden"])
        assert torch.equal(grads[1], expected["grad_weight"])


@pytest.mark.usefixtures("narrow_tiles")
def test_frozen_sides_get_no_gradient_and_cost_no_product(operators) -> None:
    case = head_case(5, vocab_size=901)
    for frozen in ("hidden", "weight"):
        leaves = {name: getattr(case, name).clone().requires_grad_(name != frozen) for name in ("hidden", "weight")}
        log_probs, _ = tiled_head(kernels=rows_eager)(replace(case, **leaves))
        with operators() as seen:
            log_probs.sum().backward()
        assert leaves[frozen].grad is None
        assert seen["aten.mm.default"] == 2 * 4  # the logits again, and one product, of each of four tiles


@pytest.mark.usefixtures("narrow_tiles")
def test_a_second_derivative_is_an_error_that_says_so() -> None:
    case = head_case(5, vocab_size=901)
    hidden = case.hidden.clone().requires_grad_()
    log_probs, _ = tiled_head(kernels=rows_eager)(replace(case, hidden=hidden))
    (grad,) = torch.autograd.grad(log_probs.sum(), hidden, create_graph=True)
    with pytest.raises(NPUBackendError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("rows", "vocab_size", "chunk_rows"), [(1, 97, 512), (4096, 151936, 512), (131072, 152064, 512)]
)
def test_tiles_cover_the_vocabulary_once_within_their_bound(rows: int, vocab_size: int, chunk_rows: int) -> None:
    tiles = list(vocab_tiles._tiles(rows, vocab_size, chunk_rows))
    assert [tile.start for tile in tiles] == [0, *(tile.stop for tile in tiles[:-1])]
    assert tiles[-1].stop == vocab_size
    widest = max(tile.stop - tile.start for tile in tiles)
    assert widest <= max(vocab_tiles.NARROWEST, chunk_rows * vocab_size // rows) + vocab_tiles._ALIGN


@interpreted.elsewhere
def test_tiles_of_a_vocabulary_that_is_divided_among_ranks(tmp_path: Path) -> None:
    errors = gloo_ranks.run(4, "vocab_tiles_scenarios", tmp_path / "store")
    assert len(errors) == 5
    assert {name: error for name, error in errors.items() if error > 1.0} == {}


def test_parts_merge_whatever_their_sizes_and_empty_ones_make_no_nan() -> None:
    scores = torch.randn(6, 50).double() * 30
    scores[0, :20] = -torch.inf
    lowest = torch.finfo(torch.float64).min
    parts = []
    for part in (scores[:, :20], scores[:, 20:23], scores[:, 23:]):
        peak = part.amax(1).clamp(min=lowest)
        shifted = (part - peak[:, None]).clamp(min=-1000.0)
        parts.append((torch.ones(6), peak, shifted.exp().sum(1), (shifted.exp() * shifted).sum(1)))
    merged = vocab_tiles.merge_parts(RowStatistics(*(torch.stack(of) for of in zip(*parts))))
    log_total = scores.logsumexp(1) - scores.amax(1)
    assert torch.allclose(merged.total.log(), log_total)
    p = scores.softmax(1)
    entropy = -(p * scores.log_softmax(1).clamp(min=-1e4)).sum(1)
    assert torch.allclose(merged.total.log() - merged.weighted / merged.total, entropy)
    assert merged.of_label.tolist() == [3.0] * 6


@here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocab_size", "hidden_size", "temperature"),
    [(5, 256, 64, 1.0), (131, 701, 300, 0.7), (3, 1000, 40, torch.tensor([0.5, 1.0, 2.0]))],
)
def test_the_fused_forward_agrees_with_float64(
    rows, vocab_size, hidden_size, temperature, dtype: torch.dtype, small_chip: Soc
) -> None:
    case = head_case(rows, vocab_size=vocab_size, hidden_size=hidden_size, dtype=dtype, temperature=temperature)
    given = prepared(case)
    plan = plan_of(given, case, kernels=rows_ascend, chunk_rows=1, cache_bytes=0)
    launch = ascend_launches.fused_forward(small_chip, "fp32")
    assert ascend_launches.fused_parts(launch, rows, vocab_size)[0] > (1 if vocab_size > 256 else 0)
    with torch.no_grad():
        log_probs, entropy = triton_npu._fused_forward(given, plan)
    assert_within_nats(case, log_probs, entropy)
