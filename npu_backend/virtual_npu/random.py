"""Random numbers of virtual devices: drawn by the CPU, decided by the device's generator.

Each draw seeds a CPU generator from the device generator's seed and offset, and moves the offset. So
`torch.npu.manual_seed`, `get_rng_state`, `fork_rng` and activation checkpointing behave as on a device, and device
draws leave the CPU's own stream alone. The first draw after seeding equals the CPU's first draw with that seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_STEP = 4  # device generators count in fours
_MIX = 0x9E3779B97F4A7C15  # spreads (seed, offset) over 64 bits


def cpu_generator(device: torch.device, generator: torch.Generator | None) -> torch.Generator:
    """A CPU generator for one draw of a device's generator (its default one when None)."""
    return torch.Generator(device="cpu").manual_seed(next_seed(device, generator))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """For functions without a generator argument: the CPU's default generator, seeded, stands in for the device's."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def next_seed(device: torch.device, generator: torch.Generator | None = None) -> int:
    """What seeds the next draw of the device's generator; moves its offset."""
    if generator is None:
        import torch_npu

        torch_npu.npu._lazy_init()
        index = device.index if device.index is not None else torch_npu.npu.current_device()
        generator = torch_npu.npu.default_generators[index]
    elif generator.device.type != "npu":
        raise RuntimeError(f"Expected a 'npu' device type for generator but found '{generator.device.type}'")
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + _STEP)
    return seed if offset == 0 else (seed * _MIX + offset) % (1 << 63)
