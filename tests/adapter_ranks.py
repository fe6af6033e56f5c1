"""Run by tests/head/test_adapter_distributed.py on each of two ranks (gloo, CPU): `adapter_ranks.py STORE`.

Prints log lines as they come, and on rank 0 a last line of JSON: scenario -> the largest error of a gradient, relative
to the largest entry, against one process with all the data and full logits.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
from typing import Any

import tiny_models
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import npu_backend

WORLD, RANK = 2, int(os.environ["RANK"])
TEMPERATURE = 0.7


def shard_head_too(model: Any) -> Any:
    """As verl does with an untied head: a unit of its own, beside one per layer and the root."""
    mesh = init_device_mesh("cpu", (WORLD,))
    layers = model.model.layers
    for part in (*layers, model.lm_head, model) if not model.config.tie_word_embeddings else (*layers, model):
        fully_shard(part, mesh=mesh)
    return model


SCENARIOS = {
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
    batches = [tiny_models.tokens(2 * WORLD, 7, seed=seed) for seed in range(2)]
    for ids in batches:
        log_p = (whole(input_ids=ids).logits / TEMPERATURE).log_softmax(-1)
        of_label = log_p.gather(-1, ids.roll(-1, -1)[..., None])[..., 0]
        (of_label - 0.1 * (log_p.exp() * log_p).sum(-1)).mean().backward()
    wrapped = wrap(model)
    for number, ids in enumerate(batches):
        if hasattr(wrapped, "set_requires_gradient_sync"):
            wrapped.set_requires_gradient_sync(number == 1)
        output = wrapped(input_ids=ids[2 * RANK : 2 * RANK + 2], temperature=TEMPERATURE, use_cache=False)
        (output.log_probs + 0.1 * output.entropy).mean().backward()
    errors = []
    for got, wanted in zip(model.parameters(), whole.parameters()):
        gradient = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
        errors.append(float((gradient - wanted.grad).abs().max() / wanted.grad.abs().max()))
    return max(errors)


def main(store: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=RANK, world_size=WORLD)
    npu_backend.patch_forward_with_backends(tiny_models.build("qwen2"), use_fused_kernels=False)
    found = {name: worst_gradient(*scenario) for name, scenario in SCENARIOS.items()}
    dist.barrier()
    dist.destroy_process_group()
    if RANK == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
