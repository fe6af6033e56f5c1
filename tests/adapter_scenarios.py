"""What tests/head/test_adapter_distributed.py runs on two ranks: the log's lines, and gradients under DDP and FSDP2.

A gradient's number is its largest error, relative to the largest entry, against one process with all the data and full
logits.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import tiny_models
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import npu_backend
from npu_backend import log

TEMPERATURE = 0.7


def shard_head_too(model: Any) -> Any:
    """As verl does with an untied head: a unit of its own, beside one per layer and the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = model.model.layers
    for part in (*layers, model.lm_head, model) if not model.config.tie_word_embeddings else (*layers, model):
        fully_shard(part, mesh=mesh)
    return model


WRAPPERS = {
    "ddp": ("qwen2", DistributedDataParallel),
    "fsdp2 untied": ("qwen2", shard_head_too),
    "fsdp2 tied": ("qwen2_tied", shard_head_too),
    "fsdp2 softcap": ("gemma2", shard_head_too),
}


def worst_gradient(family: str, wrap: Any) -> float:
    """Two backwards; the first one without a reduction where the wrapper has a switch for that."""
    model = tiny_models.build(family)
    whole = copy.deepcopy(model)
    npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    world, rank = dist.get_world_size(), dist.get_rank()
    batches = [tiny_models.tokens(2 * world, 7, seed=seed) for seed in range(2)]
    for ids in batches:
        log_p = (whole(input_ids=ids).logits / TEMPERATURE).log_softmax(-1)
        of_label = log_p.gather(-1, ids.roll(-1, -1)[..., None])[..., 0]
        (of_label - 0.1 * (log_p.exp() * log_p).sum(-1)).mean().backward()
    wrapped = wrap(model)
    for number, ids in enumerate(batches):
        if hasattr(wrapped, "set_requires_gradient_sync"):
            wrapped.set_requires_gradient_sync(number == 1)
        output = wrapped(input_ids=ids[2 * rank : 2 * rank + 2], temperature=TEMPERATURE, use_cache=False)
        (output.log_probs + 0.1 * output.entropy).mean().backward()
    errors = []
    for got, wanted in zip(model.parameters(), whole.parameters()):
        gradient = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
        errors.append(float((gradient - wanted.grad).abs().max() / wanted.grad.abs().max()))
    return max(errors)


class Lines(logging.Handler):
    """The messages of the log of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def scenarios() -> Iterator[tuple[str, float]]:
    lines = Lines()
    log.logger.addHandler(lines)
    log.logger.setLevel(logging.INFO)
    npu_backend.patch_forward_with_backends(tiny_models.build("qwen2"), use_fused_kernels=False)
    said = sum("fused head off: use_fused_kernels=False" in line for line in lines.seen)
    for rank in range(dist.get_world_size()):
        yield f"lines of rank {rank}", said if rank == dist.get_rank() else 0
    for name, (family, wrap) in WRAPPERS.items():
        yield name, worst_gradient(family, wrap)
