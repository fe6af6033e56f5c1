"""Each row of docker/matrix.csv through pip's resolver, for x86_64 and aarch64; minutes, and an index.

The fast tests are about what was resolved last, docker/resolved.csv. pip takes wheels alone for another platform, and
antlr4-python3-runtime, which hydra-core 1.x needs, has none: without docker/resolve.py's stand-in pip goes back to
hydra-core 0.11.3, and says nothing.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import scripts
from packaging.requirements import Requirement
from packaging.version import Version

DOCKER = Path(__file__).parents[2] / "docker"
generate, resolve = scripts.load(DOCKER / "generate.py"), scripts.load(DOCKER / "resolve.py")
# Without a torch-npu there is nothing to install: A5.
ROWS = {row.name: row for row in generate.rows() if "torch-npu" in row.pins}
WITH_VERL = [row for row in ROWS.values() if "verl" in row.pins and not row.fault]


def check_hydra(versions: dict[str, str]) -> None:
    """verl's configurations need a hydra-core of the 1 series, and the omegaconf and antlr4 of it."""
    assert Version("1.1") <= Version(versions["hydra-core"]) < Version("2")
    assert Version("2.1") <= Version(versions["omegaconf"]) < Version("3")
    assert versions["antlr4-python3-runtime"].startswith("4.9.")


@pytest.mark.parametrize("machine", resolve.MACHINES)
@pytest.mark.parametrize("row", [row for row in WITH_VERL if "vllm" not in row.pins], ids=lambda row: row.name)
def test_what_is_pinned_beside_verl_has_a_hydra_of_today(row, machine: str) -> None:
    found = {
        line["package"]: line["version"]
        for line in generate.resolved()
        if (line["row"], line["machine"]) == (row.name, machine)
    }
    check_hydra(found)
    pinned = (generate.IMAGES / row.name / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"hydra-core=={found['hydra-core']}" in pinned


def test_the_stand_in_is_what_hydra_asks_for() -> None:
    pytest.importorskip("hydra", reason="hydra-core is in the environment with verl only")
    (asked_for,) = (text for text in importlib.metadata.requires("hydra-core") or [] if text.startswith("antlr4"))
    (version,) = (version for name, version in resolve.SOURCE_ONLY if name == "antlr4_python3_runtime")
    assert Requirement(asked_for).specifier.contains(version)


@pytest.mark.parametrize(("conflict", "status"), [("", 0), ("numpy", 1)])
def test_a_row_that_comes_out_otherwise_than_the_matrix_says_is_an_error(
    conflict: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resolve, "resolve", lambda row, machine: resolve.Resolution({"torch": "2"}, conflict))
    assert resolve.main("stand-in") == status
    outcome = conflict or "1 packages"
    assert capsys.readouterr().out.splitlines() == [f"stand-in {machine}: {outcome}" for machine in resolve.MACHINES]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", resolve.MACHINES)
@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_row_can_be_installed_or_shows_its_conflict(row, machine: str) -> None:
    found = resolve.resolve(row, machine)
    if row.fault:
        assert row.fault.partition(" needs ")[2] in found.conflict
        return
    assert not found.conflict
    if "verl" in row.pins:
        check_hydra(found.versions)
