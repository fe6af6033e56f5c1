"""What a release rests on: the workflow that publishes, the bill of materials, and the licences of what comes along."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from torch_free import needs_torch

# Licences under which a dependency may be installed beside an Apache-2.0 package without any duty on its users' code.
PERMISSIVE = re.compile(r"apache|bsd|mit\b|psf|python software|isc\b|mpl|mozilla|0bsd|zlib|unlicense|hpnd|cc0", re.I)
COPYLEFT = re.compile(r"\b(a?gpl|lgpl)|gnu (affero|lesser|general)", re.I)


@pytest.fixture
def workflow(checkout) -> dict:
    return yaml.safe_load((checkout / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))


def test_workflow_runs_what_ci_runs(workflow) -> None:
    assert workflow["jobs"]["test"]["steps"][-1]["run"] == ".ci/run"
    for job in workflow["jobs"].values():
        assert set(job) <= {"if", "needs", "runs-on", "timeout-minutes", "environment", "permissions", "steps"}
        assert job["timeout-minutes"] <= 120
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])


def test_only_a_tested_tag_is_published_and_without_a_token(workflow, checkout) -> None:
    jobs = workflow["jobs"]
    assert (jobs["build"]["needs"], jobs["publish"]["needs"]) == ("test", "build")
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'"
    assert workflow["permissions"] == {"contents": "read"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert "secrets." not in (checkout / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")


def licence(metadata) -> str:
    """Everything that a distribution says about its licence, without the text of it."""
    classifiers = [text for text in metadata.get_all("Classifier") or [] if text.startswith("License ::")]
    return "; ".join([metadata.get("License-Expression") or "", (metadata.get("License") or "")[:80], *classifiers])


def closure(*names: str) -> dict[str, str]:
    """Distribution -> licence, of these and of all that they need here, as far as it is installed."""
    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            metadata = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = licence(metadata)
        for text in metadata.get_all("Requires-Dist") or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


@needs_torch
def test_licences_of_what_the_package_needs(checkout) -> None:
    """torch and transformers bring all the rest; a copyleft licence among them would be news for a user."""
    found = closure("packaging", "torch", "transformers")
    assert {"packaging", "torch", "transformers", "numpy", "safetensors"} <= set(found)
    unknown = {name: text for name, text in found.items() if not PERMISSIVE.search(text) or COPYLEFT.search(text)}
    assert not unknown


@pytest.fixture
def bill(archives, install, run, tmp_path, checkout) -> dict:
    """What `make dist` writes, of an environment with the wheel and, instead of downloads, what is installed here."""
    python = install(archives.wheel)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    for installed in Path(sysconfig.get_path("purelib")).glob("*.dist-info"):
        if not (site / installed.name).exists():  # ours is the wheel's, not that of a checkout
            (site / installed.name).symlink_to(installed)
    recipe = (checkout / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (options,) = re.findall(
        r"cyclonedx_py environment (.+) -o build/sbom.cdx.json \.venv-sbom/bin/python", " ".join(recipe.split())
    )
    run(sys.executable, "-m", "cyclonedx_py", "environment", *options.split(), "-o", tmp_path / "sbom.json", python)
    return json.loads((tmp_path / "sbom.json").read_text(encoding="utf-8"))


@needs_torch
def test_bill_of_materials_names_what_the_wheel_brings(bill, archives) -> None:
    found = {re.sub(r"[-_.]+", "-", one["name"]).lower(): one for one in bill["components"]}
    assert bill["bomFormat"] == "CycloneDX"
    assert found["npu-backend"]["version"] == archives.wheel.name.split("-")[1]
    assert [one["license"]["id"] for one in found["npu-backend"]["licenses"]] == ["Apache-2.0"]
    needed = closure("packaging", "torch", "transformers")
    for name in needed:
        assert found[name]["version"] == importlib.metadata.version(name)
        assert found[name]["licenses"]
    depends = {one["ref"]: one.get("dependsOn", []) for one in bill["dependencies"]}
    asked_for = {found[name]["bom-ref"] for name in ("packaging", "torch", "transformers")}
    assert asked_for <= set(depends[found["npu-backend"]["bom-ref"]])


def test_a_release_keeps_its_bill_of_materials(workflow) -> None:
    steps = workflow["jobs"]["build"]["steps"]
    assert "make dist" in [step.get("run") for step in steps]
    kept = [step["with"]["path"] for step in steps if step.get("uses", "").startswith("actions/upload-artifact@")]
    assert kept == ["dist/", "build/sbom.cdx.json"]  # apart: all of dist/ goes to PyPI, which takes archives only
