"""Activate the virtual NPU in this process, and in the processes that it starts.

torch_npu finds its libraries and settings when it is imported, so all of this happens before torch is: the compiled
runtime is loaded by full path with global symbols (no LD_LIBRARY_PATH), the environment is set, torch_npu's folder
goes on sys.path, and the operator fallback is installed right after torch_npu, which torch imports itself at the end
of `import torch`.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from types import ModuleType

from npu_backend import soc as socs
from npu_backend.config import read_environment
from npu_backend.errors import BackendUnavailableError, ConfigError
from npu_backend.post_import import when_imported
from npu_backend.virtual_npu import build, wheel

LABEL = "virtual NPU (arithmetic by the CPU)"
MAX_DEVICES = 64  # VNPU_MAX_DEVICES of native/cann.h
DEFAULT_MEMORY = "64GiB"  # per device, as an Ascend910B has

_SITE = str(Path(__file__).parent / "site")
_active: tuple[int, str, str] | None = None


def is_active() -> bool:
    """Whether the Ascend devices of this process are, or will be once torch is imported, virtual ones."""
    return _active is not None or (read_environment().virtual_npu > 0 and "torch" not in sys.modules)


def activate(
    devices: int = 1, soc: str = socs.DEFAULT, *, memory: int | str | None = None, force: bool = False
) -> None:
    """Put `devices` virtual NPUs under torch_npu. Call it before torch is imported; child processes inherit it.

    A second call with the same arguments does nothing.

    Args:
        devices: how many devices the process sees, 1 to 64.
        soc: the chip they say they are, Ascend910B1 if not given; a name of `npu_backend.soc.SOCS`.
        memory: what each device has, in bytes or as text ("64GiB", the default); an allocation past it fails as
            torch_npu's out-of-memory error does.
        force: also on a host that has a real Ascend driver.

    Raises:
        ConfigError: `devices`, `soc` or `memory` has no meaning, or another choice is in force already.
        BackendUnavailableError: torch is imported already, the host has a real driver, there is no C compiler, or no
            torch_npu that fits the installed torch. The message gives the fix.
    """
    global _active
    exported = environment(devices, soc, memory=memory, force=force)
    size = exported["VIRTUAL_NPU_MEMORY_BYTES"]
    if _active is not None:
        if _active != (devices, soc, size):
            raise ConfigError(
                f"the virtual NPU is active with {_active[0]} x {_active[1]} of {_active[2]} bytes; "
                f"it cannot become {devices} x {soc} of {size} bytes"
            )
        return
    if "torch" in sys.modules:
        raise BackendUnavailableError(
            "torch is imported already, and it looks for devices when it is; call npu_backend.virtual_npu.activate() "
            "before the first `import torch`, or start the program with `npu-backend run --virtual-npu -- COMMAND`"
        )
    folder, wheel_folder = prepare(force=force)
    os.environ.update(exported)
    _set_runtime_environment(folder, devices, socs.find_soc(soc))
    for name in build.LIBRARIES:
        ctypes.CDLL(str(folder / "lib" / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
    if wheel_folder is not None:
        sys.path.append(str(wheel_folder))  # last: it must shadow nothing
    when_imported("torch_npu", _install_fallback)
    _active = (devices, soc, size)


def activate_inherited() -> None:
    """Activate what `npu-backend run` or a parent's `activate()` asked for, just before torch is imported."""
    devices = read_environment().virtual_npu
    if devices and wheel.has_torch():  # else `import torch` itself says what is missing
        activate(
            devices,
            os.environ.get("VIRTUAL_NPU_SOC") or socs.DEFAULT,
            memory=os.environ.get("VIRTUAL_NPU_MEMORY_BYTES") or None,
            force=bool(os.environ.get("VIRTUAL_NPU_FORCE")),
        )


def prepare(*, force: bool = False) -> tuple[Path, Path | None]:
    """Check the host, compile the runtime if need be, and find torch_npu; returns their folders.

    Raises:
        BackendUnavailableError: see `activate`.
    """
    driver = _real_driver()
    if driver and not force:
        raise BackendUnavailableError(
            f"this host has a real Ascend driver ({driver}), which the virtual NPU would hide; use the device, or ask "
            "for the virtual one all the same: activate(force=True), npu-backend run --force"
        )
    wheel_folder = wheel.torch_npu_folder()
    return build.runtime_folder(), wheel_folder


def environment(devices: int, soc: str, *, memory: int | str | None = None, force: bool = False) -> dict[str, str]:
    """The variables by which a child process inherits the virtual NPU.

    Raises:
        ConfigError: `devices`, `soc` or `memory` has no meaning.
    """
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices <= MAX_DEVICES:
        raise ConfigError(f"the number of virtual devices must be an integer from 1 to {MAX_DEVICES}, got {devices!r}")
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != _SITE]
    return {
        "NPU_BACKEND_VIRTUAL_NPU": str(devices),
        "VIRTUAL_NPU_SOC": socs.find_soc(soc).name,
        "VIRTUAL_NPU_MEMORY_BYTES": str(_parse_bytes(DEFAULT_MEMORY if memory is None else memory)),
        "VIRTUAL_NPU_FORCE": "1" if force else "",
        "PYTHONPATH": os.pathsep.join([_SITE, *inherited]),
        "TRITON_INTERPRET": "1",  # nothing here compiles a Triton kernel; it counts when triton is imported
    }


def _parse_bytes(size: int | str) -> int:
    """Bytes of a size such as 68719476736, "64GiB", "512 MiB" or "80GB"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?)B?|B)?\s*", str(size).upper())
    number, unit, binary = match.groups() if match else ("0", None, None)
    bytes_ = int(float(number) * (1024 if binary else 1000) ** (" KMGT".index(unit) if unit else 0))
    if bytes_ <= 0:
        raise ConfigError(f"memory={size!r} is no size of a device; write bytes, or for example 64GiB, 512MiB, 80GB")
    return bytes_


def _set_runtime_environment(folder: Path, devices: int, chip: socs.Soc) -> None:
    os.environ.update(
        {
            # read by native/
            "VIRTUAL_NPU_DEVICES": str(devices),
            "VIRTUAL_NPU_CUBE_CORES": str(chip.cube_cores),
            "VIRTUAL_NPU_VECTOR_CORES": str(chip.vector_cores),
            "VIRTUAL_NPU_UB_BYTES": str(chip.ub_bytes),
            # read by torch_npu
            "ASCEND_HOME_PATH": str(folder),
            "ASCEND_OPP_PATH": str(folder / "opp"),
            "TASK_QUEUE_ENABLE": "0",  # operators run in the calling thread
        }
    )


def _real_driver() -> str | None:
    """The device node of a real Ascend driver, if there is one."""
    return next((str(node) for node in sorted(Path("/dev").glob("davinci*"))), None)


def _install_fallback(torch_npu: ModuleType) -> None:
    """The end of torch_npu's import, whoever imports it."""
    from npu_backend.virtual_npu import fallback

    fallback.install()
