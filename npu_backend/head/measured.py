"""Times of the PPO head measured on this host, which `impl_backend="auto"` follows: `bench --store` keeps them.

They count for the chip, the dtype and the versions with which they were taken. One order of backends holds for all
shapes, so that a run does not change its arithmetic from one micro-batch to the next.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from npu_backend import __version__, device
from npu_backend.config import cache_folder
from npu_backend.errors import ConfigError
from npu_backend.log import warn_once

_PACKAGES = ("torch", "torch-npu", "triton", "triton-ascend", "liger-kernel")


def file() -> Path:
    """Where the times are kept: one entry per chip."""
    return cache_folder() / "head_times.json"


def store(on: torch.device, dtype: torch.dtype, milliseconds: Mapping[str, float]) -> Path:
    """Keep what one forward and backward took by each backend, summed over the measured shapes, for chip and dtype.

    Raises:
        OSError: the file cannot be written.
    """
    chips, versions = _read(), _versions()
    chip = chips.get(_chip(on), {})
    times = chip.get("milliseconds", {}) if chip.get("versions") == versions else {}
    chips[_chip(on)] = {
        "versions": versions,
        "measured": datetime.date.today().isoformat(),
        "milliseconds": {**times, str(dtype): dict(milliseconds)},
    }
    file().parent.mkdir(parents=True, exist_ok=True)
    file().write_text(json.dumps(chips, indent=1) + "\n", encoding="utf-8")
    _order.cache_clear()
    return file()


def order(on: torch.device, dtype: torch.dtype) -> tuple[tuple[str, ...], str]:
    """The backends that were measured here, the fastest first, and how that is known; `()` if none were."""
    return _order(on, dtype)


# What torch.compiler.assume_constant_result does, which would import all of torch._dynamo to do it.
order._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _order(on: torch.device, dtype: torch.dtype) -> tuple[tuple[str, ...], str]:
    found = _read()
    chip = found.get(_chip(on)) if found else None
    if chip is None or str(dtype) not in chip["milliseconds"]:
        return (), ""
    if chip["versions"] != _versions():
        warn_once(
            f"head.measured.{_chip(on)}",
            f"PPO head: impl_backend='auto' does not follow the times of {chip['measured']} in {file()}: they are of "
            f"{_words(chip['versions'])}, and this is {_words(_versions())}. Run `npu-backend bench --store` again",
        )
        return (), ""
    times = chip["milliseconds"][str(dtype)]
    fastest_first = tuple(sorted(times, key=times.__getitem__))
    measured = ", ".join(f"{name} {times[name]:.1f} ms" for name in fastest_first)
    return fastest_first, f"the fastest measured on this host on {chip['measured']} ({measured})"


def _read() -> dict[str, Any]:
    try:
        return dict(json.loads(file().read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        where = "" if isinstance(error, ConfigError) else f"{file()}: "  # there is no folder for caches
        warn_once("head.measured", f"PPO head: the times measured on this host cannot be read: {where}{error}")
        return {}


def _chip(on: torch.device) -> str:
    return str(torch.get_device_module(on).get_device_name(on))


def _versions() -> dict[str, str]:
    installed = device.versions()
    return {"npu-backend": __version__, **{name: installed[name] for name in _PACKAGES if name in installed}}


def _words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
