"""The install script in a clean environment and the Dockerfile in a real build, both of row `stand-in`: torch_npu and
all the rest are the real packages, CANN is the virtual NPU's software runtime.

The build needs root, buildah and debootstrap (Debian); no container engine runs. Without them its tests are not run,
and say so. The wheels stay in build/docker-wheels for the next time.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_backend.virtual_npu import build as virtual_npu

CHECKOUT = Path(__file__).parents[2]
ROW = CHECKOUT / "docker" / "images" / "stand-in"
WHEELS = CHECKOUT / "build" / "docker-wheels"
IMAGE, BASE = "localhost/npu-backend:stand-in", "localhost/npu-backend-stand-in"
SET_ENV = """\
export ASCEND_HOME_PATH={toolkit}
export ASCEND_OPP_PATH={toolkit}/opp
export LD_LIBRARY_PATH={toolkit}/lib64${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}
"""
SMOKE = ("import torch_npu ", "import verl ", "operators planned for")
pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="not run: row stand-in is for Python 3.11"),
    pytest.mark.skipif(platform.system() != "Linux", reason="not run: torch_npu has no wheel for this system"),
]


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with stdout and stderr together."""
    return subprocess.run(
        [str(part) for part in command],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def run_well(*command: object, **environment: str) -> str:
    done = run(*command, **environment)
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels() -> Path:
    """Everything that row `stand-in` installs, as wheels: the builds below need no index."""
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", WHEELS, "--find-links", WHEELS)
    constraints = ROW / "constraints.txt"
    pins = dict(line.split("==") for line in constraints.read_text().splitlines() if "==" in line and ";" not in line)
    torch = f"torch=={pins['torch']}" + ("+cpu" if platform.machine() == "x86_64" else "")
    wanted = ("--constraint", constraints, torch, "transformers", "verl", "hatchling", "setuptools", "wheel")
    alone = ("--no-deps", *(f"{name}=={pins[name]}" for name in ("torch-npu", "triton-ascend")))
    if any(run(*pip, "--no-index", *what).returncode for what in (wanted, alone)):  # not there since the last time
        pytorch = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")
        if run(*pip, *wanted).returncode:  # as pip is set up here; PyTorch's own index where that has no such torch
            run_well(*pip, *pytorch, *wanted)
        run_well(*pip, *alone)
    return WHEELS


def stand_in_cann(top: Path, seen_as: str) -> None:
    """A CANN as the vendor's images have it, below `top`, which will be `seen_as` where it is used."""
    toolkit = top / "ascend-toolkit" / "latest"
    runtime = virtual_npu.runtime_folder()
    shutil.copytree(runtime / "lib", toolkit / "lib64")
    for name in ("opp", "runtime", "compiler"):
        (toolkit / name).mkdir()
    (top / "ascend-toolkit" / "set_env.sh").write_text(SET_ENV.format(toolkit=f"{seen_as}/ascend-toolkit/latest"))


def test_install_script_in_a_clean_environment(wheels: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    home = tmp_path / "home"
    stand_in_cann(home / "Ascend", str(home / "Ascend"))
    variables = {
        "PYTHON": str(tmp_path / "env" / "bin" / "python"),
        "PIP_CONSTRAINT": str(ROW / "constraints.txt"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "HOME": str(home),
        "PYTHONPATH": "",
    }
    said = run_well("sh", CHECKOUT / "docker" / "install.sh", "all", "torch_npu", CHECKOUT, **variables)
    assert all(words in said for words in SMOKE)
    assert "0 errors, 0 warnings" in said


class Buildah:
    """buildah with its storage in one folder, without an engine and without namespaces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._base = ("buildah", "--storage-driver", "vfs", "--root", folder / "storage", "--runroot", folder / "run")

    def build(self, dockerfile: Path, tag: str, context: Path, *options: object) -> str:
        command = ("bud", "--isolation", "chroot", "--file", dockerfile, "--tag", tag, *options, context)
        return run_well(*self._base, *command)

    def labels(self, tag: str) -> dict[str, str]:
        return json.loads(run_well(*self._base, "inspect", "--type", "image", tag))["OCIv1"]["config"]["Labels"]

    def container(self, tag: str) -> str:
        return run_well(*self._base, "from", "--pull-never", tag).strip().splitlines()[-1]

    def run(self, container: str, *command: str, user: str = "npu") -> subprocess.CompletedProcess[str]:
        return run(*self._base, "run", "--isolation", "chroot", "--user", user, container, "--", *command)


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    missing = [tool for tool in ("buildah", "debootstrap") if not shutil.which(tool)]
    if os.geteuid() != 0:
        pytest.skip("not run: building an image needs root")
    if missing:
        pytest.skip(f"not run: no {' and no '.join(missing)} (Debian: apt-get install {' '.join(missing)})")
    folder = tmp_path_factory.mktemp("buildah")
    yield Buildah(folder)
    subprocess.run(["rm", "-rf", folder], check=False)  # gigabytes, in a few hundred thousand files


@pytest.fixture(scope="module")
def container(buildah: Buildah, wheels: Path) -> str:
    """A container of the image that docker/images/stand-in/Dockerfile makes on a Debian with the stand-in CANN."""
    debian = buildah.folder / "debian"
    packages = "python3,python3-pip,python3-venv,ca-certificates"
    made = run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", debian)
    if made.returncode:
        pytest.skip(f"not run: debootstrap cannot fetch Debian: {made.stdout[-300:]}")
    stand_in_cann(debian / "usr/local/Ascend", "/usr/local/Ascend")
    scratch = buildah.folder / "Containerfile"
    scratch.write_text("FROM scratch\nCOPY . /\n")
    buildah.build(scratch, BASE, debian)
    shutil.rmtree(debian)
    settings = buildah.folder / "pip.conf"
    settings.write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    options = ("--secret", f"id=pip,src={settings}", "--volume", f"{wheels}:/wheels:ro")
    said = buildah.build(ROW / "Dockerfile", IMAGE, CHECKOUT, *options)
    assert all(words in said for words in SMOKE)
    return buildah.container(IMAGE)


def test_built_image_passes_its_own_check_as_an_ordinary_user(buildah: Buildah, container: str) -> None:
    assert buildah.run(container, "id", "-un").stdout.strip() == "npu"
    done = buildah.run(container, "sh", "/opt/npu-backend/install.sh", "check")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "0 errors, 0 warnings" in done.stdout
    assert "in /usr/local/Ascend/ascend-toolkit/latest" in done.stdout


def test_built_image_has_its_labels_and_nothing_of_the_build(buildah: Buildah, container: str) -> None:
    labels = buildah.labels(IMAGE)
    assert labels["npu-backend.row"] == "stand-in"
    assert labels["npu-backend.torch-npu"] == "2.13.0"
    look = "cat /etc/pip.conf; ls /checkout /wheels ~root/.cache; true"
    left = buildah.run(container, "sh", "-c", look, user="root").stdout
    assert "find-links" not in left
    assert "pyproject.toml" not in left
    assert ".whl" not in left


def test_pip_in_the_image_refuses_to_move_torch(buildah: Buildah, container: str) -> None:
    pip = ("python3", "-m", "pip", "install", "--user", "--no-index", "--break-system-packages")
    done = buildah.run(container, *pip, "torch==2.12.0")
    assert done.returncode != 0
    assert "(constraint) torch==2.13.0" in done.stdout


def test_the_check_fails_for_an_image_that_lost_a_package(buildah: Buildah, container: str) -> None:
    remove = "rm -r $(python3 -m pip show verl | sed -n 's/^Location: //p')/verl"
    removed = buildah.run(container, "sh", "-c", remove, user="root")
    assert removed.returncode == 0, removed.stdout
    done = buildah.run(container, "sh", "/opt/npu-backend/install.sh", "check")
    assert done.returncode != 0
    assert "import verl" in done.stdout
    assert "WRONG, it cannot be imported: ModuleNotFoundError" in done.stdout
