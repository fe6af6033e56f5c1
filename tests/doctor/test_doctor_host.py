"""doctor on faults of CANN, driver, devices, images and variables, each as it was reported in public."""

from __future__ import annotations

import pytest
from fake_host import CANN, SMI, FakeHost

from npu_backend import doctor
from npu_backend.doctor.host import Output


def only(findings: list[doctor.Finding]) -> doctor.Finding:
    assert len(findings) == 1, findings
    return findings[0]


# -- CANN -------------------------------------------------------------------------------------------------------------


@pytest.mark.case("E03")
@pytest.mark.parametrize("kept", [True, False], ids=["both installed", "the old one removed"])
def test_libraries_of_another_cann_than_set_env_says(fake: FakeHost, kept: bool) -> None:
    old = "/usr/local/Ascend/cann-8.5.1"
    if kept:
        fake.toolkit(old, "8.5.1")
    fake.environ["LD_LIBRARY_PATH"] = f"{old}/aarch64-linux/devlib:" + fake.environ["LD_LIBRARY_PATH"]
    findings = fake.findings("one_toolkit")
    assert {finding.severity for finding in findings} == {"error"}
    assert any(f"LD_LIBRARY_PATH names CANN 8.5.1 in {old}" in finding.message for finding in findings)
    assert any("does not exist" in finding.message for finding in findings) is not kept
    assert all(finding.fix.endswith(f"source {CANN}/set_env.sh") for finding in findings)


@pytest.mark.case("E03")
def test_an_environment_that_agrees_on_an_older_cann_than_the_default(fake: FakeHost) -> None:
    old = "/usr/local/Ascend/cann-8.5.1"
    fake.toolkit(old, "8.5.1")
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH", "LD_LIBRARY_PATH"):
        fake.environ[name] = fake.environ[name].replace(CANN, old)
    finding = only(fake.findings("one_toolkit"))
    assert finding.severity == "warning"
    assert f"CANN 9.1.0 in {CANN} is the installed default" in finding.message


@pytest.mark.case("E03")
def test_set_env_not_sourced(fake: FakeHost) -> None:
    fake.environ.clear()
    finding = only(fake.findings("one_toolkit"))
    assert "set_env.sh was not sourced" in finding.message
    assert finding.fix.endswith(f"source {CANN}/set_env.sh")


@pytest.mark.case("E03")
def test_the_layout_before_cann_8_5(bare: FakeHost) -> None:
    top = "/usr/local/Ascend/ascend-toolkit"
    bare.toolkit(f"{top}/8.3.RC1", "8.3.RC1")
    bare.link(f"{top}/latest", "8.3.RC1")
    bare.file(f"{top}/set_env.sh")
    bare.environ["LD_LIBRARY_PATH"] = f"{top}/latest/lib64:{top}/8.2.RC1/lib64"
    messages = [finding.message for finding in bare.findings("one_toolkit")]
    assert messages[0] == (f"LD_LIBRARY_PATH names {top}/8.2.RC1, which does not exist; installed: {top}/8.3.RC1")
    assert f"CANN 8.3.RC1 in {top}/8.3.RC1; LD_LIBRARY_PATH names CANN 8.2.RC1" in messages[1]


@pytest.mark.case("E03")
def test_latest_as_a_folder_of_links(fake: FakeHost) -> None:
    top = "/usr/local/Ascend/ascend-toolkit"
    fake.remove("/usr/local/Ascend/cann")
    fake.toolkit(f"{top}/8.3.RC1", "8.3.RC1")
    fake.link(f"{top}/latest/aarch64-linux", "../8.3.RC1/aarch64-linux")
    for name, value in fake.environ.items():
        fake.environ[name] = value.replace(CANN, f"{top}/latest")
    facts = doctor.Facts(fake.host())
    assert str(facts.toolkit) == f"CANN 8.3.RC1 in {top}/8.3.RC1"
    fake.environ["LD_LIBRARY_PATH"] += f":{top}/8.3.RC1/lib64"  # the same by another name
    assert fake.findings("one_toolkit") == []


def test_no_cann_at_all(bare: FakeHost) -> None:
    bare.package("torch-npu", "2.10.0")
    assert "no CANN is installed" in only(bare.findings("one_toolkit")).message


# -- driver and devices -----------------------------------------------------------------------------------------------


@pytest.mark.case("E07")
def test_the_driver_is_not_mounted(fake: FakeHost) -> None:
    fake.remove("/usr/local/Ascend/driver/lib64/driver/libascend_hal.so")
    finding = only(fake.findings("driver"))
    assert "driver not mounted: no libascend_hal.so" in finding.message
    assert "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver" in finding.fix
    assert "--device" not in finding.fix.split("(")[0]


