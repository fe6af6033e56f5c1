"""The one way in which doctor looks at a host: its files, environment variables, sys.path and commands.

Nothing here raises: what cannot be read is absent. Tests put a folder in place of `/`, a dictionary in place of the
environment and a function in place of running commands.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MOST = 4 * 2**20  # characters of a text file; nothing that doctor reads is longer


@dataclass(frozen=True)
class Output:
    """What a command did. `status` is None when it could not be started or ran out of time; `text` says which."""

    status: int | None
    text: str


def run(command: Sequence[str], environ: Mapping[str, str], seconds: float) -> Output:
    """Run a command with a time limit; stdout and stderr together, as they came."""
    try:
        done = subprocess.run(
            list(command),
            env=dict(environ),
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired:
        return Output(None, f"{command[0]} did not end within {seconds:g} s")
    except (OSError, ValueError) as error:
        return Output(None, f"{command[0]} cannot be run: {error}")
    return Output(done.returncode, done.stdout.decode("utf-8", "replace"))


class Host:
    """A host to examine; by default the one that this process runs on.

    Args:
        root: the folder that stands for `/` in every path below.
        environ: the environment variables.
        path: the folders of `sys.path`, as they are (not below `root`).
        execute: what runs a command: `(command, environ, seconds) -> Output`.
        python: the interpreter, for commands that are run or shown.
    """

    def __init__(
        self,
        root: str | Path = "/",
        environ: Mapping[str, str] | None = None,
        path: Sequence[str] | None = None,
        execute: Callable[[Sequence[str], Mapping[str, str], float], Output] = run,
        python: str = sys.executable,
    ) -> None:
        self.root = Path(root)
        self.environ: Mapping[str, str] = os.environ if environ is None else environ
        self.path = list(dict.fromkeys(map(_absolute, sys.path if path is None else path)))
        self.python = python
        self._execute = execute

    def execute(self, command: Sequence[str], seconds: float) -> Output:
        """Run a command in the host's environment."""
        return self._execute(command, self.environ, seconds)

    def inside(self, path: str | Path) -> Path:
        """Where a path of the host, such as /dev/davinci0, really is."""
        return self.root / str(path).lstrip("/")

    def exists(self, path: str | Path) -> bool:
        """Whether the host has this file or folder; a link to nothing does not count."""
        return exists(self.inside(path))

    def read(self, path: str | Path) -> str:
        """The text of a file of the host, "" if there is none."""
        return read(self.inside(path))

    def entries(self, folder: str | Path) -> list[str]:
        """The sorted names in a folder of the host; none if it cannot be read."""
        return entries(self.inside(folder))

    def resolve(self, path: str | Path) -> str:
        """The path with its links followed, as the host sees it."""
        try:
            real = os.path.realpath(self.inside(path))
            return "/" + os.path.relpath(real, os.path.realpath(self.root)) if self.root != Path("/") else real
        except (OSError, ValueError):
            return str(path)


def _absolute(entry: str) -> str:
    try:
        return os.path.abspath(entry)
    except OSError:  # a relative entry, and the current folder is gone
        return entry


def exists(path: Path) -> bool:
    """`Path.exists` that takes every error for a no."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read(path: Path) -> str:
    """The text of a file, "" if it cannot be read; bytes that are not UTF-8 are replaced."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST)
    except (OSError, ValueError):
        return ""


def entries(folder: Path) -> list[str]:
    """The sorted names in a folder; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except (OSError, ValueError):
        return []
