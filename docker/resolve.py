"""Ask pip whether each row of matrix.csv can be installed on x86_64 and on aarch64, and note what it brings along.

    python docker/resolve.py                 # every row; writes resolved.csv, from which generate.py makes constraints
    python docker/resolve.py ROW ...         # these rows, written nowhere

Nothing is installed: `pip install --dry-run --platform ...`, which takes minutes per row. Empty wheels with the real
version and requirements stand for what no public index has: the build of torch without CUDA for x86_64 (PyTorch's own
index) and triton-ascend after 3.2.0 (the vendor's). pip evaluates environment markers for the Python and the machine
that it runs on, whatever --platform says.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from generate import HERE, Row, rows

MACHINES = ("x86_64", "aarch64")
# Ubuntu 22.04 of the base images has glibc 2.35; pip takes no tag as implied by another.
GLIBC = (17, 24, 26, 27, 28, 31, 34, 35)
PUBLIC_TRITON_ASCEND = ("3.2.0",)
# Published as source only, which pip does not take for another platform; pure Python without requirements.
SOURCE_ONLY = (("antlr4_python3_runtime", "4.9.3"),)
# What torch needs besides the packages of its CUDA build.
TORCH_NEEDS = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec")
# Installed without their dependencies (docker/install.sh); their requirements are compared with the row's pins instead.
ALONE = ("torch-npu", "triton-ascend", "liger-kernel", "vllm-ascend")


@dataclass(frozen=True)
class Resolution:
    """What pip said. `versions` is what it would install; `conflict` is why it cannot, "" if it can."""

    versions: dict[str, str]
    conflict: str


def resolve(row: Row, machine: str) -> Resolution:
    """Resolve a row for a machine, `x86_64` or `aarch64`.

    Raises:
        RuntimeError: pip failed for another reason than the row's pins, such as an index that does not answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        _stand_ins(row, Path(folder))
        return _resolve(row, machine, folder)


def _resolve(row: Row, machine: str, folder: str) -> Resolution:
    pins = [f"{name}=={version}" for name, version in row.pins.items()]
    alone = [pin for pin in pins if pin.partition("==")[0] in ALONE]
    metadata, conflict = _pip(row, machine, folder, "--no-deps", *alone)
    if not conflict:
        conflict = _broken(metadata, row)
    if conflict:
        return Resolution({}, conflict)
    main = [f"{name}=={row.pins[name]}" for name in ("transformers", "numpy", "verl")]
    main.append(f"torch=={row.pins['torch']}+cpu")
    metadata, conflict = _pip(row, machine, folder, *main)
    return Resolution({normal(m["name"]): m["version"].partition("+")[0] for m in metadata}, conflict)


def _pip(row: Row, machine: str, folder: str, *arguments: str) -> tuple[list[dict[str, object]], str]:
    """The metadata of what pip would install, and why it cannot ("" if it can)."""
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC]
    platforms += [f"--platform={name}_{machine}" for name in ("manylinux2014", "linux")]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", f"--report={folder}/report"]
    command += [
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={row.python}",
        f"--target={folder}/none",
    ]
    command += [f"--find-links={folder}", *platforms, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        report = json.loads(Path(folder, "report").read_text(encoding="utf-8"))
        return [item["metadata"] for item in report["install"]], ""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    because = [line for line in lines if re.search(r" depends on |user requested|No matching distribution", line)]
    if not because:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return [], "; ".join(dict.fromkeys(because))


def _broken(metadata: list[dict[str, object]], row: Row) -> str:
    """What distributions installed without their dependencies ask for, and the row has otherwise."""
    from packaging.requirements import Requirement

    broken = []
    for distribution in metadata:
        for text in distribution.get("requires_dist") or []:
            requirement = Requirement(text)
            pinned = row.pins.get(normal(requirement.name))
            # torch-npu for x86_64 asks for the build without CUDA by name
            wanted = re.sub(r"\+cpu", "", str(requirement.specifier))
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if pinned and applies and not Requirement(f"x{wanted}").specifier.contains(pinned, prereleases=True):
                broken.append(f"{distribution['name']} {distribution['version']} needs {requirement.name}{wanted}")
    return "; ".join(broken)


def _stand_ins(row: Row, folder: Path) -> None:
    """Wheels with nothing but metadata, for what no public index has, or not as a wheel."""
    for name, version in SOURCE_ONLY:
        _empty_wheel(folder, name, version, [])
    torch = f"{row.pins['torch']}+cpu"
    numpy = f"numpy=={row.pins['numpy']}"
    _empty_wheel(folder, "torch", torch, [*TORCH_NEEDS, numpy])
    version = row.pins.get("triton-ascend")
    if version and version not in PUBLIC_TRITON_ASCEND:
        _empty_wheel(folder, "triton_ascend", version, [])


def _empty_wheel(folder: Path, name: str, version: str, needs: list[str]) -> None:
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def normal(name: str) -> str:
    """A distribution's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main(*names: str) -> int:
    """Resolve rows and print what came out; the exit status is 1 if one came out otherwise than the matrix says."""
    chosen = [row for row in rows() if (not names or row.name in names) and "torch-npu" in row.pins]
    surprises, lines = 0, []
    for row in chosen:
        for machine in MACHINES:
            found = resolve(row, machine)
            surprises += bool(found.conflict) != bool(row.fault)
            print(f"{row.name} {machine}: {found.conflict or f'{len(found.versions)} packages'}", flush=True)
            if not row.fault and "vllm" not in row.pins:  # vLLM is built from source: what it brings is not known here
                lines += [(row.name, machine, *item) for item in sorted(found.versions.items())]
    if not names:
        with (HERE / "resolved.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("row", "machine", "package", "version"), *lines])
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
