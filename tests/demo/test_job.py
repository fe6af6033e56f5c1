"""The whole demo on a tiny random model, on a plain CPU. On a virtual NPU: tests/virtual_npu/test_demo.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import npu_backend
from npu_backend import cli
from npu_backend.demo.arithmetic import Addition
from npu_backend.demo.job import Options, run_demo


@pytest.fixture(autouse=True)
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_BACKEND_DEVICE", "cpu")


def test_it_runs_any_folder_and_says_what_a_cpu_does_not_show(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_demo(Options(model=str(tiny_folder), steps=2))
    out = capsys.readouterr().out
    assert report.ok, report.findings
    for heading in ("1. plan", "2. apply", "3. verify", "4. score", "5. train", "6. revert"):
        assert f"== {heading}" in out
    assert "not shown here: the patched operators" in out
    assert len(report.facts["training"]["steps"]) == 2
    assert report.facts["training"]["weight_change"] > 0
    assert max(report.facts["score"]["largest_difference"].values()) < 1e-4
    assert npu_backend.patch_status().rows == ()


def test_json_is_the_only_thing_on_stdout(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["demo", "--model", str(tiny_folder), "--steps", "1", "--json"])
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert status == 0
    assert report["ok"] is True
    assert report["device"] == "cpu"
    assert "GRPO" not in captured.err


def test_a_reward_that_tells_no_answers_apart_is_a_finding(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Addition, "reward", lambda self, completion: 0.5)
    assert cli.main(["demo", "--model", str(tiny_folder), "--steps", "1"]) == 1
    out = capsys.readouterr().out
    assert "FINDING: train: step 1: only 0% of the groups have an advantage" in out
    assert "FINDING: train: the weights changed by 0" in out
    assert out.rstrip().splitlines()[-1].startswith("npu-backend demo: NOT ok")


def test_the_same_seed_gives_the_same_run(tiny_folder: Path) -> None:
    first, second = (run_demo(Options(model=str(tiny_folder), steps=1), quiet=True) for _ in range(2))
    assert first.facts["training"]["steps"][0]["loss"] == second.facts["training"]["steps"][0]["loss"]


def test_a_folder_without_a_tokenizer_is_bad_use(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())
    assert cli.main(["demo", "--model", str(tmp_path)]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_a_picture_is_drawn(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "training.png"
    run_demo(Options(model=str(tiny_folder), steps=1, plot=str(picture)), quiet=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
