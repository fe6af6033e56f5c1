"""Checks that what goes wrong in a process group is an error, and soon, each called by all ranks together."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from this_rank import DEVICE, RANK, WORLD


def ranks_in_different_calls_are_told_so() -> None:
    group = dist.new_group(list(range(WORLD)))
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x, group=group)
    with pytest.raises(
        RuntimeError, match=r"ranks are in different calls: .*broadcast.*all_reduce|all_reduce.*broadcast"
    ):
        dist.broadcast(x, 0, group=group) if RANK == 0 else dist.all_reduce(x, group=group)
    with pytest.raises(RuntimeError, match="a collective of this group failed in rank"):
        dist.all_reduce(x, group=group)
    sizes = dist.new_group(list(range(WORLD)))
    dist.all_reduce(x, group=sizes)
    with pytest.raises(RuntimeError, match=r"count 4\).*count 5\)|count 5\).*count 4\)"):
        dist.all_reduce(torch.ones(4 + (RANK == 0), device=DEVICE), group=sizes)


def ranks_that_disagree_about_lengths_are_told_so() -> None:
    """Lists of uneven tensors; the last rank's piece is longer in every list but rank 0's."""
    lengths = [1 + (rank == WORLD - 1) + (rank == WORLD - 1 and RANK != 0) for rank in range(WORLD)]
    pieces = [torch.ones(length, device=DEVICE) for length in lengths]
    told = rf"the piece of rank {WORLD - 1} has [23] elements here, [23] in rank|a collective of this group failed"
    group = dist.new_group(list(range(WORLD)))
    with pytest.raises(RuntimeError, match=f"all_gather: {told}"):
        dist.all_gather(pieces, torch.ones(lengths[RANK], device=DEVICE), group=group)
    group = dist.new_group(list(range(WORLD)))
    with pytest.raises(RuntimeError, match=f"reduce_scatter: {told}"):
        dist.reduce_scatter(torch.empty(lengths[RANK], device=DEVICE), pieces, group=group)


def a_rank_that_does_not_come_is_a_timeout() -> None:
    group = dist.new_group(list(range(WORLD)))
    x = torch.ones(4, device=DEVICE)
    os.environ["HCCL_EXEC_TIMEOUT"] = "3"  # read when the group's first collective connects its ranks
    dist.all_reduce(x, group=group)
    del os.environ["HCCL_EXEC_TIMEOUT"]
    dist.barrier()
    if RANK == 0:
        return  # to the next check, where it waits for the others
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="did not come within 3 s|a collective of this group failed") as raised:
        dist.all_reduce(x, group=group)
    waited = time.monotonic() - start
    assert waited < 60  # without the variable it is half an hour
    assert waited > 3 or "a collective of this group failed" in str(raised.value)


def a_rank_that_is_killed_ends_the_others() -> None:
    """The last check of its world: a forked child of the dead rank lives on, as a DataLoader's worker may."""
    pids: list[int] = [0] * WORLD
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    if RANK == WORLD - 1:
        if os.fork() == 0:
            while _exists(pids[0]):
                time.sleep(0.1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank {WORLD - 1} died|a collective of this group failed"):
        dist.all_reduce(torch.ones(4, device=DEVICE))
    assert time.monotonic() - start < 60


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
