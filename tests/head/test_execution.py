"""What the torch backend executes, saves and guarantees: memory, operators, batch invariance, torch.compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from references import HeadCase, head_case, run_head

import npu_backend
from npu_backend.head import linear_log_prob


def head(case: HeadCase, **options: object):
    log_probs, entropy, _ = npu_backend.linear_log_prob(
        case.hidden, case.weight, case.labels, **case.options(), **options
    )
    return log_probs, entropy


@pytest.mark.case("D31")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_tensors_are_under_3_percent_of_the_logits(dtype: torch.dtype, saved_elements) -> None:
    case = head_case(2048, hidden_size=32, vocab_size=4096, dtype=dtype)
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    with saved_elements() as saved:
        head(replace(case, hidden=hidden, weight=weight), logits_cache_gib=0)
    elements = sum(tensor.numel() for tensor in saved)
    assert 2048 * 32 + 4096 * 32 <= elements < 0.03 * 2048 * 4096
    saved_as_given = {tensor.data_ptr() for tensor in saved}
    assert weight.data_ptr() in saved_as_given  # not a copy: FSDP2 refills this very storage before backward


def test_no_tensor_ever_holds_more_than_one_chunk_of_logits() -> None:
    """The largest tensor of forward and backward is a chunk of logits, not [N, V]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    with Largest() as largest:
        run_head(head_case(2000, hidden_size=8, vocab_size=300), head)
    assert largest.elements == 512 * 300


@pytest.mark.parametrize("gib", [0.5 * 512 * 300 * 4 / 2**30, 1.5 * 512 * 300 * 4 / 2**30, 1, "auto"])
def test_a_logits_cache_keeps_to_its_budget_and_changes_no_bit(gib: float | str, saved_elements, monkeypatch) -> None:
    case = head_case(1200, hidden_size=8, vocab_size=300, softcap=5.0, temperature=0.7)
    expected = run_head(case, head)
    with saved_elements() as saved:
        got = run_head(case, lambda given: head(given, logits_cache_gib=gib))
    for name, value in got.items():
        assert torch.equal(value, expected[name])
    logits = sum(tensor.numel() for tensor in saved if tensor.shape[-1:] == (300,)) * 4
    chunks = 0 if gib == "auto" else int(gib * 2**30) // (512 * 300 * 4)
    assert logits == min(chunks * 512, 1200) * 300 * 4
    monkeypatch.setenv("NPU_BACKEND_LOGITS_CACHE_GIB", str(gib))
    with saved_elements() as by_environment:
        run_head(case, head)
    assert [tensor.shape for tensor in by_environment] == [tensor.shape for tensor in saved]


def test_a_pass_without_backward_keeps_no_logits(monkeypatch) -> None:
    budgets = []
    original = linear_log_prob.Plan
    monkeypatch.setattr(linear_log_prob, "Plan", lambda **kw: budgets.append(kw["cache_bytes"]) or original(**kw))
    case = head_case(20)
    weight = case.weight.clone().requires_grad_()
    head(case, logits_cache_gib=1)
    with torch.no_grad():
        head(replace(case, weight=weight), logits_cache_gib=1)
    head(replace(case, weight=weight), logits_cache_gib=1)
    assert budgets == [0, 0, 2**30]


_MATMULS = ("mm", "matmul", "linear", "einsum", "dot", "mv", "gemm", "addr", "outer")


@pytest.mark.case("D15", "D34")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (700,), (2, 300)])
@pytest.mark.parametrize("invariant", ["0", "1"])
def test_every_gemm_is_aten_mm(dtype, shape: tuple[int, ...], invariant: str, operators, monkeypatch) -> None:
    """So an override of that one operator, for example by a batch-invariant one, reaches the whole head."""
    monkeypatch.setenv("NPU_BACKEND_BATCH_INVARIANT", invariant)
    case = head_case(
        *shape, dtype=dtype, bias=torch.zeros(101, dtype=dtype), softcap=3.0, temperature=torch.ones(shape)
    )
    with operators() as seen:
        run_head(case, head)
    like_matmul = {name for name in seen if any(part in name.split(".")[1] for part in _MATMULS)}
    assert like_matmul == {"aten.mm.default"}


