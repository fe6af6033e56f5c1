"""Checks that training in parallel equals training in one process, each called by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from this_rank import DEVICE, RANK, WORLD, here
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard


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
    # Its usual epsilon would make a step of full length out of the rounding noise of a gradient that is next to zero.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
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


def fsdp2() -> None:
    _fsdp2(WORLD)


def hsdp_on_a_two_dimensional_mesh() -> None:
    shape = (2, WORLD // 2)
    _fsdp2(*shape)
    if WORLD == 2:  # FSDP1 does not shard, nor replicate, over a single rank
        return
    mesh = init_device_mesh("npu", shape, mesh_dim_names=("replicate", "shard"))
    _fsdp1(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


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
