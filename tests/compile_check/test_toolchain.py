"""Where the vendor's compiler is looked for, and what is said when it is not there."""

from __future__ import annotations

import importlib.metadata
import os

import pytest

from npu_backend.ascend import toolchain
from npu_backend.errors import BackendUnavailableError, ConfigError


def make_program(folder, version="1.2.0 (/usr1/build 8796a8ac1508 2026-07-29)"):
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "bishengir-compile"
    program.write_text(f"#!/bin/sh\necho 'bishengir-compile {version}'\n")
    program.chmod(0o755)
    return folder


@pytest.fixture
def folder(tmp_path):
    """A folder as `install` makes it, with two releases."""
    for release in ("1.2.0", "1.0.0"):
        make_program(tmp_path / f"ascendnpu-ir-{release}" / "ascendnpuir" / "bin")
    (tmp_path / f"triton-ascend-{toolchain.FRONT_END}" / "triton").mkdir(parents=True)
    return tmp_path


@pytest.fixture(autouse=True)
def _no_host_compiler(monkeypatch):
    monkeypatch.setattr(toolchain, "_host_programs", lambda: None)


def test_the_newest_release_that_is_there_is_taken(folder):
    found = toolchain.find(folder)
    assert found.describe() == {
        "triton-ascend": "3.2.0",
        "ascendnpu-ir": "1.2.0",
        "bishengir-compile": "1.2.0 8796a8ac1508 2026-07-29",
    }
    assert toolchain.find(folder, "1.0.0").release == "1.0.0"


def test_the_worker_sees_the_toolchain_first_and_starts_no_device(folder, monkeypatch):
    monkeypatch.setenv("NPU_BACKEND_VIRTUAL_NPU", "2")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    variables = toolchain.find(folder).environment()
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == str(folder / "triton-ascend-3.2.0")
    assert variables["PATH"].split(os.pathsep)[0] == str(folder / "ascendnpu-ir-1.2.0/ascendnpuir/bin")
    assert variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert not {"NPU_BACKEND_VIRTUAL_NPU", "TRITON_INTERPRET"} & variables.keys()


def test_a_missing_toolchain_names_the_command_that_fetches_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match=r"npu-backend compile-check --install$"):
        toolchain.find()
    with pytest.raises(BackendUnavailableError, match=r"--install --compiler 1\.1\.0$"):
        toolchain.find(compiler="1.1.0")


def test_a_folder_without_a_toolchain_is_named(tmp_path):
    with pytest.raises(BackendUnavailableError, match=f"--toolchain {tmp_path} does not hold"):
        toolchain.find(tmp_path)


def test_an_unknown_release_lists_the_known_ones(folder):
    for call in (lambda: toolchain.find(folder, "9.9"), lambda: toolchain.install("9.9", folder=folder)):
        with pytest.raises(ConfigError, match=r"1\.2\.0, 1\.1\.0, 1\.0\.0"):
            call()


def test_on_an_ascend_host_its_own_compiler_is_used(tmp_path, monkeypatch):
    monkeypatch.undo()
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "3.2.2" if name == "triton-ascend" else version(name)
    )
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(BackendUnavailableError, match="--compiler host"):
        toolchain.find(compiler="host")
    programs = make_program(tmp_path / "compiler" / "bishengir" / "bin", "9.1.0")
    found = toolchain.find()
    assert found.programs == programs
    assert found.front_end is None
    assert found.describe() == {"triton-ascend": "3.2.2", "ascendnpu-ir": "host", "bishengir-compile": "9.1.0"}


def test_a_compiler_that_does_not_run_is_an_error(folder):
    (folder / "ascendnpu-ir-1.2.0/ascendnpuir/bin/bishengir-compile").write_text("no program")
    with pytest.raises(BackendUnavailableError, match="does not run here"):
        toolchain.find(folder)


def test_pip_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain.subprocess, "call", lambda command, **options: 1)
    with pytest.raises(BackendUnavailableError, match=r"Python 3\.10 and 3\.11"):
        toolchain.install(folder=tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_what_is_there_is_not_fetched_again(folder, monkeypatch):
    def fail(command, **options):
        raise AssertionError(command)

    monkeypatch.setattr(toolchain.subprocess, "call", fail)
    assert toolchain.install(folder=folder) == toolchain.find(folder, "1.2.0")