@pytest.mark.case("E07")
def test_the_driver_is_mounted_where_the_loader_does_not_look(fake: FakeHost) -> None:
    fake.environ["LD_LIBRARY_PATH"] = f"{CANN}/lib64"
    assert "which neither LD_LIBRARY_PATH nor /etc/ld.so.conf.d names" in only(fake.findings("driver")).message
    fake.file("/etc/ld.so.conf.d/ascend.conf", "/usr/local/Ascend/driver/lib64/driver/\n")
    assert fake.findings("driver") == []


@pytest.mark.case("E07")
@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("ImportError: libascend_hal.so: cannot open shared object file", "mount the driver"),
        ("ImportError: libhccl.so: cannot open shared object file", "set_env.sh"),
        ("OSError: /x/_C.so: undefined symbol: _ZN5torch", "one number"),
        ("ModuleNotFoundError: No module named 'yaml'", "--install-plan"),
        ("", "by hand"),
    ],
)
def test_torch_npu_that_cannot_be_imported(fake: FakeHost, text: str, fix: str) -> None:
    fake.outputs["torch_npu"] = Output(1, f"Traceback (most recent call last):\n{text}\n" if text else "")
    finding = only(fake.findings(probes=True))
    assert finding.check == "torch_npu_import"
    assert (text or "no output") in finding.message
    assert fix in finding.fix


def test_torch_npu_that_hangs_or_finds_no_device(fake: FakeHost) -> None:
    fake.outputs["torch_npu"] = Output(None, "python did not end within 180 s")
    assert "did not end within 180 s" in only(fake.findings(probes=True)).message
    fake.outputs["torch_npu"] = Output(0, "devices: 0\n")
    assert "finds no device" in only(fake.findings(probes=True)).message


@pytest.mark.case("E08")
def test_a_plain_container_lists_every_missing_mount(bare: FakeHost) -> None:
    bare.toolkit(CANN, "9.1.0")
    finding = only(bare.findings("driver"))
    assert finding.severity == "error"
    for mount in (
        *("--device /dev/davinci0", "--device /dev/davinci_manager", "--device /dev/devmm_svm"),
        *("--device /dev/hisi_hdc", "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver"),
        *("-v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi", "-v /usr/local/dcmi:/usr/local/dcmi"),
    ):
        assert mount in finding.fix
    assert "npu-backend run --virtual-npu" in finding.fix


@pytest.mark.case("E08")
def test_only_npu_smi_is_missing(fake: FakeHost) -> None:
    fake.remove("/usr/local/bin/npu-smi")
    finding = only(fake.findings())
    assert (finding.check, finding.severity) == ("driver", "note")
    assert "npu-smi" in finding.fix


@pytest.mark.case("E09")
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "every device is hidden"),
        ("0, 1", "'0,' is left"),
        ("npu:0", "'' is left"),
        ("3,2,1", "must rise"),
        ("1,1", "must rise"),
        ("6,7,8", "there is no device 8 here (8 devices"),
        ("9" * 5000, "there is no device"),
    ],
)
def test_visible_devices_that_hide_more_than_meant(fake: FakeHost, value: str, message: str) -> None:
    fake.environ["ASCEND_RT_VISIBLE_DEVICES"] = value
    finding = only(fake.findings())
    assert (finding.check, finding.severity) == ("visible_devices", "error")
    assert finding.message.startswith(f"ASCEND_RT_VISIBLE_DEVICES={value!r}")
    assert message in finding.message
    assert f"ASCEND_RT_VISIBLE_DEVICES={value}" in str(doctor.examine(fake.host()))  # what matters is printed


@pytest.mark.case("E09")
@pytest.mark.parametrize("value", ["0", "0,1,2", "7"])
def test_visible_devices_that_are_fine(fake: FakeHost, value: str) -> None:
    fake.environ["ASCEND_RT_VISIBLE_DEVICES"] = value
    assert fake.findings() == []


@pytest.mark.case("E09")
def test_variables_beside_it(fake: FakeHost) -> None:
    fake.environ |= {"CUDA_VISIBLE_DEVICES": "0", "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"}
    notes = fake.findings("visible_devices")
    assert [finding.severity for finding in notes] == ["note", "note"]
    assert doctor.examine(fake.host()).ok
    fake.environ |= {"ASCEND_RT_VISIBLE_DEVICES": "4,5", "ASCEND_DEVICE_ID": "4"}
    assert "ASCEND_DEVICE_ID=4 is an index" in fake.findings("visible_devices")[0].message


# -- image and chip ---------------------------------------------------------------------------------------------------


