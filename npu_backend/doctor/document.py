"""The version matrix and the list of checks as text, as JSON, and as tables for the pages (docs/generate.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from npu_backend.doctor import checks, matrix, probe
from npu_backend.report import table

_COLUMNS = ("tested", "soc", *matrix.COLUMNS, "python", "tested by")
_BAD = ("package", "releases", "with", "severity", "why")


def matrix_dict() -> dict[str, Any]:
    """The matrix for JSON."""
    rows = [{**asdict(row), "versions": dict(row.versions)} for row in matrix.rows()]
    return {"rows": rows, "known_bad": [asdict(bad) for bad in matrix.known_bad()]}


def matrix_text() -> str:
    """The matrix for a terminal; sources come after the tables."""
    sources = dict.fromkeys(f"{row.tested_by}: {row.source}" for row in matrix.rows())
    return "\n".join(
        [
            "versions published as working together (- is not stated):",
            *table(_COLUMNS, _rows()),
            "",
            "known to be bad:",
            *table(_BAD, _bad_rows()),
            "",
            "sources:",
            *sources,
            *(f"{bad.package} {bad.versions}: {bad.source}" for bad in matrix.known_bad()),
        ]
    )


def sections() -> dict[str, str]:
    """The tables of docs/doctor.md by name."""
    documented = [(check.__name__, (check.__doc__ or "").partition("\n")[0]) for check in (*checks.ALL, *probe.ALL)]
    with_sources = [[*row, f"[source]({_link(r.source)})"] for row, r in zip(_rows(), matrix.rows(), strict=True)]
    bad = [[*row, f"[source]({_link(b.source)})"] for row, b in zip(_bad_rows(), matrix.known_bad(), strict=True)]
    return {
        "checks": _markdown(("check", "finds"), documented),
        "matrix": _markdown((*_COLUMNS, "source"), with_sources),
        "known bad": _markdown((*_BAD, "source"), bad),
    }


def _rows() -> list[list[str]]:
    return [
        [
            row.name,
            row.soc or "-",
            *(row.versions.get(c, "-") for c in matrix.COLUMNS),
            row.python or "-",
            row.tested_by,
        ]
        for row in matrix.rows()
    ]


def _bad_rows() -> list[list[str]]:
    return [
        [bad.package, bad.versions, f"{bad.other} {bad.other_versions}".strip() or "-", bad.severity, bad.why]
        for bad in matrix.known_bad()
    ]


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _link(source: str) -> str:
    return source.removeprefix("docs/")  # as seen from docs/doctor.md
