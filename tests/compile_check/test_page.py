"""docs/what_runs_on_your_chip.md says what docs/chips/verdicts.json says, and that what the compiler says now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import scripts

from npu_backend.ascend import models
from npu_backend.ascend.check import DTYPES, check

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def update():
    return scripts.load(DOCS / "chips" / "update.py")


@pytest.fixture(scope="module")
def entries():
    return json.loads((DOCS / "chips" / "verdicts.json").read_text())


def test_the_page_is_the_one_of_the_data(update, entries):
    assert update.PAGE.read_text() == update.page(entries), "run docs/chips/update.py"


def test_the_page_knows_every_model_of_the_table(entries):
    ours = next(entry for entry in entries if not entry["liger"])
    assert list(ours["models"]) == [model.name for model in models.published()]
    assert {line["dtype"] for line in ours["lines"]} == set(DTYPES)


def test_the_worst_verdict_of_several_keys_is_shown(update):
    def row(verdict):
        whole = {"status": "ok", "need": 0, "available": 0, "scope": "", "use": {}, "capacity": {}, "ping_pong": "kept"}
        names = {"soc": "Ascend910B1", "dtype": "bfloat16", "operator": "rms_norm", "kernel": "k", "models": ["M"]}
        return names | {"verdict": whole | verdict}

    overflow = {"status": "overflow", "need": 2, "available": 1, "scope": "UB"}
    lost = {"ping_pong": "lost", "use": {"UB": 8}, "capacity": {"UB": 10}}
    report = {
        "liger": "ascend", "toolchain": {"ascendnpu-ir": "1.0.0"}, "models": {"M": "qwen3"}, "lengths": [4096],
        "rows": [row({}), row(lost), row(overflow)],
    }  # fmt: skip
    page = update.page([update.condense(report)])
    assert "| qwen3 | rms_norm | overflow, needs 2 of 1 bits of UB |" in page
    report["rows"].pop()
    assert "| qwen3 | rms_norm | ok, slower |" in update.page([update.condense(report)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_data_are_what_the_compiler_says_now(update, entries, compiler):
    said = next(entry for entry in entries if not entry["liger"])
    socs = list(dict.fromkeys(line["soc"] for line in said["lines"]))
    assert update.condense(check(models.published(), socs, DTYPES, compiler).to_dict()) == said
