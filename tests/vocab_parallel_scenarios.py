"""What tests/head/test_vocab_parallel.py runs on four ranks: the head with the vocabulary divided among them, on the
torch backend; on the triton backend where Triton's interpreter is on or HEAD_TEST_DEVICE is cuda.

Every number is an error over what `references` allows, so 1 is the limit; a sum that is lost or counted twice is far
beyond it. What must hold on every rank besides is asserted here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from references import HeadCase, error_bound, full_logits_head, head_case, max_error, run_head
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import npu_backend
from npu_backend import verl_plugin
from npu_backend.errors import BackendUnavailableError, HeadInputError
from npu_backend.head import triton_cuda
from npu_backend.head.linear_log_prob import in_chunks
from npu_backend.head.selection import row_compaction

UNEVEN = (40, 7, 33, 21)
VOCAB = sum(UNEVEN)
ROWS = 10
_UPSTREAM = ("grad_log_probs", "grad_entropy")
DEVICE = os.environ.get("HEAD_TEST_DEVICE", "cpu")
BACKEND = "triton" if triton_cuda.interpreted() or DEVICE == "cuda" else "torch"


def scenarios() -> Iterator[tuple[str, float]]:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    pair, world = grid.get_group("tensor"), dist.group.WORLD
    case = head_case(ROWS, vocab_size=VOCAB)
    case.labels[3] = case.ignore_index
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))
    per_row = torch.rand(ROWS, generator=torch.Generator().manual_seed(6)) + 0.5
    yield "4 uneven parts", _parts(case, UNEVEN, world)
    yield "bfloat16", _parts(case.to(torch.bfloat16), UNEVEN, world)
    everything = replace(case, bias=bias, softcap=3.0, logit_scale=0.7, temperature=per_row)
    yield "bias, scale, softcap, temperature per row", _parts(everything, UNEVEN, world)
    yield "entropy only", _parts(replace(case, grad_log_probs=None), UNEVEN, world)
    yield "log-probs only", _parts(replace(case, grad_entropy=None), UNEVEN, world, calculate_entropy=False)
    yield "cached logits", _parts(case, UNEVEN, world, logits_cache_gib=1.0)
    yield "no rows", _parts(head_case(0, vocab_size=VOCAB), UNEVEN, world)
    if BACKEND == "torch":  # docs/head.md: what a label far below the largest score costs the others' float32 gradients
        yield "large logits", _parts(head_case(ROWS, vocab_size=VOCAB, spread=60.0), UNEVEN, world)
    own = head_case(ROWS, vocab_size=202)
    for name, labels in (("first", own.labels % 101), ("second", own.labels % 101 + 101)):
        yield f"all labels in the {name} part", _parts(replace(own, labels=labels), (101, 101), pair)
    own.labels[:] = torch.tensor([100, 101] * 5)  # the last and the first column of a part
    yield "labels on the edges", _parts(own, (101, 101), pair)
    bias[80:] = -torch.inf  # all of the last part, as if the vocabulary were padded
    yield "a part of -inf", _parts(replace(case, bias=bias, labels=case.labels % 80), UNEVEN, world)
    quiet = torch.arange(ROWS) % 3 != 0
    some = {name: getattr(case, name).masked_fill(quiet, 0.0) for name in _UPSTREAM}
    none = {name: torch.zeros(ROWS) for name in _UPSTREAM}
    yield "some rows without upstream gradients", _parts(replace(case, **some), UNEVEN, world)
    yield "no row with an upstream gradient", _parts(replace(case, **none), UNEVEN, world)
    with row_compaction(True):
        yield "rows left out", _parts(replace(case, **some), UNEVEN, world)
        cached = _parts(replace(everything, **some), UNEVEN, world, logits_cache_gib=1.0)
        yield "rows left out, every option, cached logits", cached
        yield "every row left out", _parts(replace(case, **none), UNEVEN, world)
    if BACKEND == "triton":
        _communication(case, [("gather", 1), ("sum", ROWS - 1), ("gather", 3 * (ROWS - 1))])
        return
    os.environ["NPU_BACKEND_BATCH_INVARIANT"] = "1"
    yield "batch invariant", _parts(case, UNEVEN, world)
    del os.environ["NPU_BACKEND_BATCH_INVARIANT"]
    yield "Megatron's call", _megatron(pair, lambda hidden, _: hidden)
    yield "Megatron's call after its gather, which sums", _megatron(pair, _Gather.apply, True)
    yield "Megatron's call after its gather, which does not sum", _megatron(pair, _Gather.apply, False)
    yield "Megatron's call after its copy, which sums", _megatron(pair, _CopyToModelParallelRegion.apply)
    yield "fsdp over the data, parts over the rest", _fsdp_and_parts(grid)
    _communication(case, [("gather", 1), ("max", ROWS), ("sum", 3 * ROWS)])
    _errors(case, grid)


def _own_part(case: HeadCase, sizes: tuple[int, ...], group: Any) -> slice:
    rank = dist.get_rank(group)
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def _parts(case: HeadCase, sizes: tuple[int, ...], group: Any, **options: Any) -> float:
    """Outputs, and gradients of the hidden states and this rank's part of weight and bias."""
    part = _own_part(case, sizes, group)
    own = replace(case, weight=case.weight[part], bias=None if case.bias is None else case.bias[part])

    def head(given: HeadCase) -> tuple[Tensor, Tensor | None]:
        there = given.on(DEVICE)
        log_probs, entropy, backend = in_chunks(
            there.hidden,
            there.weight,
            there.labels,
            process_group=group,
            impl_backend=BACKEND,
            chunk_rows=4,
            **there.options(),
            **options,
        )
        assert backend == BACKEND
        return log_probs.cpu(), None if entropy is None else entropy.cpu()

    got = run_head(own, head)
    for name, value in got.items():
        assert value.isfinite().all(), name
    reference = run_head(case.to(torch.float64), full_logits_head)
    eager = run_head(case, full_logits_head)
    worst = 0.0
    for name, value in got.items():
        cut = part if name in ("grad_weight", "grad_bias") else slice(None)
        if value.numel():
            bound = error_bound(eager[name], reference[name], value.dtype)
            worst = max(worst, max_error(value, reference[name][cut]) / bound if bound else 0.0)
    return worst


