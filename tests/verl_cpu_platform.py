"""A platform `cpu` for verl >= 0.9.0, which has none: import this after setting VERL_PLATFORM=cpu, before using verl.

For tests only. VERL_ENGINE_DEVICE must name a device that verl has an engine for. Two checks that are there for GPUs
are taken out: FSDP1 refuses to broadcast CPU tensors, and verl's worker asks for the backend "cpu:gloo,cpu:gloo".
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._init_utils as fsdp_checks
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform

_NOTHING = ("empty_cache", "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")


def _device_module() -> Any:
    """`torch.cpu` with what verl asks every accelerator's module for."""
    module = types.ModuleType("cpu_device")
    vars(module).update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")})
    vars(module).update(dict.fromkeys(_NOTHING, lambda *args, **kwargs: 0))
    vars(module).update(
        is_available=lambda: True,
        get_device_name=lambda *args: "CPU",
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        mem_get_info=lambda *args: (0, 1),
    )
    return module


@PlatformRegistry.register(platform="cpu")
class _Cpu(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM") == "cpu"

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE"

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, number: int) -> dict[str, int]:
        return {"num_cpus": number}

    def is_ipc_supported(self) -> bool:
        return False

    def get_device_capability(self, index: int = 0) -> tuple[None, None]:
        return None, None

    def cudart(self) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    @contextlib.contextmanager
    def nvtx_range(self, message: str) -> Iterator[None]:
        yield

    def _nothing(self, *args: Any) -> None:
        pass

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing


def _init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    return _original_init(("gloo" if backend == "cpu:gloo,cpu:gloo" else backend), *args, **kwargs)


_original_init = dist.init_process_group
dist.init_process_group = _init_process_group
fsdp_checks._check_module_states_for_sync_module_states = lambda module_states: None
set_platform(_Cpu())
