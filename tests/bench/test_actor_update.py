"""`npu-backend bench --end-to-end`: what it trains, on one rank and on two, and what its report makes of the times."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import actor_update_scenarios
import gloo_ranks
import pytest
import torch

from npu_backend import cli
from npu_backend.bench import actor_report, actor_update
from npu_backend.bench.contestants import Contestant
from npu_backend.bench.measure import eager

CPU = torch.device("cpu")


@gloo_ranks.newer_gloo
def test_two_ranks_train_what_one_rank_trains(tmp_path: Path) -> None:
    found = gloo_ranks.run(2, "actor_update_scenarios", tmp_path / "store")
    assert found["gradients, tied"] < 1e-5
    assert found["gradients, untied"] < 1e-5
    alone = actor_update.Setting(**{**vars(actor_update_scenarios.setting(actor_update.TINY)), "curve_sequences": 4})
    losses = actor_update.loss_curve(alone, eager, 0, 6, CPU)
    assert [found[f"loss {number}"] for number in range(6)] == pytest.approx(losses, rel=1e-5)
    assert losses[3] < losses[0]  # it learns on a batch
    assert found["times"] == 1
    assert found["time of the first update"] == -found["minus that"]


def test_a_head_that_fails_is_reported_and_the_others_are_measured() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernel")

    heads = [Contestant("broken", broken, ""), Contestant("eager", eager, "")]
    setting = actor_update_scenarios.setting(actor_update.TINY)
    found = actor_update.measure(setting, heads, 0, 1, "transformers", CPU)
    assert found["failures"] == {"broken": "RuntimeError: no kernel"}
    assert [(timing["contestant"], timing["mode"]) for timing in found["timings"]] == [
        (actor_update.NO_HEAD.name, "all"),
        ("eager", "all"),
        ("eager", "silent"),
    ]


def test_what_was_measured_can_be_written_and_shown_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    arguments = ["--end-to-end", "--only", "npu-backend", "--seeds", "1", "--rounds", "1", "--updates", "2"]
    assert cli.main(["bench", *arguments, "--output", str(file)]) == 0
    measured = capsys.readouterr().out
    assert "| npu-backend torch |" in measured
    assert "no operators of Liger: liger does not run on this device: cpu" in measured
    assert len(json.loads(file.read_text())["curves"]["npu-backend torch"]) == 2
    assert cli.main(["bench", "--end-to-end", "--read", str(file)]) == 0
    assert capsys.readouterr().out == measured


def _document(times: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """A document with one round per seed: operators -> head -> time of each seed."""
    results = []
    for operators, heads in times.items():
        for seed in range(len(next(iter(heads.values())))):
            timings = [
                {"contestant": name, "mode": "all", "ms": [ms[seed]], "peak_gib": None} for name, ms in heads.items()
            ]
            results.append({"seed": seed, "operators": operators, "timings": timings, "failures": {}})
    return {"results": results, "setting": {"silent": 0.5}, "curves": {}}


def test_times_are_compared_seed_by_seed() -> None:
    plain = {"npu-backend x": [50.0, 60.0, 70.0, 80.0], "verl chunked": [100.0, 100.0, 100.0, 100.0]}
    found = _document({"transformers": plain, "Liger": {"npu-backend x": [25.0] * 4}})
    (_, peer, _, mean, half), (_, plain_verl, _, total, none) = actor_report.comparisons(found)
    assert (peer, plain_verl) == ("verl chunked", "verl chunked, operators of transformers")
    assert mean == pytest.approx(0.35)
    # standard deviation of 0.5, 0.4, 0.3, 0.2 over the root of four, times t for three degrees of freedom
    assert half == pytest.approx(3.182 * math.sqrt(0.05 / 3) / 2)
    assert (total, none) == pytest.approx((0.75, 0.0))


def test_loss_curves_are_measured_by_the_difference_between_two_runs_of_verl() -> None:
    curves = {"verl chunked": [0.0, 0.0], "npu-backend x": [3.0, 3.0], "verl chunked, again": [1.0, 1.0]}
    found = {"curves": curves}
    assert actor_report.curve_differences(found) == [
        ("verl chunked, again", 1.0, 1.0),
        ("npu-backend x", pytest.approx(2.5), pytest.approx(2.5)),
    ]
