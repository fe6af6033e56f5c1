"""The version matrix: which releases somebody published as tested together (matrix.csv), and which are known to be bad
(known_bad.csv). Both are data with a source per row; this file reads and compares them.

A host is compared group by group, for nobody publishes all of these versions together.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet

from npu_backend.doctor.packages import parse

COLUMNS = ("cann", "torch", "torch-npu", "triton-ascend", "transformers", "liger-kernel", "verl")
# What must have been tested together, if the host has two of it or more.
GROUPS = (("torch", "torch-npu", "cann"), ("triton-ascend", "cann"), ("liger-kernel", "triton-ascend"))
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """One set of releases tested together; a version that the source does not state is absent from `versions`."""

    name: str
    soc: str
    python: str
    versions: Mapping[str, str]
    tested_by: str
    source: str

    def differences(self, versions: Mapping[str, str]) -> list[str]:
        """What this row states otherwise, or not at all."""
        return [name for name, version in versions.items() if not same(version, self.versions.get(name, ""))]


@dataclass(frozen=True)
class KnownBad:
    """Releases of `package` that are bad, by themselves or together with releases of another package."""

    package: str
    versions: str
    other: str
    other_versions: str
    severity: str
    why: str
    fix: str
    source: str

    def matches(self, installed: Mapping[str, str]) -> bool:
        """Whether these versions are installed. A version that cannot be parsed is in no range."""
        return _within(installed.get(self.package), self.versions) and (
            not self.other or _within(installed.get(self.other), self.other_versions)
        )


@functools.cache
def rows() -> tuple[Row, ...]:
    """The matrix, newest CANN first."""
    return tuple(
        Row(
            name=line["name"],
            soc=line["soc"],
            python=line["python"],
            versions={column: line[column] for column in COLUMNS if line[column]},
            tested_by=line["tested_by"],
            source=line["source"],
        )
        for line in _lines("matrix.csv")
    )


@functools.cache
def known_bad() -> tuple[KnownBad, ...]:
    """Every release known to be bad."""
    return tuple(KnownBad(*line.values()) for line in _lines("known_bad.csv"))


def tested(versions: Mapping[str, str]) -> Row | None:
    """The first row that states just these versions."""
    return next((row for row in rows() if not row.differences(versions)), None)


def nearest(versions: Mapping[str, str], others: Mapping[str, str]) -> Row:
    """The row with the fewest, then the smallest differences to `versions`; `others` decides between equal ones."""

    def key(row: Row) -> tuple[int, float, int]:
        distance = sum(_distance(version, row.versions.get(name, "")) for name, version in versions.items())
        return len(row.differences(versions)), distance, len(row.differences(others))

    return min(rows(), key=key)


def tested_versions(name: str) -> list[str]:
    """The versions of one component in the matrix, newest first."""
    return sorted({row.versions[name] for row in rows() if name in row.versions}, key=_numbers, reverse=True)


def same(left: str, right: str) -> bool:
    """Whether two versions are one release: 2.9.0+cpu is 2.9.0, 8.3.rc1 is 8.3.RC1, 2.9.0.post2 is not 2.9.0."""
    a, b = parse(left), parse(right)
    return a.public == b.public if a and b else left.lower() == right.lower()


def _within(version: str | None, specifier: str) -> bool:
    parsed = parse(version) if version else None
    return parsed is not None and SpecifierSet(specifier).contains(parsed.public, prereleases=True)


def _distance(left: str, right: str) -> float:
    """How far apart two versions are; a step of the first number outweighs any of the second, and so on."""
    pairs = zip(_numbers(left), _numbers(right), strict=True)
    return sum(abs(a - b) / 1000.0**place for place, (a, b) in enumerate(pairs))


def _numbers(version: str) -> tuple[int, int, int, int]:
    """Major, minor, micro, post, each below 1000; zeros for what cannot be parsed."""
    parsed = parse(version)
    if parsed is None:
        return (0, 0, 0, 0)
    major, minor, micro, post = (
        min(number, 999) for number in (parsed.major, parsed.minor, parsed.micro, parsed.post or 0)
    )
    return major, minor, micro, post


def _lines(file: str) -> list[dict[str, str]]:
    with (_FOLDER / file).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))
