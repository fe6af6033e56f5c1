"""Checks of what is installed where: triton and triton-ascend over each other, lost files, second copies."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from packaging.version import Version

from npu_backend.doctor.facts import MODULES, Facts
from npu_backend.doctor.packages import Package, canonical, parse
from npu_backend.doctor.report import Finding
from npu_backend.patches.liger import TRITON_ASCEND, TRITON_ASCEND_INDEX

_CONFLICT = "https://github.com/triton-lang/triton-ascend/issues/306"
_IN_TRITON = tuple(name for name, file in MODULES.items() if file == MODULES["triton"])
_RECORDED = ("triton", "triton-ascend", "torch-npu", "liger-kernel")  # few enough files to look at each


def triton_owner(facts: Facts) -> Iterator[Finding]:
    """Two distributions installed into one `triton` folder: whose the files are, and the order that repairs it."""
    here = [facts.packages[name][0] for name in _IN_TRITON if name in facts.packages]
    if len(here) < 2:
        return
    shared = _shared_files(here)
    owned = {package.name: sum(bool(package.owns(path)) for path in shared) for package in here}
    counts = ", ".join(f"{owned[p.name]} are those of {p}" for p in here)
    message = f"{' and '.join(map(str, here))} are installed into the same folder `triton`"
    message += f"; of {len(shared)} files that differ {counts}" if shared else "; whose files these are is unknown"
    ascend = next((p for p in here if p.name == "triton-ascend"), None)
    if ascend is None:
        fix = "\n".join([pip(facts, f"uninstall -y {' '.join(p.name for p in here)}"), "then install one of them"])
        yield Finding("triton_owner", "error", message, fix, _CONFLICT)
        return
    intact = bool(shared) and owned["triton-ascend"] == len(shared)
    if intact and _asks_for(ascend, here):  # 3.2.1 and later want to be written over the triton that they require
        yield Finding(
            "triton_owner",
            "note",
            f"{message}; this is how triton-ascend from 3.2.1 on installs itself",
            "nothing now; but installing, upgrading or removing triton takes these files away. Then:\n"
            + repair(facts, here, ascend.version),
            "https://gitcode.com/Ascend/triton-ascend/blob/main/docs/en/FAQ.md",
        )
        return
    severity = "warning" if intact else "error"
    message += "" if intact else "; kernels for the NPU end with '0 active drivers' or an import error"
    yield Finding("triton_owner", severity, message, repair(facts, here, ascend.version), _CONFLICT)


def triton_backend(facts: Facts) -> Iterator[Finding]:
    """A triton in use that compiles for GPUs only, on a host where an NPU is expected."""
    backends = facts.triton_backends
    if not facts.ascend or backends is None or "ascend" in backends:
        return
    if len([name for name in _IN_TRITON if name in facts.packages]) > 1:
        return  # triton_owner gives the repair
    packages = [facts.packages[name][0] for name in _IN_TRITON if name in facts.packages]
    yield Finding(
        "triton_backend",
        "warning",
        f"the triton in use ({facts.modules['triton'][0]}) compiles for {', '.join(backends) or 'nothing'}, not for "
        "Ascend: Triton kernels, Liger's among them, find no driver here",
        repair(facts, packages, ""),
        "https://github.com/triton-lang/triton-ascend/issues/1906",
    )


def missing_files(facts: Facts) -> Iterator[Finding]:
    """Files that a distribution installed and that are gone: another one's removal took them."""
    for name in _RECORDED:
        for package in facts.packages.get(name, ())[:1]:
            code = [p for p in package.record if p.endswith((".py", ".so")) and not p.startswith(("..", "/"))]
            gone = [path for path in code if not os.path.exists(os.path.join(package.folder, path))]
            if gone:
                yield Finding(
                    "missing_files",
                    "error",
                    f"{len(gone)} of the {len(code)} code files of {package} are gone from {package.folder}, "
                    f"for example {gone[0]}",
                    reinstall(facts, package.name, package.version),
                    _CONFLICT if "triton" in name else "",
                )


def two_copies(facts: Facts) -> Iterator[Finding]:
    """Two copies of a package on sys.path: both are named, and the one in use."""
    for module, folders in facts.modules.items():
        if len(folders) > 1:
            yield Finding(
                "two_copies",
                "warning",
                f"sys.path holds {len(folders)} copies of {module}: {folders[0]} is in use, "
                f"{', '.join(folders[1:])} is hidden",
                f"keep one: remove the other, or take its folder out of PYTHONPATH ({_python_path(facts)})",
                "https://github.com/modelscope/ms-swift/issues/9245",
            )
    for name, copies in facts.packages.items():
        if len({copy.folder for copy in copies}) < len(copies):
            yield Finding(
                "two_copies",
                "error",
                f"{copies[0].folder} holds the metadata of {' and of '.join(map(str, copies))}: an upgrade broke off",
                f"remove {', '.join(copy.info for copy in copies)}, then\n" + reinstall(facts, name, copies[0].version),
            )


def repair(facts: Facts, packages: list[Package], version: str) -> str:
    """Remove every owner of the folder first: removing one later would take files of the other with it."""
    names = dict.fromkeys([*(p.name for p in packages), "triton-ascend"])
    wanted = version or facts.versions.get("triton-ascend", "") or TRITON_ASCEND
    return "\n".join([pip(facts, f"uninstall -y {' '.join(names)}"), reinstall(facts, "triton-ascend", wanted)])


def reinstall(facts: Facts, name: str, version: str) -> str:
    """The command that puts all files of a distribution back and moves nothing else."""
    return install(facts, name, version, "--force-reinstall ")


def install(facts: Facts, name: str, version: str, option: str = "") -> str:
    """The command that adds a distribution and moves nothing else."""
    target = f"{name}=={version}" if version else name
    old = (parse(version) or Version("0")) <= Version("3.2.0")
    index = f" --extra-index-url {TRITON_ASCEND_INDEX}" if name == "triton-ascend" and not old else ""
    return pip(facts, f"install --no-deps {option}{target}{index}")


def pip(facts: Facts, arguments: str) -> str:
    """A pip command for the Python that is examined."""
    return f"{shlex.quote(facts.host.python)} -m pip {arguments}"


def _shared_files(packages: list[Package]) -> list[str]:
    """Files that more than one of the packages recorded, and not the same file; each can only be one's."""
    records = [package.record for package in packages]
    every = dict.fromkeys(path for record in records for path in record if "__pycache__" not in path)
    return [path for path in every if len({record[path] for record in records if path in record}) > 1]


def _asks_for(package: Package, others: list[Package]) -> bool:
    """Whether a package requires every other one, in the version that is here."""
    required = {canonical(requirement.name): requirement.specifier for requirement in package.requires}

    def asked(other: Package) -> bool:
        version = parse(other.version)
        return version is not None and other.name in required and version in required[other.name]

    return all(other is package or asked(other) for other in others)


def _python_path(facts: Facts) -> str:
    return facts.environ.get("PYTHONPATH") or "which is not set"
