"""Rows that change nothing, left out where that is asked for: exact, less work, one wait.

`either` is the torch backend, or the NPU's tiles of the vocabulary with eager row kernels in the place of Ascend's.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from references import HeadCase, assert_head_matches, head_case, run_head
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import npu_backend
from npu_backend.head import linear_log_prob, vocab_tiles
from npu_backend.head.inputs import trusted_values
from npu_backend.head.selection import row_compaction

CHUNK = 16
ROWS = 100
GIB_OF_A_CHUNK = CHUNK * 101 * 4 / 2**30  # of float32 logits
UPSTREAM = ("grad_log_probs", "grad_entropy")


def head(case: HeadCase, compact: bool = True, **options: object) -> tuple[Tensor, Tensor | None]:
    with row_compaction(compact):
        return linear_log_prob.in_chunks(
            case.hidden, case.weight, case.labels, chunk_rows=CHUNK, impl_backend="torch", **case.options(), **options
        )[:2]


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> int:
    """The NPU's autograd function in the place of the torch backend's; how many tiles it makes of the vocabulary."""
    monkeypatch.setattr(linear_log_prob, "ChunkedHead", vocab_tiles.VocabTiledHead)
    monkeypatch.setattr(vocab_tiles, "NARROWEST", 32)
    monkeypatch.setattr(vocab_tiles, "_ALIGN", 8)
    return 4


@pytest.fixture(params=["chunks of rows", "tiles of the vocabulary"])
def either(request: pytest.FixtureRequest) -> None:
    if request.param != "chunks of rows":
        request.getfixturevalue("tiles")


def all_rows(case: HeadCase, **options: object) -> tuple[Tensor, Tensor | None]:
    return head(case, compact=False, **options)


def some_rows(case: HeadCase, *, silent: float, ignored: float = 0.0) -> HeadCase:
    """The case with shares of its rows, at random, without upstream gradients and ignored."""
    shape, random = case.labels.shape, torch.Generator().manual_seed(3)
    is_silent = torch.rand(shape, generator=random) < silent
    labels = case.labels.masked_fill(torch.rand(shape, generator=random) < ignored, case.ignore_index)
    upstream = {name: getattr(case, name) for name in UPSTREAM}
    return replace(
        case,
        labels=labels,
        **{name: grad if grad is None else grad.masked_fill(is_silent, 0.0) for name, grad in upstream.items()},
    )


def numbers_of_rows(case: HeadCase) -> tuple[int, int]:
    """How many rows count, and how many of those are loud."""
    counting = case.labels != case.ignore_index
    given = [grad for grad in (case.grad_log_probs, case.grad_entropy) if grad is not None]
    return int(counting.sum()), int((counting & torch.stack([grad != 0 for grad in given]).any(0)).sum())


class Work(TorchDispatchMode):
    """M, N, K of every `aten::mm`, and how often the host asked for a number of the device's."""

    def __init__(self) -> None:
        super().__init__()
        self.gemms: list[tuple[int, int, int]] = []
        self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name == "aten.mm.default":
            self.gemms.append((args[0].shape[0], args[1].shape[1], args[0].shape[1]))
        self.waits += name.split(".")[1] in ("_local_scalar_dense", "item", "nonzero", "equal", "masked_select")
        return func(*args, **(kwargs or {}))

    def flops(self) -> int:
        return sum(2 * m * n * k for m, n, k in self.gemms)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """The work done inside. `tolist` of a CPU tensor goes past the dispatcher, so it is counted where it is called."""
    original = torch.Tensor.tolist
    with Work() as work, monkeypatch.context() as patch:

        def tolist(tensor: Tensor):
            work.waits += 1
            return original(tensor)

        patch.setattr(torch.Tensor, "tolist", tolist)
        yield work


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks_kept", [0, 3, 100])
@pytest.mark.parametrize(("silent", "ignored"), [(0.5, 0.0), (0.5, 0.3), (0.0, 0.3), (0.95, 0.0)])
def test_values_and_gradients(dtype: torch.dtype, chunks_kept: int, silent: float, ignored: float) -> None:
    gib = chunks_kept * GIB_OF_A_CHUNK * dtype.itemsize / 4
    case = some_rows(head_case(4, 25, dtype=dtype, temperature=0.8), silent=silent, ignored=ignored)
    got = assert_head_matches(case, lambda given: head(given, logits_cache_gib=gib))
    quiet = (case.labels == case.ignore_index) | ((case.grad_log_probs == 0) & (case.grad_entropy == 0))
    assert not got["grad_hidden"][quiet].any()
    assert got["grad_hidden"][~quiet].abs().amax(-1).all()


