"""Installed distributions, read from their `.dist-info` folders: versions, requirements, and whose a file is.

importlib.metadata is not used: it raises on, or silently skips, just the broken folders that doctor is asked about.
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from npu_backend.doctor import host as hosts

_INFO = re.compile(r"(?P<name>[^-]+)(?:-(?P<version>[^-]+))?(?:-py[\d.]+)?\.(?:dist|egg)-info")
_HASHED = 2**20  # larger files are compared by their size only


@dataclass(frozen=True)
class Package:
    """One installed copy: `folder` is the entry of sys.path, `info` the folder of its metadata."""

    name: str
    version: str
    folder: str
    info: str

    def __str__(self) -> str:
        return f"{self.name} {self.version or '(no version)'}"

    @functools.cached_property
    def requires(self) -> list[Requirement]:
        """Its `Requires-Dist` that hold here and that can be parsed; extras are left out."""
        found = []
        for text in _fields(self.info, "Requires-Dist"):
            try:
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    found.append(requirement)
            except (InvalidRequirement, ValueError, KeyError):
                continue
        return found

    @functools.cached_property
    def record(self) -> dict[str, tuple[str, str]]:
        """Path of each file that it says it installed -> (sha256 in base64, size), either may be empty."""
        lines = hosts.read(Path(self.info) / "RECORD").replace("\0", "").splitlines()
        rows = []
        for line in lines:  # line by line: one broken line costs no other
            try:
                rows += list(csv.reader([line]))
            except csv.Error:
                continue
        return {row[0]: (row[1].partition("sha256=")[2], row[2]) for row in rows if len(row) == 3 and row[0]}

    def owns(self, path: str) -> bool | None:
        """Whether the file on disk is the one that this package recorded; None if it recorded no such file."""
        if path not in self.record:
            return None
        digest, size = self.record[path]
        file = Path(self.folder) / path
        try:
            actual = file.stat().st_size
            if size.isdecimal() and int(size) != actual:
                return False
            if not digest or actual > _HASHED:
                return True
            found = hashlib.sha256(file.read_bytes()).digest()
        except (OSError, ValueError):
            return False
        return base64.urlsafe_b64encode(found).rstrip(b"=").decode() == digest


def find(path: list[str], names: frozenset[str]) -> dict[str, list[Package]]:
    """Every copy of the named distributions on `path`, by canonical name; the one in use comes first."""
    found: dict[str, list[Package]] = {}
    seen: set[str] = set()
    for folder in path:
        for entry in hosts.entries(Path(folder)):
            match = _INFO.fullmatch(entry)
            name = canonical(match["name"]) if match else ""
            info = Path(folder) / entry
            if match is None or name not in names or (real := os.path.realpath(info)) in seen:
                continue
            seen.add(real)
            version = next(iter(_fields(str(info), "Version")), match["version"] or "")
            found.setdefault(name, []).append(Package(name, version, folder, str(info)))
    return found


def canonical(name: str) -> str:
    """torch_npu, torch-npu and Torch.NPU are one distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(version: str) -> Version | None:
    """A PEP 440 version, or None; CANN's 8.3.RC1 and 9.1.0-beta.2 are ones too."""
    try:
        return Version(version)
    except ValueError:  # InvalidVersion, or more digits than Python converts
        return None


def base(version: str) -> str:
    """2.9.0.post2 and 2.9.0+cpu -> 2.9.0; what cannot be parsed stays as it is."""
    parsed = parse(version)
    return parsed.base_version if parsed else version


def _fields(info: str, field: str) -> list[str]:
    """The values of a field of METADATA, or of the older PKG-INFO (which may be the .egg-info file itself)."""
    folder = Path(info)
    text = hosts.read(folder / "METADATA") or hosts.read(folder / "PKG-INFO") or hosts.read(folder)
    header = re.split(r"\r?\n\r?\n", text, maxsplit=1)[0]
    return [line.partition(":")[2].strip() for line in header.splitlines() if line.startswith(f"{field}:")]
