"""docker/: the rendered files say what the matrix says, and the matrix what doctor would accept in the image."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import scripts

from npu_backend.doctor import matrix
from npu_backend.doctor.facts import DRIVER, MANAGERS
from npu_backend.doctor.packages import parse

DOCKER = Path(__file__).parents[2] / "docker"


generate = scripts.load(DOCKER / "generate.py")
ROWS = generate.rows()
BUILT = [row for row in ROWS if not row.fault]


def by_name(row) -> str:
    return row.name


def test_rendered_files_have_not_drifted() -> None:
    assert generate.differences() == []


@pytest.mark.parametrize("change", ["edited", "missing", "of no row"])
def test_a_drifted_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, change: str) -> None:
    images = tmp_path / "docker" / "images"
    monkeypatch.setattr(generate, "CHECKOUT", tmp_path)
    monkeypatch.setattr(generate, "IMAGES", images)
    monkeypatch.setattr(generate, "DOCUMENT", tmp_path / "docker.md")
    (tmp_path / "npu_backend").mkdir()
    (tmp_path / "npu_backend" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    places = "".join(f"<!-- generated: {name} -->\n<!-- end -->\n" for name in generate.tables())
    (tmp_path / "docker.md").write_text(places)
    assert generate.main() == 0
    assert generate.main("--check") == 0
    file = images / BUILT[0].name / "Dockerfile"
    if change == "edited":
        file.write_text(file.read_text().replace("USER npu", "USER root"))
    elif change == "missing":
        file.unlink()
    else:
        file = images / "older" / "Dockerfile"
        file.parent.mkdir()
        file.touch()
    assert generate.main("--check") == 1
    assert str(file.relative_to(tmp_path)) in capsys.readouterr().out


@pytest.mark.parametrize("row", BUILT, ids=by_name)
def test_doctor_accepts_the_pins(row) -> None:
    """The last step of the build is doctor; this is what it compares, without an image."""
    versions = {**row.pins, **({"cann": row.cann} if row.cann else {})}
    for group in matrix.GROUPS:
        present = {name: versions[name] for name in group if name in versions}
        assert len(present) < 2 or matrix.tested(present), f"nobody published {present} as tested together"
    assert not [bad.why for bad in matrix.known_bad() if bad.matches(versions)]
    assert parse(row.pins["transformers"]) >= parse("4.51")


def test_every_generation_has_a_row_and_every_row_without_image_its_fault() -> None:
    assert {chip for row in ROWS for chip in row.chips} >= {"A2", "A3", "A5"}
    assert any("numpy>=2.0.0" in row.fault for row in ROWS)
    shown = generate.DOCUMENT.read_text(encoding="utf-8")
    for row in ROWS:
        assert row.fault or {"torch", "torch-npu", "transformers", "verl", "numpy"} <= set(row.pins)
        assert f"| {row.name} |" in shown


@pytest.mark.parametrize("row", BUILT, ids=by_name)
def test_dockerfile(row) -> None:
    text = (generate.IMAGES / row.name / "Dockerfile").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines.index("ENV PIP_CONSTRAINT=/opt/npu-backend/constraints.txt") < min(
        number for number, line in enumerate(lines) if "install.sh" in line and line.lstrip().startswith("sh ")
    )
    assert lines.index("USER npu") < lines.index("RUN sh /opt/npu-backend/install.sh check")
    assert not re.search(r"(?i)(password|token|secret)\s*=", text)
    for name, version in row.pins.items():
        assert f'npu-backend.{name}="{version}"' in text
    if row.cann:
        chip = generate.TAGS[row.chips[0]]
        assert f"ARG CHIP={chip}\nARG BASE_IMAGE={generate.REGISTRY}:{row.cann}-${{CHIP}}-" in text


@pytest.mark.parametrize("row", BUILT, ids=by_name)
def test_constraints_pin_the_row(row) -> None:
    lines = (generate.IMAGES / row.name / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.partition(";")[0] for line in lines if line and not line.startswith("#")]
    assert {f"{name}=={version}" for name, version in row.pins.items()} <= set(pins)
    assert all(re.fullmatch(r"[a-z0-9-]+==[^=<>~]+", pin) for pin in pins)


@pytest.mark.parametrize("where", ["docs/docker.md", "docker/compose.yaml"])
def test_devices_and_mounts_are_those_that_doctor_asks_for(where: str) -> None:
    text = (DOCKER.parent / where).read_text(encoding="utf-8")
    for path in (DRIVER, "/usr/local/dcmi", "/usr/local/bin/npu-smi", "/etc/ascend_install.info"):
        assert f" {path}:{path}:ro" in text
    for node in ("/dev/davinci0", *MANAGERS):
        assert re.search(rf"(--device|-) {node}\b", text)


def install(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(DOCKER / "install.sh"), *arguments]
    return subprocess.run(command, env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "install.sh torch|stack"),
        (("everything",), "install.sh torch|stack"),
        (("operators", "ligre"), "OPERATORS is torch_npu or liger, not 'ligre'"),
        (("operators", "liger"), "this row has no tested liger-kernel"),
    ],
)
def test_install_script_refuses_what_it_does_not_know(arguments, says: str) -> None:
    done = install(*arguments, PIP_CONSTRAINT=str(generate.IMAGES / "cann8.5.0" / "constraints.txt"))
    assert done.returncode == 2
    assert says in done.stderr


def test_smoke_test_names_a_package_that_is_missing_or_of_another_version(tmp_path: Path) -> None:
    import numpy

    (tmp_path / "constraints.txt").write_text(f"# pins\nnumpy=={numpy.__version__}\nvllm-ascend==0.0.1\n")
    done = subprocess.run(
        [sys.executable, str(DOCKER / "smoke.py"), str(tmp_path / "constraints.txt")],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(DOCKER.parent), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert re.search(r"import numpy +\S+ +ok", done.stdout)
    assert re.search(r"import vllm_ascend +WRONG, it cannot be imported: ModuleNotFoundError", done.stdout)
