"""The archives that a release would upload, built once, and empty environments to install them into."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


class Archives:
    """The wheel and the sdist of the checkout; `python -m build` makes the wheel from the sdist, so it tests both."""

    def __init__(self, folder: Path) -> None:
        run_command(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, CHECKOUT)
        (self.wheel,) = folder.glob("*.whl")
        (self.sdist,) = folder.glob("*.tar.gz")

    def wheel_files(self) -> dict[str, bytes]:
        """Name -> content of what the wheel installs, without its metadata."""
        with zipfile.ZipFile(self.wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}

    def sdist_files(self) -> dict[str, bytes]:
        """Name -> content of the sdist, without its top folder."""
        with tarfile.open(self.sdist) as archive:
            members = [member for member in archive if member.isfile()]
            return {member.name.partition("/")[2]: archive.extractfile(member).read() for member in members}


def run_command(*command: object, cwd: Path | None = None) -> str:
    """Run a command, which must succeed, and return what it printed."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@pytest.fixture
def run() -> Callable[..., str]:
    return run_command


@pytest.fixture(scope="session")
def checkout() -> Path:
    return CHECKOUT


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    return Archives(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def install(tmp_path: Path) -> Callable[[Path], Path]:
    """install(wheel) -> the Python of a new environment that has this wheel and nothing else."""

    def into_new_environment(wheel: Path) -> Path:
        venv.create(tmp_path / "env", with_pip=False)
        python = tmp_path / "env" / "bin" / "python"
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
        run_command(*pip, wheel)
        return python

    return into_new_environment
