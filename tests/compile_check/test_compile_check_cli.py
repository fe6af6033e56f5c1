"""The command: options, exit status, what it prints. The worker's answers are made up here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from npu_backend import cli
from npu_backend.ascend import toolchain
from npu_backend.ascend.verdict import Verdict

OK = Verdict("ok", use={"UB": 1057056}, capacity={"UB": 1572864}, ping_pong="kept", core="AIV")
OVERFLOW = Verdict("overflow", "", "UB", 8577280, 1572864)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the command with a worker that answers every chip with these messages."""
    monkeypatch.setattr(toolchain, "find", lambda *arguments: toolchain.Toolchain(None, tmp_path, "host", "9.1.0"))
    monkeypatch.setattr(toolchain.Toolchain, "describe", lambda self: {"triton-ascend": "3.2.2"})

    def call(*arguments: str, answers=()) -> tuple[int, str, list[dict]]:
        requests = tmp_path / "requests"
        requests.write_text("")
        script = (
            f"import sys\nopen({str(requests)!r}, 'a').write(sys.stdin.read() + '\\n')\n"
            f"for line in {[json.dumps(a) for a in answers]!r}: print(line)\n"
        )
        worker = [sys.executable, "-c", script]
        popen = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen(worker, **options))
        status = cli.main(["compile-check", *arguments])
        monkeypatch.setattr(subprocess, "Popen", popen)
        return status, capsys.readouterr().out, [json.loads(line) for line in requests.read_text().splitlines()]

    return call


def row(verdict: Verdict, **changes):
    message = {"soc": "Ascend910B1", "dtype": "bfloat16", "operator": "ppo_head", "kernel": "rows_forward"}
    more = {"constants": {}, "programs": 48, "models": ["Qwen3-8B"], "lengths": []}
    return {"row": {**message, **more, "verdict": verdict.to_dict(), **changes}}


def test_no_findings_is_exit_status_0(run):
    status, out, _ = run("--model-type", "qwen3", "--soc", "Ascend910B1", answers=[{"total": 1}, row(OK)])
    assert status == 0
    assert "67%" in out
    assert out.endswith("no findings\n")


def test_an_overflow_is_exit_status_1_with_needed_and_available(run):
    status, out, _ = run("--soc", "Ascend910B1", answers=[row(OVERFLOW)])
    assert status == 1
    assert "finding: Ascend910B1 bfloat16 ppo_head rows_forward: UB overflow: needs 8577280 of 1572864 bits" in out


def test_json_is_one_document_with_the_rows_and_what_was_not_done(run):
    status, out, _ = run("--json", "--soc", "Ascend910B1", answers=[row(OVERFLOW), row(OK, kernel="rows_backward")])
    document = json.loads(out)
    assert status == 1
    assert [r["kernel"] for r in document["rows"]] == ["rows_backward", "rows_forward"], "in a fixed order"
    assert document["rows"][1]["verdict"]["need"] == 8577280
    assert len(document["findings"]) == 1
    assert "nothing ran on a device" in document["what"]


def test_a_refused_operator_of_liger_comes_with_what_switches_it_off(run):
    answers = [row(OVERFLOW, operator="rms_norm", models=["Qwen3-8B"])]
    status, out, requests = run("--liger", "--model-type", "qwen3", "--soc", "Ascend910B1", answers=answers)
    assert status == 1
    assert "on Ascend910B1 bfloat16: NPU_BACKEND_SKIP=qwen3.rms_norm" in out
    assert requests[0]["liger"] == "ascend"
    assert requests[0]["lengths"] == [4096, 4099]


def test_recompilations_are_no_finding_but_advice(run):
    counts = {"lengths": 100, "each": 6, "kernels": 594, "token_constants": ["n_rows"]}
    answers = [{"recompiles": {"model": "Qwen3-8B", "dtype": "bfloat16", "operator": "rms_norm", **counts}}]
    status, out, _ = run("--liger", "--model-type", "qwen3", "--soc", "Ascend910B1", answers=answers)
    assert status == 0
    assert "594 kernels for 100 numbers of tokens" in out
    assert "n_rows is part of the compile key" in out
    assert "NPU_BACKEND_SKIP=qwen3.rms_norm, or pad batches to few lengths" in out


def test_every_chip_and_model_is_asked_for(run):
    _, _, requests = run("--soc", "Ascend910B3,Ascend950PR_9579", "--dtype", "float32,float16")
    assert [request["soc"] for request in requests] == ["Ascend910B3", "Ascend950PR_9579"]
    assert requests[0]["dtypes"] == ["float32", "float16"]
    assert len(requests[0]["models"]) >= 20


def test_a_models_configuration_file_is_read(run, tmp_path):
    file = tmp_path / "config.json"
    text = {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "final_logit_softcapping": 30.0}
    for content in (text, {"model_type": "some_vlm", "text_config": text}):
        file.write_text(json.dumps(content))
        _, _, requests = run("--config", str(file), "--soc", "Ascend910B1")
        (model,) = requests[0]["models"]
        assert (model["vocab_size"], model["hidden_size"], model["softcap"]) == (256000, 2304, True)


def test_sizes_that_a_configuration_leaves_out_are_transformers_defaults(run, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3"}))
    _, _, requests = run("--config", str(file), "--soc", "Ascend910B1")
    assert requests[0]["models"][0]["vocab_size"] == 151936


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--soc", "Ascend910C"], "unknown soc 'Ascend910C'"),
        (["--soc", ","], "a list of names"),
        (["--dtype", "int8"], "--dtype 'int8'"),
        (["--model-type", "gpt5"], "no such model is in the table"),
        (["--liger", "--seq-len", "0"], "--seq-len: '0'"),
        (["--seq-len", "2048"], "--seq-len goes with --liger"),
        (["--liger", "--seq-len", "1,99999999999999999999"], "--seq-len: '99999999999999999999' is not a number"),
        (["--liger", "--model-type", "glm4"], "has nothing for the model type 'glm4'"),
        (["--config", "/nowhere/config.json"], "cannot be read"),
    ],
)
def test_bad_use_is_exit_status_2(run, capsys, arguments, words):
    assert cli.main(["compile-check", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_worker_that_breaks_is_reported_with_its_last_words(run, monkeypatch, capsys):
    popen = subprocess.Popen
    script = [sys.executable, "-c", "import sys; sys.exit('No module named liger_kernel')"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen(script, **options))
    assert cli.main(["compile-check", "--soc", "Ascend910B1"]) == 2
    assert "worker ended with 1: No module named liger_kernel" in capsys.readouterr().err
