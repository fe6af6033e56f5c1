"""Facts about a host, gathered on first use through `Host`: packages, CANN, driver, devices, chip.

Only files, variables and, for the chip, `npu-smi` with a time limit; nothing is imported.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from npu_backend import config
from npu_backend.doctor import host as hosts
from npu_backend.doctor.host import Host
from npu_backend.doctor.packages import Package, find, parse
from npu_backend.errors import ConfigError

# Distribution -> the file by which Python finds what it installs.
MODULES = {
    "npu-backend": "npu_backend/__init__.py",
    "torch": "torch/__init__.py",
    "torch-npu": "torch_npu/__init__.py",
    "torchvision": "torchvision/__init__.py",
    "torchaudio": "torchaudio/__init__.py",
    "triton": "triton/__init__.py",
    "triton-ascend": "triton/__init__.py",
    "flagtree": "triton/__init__.py",
    "pytorch-triton": "triton/__init__.py",
    "transformers": "transformers/__init__.py",
    "liger-kernel": "liger_kernel/__init__.py",
    "verl": "verl/__init__.py",
    "vllm": "vllm/__init__.py",
    "vllm-ascend": "vllm_ascend/__init__.py",
    "megatron-core": "megatron/core/__init__.py",
    "mindspeed": "mindspeed/__init__.py",
    "ray": "ray/__init__.py",
    "numpy": "numpy/__init__.py",
}
# The environment variables that decide what a training process finds; a report shows those that are set.
VARIABLES = (
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_VISIBLE_DEVICES",
    "ASCEND_DEVICE_ID",
    "CUDA_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_OPP_PATH",
    "SOC_VERSION",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONPATH",
    "LIGER_KERNEL_IMPL",
)
DRIVER = "/usr/local/Ascend/driver"
HAL = "libascend_hal.so"  # the driver's library; torch_npu cannot be imported without it
MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
_ASCEND = "/usr/local/Ascend"
_TOOLKIT = re.compile(r"(.*/(?:cann(?:-[^/]+)?|ascend-toolkit/[^/]+|nnae/[^/]+))(?:/.*)?")
_SMI_SECONDS = 8.0


@dataclass(frozen=True)
class Toolkit:
    """An installed CANN: its folder with the links followed, and its version ("" if it does not say)."""

    folder: str
    version: str

    def __str__(self) -> str:
        return f"CANN {self.version or '(no version)'} in {self.folder}"


class Facts:
    """The facts; each is gathered when it is first asked for, and kept."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.environ = host.environ

    # -- Python ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def packages(self) -> dict[str, list[Package]]:
        """Every installed copy of what matters here; the one in use is the first."""
        return find(self.host.path, frozenset(MODULES))

    @functools.cached_property
    def versions(self) -> dict[str, str]:
        """The versions in use, CANN's with them."""
        found = {name: copies[0].version for name, copies in self.packages.items() if copies[0].version}
        return {**found, **({"cann": self.toolkit.version} if self.toolkit and self.toolkit.version else {})}

    @functools.cached_property
    def modules(self) -> dict[str, list[str]]:
        """Import name -> the folders that hold it, in the order in which Python looks; a folder counts once."""
        found: dict[str, dict[str, str]] = {}
        for file in dict.fromkeys(MODULES.values()):
            name = file.rpartition("/")[0].replace("/", ".")
            for folder in self.host.path:
                if hosts.exists(Path(folder) / file):
                    package = str((Path(folder) / file).parent)
                    found.setdefault(name, {}).setdefault(os.path.realpath(package), package)
        return {name: list(folders.values()) for name, folders in found.items()}

    @functools.cached_property
    def triton_backends(self) -> list[str] | None:
        """The devices that the triton in use compiles for; None without a triton."""
        if "triton" not in self.modules:
            return None
        folder = Path(self.modules["triton"][0]) / "backends"
        return [name for name in hosts.entries(folder) if hosts.exists(folder / name / "driver.py")]

    # -- CANN --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def toolkits(self) -> list[Toolkit]:
        """Every CANN that is installed, in /usr/local/Ascend or the home folder, newest first."""
        folders = []
        for top in (_ASCEND, f"{self.environ.get('HOME', '/root')}/Ascend"):
            folders += [f"{top}/{name}" for name in self.host.entries(top) if re.fullmatch(r"cann(-.+)?", name)]
            for kind in ("ascend-toolkit", "nnae"):
                folders += [f"{top}/{kind}/{name}" for name in self.host.entries(f"{top}/{kind}")]
        kept = {t.folder: t for t in map(self.toolkit_at, folders) if t is not None and self._is_toolkit(t)}
        zero = parse("0")
        return sorted(kept.values(), key=lambda t: (parse(t.version) or zero, t.folder), reverse=True)

    @functools.cached_property
    def toolkit(self) -> Toolkit | None:
        """The CANN that the environment names, else the one that its installer's link names, else the newest."""
        chosen = self.environ.get("ASCEND_HOME_PATH") or self.environ.get("ASCEND_TOOLKIT_HOME")
        return (self.toolkit_at(chosen) if chosen else None) or self.default_toolkit

    @functools.cached_property
    def default_toolkit(self) -> Toolkit | None:
        """The CANN that set_env.sh would choose."""
        links = (f"{_ASCEND}/cann", f"{_ASCEND}/ascend-toolkit/latest")
        linked = (self.toolkit_at(link) for link in links if self.host.exists(link))
        return next((t for t in linked if t), None) or next(iter(self.toolkits), None)

    def toolkit_at(self, path: str) -> Toolkit | None:
        """The CANN that a path is inside of, if the path looks like one; it need not exist."""
        match = _TOOLKIT.fullmatch(path.rstrip("/"))
        if match is None:
            return None
        folder = self._version_folder(self.host.resolve(match[1]))
        return Toolkit(folder, self._toolkit_version(folder))

    def _version_folder(self, folder: str) -> str:
        """Before CANN 8.5 `latest` can be a folder of links into the version's folder, not a link itself."""
        for name in self.host.entries(folder) if folder.endswith("/latest") else ():
            target = self.host.resolve(f"{folder}/{name}").rpartition("/")[0]
            if name.endswith("-linux") and target.rpartition("/")[0] == folder.rpartition("/")[0]:
                return target
        return folder

    def _is_toolkit(self, toolkit: Toolkit) -> bool:
        return any(self.host.exists(f"{toolkit.folder}/{name}") for name in ("set_env.sh", "lib64", "opp", "compiler"))

    def _toolkit_version(self, folder: str) -> str:
        for name in self.host.entries(folder):
            if name.endswith("-linux"):
                text = self.host.read(f"{folder}/{name}/ascend_toolkit_install.info")
                if match := re.search(r"^\s*version\s*=\s*(\S+)", text, re.MULTILINE):
                    return match[1]
        match = re.search(r"(?:^cann-|^)(\d+\.\d+.*)$", folder.rpartition("/")[2])
        return match[1] if match else ""

    # -- driver and devices ------------------------------------------------------------------------------------------

    @functools.cached_property
    def devices(self) -> list[str]:
        """The device nodes of NPUs, in the order of their numbers."""
        nodes = [name for name in self.host.entries("/dev") if re.fullmatch(r"davinci\d+", name)]
        return [f"/dev/{name}" for name in sorted(nodes, key=lambda name: int(name[len("davinci") :]))]

    @functools.cached_property
    def hal_folders(self) -> list[str]:
        """The folders with the driver's library: its own, and those of LD_LIBRARY_PATH."""
        own = [f"{DRIVER}/lib64/{part}".rstrip("/") for part in ("driver", "common", "")]
        return [folder for folder in dict.fromkeys(own + self.library_path) if self.host.exists(f"{folder}/{HAL}")]

    @functools.cached_property
    def library_path(self) -> list[str]:
        """The entries of LD_LIBRARY_PATH."""
        entries = self.environ.get("LD_LIBRARY_PATH", "").split(":")
        return [entry.rstrip("/") or "/" for entry in entries if entry]

    @functools.cached_property
    def driver_version(self) -> str:
        """What the mounted driver says it is, "" without one."""
        match = re.search(r"^Version\s*=\s*(\S+)", self.host.read(f"{DRIVER}/version.info"), re.MULTILINE)
        return match[1] if match else ""

    @functools.cached_property
    def npu_smi(self) -> str:
        """Where npu-smi is, "" if nowhere."""
        folders = [*self.environ.get("PATH", "").split(":"), "/usr/local/bin", "/usr/local/sbin"]
        return next((f"{f}/npu-smi" for f in folders if f and self.host.exists(f"{f}/npu-smi")), "")

    @functools.cached_property
    def chip(self) -> str:
        """The chip's name in the table of `npu-smi info`, for example 910B3 or 310P3; "" if it cannot be asked."""
        if not self.npu_smi or not self.devices:
            return ""
        output = self.host.execute([self.npu_smi, "info"], _SMI_SECONDS)
        match = re.search(r"^\|\s*\d+\s+(?:Ascend)?((?:910|310|950)\w*)\s*\|", output.text, re.MULTILINE)
        return match[1] if match else ""

    @functools.cached_property
    def kernels(self) -> list[str]:
        """The chips that the installed CANN has compiled operators for: ascend910b, ascend910_93, ascend310p ..."""
        if self.toolkit is None:
            return []
        folder = f"{self.toolkit.folder}/opp/built-in/op_impl/ai_core/tbe/kernel"
        return [name for name in self.host.entries(folder) if re.match(r"ascend\d", name)]

    # -- what kind of host this is -----------------------------------------------------------------------------------

    @functools.cached_property
    def settings(self) -> config.Environment | ConfigError:
        """Our own variables, or what is wrong with them."""
        try:
            return config.read_environment(self.environ)
        except ConfigError as error:
            return error

    @property
    def virtual(self) -> int:
        """How many virtual NPUs stand in for a device."""
        return self.settings.virtual_npu if isinstance(self.settings, config.Environment) else 0

    @functools.cached_property
    def ascend(self) -> str:
        """Why a real NPU is expected here, "" if none is."""
        if self.virtual:
            return ""
        reasons = {
            "NPU devices": bool(self.devices),
            "an Ascend driver": self.host.exists(DRIVER),
            "CANN": bool(self.toolkits),
            "torch-npu": "torch-npu" in self.packages,
        }
        return ", ".join(reason for reason, here in reasons.items() if here)

    def shown_variables(self) -> Mapping[str, str]:
        """The variables of `VARIABLES`, and ours, that are set; an empty one is set."""
        ours = sorted(name for name in self.environ if name.startswith(("NPU_BACKEND_", "VIRTUAL_NPU_")))
        return {name: self.environ[name] for name in (*VARIABLES, *ours) if name in self.environ}


def python_version() -> str:
    """3.11.4."""
    return ".".join(map(str, sys.version_info[:3]))
