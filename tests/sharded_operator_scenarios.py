"""What tests/operators/test_sharded.py runs on two ranks: DTensor activations through a patched norm and MLP.

A scenario raises where something differs; its number counts the comparisons.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import fake_torch_npu
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from npu_backend.operators import counters, gated_mlp, rms_norm

CONTEXT = SimpleNamespace(hf_config=None)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def replicated(module: nn.Module, mesh: object) -> nn.Module:
    for parent in module.modules():
        for name, parameter in list(parent.named_parameters(recurse=False)):
            setattr(parent, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()])))  # type: ignore[arg-type]
    return module


def compare(module: nn.Module, forward: object, x: Tensor, mesh: object, placement: Placement, op: str) -> None:
    """Patched on DTensors against unpatched on the whole tensors: values, gradients, placements."""
    plain = x.detach().requires_grad_()
    expected = module(plain)
    expected.square().sum().backward()
    grads = [p.grad.clone() for p in module.parameters()]  # type: ignore[union-attr]
    sharded = replicated(module, mesh)
    wrapped = distribute_tensor(x, mesh, [placement]).requires_grad_()  # type: ignore[arg-type]
    counters.reset()
    got = forward(sharded, wrapped)  # type: ignore[operator]
    assert isinstance(got, DTensor)
    assert got.placements == sharded(wrapped).placements, got.placements  # as the unpatched module gives it
    assert got.shape == expected.shape
    torch.testing.assert_close(full(got), expected)
    got.square().sum().backward()
    torch.testing.assert_close(full(wrapped.grad), plain.grad)
    for parameter, grad in zip(sharded.parameters(), grads):
        torch.testing.assert_close(full(parameter.grad), grad)
    assert counters.calls() == {op: 1}, (placement, counters.fallbacks())


def fallbacks(mesh: object) -> int:
    """Rows split over ranks and partial sums go to the original, which has rules of its own for them."""
    module = replicated(LlamaRMSNorm(8), mesh)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    expected = full(module(x if not isinstance(module.weight, DTensor) else distribute_tensor(x, mesh, [Replicate()])))  # type: ignore[arg-type]
    forward = rms_norm.plain(LlamaRMSNorm.forward, CONTEXT)
    inputs = (
        distribute_tensor(x, mesh, [Shard(1)]),  # type: ignore[arg-type]
        DTensor.from_local(x / 2, mesh, [Partial()]),  # type: ignore[arg-type]
    )
    for given in inputs:
        counters.reset()
        torch.testing.assert_close(full(forward(module, given)), expected)
        assert counters.calls() == {}
        assert sum(counters.fallbacks()["rms_norm"].values()) == 1
    return len(inputs)


def scenarios() -> Iterator[tuple[str, float]]:
    fake_torch_npu.install(pytest.MonkeyPatch())
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    norm, mlp = rms_norm.plain(LlamaRMSNorm.forward, CONTEXT), gated_mlp.split(Qwen3MLP.forward, CONTEXT)
    shapes = ((4, 6, 8), (3, 5, 8), (1, 1, 8))  # even shards, uneven ones, and a rank with nothing
    placements = (Shard(0), Shard(1), Replicate())
    for placement, shape in itertools.product(placements, shapes):
        compare(LlamaRMSNorm(8), norm, torch.randn(shape), mesh, placement, "rms_norm")
    yield "rms_norm", len(placements) * len(shapes)
    config = SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act="silu")
    # torch's own linear takes uneven shards of two axes only
    cases = ((Shard(0), (4, 6, 8)), (Shard(0), (3, 8)), (Shard(0), (1, 8)), (Replicate(), (4, 6, 8)))
    for placement, shape in cases:
        compare(Qwen3MLP(config), mlp, torch.randn(shape), mesh, placement, "gated_mlp")
    yield "gated_mlp", len(cases)
    yield "rms_norm's fallbacks", fallbacks(mesh)
