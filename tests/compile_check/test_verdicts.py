"""Kernels with a known verdict, through the real front end and the real compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from npu_backend.soc import find_soc

pytestmark = pytest.mark.timeout(1800)  # whichever test comes first waits for the compilers
SAMPLES = Path(__file__).parents[1] / "sample_kernels.py"


@pytest.fixture(scope="module")
def verdicts(compiler):
    found = {}
    for chip in ("Ascend910B1", "Ascend950PR_9579"):
        command = [sys.executable, str(SAMPLES), chip]
        done = subprocess.run(command, env=compiler.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found[chip] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("chip", ["Ascend910B1", "Ascend950PR_9579"])
def test_what_fits_and_what_does_not(verdicts, chip):
    small, large = verdicts[chip]["small"], verdicts[chip]["too large"]
    ub = find_soc(chip).ub_bytes * 8
    assert small["status"] == "ok"
    assert small["use"] == {"UB": 1024 * 32}
    assert small["capacity"]["UB"] == ub
    assert small["core"] == "AIV"
    assert large["status"] == "overflow"
    assert (large["scope"], large["need"], large["available"]) == ("UB", 65536 * 32, ub)


def test_the_chips_of_the_table_are_the_compilers(verdicts):
    for chip, samples in verdicts.items():
        soc = find_soc(chip)
        sizes = {"UB": soc.ub_bytes * 8, "L1": soc.l1_bytes * 8, "L0C": soc.l0c_bytes * 8}
        assert samples["small"]["capacity"] == sizes


def test_ping_pong_is_kept_or_lost(verdicts):
    samples = verdicts["Ascend910B1"]
    assert samples["small"]["ping_pong"] == "none", "no loop, nothing to overlap"
    assert samples["overlapping"]["ping_pong"] == "kept"
    assert samples["tight"]["ping_pong"] == "lost"
    assert "enable-auto-multi-buffer" in samples["tight"]["retries"]
    assert verdicts["Ascend950PR_9579"]["tight"]["ping_pong"] == "kept", "that chip has more"


def test_near_the_limit_a_verdict_is_repeated(verdicts):
    samples = verdicts["Ascend910B1"]
    assert samples["small"]["runs"] == 1
    assert samples["too large"]["runs"] == samples["tight"]["runs"] == 3


@pytest.mark.parametrize(("name", "words"), [("atomic after dot", "an atomic"), ("masked dot", "masked along")])
def test_code_that_compiles_and_is_wrong_is_suspect(verdicts, name, words):
    verdict = verdicts["Ascend910B1"][name]
    assert verdict["status"] == "suspect"
    assert words in verdict["message"]
    assert verdict["core"] == "MIX"


def test_an_atomic_straight_on_a_product_uses_a_buffer_that_was_never_planned(verdicts):
    assert verdicts["Ascend910B1"]["atomic on dot"]["status"] == "suspect"
    assert "never planned" in verdicts["Ascend910B1"]["atomic on dot"]["message"]


@pytest.mark.parametrize("name", ["masked dot, select", "whole dot"])
def test_the_ways_around_it_are_not_suspect(verdicts, name):
    assert verdicts["Ascend910B1"][name]["status"] == "ok"


def test_what_triton_refuses_is_unsupported_with_its_words(verdicts):
    verdict = verdicts["Ascend910B1"]["no kernel"]
    assert verdict["status"] == "unsupported"
    assert "undefined_name is not defined" in verdict["message"]
