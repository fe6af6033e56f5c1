"""Installing this package never moves torch, torch_npu or any triton of the host."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from email.parser import Parser
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch_free import needs_torch

# What a host brings with its driver and images: never asked for by name, or only with a lower bound (torch).
OF_THE_HOST = ("torch", "torch-npu", "torchvision", "torchaudio", "triton", "triton-ascend", "liger-kernel", "vllm")


def requirements_of(wheel) -> list[Requirement]:
    """Every requirement that the wheel states, those of its extras too."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    return [Requirement(text) for text in metadata.get_all("Requires-Dist")]


def would_install(requirement: str, *options: str, **environment: str) -> set[str]:
    """Names of what pip would install into this environment for a requirement."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *options, requirement]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    return {item["metadata"]["name"].lower().replace("_", "-") for item in report["install"]}


@pytest.mark.case("C06", "E02")
def test_wheel_asks_for_nothing_that_could_move_the_host(archives) -> None:
    for requirement in requirements_of(archives.wheel):
        assert not requirement.url
        assert {specifier.operator for specifier in requirement.specifier} <= {">="}, (
            f"{requirement}: lower bounds only"
        )
        assert requirement.name == "torch" or requirement.name not in OF_THE_HOST


@needs_torch
@pytest.mark.case("C06", "E02")
@pytest.mark.parametrize("extra", ["", "[demo]"])
def test_install_beside_a_host_brings_this_package_alone(archives, extra) -> None:
    """Without any index: whatever pip wanted to move or add would make it fail."""
    assert would_install(f"{archives.wheel}{extra}", PIP_NO_INDEX="1") <= {"npu-backend"}


@pytest.mark.slow
@pytest.mark.case("E02")
@pytest.mark.parametrize("extra", ["completion", "plot"])
def test_extra_resolved_from_the_registry_moves_nothing(archives, extra) -> None:
    assert not would_install(f"{archives.wheel}[{extra}]").intersection(OF_THE_HOST)


@pytest.mark.slow
@pytest.mark.case("C06")
def test_install_into_an_empty_environment_needs_no_extra_index(archives) -> None:
    found = would_install(str(archives.wheel), "--ignore-installed", PIP_EXTRA_INDEX_URL="")
    assert {"npu-backend", "torch", "transformers"} <= found
    assert not found & {"torch-npu", "triton-ascend", "liger-kernel"}


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_no_pin_is_for_other_pythons_than_it_says(checkout, python) -> None:
    """As far as the pinned releases are installed here; one that a Python cannot have ends `make test` there."""
    checked = 0
    for line in (checkout / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines():
        pin = Requirement(line) if not line.startswith("#") else None
        if pin is None or (pin.marker and not pin.marker.evaluate({"python_version": python})):
            continue
        try:
            metadata = importlib.metadata.metadata(pin.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if pin.specifier.contains(metadata["Version"], prereleases=True):
            checked += 1
            assert SpecifierSet(metadata.get("Requires-Python") or "").contains(f"{python}.0"), line
    assert checked > 50
