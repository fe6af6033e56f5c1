"""doctor's output: the command, JSON, the install plan, docs/doctor.md; and that no broken host makes it fail."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import fake_host
import interpreted
import processor_time
import pytest
from fake_host import FakeHost
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_backend import cli, doctor
from npu_backend.doctor import checks
from npu_backend.doctor.plan import install_plan

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "doctor.md"
HELD = ("torch", "torch-npu", "triton", "triton-ascend")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: FakeHost):
    """Run `npu-backend doctor` on the fake host."""
    monkeypatch.setattr(doctor, "Host", fake.host)

    def run(*arguments: str) -> tuple[int, str]:
        status = cli.main(["doctor", *arguments])
        return status, capsys.readouterr().out

    return run


def test_the_exit_status_is_that_of_errors_and_warnings(command, fake: FakeHost) -> None:
    assert command()[0] == 0
    fake.environ["CUDA_VISIBLE_DEVICES"] = "0"
    status, text = command()
    assert (status, "0 errors, 0 warnings, 1 note" in text) == (0, True)
    fake.environ["ASCEND_RT_VISIBLE_DEVICES"] = ""
    status, text = command()
    assert status == 1
    assert "error: visible_devices: ASCEND_RT_VISIBLE_DEVICES=''" in text
    assert "  fix: unset ASCEND_RT_VISIBLE_DEVICES" in text


@pytest.mark.parametrize("arguments", [["--matrix", "--probe"], ["--install-plan", "--matrix"], ["now"]])
def test_options_that_exclude_each_other_are_bad_use(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["doctor", *arguments])
    assert exited.value.code == 2


def test_json_has_the_documented_keys(command, fake: FakeHost) -> None:
    fake.environ["CUDA_VISIBLE_DEVICES"] = "0"
    report = json.loads(command("--json", "--probe")[1])
    assert list(report) == ["schema", "npu_backend", "ok", "facts", "findings", "checks", "not_run"]
    assert report["schema"] == 1
    assert list(report["facts"]) == ["host", "python", "virtual_npu", "packages", "modules", "ascend", "variables"]
    assert list(report["facts"]["packages"][0]) == ["name", "version", "folder"]
    assert list(report["findings"][0]) == ["check", "severity", "message", "fix", "source"]
    assert report["not_run"] == []
    text = DOCUMENT.read_text(encoding="utf-8")
    for key in (*(set(report) - {"facts"}), *(f"facts.{key}" for key in report["facts"]), *report["facts"]["ascend"]):
        assert f"`{key}`" in text, f"docs/doctor.md does not describe {key}"


@pytest.mark.case("E05")
def test_the_matrix_is_printed_with_its_sources(command) -> None:
    status, text = command("--matrix")
    assert status == 0
    assert "2.10.0.post4" in text
    assert "==2.7.1.post2" in text
    assert "https://docs.vllm.ai/projects/ascend" in text
    data = json.loads(command("--matrix", "--json")[1])
    assert {"name", "soc", "python", "versions", "tested_by", "source"} == set(data["rows"][0])


def test_the_document_names_every_check() -> None:
    """That its tables are the code's is in tests/docs."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(f"| {check.__name__} | " in text for check in checks.ALL)


