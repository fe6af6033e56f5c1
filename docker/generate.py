"""Write the Dockerfile and constraints of every row of matrix.csv, and the tables of docs/docker.md.

    python docker/generate.py            # write what differs
    python docker/generate.py --check    # write nothing; name what differs, exit status 1

What it writes follows from matrix.csv, Dockerfile.template and resolved.csv (docker/resolve.py) alone, so that no
rendered file can say anything else. A row with a `fault` gets no Dockerfile: the fault is shown in docs/docker.md.
"""

from __future__ import annotations

import csv
import re
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent
IMAGES = HERE / "images"
DOCUMENT = CHECKOUT / "docs" / "docker.md"
# The distributions of a row, in the order of its columns.
PINNED = (
    "torch",
    "torch-npu",
    "triton-ascend",
    "transformers",
    "numpy",
    "verl",
    "liger-kernel",
    "vllm",
    "vllm-ascend",
)
REGISTRY = "swr.cn-south-1.myhuaweicloud.com/ascendhub/cann"
TAGS = {"A2": "910b", "A3": "a3"}  # how the vendor's tags call the generations
STAND_IN = "localhost/npu-backend-stand-in"  # tests/docker/test_docker_build.py makes it
MOUNT = "--mount=type=secret,id=pip,target=/etc/pip.conf"


@dataclass(frozen=True)
class Row:
    """One line of the matrix. `pins` lacks what the row leaves out; `fault` says why there can be no image."""

    name: str
    chips: tuple[str, ...]
    cann: str
    python: str
    pins: dict[str, str]
    fault: str


def rows() -> list[Row]:
    """The matrix, in the order of its file."""
    with (HERE / "matrix.csv").open(encoding="utf-8", newline="") as file:
        return [
            Row(
                name=line["row"],
                chips=tuple(line["chips"].split()),
                cann=line["cann"],
                python=line["python"],
                pins={name: line[name] for name in PINNED if line[name]},
                fault=line["fault"],
            )
            for line in csv.DictReader(file)
        ]


def resolved() -> list[dict[str, str]]:
    """What docker/resolve.py found: a line (`row`, `machine`, `package`, `version`) per package."""
    with (HERE / "resolved.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def dockerfile(row: Row) -> str:
    """The Dockerfile of a row.

    Raises:
        KeyError: the template names a value that is not there.
    """
    values = {
        "row": row.name,
        "chips": " or ".join(f"{TAGS[chip]} ({chip})" for chip in row.chips if chip in TAGS) or "none: a stand-in",
        "operators": "; liger: and Liger-Kernel"
        if "liger-kernel" in row.pins
        else "; this row has no tested Liger-Kernel",
        "base_arguments": _base_arguments(row),
        "mount": MOUNT,
        "steps": "\n".join(_step(row, step) for step in _steps(row)),
        "version": _version(),
        "labels": " \\\n".join(f'      npu-backend.{name}="{value}"' for name, value in _labels(row).items()),
    }
    template = (HERE / "Dockerfile.template").read_text(encoding="utf-8")
    return re.sub(r"@([a-z_]+)@", lambda match: values[match[1]], template)


def constraints(row: Row) -> str:
    """The constraints of a row: its pins, then what they bring along, as far as it was resolved for both machines."""
    lines = ["# Written by docker/generate.py. The pins of the matrix:"]
    lines += [f"{name}=={version}" for name, version in row.pins.items()]
    found: dict[str, dict[str, str]] = {}
    for line in resolved():
        if line["row"] == row.name and line["package"] not in row.pins:
            found.setdefault(line["package"], {})[line["machine"]] = line["version"]
    if found:
        lines.append("# What they bring along (docker/resolve.py):")
    for package, versions in sorted(found.items()):
        if len(set(versions.values())) == 1:
            lines.append(f"{package}=={next(iter(versions.values()))}")
        else:
            lines += [f'{package}=={v}; platform_machine == "{machine}"' for machine, v in sorted(versions.items())]
    return "\n".join(lines) + "\n"


def tables() -> dict[str, str]:
    """The generated parts of docs/docker.md by name."""
    columns = ("row", "chips", "CANN", "Python", *PINNED)
    every = rows()
    built = [
        [r.name, " ".join(r.chips), r.cann or "-", r.python, *(r.pins.get(name, "-") for name in PINNED)]
        for r in every
        if not r.fault
    ]
    return {
        "images": _markdown(columns, built),
        "faults": _markdown(("row", "no image, because"), [[r.name, r.fault] for r in every if r.fault]),
    }


def files() -> dict[Path, str]:
    """Every file that this script writes, with its content."""
    written = {}
    for row in rows():
        if not row.fault:
            written[IMAGES / row.name / "Dockerfile"] = dockerfile(row)
            written[IMAGES / row.name / "constraints.txt"] = constraints(row)
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, table in tables().items():
        before, start, rest = text.partition(f"<!-- generated: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not start or not end:
            raise ValueError(f"{DOCUMENT} has no place for {name!r}: `<!-- generated: {name} -->` to `<!-- end -->`")
        text = f"{before}{start}{table}\n{end}{after}"
    return {**written, DOCUMENT: text}


def differences() -> list[str]:
    """What the files on disk have otherwise, a line each."""
    wanted = files()
    there = {path for path in IMAGES.rglob("*") if path.is_file()}
    found = [f"{path.relative_to(CHECKOUT)} belongs to no row" for path in sorted(there - set(wanted))]
    for path, content in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            found.append(f"{path.relative_to(CHECKOUT)} is not what the matrix and the template say")
    return found


def main(*arguments: str) -> int:
    """Write, or with --check compare; the exit status is 1 for a difference found and 2 for bad use."""
    if arguments == ("--check",):
        found = differences()
        print("\n".join([*found, "run: python docker/generate.py"] if found else ["docker/images is up to date"]))
        return 1 if found else 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    for path, content in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return 0


def _base_arguments(row: Row) -> str:
    if not row.cann:
        return f"ARG BASE_IMAGE={STAND_IN}"
    return f"ARG CHIP={TAGS[row.chips[0]]}\nARG BASE_IMAGE={REGISTRY}:{row.cann}-${{CHIP}}-ubuntu22.04-py{row.python}"


def _steps(row: Row) -> list[str]:
    return ["torch", "stack", *(["vllm"] if "vllm" in row.pins else []), "triton"]


def _step(row: Row, step: str) -> str:
    return f"RUN {MOUNT} \\\n    sh /opt/npu-backend/install.sh {step}"


def _labels(row: Row) -> dict[str, str]:
    labels = {"row": row.name, "cann": row.cann, "python": row.python, **row.pins}
    if "liger-kernel" in labels:
        labels["operators"] = "$OPERATORS"
    return {name: value for name, value in labels.items() if value}


def _version() -> str:
    text = (CHECKOUT / "npu_backend" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if match is None:
        raise ValueError('npu_backend/__init__.py has no line `__version__ = "..."`')
    return match[1]


def _markdown(columns: tuple[str, ...], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, ["---"] * len(columns), *lines])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
