"""`npu-backend plan` where nothing would be patched, because of the device: said once, with the way on."""

from __future__ import annotations

import json

import pytest

from npu_backend import cli
from npu_backend.patches.engine import Row
from npu_backend.report import PatchReport

HINT = "npu-backend run --virtual-npu -- npu-backend plan"


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_BACKEND_DEVICE", "cpu")


def test_the_reason_of_all_rows_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan"]) == 0
    out = capsys.readouterr().out
    assert out.count("verl_npu does not run on this device") == 1
    assert out.count("skipped ") > 20
    assert HINT in out.splitlines()[-1]


def test_json_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--json"]) == 0
    out = capsys.readouterr().out
    assert all("does not run on this device" in row["reason"] for row in json.loads(out)["rows"])


def test_reasons_that_differ_stay_in_their_rows() -> None:
    rows = [Row(f"lib.model:{name}", "mlp", "m", "us", "skipped", f"because of {name}") for name in ("A", "B")]
    first, *others = str(PatchReport(tuple(rows), "us", "cpu")).splitlines()
    assert first == "patch set us on cpu: 2 skipped"
    assert [line.endswith(end) for line, end in zip(others, ("reason", "of A", "of B"), strict=True)] == [True] * 3


def test_a_report_of_the_head_alone_names_no_patch_set() -> None:
    row = Row("m.forward", "ppo_head", "m", "npu_backend.head", "applied", "backend torch")
    assert str(PatchReport((row,), None, "cpu")).startswith("PPO head on cpu: 1 applied\n")


def test_a_target_that_is_no_path_ends_in_no_colon(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model-type", "gpt2", "--use-liger"]) == 1
    out = capsys.readouterr().out
    assert "gpt2:" not in out
    assert HINT not in out  # no NPU would change it