def test_doctor_is_quick_and_loads_nothing_heavy() -> None:
    heavy = ("torch", "torch_npu", "transformers", "triton", "liger_kernel", "numpy")
    code = (
        "import sys; from npu_backend import cli; cli.main(['doctor']); cli.main(['doctor', '--install-plan']);"
        f"print(sorted(set({heavy}) & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr.strip() == "[]"

    assert processor_time.of_python("-m", "npu_backend", "doctor", runs=3) < 1.0


@interpreted.supported
def test_the_probes_kernel_adds_one_in_tritons_interpreter() -> None:
    code = "from npu_backend.doctor import triton_kernel; triton_kernel.check('cpu'); print('added')"
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert found.stdout.strip() == "added", found.stderr


# -- the install plan -------------------------------------------------------------------------------------------------


def commands(lines: list[str]) -> list[list[str]]:
    return [shlex.split(line) for line in lines if not line.startswith("#")]


@pytest.mark.case("C06", "E02")
@pytest.mark.parametrize(
    "missing", [(), HELD[1:], ("torch-npu",), ("triton-ascend", "liger-kernel"), ("transformers",)]
)
def test_the_install_plan_adds_what_is_missing_and_moves_nothing(fake: FakeHost, missing: tuple[str, ...]) -> None:
    for name in missing:
        for info in fake.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            info.rename(fake.site / f"{name}.gone")
    facts = doctor.Facts(fake.host())
    asked = []
    for line in commands(install_plan(facts)):
        assert line[:5] == ["python", "-m", "pip", "install", "--no-deps"]
        asked.append(line[5].partition("==")[0])
        assert "==" in line[5]
        assert not {"--upgrade", "-U", "--force-reinstall"} & set(line)
    assert not set(asked) & set(facts.versions), "an installed package would be moved"
    assert set(missing) & {"torch-npu", "triton-ascend", "liger-kernel"} <= set(asked)
    assert {"verl", "npu-backend"} <= set(asked)


@pytest.mark.case("C06")
def test_the_versions_of_the_install_plan_are_those_of_the_tested_row(fake: FakeHost) -> None:
    for pattern in ("torch_npu-*", "triton_ascend-*"):
        next(fake.site.glob(pattern)).rename(fake.site / f"{pattern[:5]}.gone")
    lines = "\n".join(install_plan(doctor.Facts(fake.host())))
    assert "torch-npu==2.10.0.post4\n" in lines
    assert "triton-ascend==3.2.2 --extra-index-url https://triton-ascend.osinfra.cn/pypi/simple/" in lines


@pytest.mark.case("C05")
def test_the_install_plan_puts_nothing_over_an_installed_triton(fake: FakeHost) -> None:
    next(fake.site.glob("triton_ascend-*")).rename(fake.site / "gone")
    fake.package("triton", "3.5.0")
    lines = install_plan(doctor.Facts(fake.host()))
    assert not [line for line in commands(lines) if any("triton" in word for word in line)]
    assert any(line.startswith("# triton-ascend is left out") for line in lines)


def test_the_install_plan_of_a_host_without_an_npu(bare: FakeHost) -> None:
    bare.package("torch", "2.13.0")
    lines = install_plan(doctor.Facts(bare.host()))
    assert {line[5].partition("==")[0] for line in commands(lines)} == {"liger-kernel", "verl", "npu-backend"}
    assert any("triton-ascend==3.2.2 --extra-index-url https://triton" in line for line in lines)


def test_what_the_install_plan_puts_beside_verl_is_documented_and_what_our_tests_install(bare: FakeHost) -> None:
    bare.package("torch", "2.13.0")
    bare.package("transformers", "5.24.0")  # too new for verl, which asks for one below 5.11
    [line] = [line for line in install_plan(doctor.Facts(bare.host())) if "tensordict" in line]
    command = line.removeprefix("#   python -m ")
    assert command.startswith("pip install transformers==5.10.4 ")
    assert command in (ROOT / "docs/verl.md").read_text(encoding="utf-8")
    names = [re.split("[=<>]", word)[0] for word in shlex.split(command)[2:]]
    ours = (ROOT / "requirements/transformers5.txt").read_text(encoding="utf-8").split("# what verl imports")[1]
    wanted = [name for name in ours.splitlines()[1:] if name and not name.startswith("#")]
    assert sorted(names) == sorted([*wanted, "transformers", "accelerate", "peft"])


# -- broken hosts -----------------------------------------------------------------------------------------------------


def never_fails(fake: FakeHost) -> doctor.DoctorReport:
    """Every way to ask, on a host that may be broken."""
    report = doctor.examine(fake.host(), probes=True)
    assert str(report)
    json.dumps(report.to_dict())
    assert all(finding.fix for finding in report.findings)
    assert install_plan(doctor.Facts(fake.host()))
    return report


def test_a_check_that_fails_is_a_finding_and_the_others_run(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(facts: doctor.Facts):
        yield doctor.Finding("broken", "note", "found before", "nothing")
        raise OSError("disk on fire")

    monkeypatch.setattr(checks, "ALL", (broken, *checks.ALL))
    fake.environ["ASCEND_RT_VISIBLE_DEVICES"] = ""
    found = {finding.check: finding for finding in doctor.examine(fake.host()).findings if finding.severity != "note"}
    assert found["broken"].message == "the check itself failed: OSError: disk on fire"
    assert "visible_devices" in found
    assert len(doctor.examine(fake.host()).findings) == 3


def test_metadata_and_folders_that_cannot_be_read(fake: FakeHost, tmp_path: Path) -> None:
    for info in fake.site.glob("*.dist-info"):
        (info / "RECORD").unlink()
        (info / "RECORD").mkdir()  # a folder in place of a file
        (info / "METADATA").unlink()
        (info / "METADATA").symlink_to("METADATA")  # a link to itself
    (fake.site / "verl-0.9.1.dist-info").symlink_to("nowhere")
    (fake.site / "vllm-.dist-info").touch()
    fake.path += ["", "/no/such/folder", "\0", str(tmp_path / "file.zip"), "x" * 5000]
    (fake.root / "dev/davinci9").symlink_to("davinci9")
    fake.environ["LD_LIBRARY_PATH"] = f":::\0:{'/' * 1000}:/usr/local/Ascend/cann-x/\udcff"
    fake.environ["ASCEND_HOME_PATH"] = "/usr/local/Ascend/cann-" + "9" * 5000
    report = never_fails(fake)
    assert {p["version"] for p in report.facts["packages"]} >= {"2.10.0+cpu", "3.2.2"}  # from the folders' names


def test_without_the_package_that_doctor_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    assert cli.main(["doctor"]) == 2
    assert "-m pip install --no-deps --force-reinstall packaging" in capsys.readouterr().err


def test_names_that_are_not_text_can_be_printed(fake: FakeHost) -> None:
    fake.environ["PYTHONPATH"] = "/caf\udce9"
    report = str(doctor.examine(fake.host()))
    code = f"import io, sys; sys.stdout.reconfigure(errors='backslashreplace'); print({report!r})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_terminal_that_cannot_show_a_name(encoding: str) -> None:
    environ = {**os.environ, "PYTHONIOENCODING": encoding, "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
    environ["ASCEND_VISIBLE_DEVICES"] = "\u4e03\udcff"
    found = subprocess.run([sys.executable, "-m", "npu_backend", "doctor"], capture_output=True, env=environ)
    assert b"Traceback" not in found.stderr
    assert b"ASCEND_VISIBLE_DEVICES" in found.stdout


ODD = st.text(max_size=40) | st.from_regex(r"[0-9.]{1,12}(rc|post|\+|-|!)?[0-9a-z]{0,6}", fullmatch=True)
NAMES = st.sampled_from(["torch", "torch-npu", "triton", "triton-ascend", "transformers", "liger-kernel", "numpy"])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    metadata=st.dictionaries(NAMES, st.tuples(ODD, st.binary(max_size=80), st.binary(max_size=120)), max_size=4),
    variables=st.dictionaries(
        st.sampled_from(["ASCEND_RT_VISIBLE_DEVICES", "ASCEND_DEVICE_ID", "LD_LIBRARY_PATH", "SOC_VERSION", "HOME"])
        | st.sampled_from(["NPU_BACKEND_SKIP", "NPU_BACKEND_VIRTUAL_NPU", "ASCEND_HOME_PATH", "PATH"]),
        ODD | st.from_regex(r"(/usr/local/Ascend/(cann-[0-9.]{1,5}|ascend-toolkit/[a-z]{1,6})/[a-z/]*:?){1,3}"),
    ),
    smi=st.text(max_size=60),
    install_info=st.text(max_size=40),
)
def test_no_metadata_variable_or_output_makes_doctor_fail(
    tmp_path_factory: pytest.TempPathFactory,
    metadata: dict[str, tuple[str, bytes, bytes]],
    variables: dict[str, str],
    smi: str,
    install_info: str,
) -> None:
    fake = fake_host.healthy(tmp_path_factory.mktemp("fuzz") / "host")
    for name, (version, requires, record) in metadata.items():
        info = next(fake.site.glob(f"{name.replace('-', '_')}-*.dist-info"), None) or fake.package(name, "1.0")
        text = f"Name: {name}\nVersion: {version}\nRequires-Dist: ".encode("utf-8", "surrogatepass")
        (info / "METADATA").write_bytes(text + requires)
        (info / "RECORD").write_bytes(b"triton/__init__.py," + record)
    fake.environ |= variables
    fake.outputs["npu-smi"] = doctor.host.Output(0, smi)
    fake.file(f"{fake_host.CANN}/aarch64-linux/ascend_toolkit_install.info", f"version={install_info}")
    report = never_fails(fake)
    assert not [finding for finding in report.findings if "the check itself failed" in finding.message]
