"""A vocabulary that is divided among the ranks of a tensor-parallel group: what the ranks tell each other.

Each rank holds consecutive rows of the weight, rank 0 the first ones; their numbers may differ. It computes the softmax
statistics of its own columns for all rows. Then one maximum and one sum over the group, of a few numbers per row, make
them those of the whole vocabulary; weight and logits stay where they are.

Hidden states are the same on every rank, and so are both outputs. The weight's gradient is that of the rank's own part.
The hidden states' gradient is summed over the group, since every part of the vocabulary contributes to it, unless the
hidden states come from an operation of Megatron's that sums it in its own backward (`summed_upstream`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from npu_backend.errors import HeadInputError

if TYPE_CHECKING:
    from npu_backend.head.chunked import RowStatistics

_RESHAPES = ("View", "ReshapeAlias", "UnsafeView", "Squeeze", "Unsqueeze", "Transpose", "T", "Clone", "ToCopy")


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of the vocabulary: ids first <= id < first + columns, of `total` ids in the group.

    `first` and `total` are 0-dim tensors: reading them would wait for the device.
    """

    group: Any
    columns: int
    first: Tensor
    total: Tensor

    def local(self, labels: Tensor) -> Tensor:
        """Labels as columns of this shard. Other ranks' become `columns`, one past the last; negative ones stay."""
        shifted = labels - self.first
        elsewhere = (shifted < 0) | (shifted >= self.columns)
        return torch.where(labels < 0, labels, shifted.masked_fill(elsewhere, self.columns))


def locate(columns: int, process_group: Any, device: torch.device) -> VocabShard | None:
    """Where this rank's `columns` are in the vocabulary; None where the group has one rank. Collective.

    Raises:
        HeadInputError: `process_group` is not a process group, or this rank is not in it.
    """
    if process_group is None:
        return None
    if not isinstance(process_group, dist.ProcessGroup):
        raise HeadInputError(
            "linear_log_prob: process_group must be a torch.distributed process group that this rank is in (of a mesh, "
            f"mesh.get_group(dimension)), got {process_group!r}"
        )
    if process_group.size() == 1:
        return None
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(process_group.size())]
    dist.all_gather(counts, torch.full_like(counts[0], columns), group=process_group)
    ends = torch.cat(counts).cumsum(0)
    return VocabShard(process_group, columns, ends[process_group.rank()] - columns, ends[-1])


def merge(found: RowStatistics, group: Any) -> RowStatistics:
    """The statistics over the columns of all ranks, from those over this rank's."""
    peak = found.peak.clone()
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    moved = found.peak - peak
    shrink = moved.exp()
    parts = [found.of_label, found.total * shrink]
    if found.weighted is not None:
        moved = moved.masked_fill(shrink == 0.0, 0.0)  # -inf would make 0 * inf = NaN
        parts.append((found.weighted + found.total * moved) * shrink)
    sums = torch.stack(parts)
    dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
    return found._replace(
        of_label=sums[0], peak=peak, total=sums[1], weighted=None if found.weighted is None else sums[2]
    )


def gather_parts(own: Tensor, group: Any) -> Tensor:
    """Every rank's statistics [3, ranks, M] from this one's [3, 1, M]."""
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts, dim=1)


def summed_upstream(hidden: Tensor) -> bool:
    """Whether `hidden` comes straight from Megatron code whose backward sums its gradient over the group.

    That is the gather of sequence parallelism (verl's fused forward calls it right before the head), which says so in
    `tensor_parallel_output_grad`, and the copy to the tensor-parallel region. To sum here too would count twice.
    """
    node = hidden.grad_fn
    while node is not None and node.name().rstrip("0123456789").removesuffix("Backward") in _RESHAPES:
        node = node.next_functions[0][0]
    if node is None:
        return False
    return node.name() == "_CopyToModelParallelRegionBackward" or bool(
        getattr(node, "tensor_parallel_output_grad", False)
    )
