"""The vendor's compiler for Triton kernels: found on an Ascend host, or fetched from PyPI into the cache folder.

It is two packages: triton-ascend (the front end, a fork of triton under the same name) and ascendnpu-ir
(bishengir-compile). They stay out of every environment, where the first would replace triton; the worker is the Python
in use with these folders in front on its path, so that it has the same torch, transformers and Liger.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from npu_backend.config import cache_folder
from npu_backend.errors import BackendUnavailableError, ConfigError

FRONT_END = "3.2.0"  # triton-ascend: the newest release on PyPI
COMPILERS = ("1.2.0", "1.1.0", "1.0.0")  # ascendnpu-ir, newest first; PyPI has these
HOST = "host"  # the compiler of the CANN on this host
_PACKAGES = (f"triton-ascend=={FRONT_END}", "pybind11==3.1.0")  # the second is imported by the first
_UNUSED = "bishengir-opt*"  # half of ascendnpu-ir


@dataclass(frozen=True)
class Toolchain:
    """Where triton-ascend and bishengir-compile are.

    Attributes:
        front_end: The folder to put on the worker's sys.path; None if triton-ascend is installed.
        programs: The folder of bishengir-compile.
        release: Of ascendnpu-ir, or "host".
        build: What bishengir-compile says of itself; ascendnpu-ir 1.0.0 calls itself 0.1.0.
    """

    front_end: Path | None
    programs: Path
    release: str
    build: str

    def describe(self) -> dict[str, str]:
        """For reports."""
        front_end = FRONT_END if self.front_end else importlib.metadata.version("triton-ascend")
        return {"triton-ascend": front_end, "ascendnpu-ir": self.release, "bishengir-compile": self.build}

    def environment(self) -> dict[str, str]:
        """The variables of the worker: this toolchain in front of everything, and no device looked for."""
        variables = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_THE_WORKER}
        paths = [*([str(self.front_end)] if self.front_end else []), *sys.path]
        return {
            **variables,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)),
            "PATH": f"{self.programs}{os.pathsep}{os.environ.get('PATH', '')}",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }


# A virtual NPU would start in the worker; an interpreter would take the kernels away; the last two change the options
# or fill the user's cache.
_NOT_FOR_THE_WORKER = ("NPU_BACKEND_VIRTUAL_NPU", "TRITON_INTERPRET", "ENABLE_PRINT_UB_BITS", "TRITON_DEBUG")


def find(folder: Path | None = None, compiler: str | None = None) -> Toolchain:
    """The toolchain to use.

    Args:
        folder: A folder that `install` filled; None for this host's own triton-ascend and CANN, else the cache folder.
        compiler: A release of ascendnpu-ir, or "host"; None for the host's if it has one, else the newest one there.

    Raises:
        ConfigError: no such release.
        BackendUnavailableError: it is not there; with the command that fetches it.
    """
    if compiler not in (None, HOST, *COMPILERS):
        raise ConfigError(f"--compiler {compiler!r} is not one of {', '.join((HOST, *COMPILERS))}")
    if folder is None and compiler in (None, HOST):
        programs = _host_programs()
        if programs is not None:
            return Toolchain(None, programs, HOST, _build(programs))
        if compiler == HOST:
            raise BackendUnavailableError(
                "--compiler host: this Python has no triton-ascend, or neither PATH nor ASCEND_HOME_PATH leads to "
                "bishengir-compile. Source CANN's set_env.sh, or leave --compiler out"
            )
    root = folder or default_folder()
    for release in [compiler] if compiler else COMPILERS:
        programs = _programs(root, release)
        if (programs / "bishengir-compile").exists() and (_front_end(root) / "triton").is_dir():
            return Toolchain(_front_end(root), programs, release, _build(programs))
    what = f"ascendnpu-ir {compiler or COMPILERS[0]}"
    fetch = f"npu-backend compile-check --install{f' --compiler {compiler}' if compiler else ''}"
    if folder is not None:
        raise BackendUnavailableError(f"--toolchain {folder} does not hold triton-ascend {FRONT_END} and {what}")
    raise BackendUnavailableError(
        f"the vendor's compiler is not here: triton-ascend {FRONT_END} and {what} from PyPI (about 500 MB, kept in "
        f"{root}, outside every environment). Fetch it with\n  {fetch}"
    )


def install(compiler: str | None = None, pip_arguments: tuple[str, ...] = (), folder: Path | None = None) -> Toolchain:
    """Fetch what is missing of the toolchain into a folder, and return it.

    Raises:
        ConfigError: no such release.
        BackendUnavailableError: pip cannot fetch it, for example because there is no wheel for this Python.
    """
    root = folder or default_folder()
    release = compiler or COMPILERS[0]
    if release not in COMPILERS:
        raise ConfigError(f"--compiler {release!r} cannot be installed; PyPI has {', '.join(COMPILERS)}")
    _fetch(_front_end(root), _PACKAGES, pip_arguments)
    _fetch(root / f"ascendnpu-ir-{release}", (f"ascendnpu-ir=={release}",), pip_arguments)
    return find(root, release)


def default_folder() -> Path:
    """Where the toolchain is kept; triton-ascend's extension fits one Python only."""
    return cache_folder() / f"ascend-toolchain-cp{sys.version_info.major}{sys.version_info.minor}"


def _front_end(root: Path) -> Path:
    return root / f"triton-ascend-{FRONT_END}"


def _programs(root: Path, release: str) -> Path:
    return root / f"ascendnpu-ir-{release}" / "ascendnpuir" / "bin"


def _fetch(folder: Path, requirements: tuple[str, ...], pip_arguments: tuple[str, ...]) -> None:
    """pip install into a new folder, which appears by one rename when it is whole."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-compile", "--target", str(draft), *pip_arguments, *requirements]
    try:
        if subprocess.call(command, stdout=sys.stderr):
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise BackendUnavailableError(
                f"pip could not fetch {' '.join(requirements)} for Python {version}: `{' '.join(command)}`. PyPI has "
                f"triton-ascend {FRONT_END} for Python 3.10 and 3.11 on Linux; use one of those"
            )
        for program in draft.glob(f"ascendnpuir/bin/{_UNUSED}"):
            program.unlink()
        draft.chmod(0o755)
        if not folder.is_dir():
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _host_programs() -> Path | None:
    """The folder of CANN's bishengir-compile, if triton-ascend is installed beside it."""
    try:
        importlib.metadata.version("triton-ascend")
    except importlib.metadata.PackageNotFoundError:
        return None
    found = shutil.which("bishengir-compile")
    home = os.environ.get("ASCEND_HOME_PATH")
    places = [Path(found).parent] if found else []
    places += [Path(home) / "compiler" / "bishengir" / "bin", Path(home) / "bin"] if home else []
    return next((place for place in places if (place / "bishengir-compile").exists()), None)


def _build(programs: Path) -> str:
    """What bishengir-compile says of its version, without paths of the machine that built it."""
    command = [str(programs / "bishengir-compile"), "--version"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendUnavailableError(f"{command[0]} does not run here: {error}") from error
    words = [word.strip("()") for word in said.splitlines()[0].split() if "/" not in word]
    return " ".join(word for word in words[1:] if word != "version")
