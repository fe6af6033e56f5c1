"""Which device a call is on, and that its operands are there.

A device refuses operands that live elsewhere. Here all memory is the host's, so without these checks they would
silently work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

# Pairs of tensors that may lie on two devices.
_COPIES = frozenset({"aten::_foreach_copy", "aten::_foreach_copy_"})


def current_device() -> torch.device:
    """The device on which new tensors are made."""
    return torch.device("npu", torch.accelerator.current_device_index())


def device_of(values: Iterable[Any]) -> torch.device | None:
    """The first device that arguments name or lie on."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.device.type == "npu":
            return value.device
        if isinstance(value, torch.device) and value.type == "npu":
            return value if value.index is not None else current_device()
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (torch.Tensor, type(None))):
            found = device_of(value)
            if found is not None:
                return found
    return None


def check_one_device(label: str, device: torch.device, values: Iterable[Any], *, host_indices: bool = False) -> None:
    """Refuse operands elsewhere than on `device`; scalars may be on the CPU.

    Args:
        label: the operator, for the message.
        device: where the operands must be.
        values: the arguments, lists of tensors among them.
        host_indices: lists hold indices, which may be on the CPU too.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device != device and (value.dim() or value.device.type == "npu"):
                _refuse(label, device, value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                elsewhere = isinstance(item, torch.Tensor) and item.device != device
                if elsewhere and not (host_indices and item.device.type == "cpu"):
                    _refuse(label, device, item)


def check_each_device(label: str, args: Sequence[Any]) -> None:
    """An operator on lists works place by place: each place may be on a device of its own."""
    if label.partition(".")[0] in _COPIES:
        return
    lists = [
        value for value in args if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor)
    ]
    others = [value for value in args if isinstance(value, torch.Tensor)]
    for place in zip(*lists):
        check_one_device(label, place[0].device, (*place, *others))


def _refuse(label: str, device: torch.device, value: torch.Tensor) -> None:
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {device} and "
        f"{value.device}! ({label})"
    )
