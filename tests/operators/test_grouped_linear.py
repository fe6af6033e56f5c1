"""Grouped matmul: counts, operands, experts without tokens, frozen weights, and gradients against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_torch_npu
import operator_references as exact
import pytest
import torch
from fake_torch_npu import FakeTorchNpu
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_references import normal
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_backend.operators.grouped_linear import (
    counts_of,
    grouped_linear,
    grouped_linear_reference,
    tokens_per_expert,
)
from npu_backend.virtual_npu.references import grouped_matmul

COUNTS = ([3, 0, 2, 4], [0, 0, 9, 0], [5, 0, 3, 0], [1, 1, 1, 1])


def layouts(inputs: int, outputs: int, dtype: torch.dtype) -> dict[str, tuple[dict[str, Tensor], bool]]:
    """The same four experts as one [E, out, in], as one [E, in, out], and as matrices (two per expert)."""
    stacked = normal(4, outputs, inputs, seed=1, dtype=dtype) / inputs**0.5
    halves = [half.contiguous() for expert in stacked for half in expert.chunk(2)]
    return {
        "[E, out, in]": ({"w": stacked}, True),
        "[E, in, out]": ({"w": stacked.transpose(1, 2).contiguous()}, False),
        "matrices": ({f"w{i}": half for i, half in enumerate(halves)}, True),
    }


@pytest.mark.parametrize("layout", layouts(8, 6, torch.float32))
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parity(layout: str, counts: list[int], dtype: torch.dtype, npu: FakeTorchNpu) -> None:
    weights, out_in = layouts(8, 6, dtype)[layout]

    def calling(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, **w: f(x, torch.tensor(counts), list(w.values()), out_in=out_in)

    given = {"x": normal(sum(counts), 8, dtype=dtype), **weights}
    exact.assert_parity(
        calling(grouped_linear), calling(grouped_linear_reference), calling(grouped_linear_reference), given
    )


@pytest.mark.case("B01")
@pytest.mark.parametrize("out_in", [True, False])
def test_operands_are_contiguous_forward_and_backward(out_in: bool, npu: FakeTorchNpu) -> None:
    """A transposed view of the experts gave NaN in the first backward pass on a device; a contiguous copy did not."""
    counts = torch.tensor([3, 0, 2])
    view = normal(3, 6, 8, dtype=torch.bfloat16).transpose(1, 2)  # [3, 8, 6]
    results = []
    for weight in (view, view.contiguous()):
        weight = weight.detach().requires_grad_()
        rows = normal(6 if out_in else 8, 5, dtype=torch.bfloat16).t().requires_grad_()
        out = grouped_linear(rows, counts, [weight], out_in=out_in)
        out.backward(normal(*reversed(out.shape), dtype=torch.bfloat16).t())  # a strided upstream gradient
        results.append((out.detach(), rows.grad, weight.grad))
    torch.testing.assert_close(results[0], results[1])
    assert all(torch.isfinite(t).all() for t in results[0])
    assert len(npu.seen) == 6
    for _, (x, weight), options in npu.seen:
        assert weight[0].is_contiguous()
        # documented: group_type 2 takes its left operand as the transposed view of a contiguous tensor
        assert (x[0].t() if options["group_type"] == 2 else x[0]).is_contiguous()


@pytest.mark.case("B08")
def test_running_sums_and_counts_mean_the_same(npu: FakeTorchNpu) -> None:
    counts = counts_of(torch.tensor([3, 0, 2]), 5, group_list_type=1)
    sums = counts_of(torch.tensor([3, 3, 5]), 5, group_list_type=0)
    assert torch.equal(counts, sums)
    rows, weight = normal(5, 8), normal(3, 8, 6)
    torch.testing.assert_close(
        grouped_linear(rows, counts, [weight], out_in=False), grouped_linear(rows, sums, [weight], out_in=False)
    )


@pytest.mark.case("B08")
@pytest.mark.parametrize(
    ("group_list", "group_list_type"), [([3, 3, 5], 1), ([3, 0, 2], 0), ([3, 0, 1], 1), ([3, 3, 6], 0), ([6, -1, 0], 1)]
)
def test_a_group_list_that_does_not_cover_the_rows_is_an_error(group_list: list[int], group_list_type: int) -> None:
    with pytest.raises(ValueError, match=r"rows, but there are 5"):
        counts_of(torch.tensor(group_list), 5, group_list_type=group_list_type)


@pytest.mark.case("B08")
def test_the_operator_is_told_that_it_gets_counts(npu: FakeTorchNpu) -> None:
    grouped_linear(normal(5, 8), torch.tensor([3, 0, 2]), [normal(3, 8, 6)], out_in=False)
    assert npu.count("npu_grouped_matmul", group_list_type=1) == len(npu.seen) == 1


@pytest.mark.case("B09", "B10")
@settings(max_examples=30)
@given(ids=st.lists(st.integers(0, 7), max_size=40), dtype=st.sampled_from([torch.int64, torch.int32]))
def test_counts_of_any_ids(ids: list[int], dtype: torch.dtype) -> None:
    counts = tokens_per_expert(torch.tensor(ids, dtype=dtype).reshape(-1, 1), 8)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [ids.count(e) for e in range(8)]


@pytest.mark.case("B09")
def test_counts_under_fake_tensors() -> None:
    with FakeTensorMode():
        counts = tokens_per_expert(torch.zeros(6, 2, dtype=torch.int64), 8)
    assert (counts.shape, counts.dtype) == ((8,), torch.int64)


@pytest.mark.case("B10")
def test_counts_with_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert tokens_per_expert(torch.tensor([7] * 5), 8).tolist() == [0] * 7 + [5]
    finally:
        torch.use_deterministic_algorithms(False)


def dirty(*args: Any, **kwargs: Any) -> list[Tensor]:
    """A grouped matmul that leaves whatever was in its buffer for a group without rows, as some devices do."""
    results = grouped_matmul.npu_grouped_matmul(*args, **kwargs)
    if kwargs["group_type"] == 2:
        results[0][kwargs["group_list"] == 0] = torch.nan
    return results


@pytest.mark.case("B16")
@pytest.mark.parametrize("layout", layouts(8, 6, torch.float32))
def test_experts_without_tokens_get_exactly_zero(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch_npu.install(monkeypatch, {"npu_grouped_matmul": dirty})
    tensors, out_in = layouts(8, 6, torch.float32)[layout]
    weights = [w.requires_grad_() for w in tensors.values()]
    grouped_linear(normal(8, 8), torch.tensor([5, 0, 3, 0]), weights, out_in=out_in).sum().backward()
    per_expert = torch.stack([w.grad for w in weights]).reshape(4, -1)  # type: ignore[arg-type]
    assert torch.equal(per_expert[[1, 3]], torch.zeros_like(per_expert[[1, 3]]))
    assert torch.isfinite(per_expert).all()
    assert (per_expert[[0, 2]] != 0).any(1).all()


@pytest.mark.case("B17")
@pytest.mark.parametrize("layout", layouts(8, 6, torch.float32))
def test_frozen_experts_cost_no_weight_gradient_and_keep_no_input(layout: str, npu: FakeTorchNpu) -> None:
    tensors, out_in = layouts(8, 6, torch.float32)[layout]
    rows = normal(5, 8).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = grouped_linear(rows, torch.tensor([3, 0, 2, 0]), list(tensors.values()), out_in=out_in)
    out.sum().backward()
    assert rows.grad is not None
    assert npu.count("npu_grouped_matmul", group_type=2) == 0
    assert all(t is not rows and t.shape != rows.shape for t in kept)


@pytest.mark.case("B17")
def test_frozen_input_costs_no_input_gradient(npu: FakeTorchNpu) -> None:
    weight = normal(2, 8, 6).requires_grad_()
    grouped_linear(normal(5, 8), torch.tensor([3, 2]), [weight], out_in=False).sum().backward()
    assert npu.count("npu_grouped_matmul", group_type=0) == 1
    assert npu.count("npu_grouped_matmul", group_type=2) == 1


@pytest.mark.case("B17")
def test_one_trained_matrix_among_frozen_ones(npu: FakeTorchNpu) -> None:
    weights = [normal(6, 8, seed=i) for i in range(3)]
    weights[1].requires_grad_()
    grouped_linear(normal(5, 8), torch.tensor([2, 2, 1]), weights, out_in=True).sum().backward()
    assert [w.grad is not None for w in weights] == [False, True, False]


def test_no_stacked_copy_is_kept_for_backward(npu: FakeTorchNpu) -> None:
    weights = [normal(6, 8, seed=i).requires_grad_() for i in range(4)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grouped_linear(normal(5, 8), torch.tensor([2, 2, 1, 0]), weights, out_in=True)
    own = {w.data_ptr() for w in weights}
    assert sum(t.numel() for t in kept if t.data_ptr() not in own) < weights[0].numel()
