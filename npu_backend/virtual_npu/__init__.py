"""The virtual NPU: the real torch_npu over a software CANN runtime. The arithmetic is the CPU's.

    import npu_backend
    npu_backend.virtual_npu.activate(devices=2)   # before torch is imported
    import torch
    torch.ones(3, device="npu:1")

or, for an unchanged program, `npu-backend run --virtual-npu=2 -- python train.py`. It proves code paths (dispatch,
devices, dtypes, autograd, memory bookkeeping, what is called how often); it says nothing about an NPU's numerics or
speed.

    launch.py       activate(): checks, environment, preload; what child processes inherit
    native/         the runtime in C;  build.py compiles it once per machine;  wheel.py finds torch_npu
    memory.py       a CPU tensor on the memory of a device tensor, and back
    fallback.py     every aten operator, by one boxed function;  special.py: the few that need their own
    references/     CPU references of npu:: operators;  registry.py: the table they are in, and how to add one
    counting.py     what `npu-backend run --count` prints
"""

from __future__ import annotations

from npu_backend.virtual_npu.launch import LABEL, activate, is_active
from npu_backend.virtual_npu.registry import calls, register_reference, reset_calls

__all__ = ["LABEL", "activate", "calls", "is_active", "register_reference", "reset_calls"]
