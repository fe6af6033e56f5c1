"""The tiled head and its Triton kernels, on the GPU where there is one, else on the CPU in Triton's interpreter.

The interpreter has to be switched on before triton is imported, so the tests run in a process of their own there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import interpreted
import pytest
import torch
from interpreted import INTERPRETED
from references import HeadCase, assert_head_matches, full_logits_head, head_case, run_head
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from npu_backend.errors import NPUBackendError
from npu_backend.head import inputs, triton_cuda
from npu_backend.head.selection import row_compaction

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
here = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in the process of Triton's interpreter")
in_another_process = pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the tests run in this process")
GIB = 2**30

# Tests of whole cases that name no backend: in the interpreter's process `conftest` makes that `triton`.
ANY_BACKEND = (
    "test_gradients.py::test_zero_tokens_give_empty_outputs_and_zero_gradients",
    "test_head_inputs.py::test_dense_in_dense_out_flat_in_flat_out",
    "test_parity.py::test_temperature_one_gives_the_unscaled_log_probs",
    "test_lora.py::test_the_trained_copy_of_the_head_is_used_and_trained",
    "test_lora.py::test_the_head_that_peft_would_run_now_is_the_one_that_runs",
    "test_lora.py::test_lora_on_the_head_is_refused_by_name",
    "test_adapter.py::test_input_ids_are_rolled_labels_are_rolled_and_shift_labels_are_taken_as_they_are",
    "test_adapter.py::test_the_output_is_the_models_own_with_log_probs_and_entropy_and_without_logits",
    "test_adapter.py::test_a_tied_embedding_gets_the_gradient_of_both_uses",
)


@pytest.mark.timeout(1200)
@interpreted.supported
@in_another_process
def test_in_tritons_interpreter() -> None:
    interpreted.run(__file__)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.case("A30", "D03", "D10", "D18", "D19", "D20", "D28", "D32", "D40")
@interpreted.supported
@in_another_process
def test_whole_cases_in_tritons_interpreter() -> None:
    pytest.importorskip("peft")
    interpreted.run(*(Path(__file__).with_name(test) for test in ANY_BACKEND))


def triton_head(
    *, cache: float | None = 0.0, compact: bool = True, calculate_entropy: bool = True, spaced: bool = False
) -> Callable[[HeadCase], tuple[Tensor, Tensor | None]]:
    """The head on DEVICE; `cache` is the share of the scores that may be kept, None for `auto`."""

    def head(case: HeadCase) -> tuple[Tensor, Tensor | None]:
        there = case.on(DEVICE).spaced() if spaced else case.on(DEVICE)
        given = inputs.prepare(there.hidden, there.weight, there.labels, **there.options())
        dtype = torch.promote_types(case.hidden.dtype, case.weight.dtype)
        padded = -(-given.weight.shape[0] // 256) * 256
        cache_bytes = None if cache is None else int(cache * padded * case.labels.numel() * dtype.itemsize)
        with row_compaction(compact):
            log_probs, entropy = triton_cuda.log_prob_and_entropy(
                given, dtype, calculate_entropy=calculate_entropy, cache_bytes=cache_bytes
            )
        return (
            log_probs.reshape(given.shape).cpu(),
            None if entropy is None else entropy.reshape(given.shape).cpu(),
        )

    return head


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_cuda, "TILE_BYTES", 1 << 13)  # several tiles even here


def quiet(case: HeadCase, every: int = 3) -> HeadCase:
    """The case with upstream gradients of exactly zero in all rows but each `every`-th."""
    silent = torch.arange(case.labels.numel()).reshape(case.labels.shape) % every != 0
    return replace(
        case,
        grad_log_probs=case.grad_log_probs.masked_fill(silent, 0.0),
        grad_entropy=case.grad_entropy.masked_fill(silent, 0.0),
    )


@here
@pytest.mark.case("D01", "D09", "D21")
@pytest.mark.parametrize(
    ("dtype", "cache", "silent"),
    [
        (torch.float32, 0.0, False),
        (torch.float32, 0.4, True),
        (torch.float32, 1.0, False),
        (torch.float32, 1.0, True),
        (torch.bfloat16, 0.0, True),
        (torch.bfloat16, 0.4, False),
        (torch.bfloat16, 1.0, False),
        (torch.float16, 1.0, True),
    ],
)
def test_values_and_gradients(dtype: torch.dtype, cache: float, silent: bool) -> None:
    case = head_case(11, vocab_size=1003, dtype=dtype)
    got = assert_head_matches(quiet(case) if silent else case, triton_head(cache=cache))
    assert got["log_probs"].dtype == got["entropy"].dtype == torch.float32
    assert float(got["log_probs"].max()) <= 0.0


@here
@pytest.mark.case("D09")
@pytest.mark.parametrize("cache", [0.0, 1.0])
def test_outputs_of_narrow_inputs_are_as_exact_as_float32(cache: float) -> None:
    case = head_case(11, vocab_size=1003, dtype=torch.bfloat16)
    exact = run_head(case.to(torch.float64), full_logits_head)
    got = run_head(case, triton_head(cache=cache))
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(got[name].double(), exact[name], rtol=3e-6, atol=3e-6)


@here
@pytest.mark.parametrize("vocab_size", [2, 256, 257, 4097])
@pytest.mark.parametrize("rows", [1])
def test_ragged_sizes(rows: int, vocab_size: int) -> None:
    case = head_case(rows, hidden_size=40, vocab_size=vocab_size)
    for cache in (0.0, 1.0):  # the label's score is a dot product of its own: a rounding more than eager has
        assert_head_matches(case, triton_head(cache=cache), times=6.0)


@here
@pytest.mark.case("D06", "D08")
@pytest.mark.parametrize("cache", [0.0, 0.5])
def test_every_option_at_once(cache: float) -> None:
    case = head_case(
        2, 5, vocab_size=1003, bias=torch.linspace(-1, 1, 1003), softcap=6.0, logit_scale=-0.7,
        temperature=torch.linspace(0.5, 2.0, 10).reshape(2, 5),
    )  # fmt: skip
    case.labels[0, ::3] = -100
    assert_head_matches(quiet(case), triton_head(cache=cache))


@here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_inputs(dtype: torch.dtype) -> None:
    """The kernels took elements of a weight, a bias and temperatures for neighbours that were not."""
    fields = {"temperature": torch.linspace(0.5, 2.0, 10), "bias": torch.linspace(-1, 1, 515)}
    case = head_case(2, 5, vocab_size=515, dtype=dtype, **fields)
    assert_head_matches(case, triton_head(spaced=True))
    columns_first = replace(case, weight=case.weight.t().contiguous().t(), bias=None)
    assert_head_matches(columns_first, triton_head(cache=1.0))


@here
@pytest.mark.parametrize("cache", [0.0, 1.0])
def test_masked_vocabulary_entries_contribute_nothing(cache: float) -> None:
    bias = torch.zeros(515)
    bias[500:] = -torch.inf
    case = head_case(8, vocab_size=515, bias=bias)
    labels = case.labels % 500
    got = assert_head_matches(replace(case, labels=labels), triton_head(cache=cache))
    assert not got["grad_weight"][500:].any()


@here
@pytest.mark.parametrize("cache", [0.0, 1.0])
@pytest.mark.parametrize("at_top", [False, True])
def test_a_confident_policy_keeps_the_digits_of_its_gradient(cache: float, at_top: bool) -> None:
    case = head_case(12, vocab_size=300, spread=20.0, dtype=torch.bfloat16)
    scores = case.hidden.float() @ case.weight.float().t()
    labels = scores.argmax(-1) if at_top else scores.topk(2).indices[:, 1]
    assert_head_matches(replace(case, labels=labels), triton_head(cache=cache))


@here
@pytest.mark.case("D26", "D27")
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("cache", [0.0, 1.0])
def test_ignored_rows_are_zero_whatever_they_hold(compact: bool, cache: float) -> None:
    case = head_case(10, vocab_size=303)
    case.labels[::4] = -100
    clean = run_head(case, triton_head(compact=compact, cache=cache))
    case.hidden[::4] = torch.nan
    got = run_head(case, triton_head(compact=compact, cache=cache))
    for name, value in got.items():
        assert torch.equal(value, clean[name]), name
    for name in ("log_probs", "entropy", "grad_hidden"):
        assert not got[name][::4].any()


@here
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("cache", [0.0, 1.0])
def test_ignored_rows_are_zero_where_the_bias_is_many_temperatures(cache: float, softcap: float | None) -> None:
    bias = torch.linspace(-20.0, 20.0, 303)
    case = head_case(10, vocab_size=303, temperature=0.1, bias=bias, softcap=softcap)
    case.labels[::4] = -100
    got = run_head(case, triton_head(compact=False, cache=cache))
    assert not got["grad_hidden"][::4].any()
    assert all(value.isfinite().all() for value in got.values())


@here
@pytest.mark.case("D26", "D28")
@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("compact", [False, True])
def test_no_row_that_counts_still_reaches_the_weight(rows: int, compact: bool) -> None:
    case = head_case(rows, vocab_size=300)
    got = run_head(replace(case, labels=torch.full((rows,), -100)), triton_head(compact=compact))
    assert got["log_probs"].shape == (rows,)
    assert all(not value.any() for value in got.values())
    assert got["grad_weight"].shape == case.weight.shape


@here
@pytest.mark.parametrize("cache", [0.0, 1.0])
def test_leaving_rows_out_changes_only_rounding(cache: float) -> None:
    case = quiet(head_case(12, vocab_size=700))
    case.labels[1::5] = -100
    left_out = run_head(case, triton_head(cache=cache))
    all_in = run_head(case, triton_head(cache=cache, compact=False))
    for name, value in left_out.items():
        torch.testing.assert_close(value, all_in[name], rtol=1e-5, atol=1e-6)
    silent = (case.grad_log_probs == 0) & (case.grad_entropy == 0)
    assert not left_out["grad_hidden"][silent].any()


@here
@pytest.mark.case("D04")
def test_3d_hidden_gets_its_gradient_when_the_weight_is_frozen() -> None:
    case = head_case(2, 3, vocab_size=300)
    hidden = case.hidden.clone().requires_grad_()
    log_probs, _ = triton_head(cache=1.0)(replace(case, hidden=hidden))
    (log_probs * case.grad_log_probs).sum().backward()
    expected = run_head(replace(case, grad_entropy=None).to(torch.float64), full_logits_head)["grad_hidden"]
    torch.testing.assert_close(hidden.grad.double(), expected, rtol=1e-4, atol=1e-5)


@here
@pytest.mark.parametrize("rows", [1, 7, 1500])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_loud_rows_gather_at_the_beginning_and_none_moves_onto_another(rows: int, share: float) -> None:
    from npu_backend.head import rows_cuda

    loud = torch.rand(rows, generator=torch.Generator().manual_seed(rows)) < share
    places, count = rows_cuda.order(loud.to(DEVICE))
    source = places[: int(count)].cpu()
    assert source.sort()[0].tolist() == loud.nonzero()[:, 0].tolist()
    stay = loud[: int(count)]
    assert source[stay].tolist() == stay.nonzero()[:, 0].tolist()  # so what moves, moves into gaps


@here
@pytest.mark.case("D05")
def test_strided_and_missing_upstream_gradients() -> None:
    case = head_case(8, vocab_size=300)
    sliced = replace(case, grad_log_probs=torch.randn(16)[::2], grad_entropy=torch.tensor(0.3).expand(8))
    assert_head_matches(sliced, triton_head(cache=1.0))
    assert_head_matches(replace(case, grad_entropy=None), triton_head(cache=1.0))
    assert_head_matches(replace(case, grad_log_probs=None), triton_head(cache=0.5))


@here
@pytest.mark.case("D29")
@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
def test_only_the_gradient_that_is_asked_for(wanted: str) -> None:
    case = head_case(8, vocab_size=300, bias=torch.linspace(-1, 1, 300))
    expected = run_head(case, triton_head())
    leaves = {name: getattr(case, name).clone().requires_grad_(name == wanted) for name in ("hidden", "weight", "bias")}
    log_probs, entropy = triton_head()(replace(case, **leaves))
    torch.autograd.backward([log_probs, entropy], [case.grad_log_probs, case.grad_entropy])
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name == wanted)
    assert torch.equal(leaves[wanted].grad, expected[f"grad_{wanted}"])


@here
@pytest.mark.case("D38")
def test_no_entropy_where_nobody_wants_it() -> None:
    case = head_case(8, vocab_size=300, grad_entropy=None)
    log_probs, entropy = triton_head(calculate_entropy=False)(case)
    assert entropy is None
    assert torch.equal(log_probs, triton_head()(case)[0])


@here
@pytest.mark.parametrize("cache", [0.5, 1.0])
def test_a_second_backward_recomputes_what_the_first_consumed(cache: float) -> None:
    case = head_case(8, vocab_size=600)
    hidden = case.hidden.clone().requires_grad_()
    log_probs, _ = triton_head(cache=cache)(replace(case, hidden=hidden))
    first, second = (torch.autograd.grad(log_probs.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


@here
def test_a_second_derivative_is_an_error() -> None:
    case = head_case(8, vocab_size=300)
    hidden = case.hidden.clone().requires_grad_()
    log_probs, _ = triton_head()(replace(case, hidden=hidden))
    (grad,) = torch.autograd.grad(log_probs.sum(), hidden, create_graph=True)
    with pytest.raises(NPUBackendError, match="no second derivative"):
        grad.sum().backward()


@here
def test_not_a_number_stays_visible() -> None:
    case = head_case(6, vocab_size=300)
    case.hidden[2, 3] = torch.nan
    got = run_head(case, triton_head(cache=1.0))
    for name in ("log_probs", "entropy"):
        assert got[name].isnan().tolist() == [False, False, True, False, False, False]
    assert got["grad_hidden"][2].isnan().all()


@here
@pytest.mark.case("D31")
@pytest.mark.parametrize("cache", [0.0, 0.3, 1.0])
def test_kept_scores_stay_within_their_budget(cache: float, saved_elements) -> None:
    rows, vocab = 8, 3000
    case = head_case(rows, vocab_size=vocab)
    with saved_elements() as saved:
        triton_head(cache=cache)(replace(case, hidden=case.hidden.clone().requires_grad_()))
    inputs_and_rows = case.hidden.numel() + case.weight.numel() + 12 * rows
    kept = sum(tensor.numel() for tensor in saved) - inputs_and_rows
    assert kept <= cache * rows * -(-vocab // 256) * 256
    assert cache < 1.0 or kept >= 0.9 * rows * vocab


@here
@pytest.mark.case("D22", "D23")
@pytest.mark.parametrize(("hidden", "weight"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_gradients_come_in_each_tensors_own_dtype(hidden: torch.dtype, weight: torch.dtype) -> None:
    case = head_case(8, vocab_size=300)
    case = replace(case, hidden=case.hidden.to(hidden), weight=case.weight.to(weight))
    got = run_head(case, triton_head())
    assert (got["grad_hidden"].dtype, got["grad_weight"].dtype) == (hidden, weight)
    exact = run_head(case.to(torch.float64), full_logits_head)
    for name in ("grad_hidden", "grad_weight"):
        torch.testing.assert_close(got[name].double(), exact[name], rtol=2e-2, atol=2e-2)


@here
@pytest.mark.parametrize("cache", [0.0, 0.4, 1.0, None])
def test_checkpoint_changes_no_bit(cache: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It unpacks saved tensors once; with `auto` (None) another amount of memory is free when it recomputes."""
    free = iter([GIB, 0])
    monkeypatch.setattr(triton_cuda, "_free_share", lambda *_: next(free))
    head = triton_head(cache=cache)
    case = head_case(11, vocab_size=1003)
    expected = run_head(case, triton_head(cache=cache or 0.0))
    for name, value in run_head(case, lambda given: checkpoint(head, given, use_reentrant=False)).items():
        assert torch.equal(value, expected[name]), name
