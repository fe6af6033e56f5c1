"""`npu-backend run --count`: what a process ran on its virtual devices, printed on stderr when it ends.

Per operator and per HCCL operation (`hccl::all_reduce`): how often it was called, and the bytes of its operands and
results (each tensor's own, not its storage's); `npu::` first, in each namespace the most called first. Per device: the
most memory that torch_npu's allocator had given out.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from npu_backend.virtual_npu import registry
from npu_backend.virtual_npu.launch import LABEL

VARIABLE = "VIRTUAL_NPU_COUNT"  # "table" or "json"

_bytes: Counter[str] = Counter()


def is_wanted() -> bool:
    """Whether this process was started with --count."""
    return bool(os.environ.get(VARIABLE))


def measured(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, with the bytes of its operands and results added up."""

    def measuring(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        _bytes[name] += _size([*args, *kwargs.values(), result])
        return result

    return measuring


def _size(values: Iterable[Any]) -> int:
    import torch

    size = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            size += value.numel() * value.itemsize
        elif isinstance(value, (list, tuple)):
            size += _size(value)
    return size


def report_at_exit() -> None:
    """Print the report when this process ends, if it ran anything."""
    atexit.register(_print)


def collectives() -> dict[str, tuple[int, int]]:
    """Calls and bytes of every HCCL operation that this process called: `{"hccl::all_reduce": (2, 4096)}`."""
    counted = ctypes.CDLL("libhccl.so").vhccl_counted  # loaded already, with the runtime
    counted.restype = ctypes.c_char_p
    calls, size = ctypes.c_uint64(), ctypes.c_uint64()
    found: dict[str, tuple[int, int]] = {}
    while (name := counted(ctypes.c_uint32(len(found)), ctypes.byref(calls), ctypes.byref(size))) is not None:
        found[f"hccl::{name.decode()}"] = (calls.value, size.value)
    return {name: numbers for name, numbers in found.items() if numbers[0]}


def facts() -> dict[str, Any]:
    """The report as data: `operators` {name: [calls, bytes]}, `peak_bytes` per device, and whose it is."""
    import torch_npu

    npu = torch_npu.npu
    devices = range(npu.device_count()) if npu.is_initialized() else range(0)
    counts = {name: (calls, _bytes[name]) for name, calls in registry.calls().items()} | collectives()
    return {
        "backend": LABEL,
        "process": os.getpid(),
        "rank": os.environ.get("RANK"),
        "peak_bytes": {f"npu:{d}": peak for d in devices if (peak := npu.max_memory_allocated(d))},
        "operators": {name: list(counts[name]) for name in sorted(counts, key=lambda n: (_rank(n), -counts[n][0], n))},
    }


def _rank(name: str) -> int:
    """The device's own operators first, then its collectives, then PyTorch's, which are many."""
    return {"npu": 0, "hccl": 1}.get(name.partition("::")[0], 2)


def _print() -> None:
    found = facts()
    if not found["operators"]:
        return
    if os.environ.get(VARIABLE) == "json":
        text = json.dumps(found)
    else:
        whose = f"process {found['process']}" + ("" if found["rank"] is None else f", rank {found['rank']}")
        lines = [f"{LABEL}: operators of {whose}", f"{'calls':>10}  {'MiB':>10}  operator"]
        lines += [f"{n:>10}  {size / 2**20:>10.2f}  {name}" for name, (n, size) in found["operators"].items()]
        lines += [
            f"peak of torch_npu's allocator on {d}: {peak / 2**20:.2f} MiB" for d, peak in found["peak_bytes"].items()
        ]
        text = "\n".join(lines)
    sys.stderr.write(text + "\n")  # at once: other ranks write there too
    sys.stderr.flush()
