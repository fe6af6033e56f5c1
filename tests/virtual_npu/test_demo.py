"""verify and the demo on a virtual NPU (arithmetic by the CPU): torch_npu's own dispatch and autograd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_checkpoint

import npu_backend
from npu_backend import cli, model_configs
from npu_backend.demo.job import Options, run_demo
from npu_backend.families import FAMILIES
from npu_backend.operators import gated_mlp
from npu_backend.verification import verify
from npu_backend.virtual_npu import LABEL


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operator_of_a_family_agrees_on_the_virtual_npu(family: str) -> None:
    try:
        config = model_configs.default_config(family)
    except npu_backend.ConfigError:
        pytest.skip("this transformers does not have the family")
    report = verify({"hf_config": config})
    assert report.ok, str(report)
    assert LABEL in report.device
    assert {row.dtype for row in report.rows if row.verdict == "ok"} == {"float32", "bfloat16"}
    assert not [row for row in report.rows if row.verdict == "absent"], str(report)
    assert npu_backend.patch_status().applied == 0


def test_verify_without_a_model_checks_what_is_in_force() -> None:
    npu_backend.apply_npu_fsdp_patches({"hf_config": model_configs.default_config("llama")})
    report = verify()
    assert report.ok
    assert {row.op for row in report.rows} == {"rms_norm", "gated_mlp", "rotary", "ppo_head", "model"}


def test_the_demo_counts_exact_operator_calls(
    tiny_folder: Path, calls: Callable[[], dict[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_demo(Options(model=str(tiny_folder), steps=2))
    out = capsys.readouterr().out
    assert report.ok, report.findings
    assert report.facts["score"]["calls_per_forward"] == {"rms_norm": 5, "gated_mlp": 2, "rotary": 4}
    assert not any(report.facts["score"]["fallbacks"].values())
    assert set(report.facts["revert"]["targets"])
    seen = calls()
    for op, operator in {"rms_norm": "npu_rms_norm", "gated_mlp": "npu_swiglu", "rotary": "npu_rotary_mul"}.items():
        assert 0 < report.facts["training"]["operator_calls"][op] <= seen[f"npu::{operator}"]
    headings = [line for line in out.splitlines() if line.startswith("==")]
    assert len(headings) == 6
    assert all(LABEL in line for line in headings)
    assert npu_backend.patch_status().rows == ()


def test_an_operator_that_does_not_run_as_often_as_the_model_says_is_a_finding(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gated_mlp, "_why_not", lambda x, activation: "a test")
    assert cli.main(["demo", "--model", str(tiny_folder), "--steps", "1"]) == 1
    out = capsys.readouterr().out
    assert "FINDING: score: gated_mlp ran 0 times in a forward pass instead of 2, with 2 fallbacks" in out
    assert npu_backend.patch_status().rows == ()
