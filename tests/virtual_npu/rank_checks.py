"""What a rank of test_distributed.py runs on virtual NPUs (arithmetic by the CPU): `rank_checks.py NAMES FOLDER`.

Every check is a function of the process group; what it raises is written to FOLDER/<rank>.json for the test to show.
Each rank knows what all ranks put in (`mine(rank)`), so that results are compared with plain torch on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("npu", RANK % torch.npu.device_count())
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


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


# ---- collectives ----


@check
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


@check
def half_types_are_summed_without_losing_digits() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        parts = [torch.randn(1000, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(WORLD)]
        special = torch.tensor([float("inf"), -0.0, 6e-8, 65504, float("nan")]).to(dtype)
        parts = [torch.cat((part, special)) for part in parts]
        got = here(parts[RANK])
        dist.all_reduce(got)
        torch.testing.assert_close(got.cpu(), sum(p.float() for p in parts).to(dtype), rtol=0, atol=0, equal_nan=True)


@check
def float64_is_refused_by_torch_npu_as_on_the_device() -> None:
    with pytest.raises(RuntimeError, match="Unsupported data type"):
        dist.all_reduce(here(mine(dtype=torch.float64)))


@check
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


@check
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


@check
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


@check
def reduce_scatter_lists_and_tensors() -> None:
    expected = sum(everyone(shape=(WORLD, 4)))[RANK]
    for operation, share in ((dist.ReduceOp.SUM, expected), (dist.ReduceOp.AVG, expected / WORLD)):
        got = torch.empty(4, device=DEVICE)
        dist.reduce_scatter_tensor(got, here(mine(shape=(WORLD, 4))), op=operation)
        same(got, share)
        dist.reduce_scatter(got, list(here(mine(shape=(WORLD, 4))).unbind()), op=operation)
        same(got, share)


@check
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


@check
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


@check
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
    start = time.monotonic()
    if RANK == 0:
        time.sleep(0.3)
    dist.barrier()
    assert time.monotonic() - start > 0.25 or RANK == 0
    with dist._coalescing_manager(device=DEVICE, async_ops=True) as together:
        tensors = [torch.full((2,), float(RANK + i), device=DEVICE) for i in range(3)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    together.wait()
    for i, tensor in enumerate(tensors):
        same(tensor, torch.full((2,), float(sum(rank + i for rank in range(WORLD)))))


@check
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


# ---- training in parallel equals training in one process ----


class Block(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a bias of keys has no gradient but noise
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(x)))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 16), Block(), Block(), nn.Linear(16, 5))


def batch() -> Tensor:
    return torch.randn(2 * WORLD, 6, 7, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, data: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()


def compare_with_one_process(model: nn.Module, weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
    reference = build()
    train(reference, batch())
    train(model, here(batch()[2 * RANK : 2 * RANK + 2]))
    expected = dict(reference.named_parameters())
    found = {name.replace("module.", ""): tensor for name, tensor in weights()}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.detach().cpu(), expected[name].detach(), rtol=1e-4, atol=2e-5)


@check
def ddp() -> None:
    model = nn.parallel.DistributedDataParallel(build().to(DEVICE), device_ids=[DEVICE.index])
    compare_with_one_process(model, model.named_parameters)


def _fsdp1(**options: object) -> None:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(
        build(), auto_wrap_policy=policy, device_id=DEVICE, use_orig_params=True, **options
    )

    def weights() -> Iterator[tuple[str, Tensor]]:
        with FullyShardedDataParallel.summon_full_params(model):
            for name, tensor in model.named_parameters():
                yield name.replace("_fsdp_wrapped_module.", ""), tensor.detach().clone()

    compare_with_one_process(model, weights)


@check
def fsdp1() -> None:
    _fsdp1()


def _fsdp2(*shape: int) -> None:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("npu", shape, mesh_dim_names=names)
    model = build().to(DEVICE)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compare_with_one_process(model, lambda: ((name, p.full_tensor()) for name, p in model.named_parameters()))


@check
def fsdp2() -> None:
    _fsdp2(WORLD)


@check
def hsdp_on_a_two_dimensional_mesh() -> None:
    shape = (2, WORLD // 2)
    _fsdp2(*shape)
    if WORLD == 2:  # FSDP1 does not shard, nor replicate, over a single rank
        return
    mesh = init_device_mesh("npu", shape, mesh_dim_names=("replicate", "shard"))
    _fsdp1(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@check
def tensor_parallel() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def mlp() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model, reference = parallelize_module(mlp().to(DEVICE), init_device_mesh("npu", (WORLD,)), plan), mlp()
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    got, expected = model(here(x)), reference(x)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-6)
    got.square().sum().backward()
    expected.square().sum().backward()
    for sharded, whole in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(sharded.grad.full_tensor().cpu(), whole.grad, rtol=1e-5, atol=1e-5)


@check
def sequence_parallel_attention_by_all_to_all() -> None:
    """Each rank holds a part of the sequence, exchanges it for a part of the heads, attends, and exchanges back."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    group = dist.group.WORLD
    batches, length, heads, width = 2, 4 * WORLD, 2 * WORLD, 8

    def exchange(x: Tensor, split: int, join: int) -> Tensor:
        parts = torch.stack(x.chunk(WORLD, split))
        parts = all_to_all_single_autograd(parts.contiguous(), [1] * WORLD, [1] * WORLD, group)
        return torch.cat(list(parts.unbind()), join)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    generator = torch.Generator().manual_seed(4)
    whole = [torch.randn(batches, heads, length, width, generator=generator).requires_grad_() for _ in range(3)]
    expected = attend(*whole)
    expected.square().sum().backward()
    own = slice(4 * RANK, 4 * RANK + 4)
    local = [here(t.detach()[:, :, own]).requires_grad_() for t in whole]
    got = exchange(attend(*(exchange(t, 1, 2) for t in local)), 2, 1)
    torch.testing.assert_close(got.cpu(), expected[:, :, own], rtol=1e-5, atol=1e-6)
    got.square().sum().backward()
    for part, complete in zip(local, whole):
        torch.testing.assert_close(part.grad.cpu(), complete.grad[:, :, own], rtol=1e-4, atol=1e-5)


# ---- what goes wrong is an error, soon ----


@check
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


@check
def a_rank_that_does_not_come_is_a_timeout() -> None:
    """The test sets HCCL_EXEC_TIMEOUT to 3 seconds."""
    group = dist.new_group(list(range(WORLD)))
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x, group=group)
    dist.barrier()
    if RANK == 0:
        time.sleep(4)  # then it goes on with the others
        return
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="did not come within 3 s|a collective of this group failed"):
        dist.all_reduce(x, group=group)
    assert 2 < time.monotonic() - start < 10


@check
def a_rank_that_is_killed_ends_the_others() -> None:
    """The last check of its world: a forked child of the dead rank lives on, as a DataLoader's worker may."""
    dist.barrier()
    if RANK == WORLD - 1:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank {WORLD - 1} died|a collective of this group failed"):
        dist.all_reduce(torch.ones(4, device=DEVICE))
    assert time.monotonic() - start < 3


def main(names: list[str], folder: Path) -> None:
    torch.npu.set_device(DEVICE)
    dist.init_process_group("hccl")
    results = {}
    for name in names:
        try:
            CHECKS[name]()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    (folder / f"{RANK}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]))
