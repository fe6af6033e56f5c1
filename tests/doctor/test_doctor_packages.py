"""doctor on faults of packages and versions, each as it was reported in public."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import fake_host
import pytest
from fake_host import CANN, FakeHost, triton_files

from npu_backend import doctor
from npu_backend.doctor import matrix


def only(findings: list[doctor.Finding]) -> doctor.Finding:
    assert len(findings) == 1, findings
    return findings[0]


@pytest.mark.case("E01")
def test_a_host_as_published_has_no_findings(fake: FakeHost) -> None:
    report = doctor.examine(fake.host(), probes=True)
    assert report.findings == ()
    assert report.ok
    assert report.facts["host"] == "8 x 910B3"


# -- triton and triton-ascend -----------------------------------------------------------------------------------------


@pytest.mark.case("C05")
def test_triton_over_triton_ascend_names_the_owner_and_the_order(fake: FakeHost) -> None:
    fake.package("triton", "3.5.0", triton_files("nvidia"))
    finding = only(fake.findings("triton_owner"))
    assert finding.severity == "error"
    assert "of 2 files that differ 2 are those of triton 3.5.0, 0 are those of triton-ascend 3.2.2" in finding.message
    assert finding.fix.splitlines() == [  # every owner goes before the one that stays comes back
        "python -m pip uninstall -y triton triton-ascend",
        "python -m pip install --no-deps --force-reinstall triton-ascend==3.2.2 --extra-index-url "
        "https://triton-ascend.osinfra.cn/pypi/simple/",
    ]


@pytest.mark.case("C05")
def test_triton_ascend_over_triton_is_how_it_installs_itself_only_if_it_says_so(fake: FakeHost) -> None:
    fake.package("triton", "3.5.0", triton_files("nvidia"))
    fake.package("triton-ascend", "3.2.2", triton_files("ascend"), requires=["triton==3.5.0"])
    finding = only(fake.findings("triton_owner"))
    assert finding.severity == "note"
    assert "takes these files away" in finding.fix

    fake.package("triton-ascend", "3.2.2", triton_files("ascend"))  # as 3.2.0: it requires nothing
    assert only(fake.findings("triton_owner")).severity == "warning"


@pytest.mark.case("C05")
def test_both_by_metadata_alone(bare: FakeHost) -> None:
    """The reported case: no file to look at."""
    for name, version in (("triton", "3.5.0"), ("triton-ascend", "3.2.2")):
        bare.package(name, version)
        (bare.site / f"{name.replace('-', '_')}-{version}.dist-info" / "RECORD").unlink()
    finding = only(bare.findings("triton_owner"))
    assert finding.severity == "error"
    assert "whose files these are is unknown" in finding.message
    assert finding.fix.startswith("python -m pip uninstall -y triton triton-ascend\n")


@pytest.mark.case("C05")
def test_files_that_the_removal_of_triton_took(fake: FakeHost) -> None:
    (fake.site / "triton/compiler.py").unlink()
    finding = only(fake.findings("missing_files"))
    assert "1 of the 4 code files of triton-ascend 3.2.2 are gone" in finding.message
    assert "triton/compiler.py" in finding.message
    assert "--force-reinstall triton-ascend==3.2.2" in finding.fix


@pytest.mark.case("C05")
def test_our_package_imports_beside_a_broken_triton(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text("raise ImportError('cannot import name libtriton')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import npu_backend; print(npu_backend.PatchReport())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.case("C13")
def test_a_triton_without_an_ascend_backend(fake: FakeHost) -> None:
    for file in fake.site.glob("triton_ascend*/*"):
        file.unlink()
    (fake.site / "triton_ascend-3.2.2.dist-info").rmdir()
    (fake.site / "triton/backends/ascend/driver.py").unlink()
    fake.package("triton", "3.6.0", triton_files("nvidia"))
    finding = only(fake.findings("triton_backend"))
    assert "compiles for nvidia, not for Ascend" in finding.message
    assert finding.fix.splitlines()[0] == "python -m pip uninstall -y triton triton-ascend"


def without_triton(fake: FakeHost) -> None:
    """What triton-ascend installed, and its metadata, go."""
    shutil.rmtree(fake.site / "triton")
    shutil.rmtree(fake.site / "triton_ascend-3.2.2.dist-info")


def test_a_liger_without_any_triton(fake: FakeHost, bare: FakeHost) -> None:
    without_triton(fake)
    command = (
        "python -m pip install --no-deps triton-ascend==3.2.2 --extra-index-url "
        "https://triton-ascend.osinfra.cn/pypi/simple/"
    )
    finding = only(fake.findings())
    assert (finding.check, finding.severity, finding.fix) == ("liger_triton", "warning", command)
    assert "liger-kernel 0.8.5 is installed, but no triton" in finding.message
    fake.outputs["npu-smi"] = doctor.host.Output(0, fake_host.SMI.format(chip="310P3"))
    assert only(fake.findings("liger_triton")).fix.startswith("keep use_liger=False")

    bare.package("liger-kernel", "0.8.5")  # no NPU: it is not known which triton
    assert f"on an NPU: {command}\non CUDA: " in only(bare.findings()).fix
    bare.package("triton", "3.9.0")
    assert bare.findings() == []


@pytest.mark.case("C13")
def test_a_kernel_that_finds_no_driver_is_one_clear_line(fake: FakeHost) -> None:
    lines = (
        "Traceback (most recent call last):\n  ...\nRuntimeError: 0 active drivers ([]). There should only be one.\n"
    )
    fake.outputs["doctor.triton_kernel"] = doctor.host.Output(1, lines)
    report = doctor.examine(fake.host(), probes=True)
    finding = only(list(report.findings))
    assert finding.message == (
        "Triton cannot run a kernel on this host: RuntimeError: 0 active drivers ([]). There should only be one."
    )
    assert "pip uninstall" in finding.fix
    assert not report.ok


# -- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.case("E01")
def test_torch_moved_away_from_torch_npu(fake: FakeHost) -> None:
    fake.package("torch", "2.12.0")
    fake.package("torch-npu", "2.8.0.post2")
    finding = only(fake.findings("torch_pair"))
    assert finding.severity == "error"
    assert "torch-npu 2.8.0.post2 is built for torch 2.8.0, but torch 2.12.0 is installed" in finding.message
    assert finding.fix.startswith("python -m pip install --no-deps torch==2.8.0\n")


@pytest.mark.case("E02")
def test_a_requirement_on_torch_that_a_later_install_broke(fake: FakeHost) -> None:
    fake.package("torchvision", "0.24.0", requires=["torch==2.9.0", "numpy", "not a requirement ==", 'x; extra == "y"'])
    finding = only(fake.findings("requirements"))
    assert "torchvision 0.24.0 requires torch==2.9.0, but torch 2.10.0+cpu is installed" in finding.message
    assert "--no-deps" in finding.fix


@pytest.mark.case("C07")
def test_an_untested_pair_shows_the_nearest_tested_row(fake: FakeHost) -> None:
    fake.package("triton-ascend", "3.2.1", triton_files("ascend"))
    finding = fake.findings("matrix")[0]
    assert finding.severity == "warning"
    assert "untested: triton-ascend 3.2.1, cann 9.1.0; nearest tested row: verl image 9.1.0" in finding.message
    assert "which has triton-ascend 3.2.2" in finding.message


@pytest.mark.case("E04")
def test_a_release_known_to_be_bad(fake: FakeHost) -> None:
    fake.package("torch", "2.7.1")
    fake.package("torch-npu", "2.7.1.post2")
    finding = only(fake.findings("known_bad"))
    assert (finding.severity, finding.source) == ("warning", "https://github.com/verl-project/verl/pull/5353")


@pytest.mark.case("C06", "C07")
def test_pypis_triton_ascend_is_too_old_for_liger(fake: FakeHost) -> None:
    fake.package("triton-ascend", "3.2.0", triton_files("ascend"))
    finding = only(fake.findings("known_bad"))
    assert finding.severity == "error"
    assert "CUDA kernels" in finding.message
    assert "--extra-index-url https://triton-ascend.osinfra.cn/pypi/simple/" in finding.fix


@pytest.mark.parametrize(
    ("version", "severity"),
    [
        ("5.10.4", None),
        ("4.57.6", None),
        ("5.5.0", "note"),
        ("5.24.0", "note"),
        ("4.52.0", "note"),
        ("?", "warning"),
    ],
)
def test_an_untested_transformers_is_no_fault(bare: FakeHost, version: str, severity: str | None) -> None:
    """A fresh installation takes the newest; `verify` shows whether it works."""
    bare.package("transformers", version)
    assert [finding.severity for finding in bare.findings("matrix")] == ([severity] if severity else [])
    if severity == "note":
        finding = only(bare.findings())
        assert f"untested: transformers {version}; nearest tested row: " in finding.message
        assert "npu-backend verify --model-type" in finding.fix
        assert doctor.examine(bare.host()).ok


@pytest.mark.case("E05")
def test_each_row_of_the_matrix_is_complete_and_found_as_tested() -> None:
    assert len({row.name for row in matrix.rows()}) == len(matrix.rows()) > 20
    for row in matrix.rows():
        assert row.source.startswith(("https://", "docs/"))
        assert row.tested_by
        assert len(row.versions) >= 2
        assert matrix.tested(row.versions) is not None
        assert not matrix.nearest(row.versions, {}).differences(row.versions)
    for bad in matrix.known_bad():
        assert bad.source.startswith(("https://", "docs/"))
        assert bad.severity in ("error", "warning")
        assert bad.fix
        assert not bad.matches({})
        assert not bad.matches({bad.package: "not a version"})


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.case("E10")
def test_two_copies_of_a_package_are_both_named_and_the_one_in_use(fake: FakeHost, tmp_path: Path) -> None:
    checkout = tmp_path / "Megatron-LM"
    for top in (checkout, fake.site):
        (top / "megatron/core").mkdir(parents=True)
        (top / "megatron/core/__init__.py").touch()
    fake.path.insert(0, str(checkout))
    fake.environ["PYTHONPATH"] = str(checkout)
    finding = only(fake.findings("two_copies"))
    assert f"{checkout}/megatron/core is in use, {fake.site}/megatron/core is hidden" in finding.message
    assert str(checkout) in finding.fix
    words = str(doctor.examine(fake.host())).split()
    assert words[words.index(f"{checkout}/megatron/core") - 3 :][:3] == ["megatron.core", "(no", "metadata)"]


@pytest.mark.case("E10")
def test_an_upgrade_that_broke_off_leaves_two_metadata_folders(fake: FakeHost) -> None:
    (fake.site / "transformers-4.57.6.dist-info").mkdir()
    finding = only(fake.findings("two_copies"))
    assert "transformers 4.57.6 and of transformers 5.10.4" in finding.message
    assert "transformers-4.57.6.dist-info" in finding.fix


def test_one_folder_by_two_names_is_one_copy(fake: FakeHost, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(fake.site)
    fake.path.append(str(tmp_path / "link"))
    assert fake.findings() == []


def test_cann_is_the_one_that_the_environment_names(fake: FakeHost) -> None:
    facts = doctor.Facts(fake.host())
    assert str(facts.toolkit) == f"CANN 9.1.0 in {CANN}"
    assert facts.versions["cann"] == "9.1.0"