def test_float64() -> None:
    case = some_rows(head_case(ROWS, dtype=torch.float64), silent=0.5, ignored=0.3)
    expected = run_head(case, all_rows)
    for name, value in run_head(case, head).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("either")
def test_every_option_at_once() -> None:
    case = head_case(
        2, 50, bias=torch.linspace(-1, 1, 101), softcap=6.0, logit_scale=-0.7,
        temperature=torch.linspace(0.5, 2.0, 100).reshape(2, 50),
    )  # fmt: skip
    case.bias[90:] = -torch.inf
    assert_head_matches(some_rows(replace(case, labels=case.labels % 90), silent=0.6, ignored=0.2), head)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("unused", UPSTREAM)
def test_one_output_is_not_used(unused: str) -> None:
    assert_head_matches(some_rows(replace(head_case(ROWS), **{unused: None}), silent=0.7, ignored=0.1), head)


def test_a_row_with_either_gradient_is_loud() -> None:
    case = head_case(ROWS)
    even = torch.arange(ROWS) % 2 == 0
    third = torch.arange(ROWS) % 3 == 0
    case = replace(
        case,
        grad_log_probs=case.grad_log_probs.masked_fill(~even, 0.0),
        grad_entropy=case.grad_entropy.masked_fill(~third, -0.0),
    )
    assert numbers_of_rows(case) == (ROWS, 67)
    assert_head_matches(case, head)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("gib", [0, 1])
def test_where_no_row_is_left_out_no_bit_changes(gib: int) -> None:
    case = head_case(ROWS, bias=torch.linspace(-1, 1, 101))
    expected = run_head(case, lambda given: all_rows(given, logits_cache_gib=gib))
    for name, value in run_head(case, lambda given: head(given, logits_cache_gib=gib)).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("gib", [0, 1])
@pytest.mark.parametrize("invariant", ["0", "1"])
@pytest.mark.parametrize("why", ["silent", "ignored", "no rows"])
def test_no_row_that_counts_still_reaches_every_parameter(why: str, gib: int, invariant: str, monkeypatch) -> None:
    monkeypatch.setenv("NPU_BACKEND_BATCH_INVARIANT", invariant)
    case = head_case(0 if why == "no rows" else 40, bias=torch.zeros(101))
    case = some_rows(case, silent=float(why == "silent") * 2, ignored=float(why == "ignored") * 2)
    with counted(monkeypatch) as work:
        got = run_head(case, lambda given: head(given, logits_cache_gib=gib))
    assert set(got) == {"log_probs", "entropy", "grad_hidden", "grad_weight", "grad_bias"}
    expected = run_head(case, all_rows)
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name
    padded = {"0": 40, "1": 48}[invariant]
    assert sum(m for m, n, _ in work.gemms if n == 101) == (padded if why == "silent" else 0)  # logits, in forward


def test_what_ignored_and_silent_rows_hold_reaches_nothing() -> None:
    case = some_rows(head_case(ROWS), silent=0.5, ignored=0.2)
    clean = run_head(case, head)
    ignored = case.labels == case.ignore_index
    case.hidden[ignored] = torch.nan
    case.grad_log_probs[ignored] = torch.nan
    for name, value in run_head(case, head).items():
        assert torch.equal(value, clean[name]), name
    silent = (case.grad_log_probs == 0) & (case.grad_entropy == 0)
    case.hidden[silent] = torch.nan
    got = run_head(case, head)
    for name in ("grad_hidden", "grad_weight"):
        assert torch.equal(got[name], clean[name]), name


@pytest.mark.parametrize(
    "wanted", [names for n in (1, 2) for names in itertools.combinations(("hidden", "weight", "bias"), n)]
)
def test_only_the_gradients_that_are_asked_for(wanted: tuple[str, ...], monkeypatch) -> None:
    case = some_rows(head_case(ROWS, bias=torch.linspace(-1, 1, 101)), silent=0.5, ignored=0.1)
    expected = run_head(case, head)
    leaves = {name: getattr(case, name).clone().requires_grad_(name in wanted) for name in ("hidden", "weight", "bias")}
    outputs = head(replace(case, **leaves))
    with counted(monkeypatch) as work:
        torch.autograd.backward(outputs, [case.grad_log_probs, case.grad_entropy])
    chunks = -(-numbers_of_rows(case)[1] // CHUNK)
    assert len(work.gemms) == chunks * (1 + ("hidden" in wanted) + ("weight" in wanted))
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in wanted)
        if leaf.grad is not None:
            assert torch.equal(leaf.grad, expected[f"grad_{name}"]), name


