"""DTensor activations: torch_npu's operators have no sharding rules, so they compute on each rank's own shard.

That is right for what works on one row (or one element) at a time, as long as no row is split and nothing is a partial
sum. The result gets the placements of the input back. Everything else goes to the original forward, which has rules of
its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from npu_backend.operators import checks


def why_not_rows(x: Any, weight: Any = None) -> str | None:
    """Why rows of `x` cannot be computed shard by shard; None for plain tensors.

    Args:
        x: [..., H], where H must be whole on every rank.
        weight: a parameter that every row needs; plain, or a DTensor that is whole on every rank of the same mesh.
    """
    if not checks.is_dtensor(x):
        return "a sharded weight with a plain input" if checks.is_dtensor(weight) else None
    for placement in x.placements:
        if placement.is_partial():
            return "a partial sum (DTensor)"
        if placement.is_shard() and placement.dim % x.dim() == x.dim() - 1:
            return "rows split over ranks (DTensor)"
    if checks.is_dtensor(weight) and (
        weight.device_mesh != x.device_mesh or not all(placement.is_replicate() for placement in weight.placements)
    ):
        return "a sharded weight (DTensor)"
    return None


def on_rows(function: Callable[[Tensor, Tensor], Tensor], x: Any, weight: Any) -> Any:
    """`function(x, weight)` on the local shard; the weight's gradient is summed over the ranks that split the rows."""
    from torch.distributed.tensor import Partial, Replicate

    if checks.is_dtensor(weight):
        # Each rank sees only its own rows: what it adds to the weight's gradient is one part of a sum.
        parts = [Partial() if placement.is_shard() else Replicate() for placement in x.placements]
        weight = weight.to_local(grad_placements=parts)
    return _rewrap(function(x.to_local(), weight), x, x.shape)


def why_not_elements(*tensors: Any) -> str | None:
    """Why elements of these tensors cannot be paired shard by shard; None for plain tensors."""
    wrapped = [tensor for tensor in tensors if checks.is_dtensor(tensor)]
    if not wrapped:
        return None
    first = wrapped[0]
    if len(wrapped) < len(tensors) or any(
        tensor.device_mesh != first.device_mesh or tuple(tensor.placements) != tuple(first.placements)
        for tensor in wrapped
    ):
        return "differently sharded operands (DTensor)"
    return "a partial sum (DTensor)" if any(placement.is_partial() for placement in first.placements) else None


def on_elements(function: Callable[..., Tensor], *tensors: Any) -> Any:
    """`function` of tensors of one shape and sharding, on the local shards."""
    return _rewrap(function(*(tensor.to_local() for tensor in tensors)), tensors[0], tensors[0].shape)


def _rewrap(local: Tensor, like: Any, shape: torch.Size) -> Any:
    """A DTensor of `shape` with the placements of `like`; shards may differ in size, so shape and stride are given."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