# -- Megatron ---------------------------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """What Megatron's gather from the sequence-parallel region does: [S/t, 1, H] to [S, 1, H], and back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any, tensor_parallel_output_grad: bool) -> Tensor:
        ctx.group, ctx.tensor_parallel_output_grad = group, tensor_parallel_output_grad
        parts = [torch.empty_like(hidden) for _ in range(group.size())]
        dist.all_gather(parts, hidden.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.tensor_parallel_output_grad:
            grad = grad.clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None, None


class _CopyToModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def _verls(*_: Any) -> Any:
    """Verl's own Triton head, which needs CUDA."""
    raise AssertionError("called verl's own head")


def _megatron(group: Any, before: Callable[..., Tensor], *flags: bool) -> float:
    """`linear_cross_entropy(hidden [S, 1, H], weight, labels [1, S], temperature, "none", group)`, as verl calls it."""
    case = head_case(ROWS, vocab_size=VOCAB, temperature=0.7)
    sizes = (60, 41)
    whole = replace(case, hidden=case.hidden[:, None], labels=case.labels[None])
    gathers = bool(flags)
    share = slice(None)
    if gathers:
        share = slice(ROWS // 2 * group.rank(), ROWS // 2 * (group.rank() + 1))
    hidden = whole.hidden[share].clone().requires_grad_()
    weight = case.weight[_own_part(case, sizes, group)].clone().requires_grad_()
    linear_cross_entropy = verl_plugin._linear_cross_entropy(_verls)
    log_probs, entropy = linear_cross_entropy(before(hidden, group, *flags), weight, whole.labels, 0.7, "none", group)
    assert log_probs.shape == entropy.shape == (1, ROWS)
    ((log_probs[0] * case.grad_log_probs).sum() + (entropy[0] * case.grad_entropy).sum()).backward()
    reference, eager = run_head(case.to(torch.float64), full_logits_head), run_head(case, full_logits_head)
    bound = error_bound(eager["grad_hidden"], reference["grad_hidden"], torch.float32)
    return max_error(hidden.grad[:, 0], reference["grad_hidden"][share]) / bound


def _fsdp_and_parts(grid: DeviceMesh) -> float:
    """Each part of the vocabulary is a DTensor over the data-parallel ranks."""
    group, data = grid.get_group("tensor"), grid["data"]
    sizes, batches = (60, 41), [head_case(ROWS, vocab_size=VOCAB, seed=seed) for seed in range(2)]
    weight = head_case(1, vocab_size=VOCAB).weight
    part = _own_part(batches[0], sizes, group)
    own = distribute_tensor(weight[part].clone(), data, [Shard(0)]).requires_grad_()
    case = batches[data.get_local_rank()]
    log_probs, entropy, _ = npu_backend.linear_log_prob(case.hidden, own, case.labels, process_group=group)
    ((log_probs * case.grad_log_probs).sum() + (entropy * case.grad_entropy).sum()).backward()

    def mean(dtype: torch.dtype) -> Tensor:
        runs = [run_head(replace(batch, weight=weight).to(dtype), full_logits_head) for batch in batches]
        return (runs[0]["grad_weight"] + runs[1]["grad_weight"]) / 2

    assert own.grad.placements == own.placements
    reference = mean(torch.float64)
    bound = error_bound(mean(torch.float32), reference, torch.float32)
    return max_error(own.grad.full_tensor(), reference[part]) / bound


# -- what travels, and what is refused --------------------------------------------------------------------------------


@contextmanager
def _recorded() -> Iterator[list[tuple[str, int]]]:
    """(collective, elements) of everything sent."""
    sent: list[tuple[str, int]] = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather")}

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        sent.append(("max" if op == dist.ReduceOp.MAX else "sum", tensor.numel()))
        return originals["all_reduce"](tensor, op, **options)

    def all_gather(parts: list[Tensor], tensor: Tensor, **options: Any) -> Any:
        sent.append(("gather", tensor.numel()))
        return originals["all_gather"](parts, tensor, **options)

    dist.all_reduce, dist.all_gather = all_reduce, all_gather
    try:
        yield sent
    finally:
        dist.all_reduce, dist.all_gather = originals["all_reduce"], originals["all_gather"]


def _communication(case: HeadCase, expected: list[tuple[str, int]]) -> None:
    part = _own_part(case, UNEVEN, dist.group.WORLD)
    there = case.on(DEVICE)
    hidden = there.hidden.clone().requires_grad_()
    with _recorded() as sent:
        output = npu_backend.linear_log_prob(
            hidden, there.weight[part], there.labels, process_group=dist.group.WORLD, impl_backend=BACKEND
        )
        assert sent == expected, sent
        output.log_probs.sum().backward()
    assert sent[len(expected) :] == [("sum", hidden.numel())], sent
    assert output.backend == BACKEND


def _errors(case: HeadCase, grid: DeviceMesh) -> None:
    """Every rank raises, so that none is left waiting."""
    world = dist.group.WORLD
    weight = case.weight[_own_part(case, UNEVEN, world)]

    def expect(error: type[Exception], words: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(error, match=re.escape(words)):
            npu_backend.linear_log_prob(*arguments, **options)

    beyond = case.labels.clone()
    beyond[4] = VOCAB
    expect(HeadInputError, f"labels[4] = {VOCAB}", case.hidden, weight, beyond, process_group=world)
    sharded = distribute_tensor(case.weight, grid["tensor"], [Shard(0)])
    group = grid.get_group("tensor")
    expect(HeadInputError, "vocab_weights.to_local()", case.hidden, sharded, case.labels, process_group=group)
    os.environ["NPU_BACKEND_STRICT"] = "1"
    expect(
        BackendUnavailableError, "divided", case.hidden, weight, case.labels, process_group=world, impl_backend="liger"
    )
    del os.environ["NPU_BACKEND_STRICT"]
    fallback = npu_backend.linear_log_prob(case.hidden, weight, case.labels, process_group=world, impl_backend="liger")
    assert fallback.backend == "torch"
