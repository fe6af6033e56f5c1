"""Checks of every collective, each a function that all ranks of the process group call together."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from this_rank import DEVICE, RANK, WORLD, everyone, here, mine, same

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def all_reduce_of_every_dtype_and_operation() -> None:
    operations = {
        dist.ReduceOp.SUM: lambda t: t.sum(0),
        dist.ReduceOp.MAX: lambda t: t.amax(0),
        dist.ReduceOp.MIN: lambda t: t.amin(0),
        dist.ReduceOp.PRODUCT: lambda t: t.prod(0),
    }
    for dtype in DTYPES:
        for operation, expected in operations.items():
            if dtype == torch.bool and operation == dist.ReduceOp.PRODUCT:
                continue
            stacked = torch.stack(everyone(dtype=dtype))
            got = here(mine(dtype=dtype))
            dist.all_reduce(got, op=operation)
            same(got, expected(stacked).to(dtype))
    mean = here(mine())
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    same(mean, torch.stack(everyone()).mean(0))
    complex_sum = here(mine(dtype=torch.complex64))
    dist.all_reduce(complex_sum)
    same(complex_sum, sum(everyone(dtype=torch.complex64)))


def half_types_are_summed_without_losing_digits() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        parts = [torch.randn(1000, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(WORLD)]
        special = torch.tensor([float("inf"), -0.0, 6e-8, 65504, float("nan")]).to(dtype)
        parts = [torch.cat((part, special)) for part in parts]
        got = here(parts[RANK])
        dist.all_reduce(got)
        torch.testing.assert_close(got.cpu(), sum(p.float() for p in parts).to(dtype), rtol=0, atol=0, equal_nan=True)


def float64_is_refused_by_torch_npu_as_on_the_device() -> None:
    with pytest.raises(RuntimeError, match="Unsupported data type"):
        dist.all_reduce(here(mine(dtype=torch.float64)))


def long_tensors_go_in_pieces() -> None:
    """Longer than a slot (2 MiB), by an uneven rest."""
    count = 3 * (2 << 20) // 4 + 12345
    got = torch.arange(count, dtype=torch.int32, device=DEVICE) * (RANK + 1)
    dist.all_reduce(got)
    total = sum(range(1, WORLD + 1))
    same(got, torch.arange(count, dtype=torch.int32) * total)
    gathered = torch.empty(WORLD * count, dtype=torch.int32, device=DEVICE)
    dist.all_gather_into_tensor(gathered, got + RANK)
    same(gathered, torch.cat([torch.arange(count, dtype=torch.int32) * total + r for r in range(WORLD)]))
    scattered = torch.empty(count, dtype=torch.int32, device=DEVICE)
    dist.reduce_scatter_tensor(scattered, gathered)
    same(scattered, (torch.arange(count, dtype=torch.int32) * total + RANK) * WORLD)
    exchanged = torch.empty_like(gathered)
    dist.all_to_all_single(exchanged, gathered + 100 * RANK)
    same(exchanged[:count], torch.arange(count, dtype=torch.int32) * total + RANK)
    dist.broadcast(got, 1)
    same(got, torch.arange(count, dtype=torch.int32) * total)


def broadcast_reduce_gather_scatter() -> None:
    for root in range(WORLD):
        got = here(mine())
        dist.broadcast(got, root)
        same(got, mine(root))
        got = here(mine())
        dist.reduce(got, root)
        same(got, sum(everyone()) if root == RANK else mine())
        parts = [torch.empty_like(got) for _ in range(WORLD)] if root == RANK else None
        dist.gather(here(mine()), parts, root)
        for part, expected in zip(parts or (), everyone()):
            same(part, expected)
        dist.scatter(got, [here(mine(root) + rank) for rank in range(WORLD)] if root == RANK else None, root)
        same(got, mine(root) + RANK)


def all_gather_lists_and_tensors() -> None:
    for dtype in DTYPES:
        parts = [torch.empty(3, 5, dtype=dtype, device=DEVICE) for _ in range(WORLD)]
        dist.all_gather(parts, here(mine(dtype=dtype)))
        for part, expected in zip(parts, everyone(dtype=dtype)):
            same(part, expected)
    whole = torch.empty(3 * WORLD, 5, device=DEVICE)
    dist.all_gather_into_tensor(whole, here(mine()))
    same(whole, torch.cat(everyone()))
    uneven = [torch.empty(rank + 1, device=DEVICE) for rank in range(WORLD)]
    dist.all_gather(uneven, torch.full((RANK + 1,), float(RANK), device=DEVICE))
    for rank, part in enumerate(uneven):
        same(part, torch.full((rank + 1,), float(rank)))


def reduce_scatter_lists_and_tensors() -> None:
    expected = sum(everyone(shape=(WORLD, 4)))[RANK]
    for operation, share in ((dist.ReduceOp.SUM, expected), (dist.ReduceOp.AVG, expected / WORLD)):
        got = torch.empty(4, device=DEVICE)
        dist.reduce_scatter_tensor(got, here(mine(shape=(WORLD, 4))), op=operation)
        same(got, share)
        dist.reduce_scatter(got, list(here(mine(shape=(WORLD, 4))).unbind()), op=operation)
        same(got, share)


def all_to_all_even_uneven_and_lists() -> None:
    got = torch.empty(WORLD, 4, device=DEVICE)
    dist.all_to_all_single(got, here(mine(shape=(WORLD, 4))))
    same(got, torch.stack([part[RANK] for part in everyone(shape=(WORLD, 4))]))
    sizes = lambda rank: [(rank + 2 * to) % 3 for to in range(WORLD)]  # also zero
    out, into = sizes(RANK), [sizes(rank)[RANK] for rank in range(WORLD)]
    got = torch.empty(sum(into), device=DEVICE)
    dist.all_to_all_single(got, torch.full((sum(out),), float(RANK), device=DEVICE), into, out)
    same(got, torch.cat([torch.full((n,), float(rank)) for rank, n in enumerate(into)]))
    parts = [torch.empty(2, device=DEVICE) for _ in range(WORLD)]
    dist.all_to_all(parts, [torch.full((2,), 10.0 * RANK + to, device=DEVICE) for to in range(WORLD)])
    for rank, part in enumerate(parts):
        same(part, torch.full((2,), 10.0 * rank + RANK))


def send_and_receive_alone_crossed_and_in_batches() -> None:
    right, left = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    got = torch.zeros(3, 5, device=DEVICE)
    if RANK == 0:
        dist.send(here(mine()), 1)
    elif RANK == 1:
        dist.recv(got, 0)
        same(got, mine(0))
    works = [dist.isend(here(mine()), right), dist.irecv(got, left)]  # everybody sends first
    for work in works:
        work.wait()
    same(got, mine(left))
    count = 5_000_000  # more than a ring holds
    long, arrived = torch.arange(count, device=DEVICE) + RANK, torch.empty(count, dtype=torch.int64, device=DEVICE)
    operations = [dist.P2POp(dist.isend, long, right), dist.P2POp(dist.irecv, arrived, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(arrived, torch.arange(count) + left)


def objects_barriers_and_work_handles() -> None:
    found: list[object] = [None] * WORLD
    dist.all_gather_object(found, {"rank": RANK, "text": "x" * (100 + RANK)})
    assert found == [{"rank": rank, "text": "x" * (100 + rank)} for rank in range(WORLD)]
    box = [f"from {RANK}"]
    dist.broadcast_object_list(box, 1)
    assert box == ["from 1"]
    gathered: list[object] = [None] * WORLD
    dist.gather_object((RANK,), gathered if RANK == 0 else None, 0)
    assert gathered == ([(rank,) for rank in range(WORLD)] if RANK == 0 else [None] * WORLD)
    dist.scatter_object_list(box, [f"to {rank}" for rank in range(WORLD)] if RANK == 0 else None, 0)
    assert box == [f"to {RANK}"]
    work = dist.all_reduce(torch.ones(2, device=DEVICE), async_op=True)
    work.wait()
    assert work.is_completed()
    if RANK == 0:
        time.sleep(0.3)
    entered = [time.monotonic()]  # one clock for every process of a machine
    dist.barrier()
    left = time.monotonic()
    dist.broadcast_object_list(entered, 0)
    assert entered[0] < left


def coalesced_calls() -> None:
    if Version(torch.__version__) < Version("2.10"):
        return  # torch_npu 2.9 has none, and trying leaves torch waiting for their end in every later call
    with dist._coalescing_manager(device=DEVICE, async_ops=True) as together:
        tensors = [torch.full((2,), float(RANK + i), device=DEVICE) for i in range(3)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    together.wait()
    for i, tensor in enumerate(tensors):
        same(tensor, torch.full((2,), float(sum(rank + i for rank in range(WORLD)))))


def groups_within_the_group() -> None:
    pairs = [dist.new_group([first, first + 1]) for first in range(0, WORLD, 2)]
    evens = dist.new_group(range(0, WORLD, 2))
    got = torch.full((3,), float(RANK), device=DEVICE)
    dist.all_reduce(got, group=pairs[RANK // 2])
    same(got, torch.full((3,), 4.0 * (RANK // 2) + 1))
    if RANK % 2 == 0:
        got = torch.full((3,), float(RANK), device=DEVICE)
        dist.all_reduce(got, group=evens)
        same(got, torch.full((3,), float(sum(range(0, WORLD, 2)))))
