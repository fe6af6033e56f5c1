"""`patches/` stands at the top of the repository and is installed as `npu_backend.patches`, by every install."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import npu_backend

BUILD = "import sys, hatchling.build as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


def source_files(folder: Path, installed_as: str) -> set[str]:
    """The files of a source folder as an install names them; the link and caches are no sources."""
    paths = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {f"{installed_as}/{p}" for p in paths if "__pycache__" not in p.parts and p.parts[0] != "patches"}


def copy_of(checkout: Path, target: Path) -> Path:
    """What the build needs of the checkout, the link kept as a link."""
    for name in ("npu_backend", "patches"):
        shutil.copytree(checkout / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(checkout / name, target / name)
    return target


def build(run, hook: str, source: Path, target: Path) -> Path:
    """Call a hook of the build backend as pip does; return the wheel."""
    target.mkdir()
    return target / run(sys.executable, "-c", BUILD, hook, target, cwd=source).splitlines()[-1]


def test_wheel_holds_every_source_file(archives, checkout) -> None:
    files = set(archives.wheel_files())
    package = source_files(checkout / "npu_backend", "npu_backend")
    assert files == package | source_files(checkout / "patches", "npu_backend/patches")
    assert {"npu_backend/patches/engine.py", "npu_backend/py.typed"} <= files


def test_sdist_holds_what_the_wheel_is_built_from(archives) -> None:
    sdist = archives.sdist_files()
    assert not [name for name in sdist if name.startswith("npu_backend/patches")]
    for name, content in archives.wheel_files().items():
        assert sdist[name.replace("npu_backend/patches/", "patches/")] == content


def test_check_wheel_contents(archives, run) -> None:
    run(sys.executable, "-m", "check_wheel_contents", "--toplevel", "npu_backend", archives.wheel)


def test_version_is_that_of_the_package(archives) -> None:
    assert archives.wheel.name == f"npu_backend-{npu_backend.__version__}-py3-none-any.whl"


def test_installed_wheel_has_no_top_level_patches(archives, install, run, tmp_path) -> None:
    python = install(archives.wheel)
    code = "import importlib.util, npu_backend.patches.engine; print(importlib.util.find_spec('patches'))"
    assert run(python, "-c", code, cwd=tmp_path) == "None"
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"npu_backend"}
    run(python.with_name("npu-backend"), "--help", cwd=tmp_path)


def test_editable_install_uses_the_folder_itself(checkout, install, run, tmp_path) -> None:
    source = copy_of(checkout, tmp_path / "source")
    python = install(build(run, "build_editable", source, tmp_path / "wheel"))
    (source / "patches" / "added_later.py").touch()
    code = "import npu_backend.patches.added_later as a, npu_backend.patches.engine as e; print(a.__file__, e.__file__)"
    folder = source / "npu_backend" / "patches"
    assert run(python, "-c", code, cwd=tmp_path) == f"{folder}/added_later.py {folder}/engine.py"


def test_wheel_is_complete_where_git_could_not_make_the_link(archives, checkout, run, tmp_path) -> None:
    source = copy_of(checkout, tmp_path / "source")
    link = source / "npu_backend" / "patches"
    link.unlink()
    link.write_text("../patches")  # what git writes with core.symlinks=false
    with zipfile.ZipFile(build(run, "build_wheel", source, tmp_path / "wheel")) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == set(archives.wheel_files())


def test_patches_cannot_be_imported_under_a_second_name(checkout) -> None:
    command = [sys.executable, "-c", "import patches"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "import this package as 'npu_backend.patches'" in done.stderr


def test_link_is_relative(checkout) -> None:
    assert (checkout / "npu_backend" / "patches").readlink() == Path("../patches")
