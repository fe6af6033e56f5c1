"""The rank that this process is, its virtual NPU, and what it and the others put into a collective.

Each rank knows what all ranks put in (`mine(rank)`), so that results are compared with plain torch on the CPU.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("npu", RANK % torch.npu.device_count())


def mine(rank: int = RANK, shape: tuple[int, ...] = (3, 5), dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank puts in: small integers, so that every dtype holds every result exactly."""
    values = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(rank))
    return values.to(dtype)


def everyone(**options: object) -> list[Tensor]:
    return [mine(rank, **options) for rank in range(WORLD)]


def same(got: Tensor, expected: Tensor) -> None:
    assert got.device == DEVICE
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0)


def here(tensor: Tensor) -> Tensor:
    return tensor.to(DEVICE)
