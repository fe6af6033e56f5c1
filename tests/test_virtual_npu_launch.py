"""Starting the virtual NPU (arithmetic by the CPU): what it refuses with which fix, and what a command inherits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_backend import soc, virtual_npu
from npu_backend.errors import BackendUnavailableError, ConfigError
from npu_backend.virtual_npu import build, launch, wheel

ROOT = Path(virtual_npu.__file__).parents[2]


def python(*code: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(code)]


def start(
    *command: str, options: tuple[str, ...] = ("--virtual-npu=2",), **variables: str
) -> subprocess.CompletedProcess:
    """Run `npu-backend run OPTIONS -- COMMAND` from a clean environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("NPU_BACKEND_", "VIRTUAL_NPU_", "ASCEND_"))}
    clean |= {"PYTHONPATH": str(ROOT), **variables}
    whole = [sys.executable, "-m", "npu_backend", "run", *options, *(("--", *command) if command else ())]
    return subprocess.run(whole, env=clean, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture
def startable() -> None:
    """Skip where the virtual NPU cannot start at all: the message says what is missing."""
    try:
        launch.prepare()
    except BackendUnavailableError as error:
        pytest.skip(str(error))


# ---- refusals, each with its fix ----


@pytest.mark.parametrize("devices", [0, -1, 65, True, "two", 1.5, None])
def test_a_number_of_devices_without_meaning_is_refused(devices: object) -> None:
    with pytest.raises(ConfigError, match="from 1 to 64"):
        virtual_npu.activate(devices)  # type: ignore[arg-type]


def test_an_unknown_soc_names_the_closest_and_all() -> None:
    with pytest.raises(ConfigError, match="did you mean 'Ascend910B3'.*Ascend910_9392"):
        virtual_npu.activate(soc="Ascend910B33")


def test_torch_imported_already_is_refused(startable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert torch.__version__
    monkeypatch.setattr(launch, "_active", None)
    with pytest.raises(
        BackendUnavailableError, match=r"before the first `import torch`.*npu-backend run --virtual-npu"
    ):
        virtual_npu.activate()


def test_no_compiler_names_one_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BackendUnavailableError, match=r"no C compiler.*apt-get install gcc"):
        build.runtime_folder()


def test_a_compiler_that_fails_shows_its_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'cannot find crti.o' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(BackendUnavailableError, match=r"ended with 3:\s*cannot find crti.o"):
        build.runtime_folder()
    assert list((tmp_path / "cache" / "npu-backend").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BackendUnavailableError, match="set XDG_CACHE_HOME to a writable folder"):
        build.runtime_folder()


def only(folder: Path, monkeypatch: pytest.MonkeyPatch, **requirements: str) -> None:
    """Let `wheel` see only distributions made of name=version lines, in an empty cache."""
    for name, version in requirements.items():
        metadata = folder / "site" / f"{name}-{version.split(' ')[0]}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        number, _, needs = version.partition(" ")
        metadata.write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n" + needs.replace("needs", "Requires-Dist:")
        )
    monkeypatch.setattr(sys, "path", [str(folder / "site")])
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def test_no_torch_npu_gives_the_command_for_the_installed_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only(tmp_path, monkeypatch, torch="2.9.1+cpu")
    with pytest.raises(BackendUnavailableError) as caught:
        wheel.torch_npu_folder()
    folder = tmp_path / "npu-backend" / wheel.cached_torch_npu("2.9.1").name
    assert f"-m pip install --no-deps --target {folder} torch-npu==2.9.1" in str(caught.value)


def test_no_torch_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only(tmp_path, monkeypatch)
    with pytest.raises(BackendUnavailableError, match="pip install torch"):
        wheel.torch_npu_folder()


def test_a_pair_that_does_not_match_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only(tmp_path, monkeypatch, torch="2.13.0+cpu", torch_npu="2.9.0 needs torch==2.9.0.*\n")
    with pytest.raises(
        BackendUnavailableError, match=r"2\.9\.0 needs torch==2\.9\.0\.\*, but torch 2\.13\.0\+cpu(.|\n)*==2\.13\.0"
    ):
        wheel.torch_npu_folder()


def test_the_build_that_a_release_was_made_with_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch_npu 2.9.0 and 2.10.0 ask for the `+cpu` build; pip's plain torch is the same release."""
    only(tmp_path, monkeypatch, torch="2.10.0", torch_npu="2.10.0 needs torch==2.10.0+cpu\n")
    assert wheel.torch_npu_folder() is None


def test_a_pair_that_matches_is_taken_from_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only(tmp_path, monkeypatch, torch="2.13.0+cpu", torch_npu="2.13.0 needs torch==2.13.0.*\n")
    assert wheel.torch_npu_folder() is None  # installed: nothing to put on the path
    folder = tmp_path / "npu-backend" / wheel.cached_torch_npu("2.13.0").name
    folder.mkdir(parents=True)
    (tmp_path / "site" / "torch_npu-2.13.0.dist-info").rename(folder / "torch_npu-2.13.0.dist-info")
    assert wheel.torch_npu_folder() == folder