@pytest.mark.case("E06")
@pytest.mark.parametrize(
    ("chip", "kernels", "tag"),
    [
        ("310P3", "ascend910b", "cann:9.1.0-310p-"),
        ("Ascend910", "ascend910b", "cann:9.1.0-a3-"),
        ("910B3", "ascend910_93", "cann:9.1.0-910b-"),
    ],
)
def test_an_image_for_another_chip_names_the_right_tag(fake: FakeHost, chip: str, kernels: str, tag: str) -> None:
    fake.outputs["npu-smi"] = Output(0, SMI.format(chip=chip))
    (fake.root / f"{CANN[1:]}/opp/built-in/op_impl/ai_core/tbe/kernel/ascend910b").rename(
        fake.root / f"{CANN[1:]}/opp/built-in/op_impl/ai_core/tbe/kernel/{kernels}"
    )
    finding = fake.findings("image")[0]
    assert finding.severity == "error"
    assert kernels in finding.message
    assert tag in finding.fix


@pytest.mark.case("E06")
def test_soc_version_of_another_chip(fake: FakeHost) -> None:
    fake.environ["SOC_VERSION"] = "ascend910_9392"
    finding = only(fake.findings())
    assert "SOC_VERSION=ascend910_9392 is not this host's chip, 910B3" in finding.message
    assert finding.fix == "export SOC_VERSION=ascend910b3"


@pytest.mark.parametrize("output", [Output(None, "npu-smi did not end within 8 s"), Output(1, "dcmi module error")])
def test_npu_smi_that_does_not_answer_is_no_chip(fake: FakeHost, output: Output) -> None:
    fake.outputs["npu-smi"] = output
    assert fake.findings() == []
    assert doctor.examine(fake.host()).facts["host"] == "8 x an NPU"


# -- what changes a process before it starts --------------------------------------------------------------------------


@pytest.mark.case("C08")
@pytest.mark.parametrize("name", ["npu_patch.pth", "sitecustomize.py"])
def test_a_shim_that_fakes_cuda_in_every_python(fake: FakeHost, name: str) -> None:
    (fake.site / name).write_text("import torch_npu; from torch_npu.contrib import transfer_to_npu\n")
    finding = only(fake.findings())
    assert finding.check == "cuda_shims"
    assert f"{fake.site}/{name}" in finding.message


@pytest.mark.case("C08")
def test_a_cuda_build_of_torch_on_an_npu_host(fake: FakeHost, bare: FakeHost) -> None:
    (fake.site / "torch/version.py").write_text("__version__ = '2.10.0+cu128'\ncuda: Optional[str] = '12.8'\n")
    assert "built for CUDA 12.8" in only(fake.findings()).message
    (fake.site / "torch/version.py").write_text("cuda: Optional[str] = None\n")
    assert fake.findings() == []


@pytest.mark.case("C09")
def test_torch_that_does_not_load_torch_npu_by_itself(fake: FakeHost) -> None:
    fake.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    finding = only(fake.findings())
    assert finding.check == "autoload"
    assert "import torch_npu" in finding.fix


def test_our_own_variables(fake: FakeHost) -> None:
    fake.environ["NPU_BACKEND_SKIP"] = "rmsnorm"
    finding = only(fake.findings())
    assert finding.check == "settings"
    assert "rmsnorm" in finding.message


# -- hosts without an NPU ---------------------------------------------------------------------------------------------


def test_a_host_with_nothing_of_ascend_has_no_findings(bare: FakeHost) -> None:
    bare.package("torch", "2.13.0")
    bare.package("triton", "3.9.0")
    bare.environ["CUDA_VISIBLE_DEVICES"] = ""
    assert bare.findings(probes=True) == []
    assert bare.commands == []  # and nothing is run
    assert "a host without an NPU" in str(doctor.examine(bare.host()))


def test_a_virtual_npu_is_called_one_and_needs_no_driver(bare: FakeHost) -> None:
    bare.package("torch-npu", "2.13.0")
    assert {finding.check for finding in bare.findings("driver")} == {"driver"}
    bare.environ |= {"NPU_BACKEND_VIRTUAL_NPU": "2", "VIRTUAL_NPU_SOC": "Ascend910B1"}
    bare.package("torch", "2.13.0")
    report = doctor.examine(bare.host())
    assert report.findings == ()
    assert report.facts["virtual_npu"] == 2
    assert "2 x Ascend910B1, virtual NPU (arithmetic by the CPU)" in str(report)


def test_an_image_that_is_being_built_has_no_driver_yet(fake: FakeHost) -> None:
    fake.remove("/usr/local/Ascend/driver/lib64/driver/libascend_hal.so")
    assert not doctor.examine(fake.host()).ok
    report = doctor.examine(fake.host(), image=True)
    assert report.ok
    assert "driver (--image)" in report.not_run
    assert "driver" not in report.checks