@pytest.mark.case("D34")
def test_an_override_of_aten_mm_takes_effect() -> None:
    calls: list[tuple[int, ...]] = []
    library = torch.library.Library("aten", "IMPL")
    try:

        def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            calls.append((*a.shape, b.shape[1]))
            return torch.addmm(a.new_zeros(1), a, b)

        library.impl("mm", counted, "CPU")
        run_head(head_case(600), head)
    finally:
        library._destroy()
    assert calls.count((512, 64, 101)) == calls.count((88, 64, 101)) == 2  # logits, forward and backward
    assert len(calls) == 8


@pytest.mark.case("D34")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [512, 100])
def test_batch_invariance(dtype: torch.dtype, chunk_size: int, monkeypatch) -> None:
    """A row alone, moved, and in another batch: the same bits, forward and for the gradient of its hidden state."""
    monkeypatch.setenv("NPU_BACKEND_BATCH_INVARIANT", "1")
    module = npu_backend.FusedLinearForPPO(chunk_size)

    def fused(case: HeadCase):
        return module.forward(case.hidden, case.weight, case.labels, case.temperature)

    case = head_case(513, hidden_size=96, vocab_size=257, dtype=dtype)
    case = replace(case, temperature=torch.linspace(0.5, 2.0, 513))
    whole = run_head(case, fused)
    generator = torch.Generator().manual_seed(1)
    samples = [torch.tensor([3]), torch.tensor([512]), torch.randperm(513, generator=generator), torch.arange(500, 513)]
    for rows in samples:
        picked = {
            name: getattr(case, name)[rows]
            for name in ("hidden", "labels", "temperature", "grad_log_probs", "grad_entropy")
        }
        part = run_head(replace(case, **picked), fused)
        for name in ("log_probs", "entropy", "grad_hidden"):
            assert torch.equal(part[name], whole[name][rows]), (name, rows)


@pytest.mark.case("D34")
def test_batch_invariant_gemms_all_have_the_same_rows(operators, monkeypatch) -> None:
    """The guarantee does not rest on this CPU's GEMM: every logits GEMM has M = 512, whatever the batch."""
    shapes: set[tuple[int, ...]] = set()
    original = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: shapes.add((*a.shape, b.shape[1])) or original(a, b))
    monkeypatch.setenv("NPU_BACKEND_BATCH_INVARIANT", "1")
    for rows in (1, 511, 512, 513, 1100):
        run_head(head_case(rows), head)
    assert shapes == {(512, 64, 101), (512, 101, 64), (101, 512, 64)}


@pytest.mark.case("D38")
def test_without_entropy_there_is_less_work(operators) -> None:
    case = head_case(600)
    with operators() as full:
        expected = run_head(replace(case, grad_entropy=None), head)
    with operators() as less:
        got = run_head(case, lambda given: head(given, calculate_entropy=False))
    assert "entropy" not in got
    for name, value in got.items():
        assert torch.equal(value, expected[name])
    assert sum(less.values()) < sum(full.values())
    assert less["aten.sum.dim_IntList"] < full["aten.sum.dim_IntList"]
    output = npu_backend.linear_log_prob(case.hidden, case.weight, case.labels, calculate_entropy=False)
    assert output.entropy is None


@pytest.mark.case("D30")
@pytest.mark.parametrize("options", ["plain", "everything"])
def test_compiles_without_a_graph_break(options: str) -> None:
    """Documented: fullgraph works, forward and backward (the chunk loop is unrolled, value checks are off)."""
    torch.compiler.reset()
    case = head_case(600, hidden_size=16, vocab_size=50)
    if options == "everything":
        case = replace(
            case, bias=torch.linspace(-1, 1, 50), softcap=3.0, logit_scale=1.5, temperature=torch.linspace(0.5, 2, 600)
        )
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    expected = run_head(case, head)
    for name, value in run_head(case, compiled).items():
        torch.testing.assert_close(value, expected[name])
    with torch.no_grad():
        torch.testing.assert_close(compiled(case)[0], expected["log_probs"])
    torch.compiler.reset()


@pytest.mark.case("D30")
@pytest.mark.parametrize("option", ["temperature", "softcap", "logit_scale"])
def test_compiled_code_takes_a_second_number(option: str) -> None:
    """The second float makes torch.compile trace a symbol, which can be compared, but has no math.isfinite."""
    torch.compiler.reset()
    case = head_case(20, hidden_size=16, vocab_size=50)
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    for number in (0.7, 0.9, 1.3):
        given = replace(case, **{option: number})
        expected = run_head(given, head)
        for name, value in run_head(given, compiled).items():
            torch.testing.assert_close(value, expected[name])
    torch.compiler.reset()
