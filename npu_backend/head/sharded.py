"""A weight that FSDP2 keeps as a DTensor: gathered for one call of the head, its gradient averaged into the shards.

This is for calls outside the forward of the module that owns the weight. Inside it (where `patch_forward_with_backends`
runs the head) FSDP2 has already gathered the weight, and reduces the gradient itself when its synchronisation is on.

The gradient is the mean over every rank of the weight's mesh: FSDP's convention, in which each rank's loss is the mean
over its own data. It holds for each kind of mesh:

    [Shard(0)]               FSDP: mean and scatter.
    [Replicate(), Shard(0)]  HSDP: the replicas have other data too, so the mean is over both dimensions.
    a tensor-parallel dimension: its ranks compute the same loss from the same data; a mean of equals changes nothing.

`full_tensor()` without a gradient placement would take each rank's own gradient for everybody's: no reduction at all.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from npu_backend.errors import HeadInputError


def is_dtensor(value: Any) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")  # if nobody imported it, nothing is a DTensor
    return distributed is not None and isinstance(value, distributed.DTensor)


def gather(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor in `dtype` on this rank; a tensor that is not a DTensor as it is. Collective over the mesh.

    The cast comes first, so that it is the narrower dtype that travels, in both directions. The gradient arrives as a
    DTensor of `value`'s own placements and dtype.
    """
    if not is_dtensor(value):
        return value
    from torch.distributed.tensor import Partial

    sharded: Any = value.to(dtype)
    mesh = sharded.device_mesh
    on_cpu = mesh.device_type == "cpu"  # gloo of torch 2.5 gives the sum, or an error, where a mean is asked for
    whole: Tensor = sharded.full_tensor(grad_placements=[Partial("sum" if on_cpu else "avg")] * mesh.ndim)
    if on_cpu and whole.requires_grad:
        whole.register_hook(lambda gradient: gradient / mesh.size())
    return whole


def check_mesh(name: str, value: Tensor, process_group: Any) -> None:
    """Refuse a DTensor that lies on the very ranks among which `process_group` divides the vocabulary.

    Raises:
        HeadInputError: gathering it would give every rank the whole vocabulary, taken for its own part of it.
    """
    if not is_dtensor(value):
        return
    mesh_ranks = set(value.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
    shared = mesh_ranks & set(dist.get_process_group_ranks(process_group))
    if len(shared) > 1:
        raise HeadInputError(
            f"linear_log_prob: {name} is a DTensor over ranks {sorted(mesh_ranks)}, and process_group divides the "
            f"vocabulary among ranks {sorted(shared)} of them. Pass this rank's part: {name}.to_local(), inside the "
            "forward where FSDP has gathered it over the other ranks"
        )