def test_a_host_with_a_real_driver_is_refused_unless_forced(startable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_real_driver", lambda: "/dev/davinci0")
    with pytest.raises(BackendUnavailableError, match=r"/dev/davinci0.*force=True.*--force"):
        launch.prepare()
    launch.prepare(force=True)


def test_processes_that_build_at_once_share_one_result(tmp_path: Path) -> None:
    code = python("from npu_backend.virtual_npu import build", "print(build.runtime_folder())")
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    running = [subprocess.Popen(code, env=variables, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = {process.communicate(timeout=200)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(folders) == 1
    assert [str(entry) for entry in (tmp_path / "npu-backend").iterdir()] == list(folders)
    built = {file.name for file in (Path(folders.pop()) / "lib").iterdir()}
    assert built == {f"lib{name}.so" for name in build.LIBRARIES}


def test_importing_it_imports_no_torch() -> None:
    code = python("import sys", "import npu_backend.virtual_npu", "assert 'torch' not in sys.modules")
    subprocess.run(code, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


# ---- the command ----


def test_chips_have_their_own_figures() -> None:
    assert (soc.find_soc("Ascend910B3").cube_cores, soc.find_soc("Ascend910B3").vector_cores) == (20, 40)
    assert soc.find_soc("Ascend910_9392").generation == "A3"
    cores = {name: soc.find_soc(f"Ascend950{name}").cube_cores for name in ("DT_950x", "PR_957a", "DT_9588", "DT_95A2")}
    assert cores == {"DT_950x": 8, "PR_957a": 28, "DT_9588": 32, "DT_95A2": 36}
    for chip in soc.SOCS.values():
        assert chip.vector_cores == 2 * chip.cube_cores
        assert chip.ub_bytes * 8 == (2031616 if chip.generation == "A5" else 1572864)


@pytest.mark.parametrize(
    ("options", "command", "status", "message"),
    [
        (("--virtual-npu",), ("sh", "-c", "exit 7"), 7, virtual_npu.LABEL),
        (("--virtual-npu",), ("no-such-command-here",), 127, "cannot run 'no-such-command-here'"),
        (("--virtual-npu",), ("/",), 126, "cannot run '/'"),
        (("--virtual-npu",), (), 2, "no command"),
        ((), ("true",), 2, "--virtual-npu"),
        (("--virtual-npu=many",), ("true",), 2, "'many' is not a number"),
        (("--virtual-npu=0",), ("true",), 2, "from 1 to 64"),
        (("--virtual-npu", "--soc", "Ascend910"), ("true",), 2, "did you mean"),
        (("--virtual-npu=3", "--json"), ("true",), 0, '"devices": 3'),
    ],
)
def test_exit_status_and_message(startable: None, options, command, status, message) -> None:
    done = start(*command, options=options)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


REPORT = """
import multiprocessing, torch
def report(where):
    x = torch.ones(3, device="npu:1") + 1
    print(where, torch.npu.device_count(), torch.npu.get_device_name(), x.device, x.sum().item(), flush=True)
if __name__ == "__main__":
    report("command")
    worker = multiprocessing.get_context("spawn").Process(target=report, args=("spawned",))
    worker.start()
    worker.join()
"""


def test_the_command_and_every_python_it_starts_have_the_devices(startable: None, tmp_path: Path) -> None:
    program, hidden = tmp_path / "program.py", tmp_path / "hidden"
    program.write_text(REPORT)
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import os; os.environ['OTHER_SITECUSTOMIZE_RAN'] = '1'\n")
    before = sorted(os.listdir(Path(sys.prefix)))
    done = start(
        sys.executable, str(program),
        options=("--virtual-npu=2", "--soc", "Ascend910B3"),
        PYTHONPATH=os.pathsep.join([str(ROOT), str(hidden)]), LD_LIBRARY_PATH="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = "2 Ascend910B3 npu:1 6.0"
    assert done.stdout.splitlines() == [f"{where} {expected}" for where in ("command", "spawned")]
    assert done.stderr.count(virtual_npu.LABEL) == 1
    assert sorted(os.listdir(Path(sys.prefix))) == before


def test_a_hidden_sitecustomize_still_runs_and_other_programs_pay_nothing(startable: None, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['HIDDEN_ONE_RAN'] = 'yes'\n")
    code = python("import os, sys", "print(os.environ.get('HIDDEN_ONE_RAN'), 'npu_backend' in sys.modules)")
    done = start(*code, PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]))
    assert done.stdout.split() == ["yes", "False"], done.stderr


def test_activate_in_a_program_works_and_is_inherited(startable: None) -> None:
    code = python(
        "import subprocess, sys",
        "from npu_backend import virtual_npu",
        "virtual_npu.activate(3, 'Ascend910_9392')",
        "virtual_npu.activate(3, 'Ascend910_9392')",
        "import torch",
        "print(virtual_npu.is_active(), torch.npu.device_count(), torch.npu.get_device_name())",
        "check = 'import torch; print(torch.npu.device_count())'",
        "subprocess.run([sys.executable, '-c', check], check=True)",
        "virtual_npu.activate(2)",
    )
    done = subprocess.run(
        code, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.split()[:4] == ["True", "3", "Ascend910_9392", "3"], done.stderr
    assert "it cannot become 2 x Ascend910B1" in done.stderr