@pytest.mark.parametrize("chunks_kept", [0, 3, 100])
def test_rows_that_are_left_out_cost_no_gemm(chunks_kept: int, monkeypatch) -> None:
    case = some_rows(head_case(ROWS), silent=0.5, ignored=0.3)
    counting, loud = numbers_of_rows(case)
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    with counted(monkeypatch) as work:
        outputs = head(case, logits_cache_gib=chunks_kept * GIB_OF_A_CHUNK)
    assert sum(m for m, _, _ in work.gemms) == counting
    with counted(monkeypatch) as work:
        torch.autograd.grad(outputs, [hidden, weight], [case.grad_log_probs, case.grad_entropy])
    shapes = Counter((n, k) for _, n, k in work.gemms)
    rows = {"hidden": sum(m for m, n, k in work.gemms if (n, k) == (64, 101))}
    rows["weight"] = sum(k for m, n, k in work.gemms if (m, n) == (101, 64))
    rows["logits"] = sum(m for m, n, k in work.gemms if (n, k) == (101, 64))
    assert rows["hidden"] == rows["weight"] == loud < 0.6 * counting
    assert shapes[(64, 101)] == -(-loud // CHUNK)  # packed: no more chunks than that many rows need
    kept_loud = loud if chunks_kept == 100 else 0
    if chunks_kept == 3:  # of the first chunks' loud rows, those that fill a chunk of backward
        counts = (case.labels != case.ignore_index).nonzero()[: 3 * CHUNK, 0]
        is_loud = (case.grad_log_probs[counts] != 0) | (case.grad_entropy[counts] != 0)
        kept_loud = int(is_loud.sum()) // CHUNK * CHUNK
        assert kept_loud > 0
    assert rows["logits"] == loud - kept_loud


@pytest.mark.parametrize("gib", [0, 1])
@pytest.mark.parametrize("invariant", ["0", "1"])
def test_the_host_waits_once_in_each_direction(gib: int, invariant: str, monkeypatch) -> None:
    monkeypatch.setenv("NPU_BACKEND_BATCH_INVARIANT", invariant)
    case = some_rows(head_case(ROWS), silent=0.5, ignored=0.3)
    weight = case.weight.requires_grad_()
    for compact in (False, True):
        with counted(monkeypatch) as forward, trusted_values():  # the check of values has one of its own
            outputs = head(case, compact, logits_cache_gib=gib)
        with counted(monkeypatch) as backward:
            torch.autograd.grad(outputs, weight, [case.grad_log_probs, case.grad_entropy])
        assert (forward.waits, backward.waits) == (compact, compact)
    with counted(monkeypatch) as forward:  # the check finds no ignored row: there is none to look for
        head(replace(case, labels=case.labels.clamp(min=0)))
    assert forward.waits == 1


def test_it_is_not_done_unasked(monkeypatch) -> None:
    case = some_rows(head_case(ROWS), silent=0.5, ignored=0.3)
    with counted(monkeypatch) as unasked:
        run_head(
            case, lambda given: npu_backend.FusedLinearForPPO(CHUNK).forward(given.hidden, given.weight, given.labels)
        )
    with counted(monkeypatch) as asked:
        run_head(case, head)
    assert unasked.flops() == 8 * ROWS * 64 * 101
    assert asked.flops() == 2 * 64 * 101 * (numbers_of_rows(case)[0] + 3 * numbers_of_rows(case)[1])


@pytest.mark.case("D34")
@pytest.mark.parametrize("chunks_kept", [0, 2, 100])
@pytest.mark.parametrize("rows", [5, 96, ROWS])
@pytest.mark.parametrize("silent", [0.3, 0.6, 0.97])
def test_a_batch_invariant_row_keeps_its_bits_and_its_chunk(
    rows: int, silent: float, chunks_kept: int, monkeypatch
) -> None:
    """Every chunk stays full, with rows that change nothing: so no bit of a row depends on which rows are left out."""
    monkeypatch.setenv("NPU_BACKEND_BATCH_INVARIANT", "1")
    case = head_case(rows, bias=torch.linspace(-1, 1, 101), temperature=torch.linspace(0.5, 2.0, rows))
    case = some_rows(case, silent=silent, ignored=0.4)
    expected = run_head(case, all_rows)
    with counted(monkeypatch) as work:
        got = run_head(case, lambda given: head(given, logits_cache_gib=chunks_kept * GIB_OF_A_CHUNK))
    for name in ("log_probs", "entropy", "grad_hidden"):
        assert torch.equal(got[name], expected[name]), name
    for name in ("grad_weight", "grad_bias"):  # sums in another order
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)
    assert {m if n != 64 or m != 101 else k for m, n, k in work.gemms} <= {CHUNK}
    loud = numbers_of_rows(case)[1]
    assert sum(m for m, n, k in work.gemms if (n, k) == (64, 101)) == -(-loud // CHUNK) * CHUNK


@pytest.mark.usefixtures("either")
def test_the_same_bits_each_time_with_deterministic_algorithms() -> None:
    case = some_rows(head_case(ROWS), silent=0.5, ignored=0.3)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (run_head(case, lambda given: head(given, logits_cache_gib=1)) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("gib", [0, 1])
def test_backward_twice_with_other_rows_silent(gib: int) -> None:
    case = head_case(ROWS)
    weight = case.weight.clone().requires_grad_()
    log_probs, _ = head(replace(case, weight=weight), logits_cache_gib=gib)
    for share in (0.5, 0.0, 0.9):
        given = some_rows(replace(case, grad_entropy=None), silent=share)
        grad = torch.autograd.grad(log_probs, weight, given.grad_log_probs, retain_graph=True)[0]
        torch.testing.assert_close(grad, run_head(given, all_rows)["grad_weight"], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpoint(reentrant: bool) -> None:
    case = some_rows(head_case(ROWS), silent=0.5, ignored=0.3)

    def checkpointed(given: HeadCase):
        def run(hidden: Tensor, weight: Tensor):
            return head(replace(given, hidden=hidden, weight=weight))

        return checkpoint(run, given.hidden, given.weight, use_reentrant=reentrant)

    def gradients(function) -> list[Tensor]:
        hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
        outputs = function(replace(case, hidden=hidden, weight=weight))
        torch.autograd.backward(outputs, [case.grad_log_probs, case.grad_entropy])
        return [hidden.grad, weight.grad]

    for got, expected in zip(gradients(checkpointed), gradients(head)):
        assert torch.equal(got, expected)


def test_compiled_code_leaves_no_row_out() -> None:
    torch.compiler.reset()
    case = some_rows(head_case(20, hidden_size=16, vocab_size=50), silent=0.5, ignored=0.3)

    def plain(given: HeadCase):
        log_probs, entropy, _ = npu_backend.linear_log_prob(given.hidden, given.weight, given.labels)
        return log_probs, entropy

    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    expected = run_head(case, plain)
    with row_compaction(True):
        got = run_head(case, compiled)
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name])
    torch.compiler.reset()


# -- tiles of the vocabulary -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("gib", [0, 1])
@pytest.mark.parametrize("why", ["silent", "ignored"])
def test_tiles_without_a_row_that_counts_still_reach_every_parameter(why: str, gib: int) -> None:
    case = some_rows(
        head_case(40, bias=torch.zeros(101)), silent=2.0 * (why == "silent"), ignored=2.0 * (why == "ignored")
    )
    got = run_head(case, lambda given: head(given, logits_cache_gib=gib))
    assert set(got) == {"log_probs", "entropy", "grad_hidden", "grad_weight", "grad_bias"}
    for name, value in got.items():
        assert value.any() == (why == "silent" and name in ("log_probs", "entropy")), name


def test_tiles_spend_no_gemm_on_rows_that_are_left_out_and_wait_once(tiles: int, monkeypatch) -> None:
    case = some_rows(head_case(ROWS), silent=0.5, ignored=0.3)
    case.labels[0], case.grad_log_probs[0] = 0, 1.0  # the first row takes part whether it counts or not
    counting, loud = numbers_of_rows(case)
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    for gib in (0, 1):
        with counted(monkeypatch) as forward, trusted_values():
            outputs = head(case, logits_cache_gib=gib)
        with counted(monkeypatch) as backward:
            torch.autograd.grad(outputs, [hidden, weight], [case.grad_log_probs, case.grad_entropy])
        assert forward.waits == backward.waits == 1
        assert len(forward.gemms) == tiles
        assert forward.flops() == 2 * 64 * 101 * counting
        assert backward.flops() == 2 * 64 * 101 * loud * (2 if gib else 3)
