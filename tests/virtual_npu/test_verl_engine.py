"""verl's own FSDPEngine, unmodified, trains with our plugin exactly as stock verl does without fused kernels.

Each case is a run of `verl_engine.py` on virtual NPUs (arithmetic by the CPU), where verl sees `npu`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is in the main environment only")

SCRIPT = Path(__file__).parent / "verl_engine.py"
LAYERS = 2
NORMS = 4 * LAYERS + 1  # two per layer, two more on queries and keys, one at the end


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory):
    """Run the script with these settings, once per session, and return its result."""
    results: dict[str, Any] = {}

    def once(*, world: int = 1, **settings: Any) -> Any:
        key = json.dumps([world, settings], sort_keys=True)
        if key not in results:
            folder = tmp_path_factory.mktemp("verl")
            environment = {**os.environ, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
            ranks = [
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), str(folder), json.dumps(settings)],
                    env={**environment, "RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank in range(world)
            ]
            outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
            results[key] = (
                json.loads((folder / "result.json").read_text()) if not any(r.returncode for r in ranks) else outputs
            )
        result = results[key]
        assert isinstance(result, dict), "\n".join(output[-3000:] for output in result)
        return result

    return once


def close(result: Any, reference: Any) -> bool:
    """Loss, gradient norm and log-probs before and after training agree to 1e-5."""
    assert result["steps"]
    return all(
        pytest.approx(flat(reference[key]), abs=1e-5, rel=1e-5) == flat(result[key])
        for key in ("steps", "before", "after")
    )


def flat(rows: list[list[float]]) -> list[float]:
    return [number for row in rows for number in row]


def stock(run: Any, **settings: Any) -> Any:
    return run(plugin=False, fused=False, **settings)


def test_stock_verl_learns(run):
    result = stock(run, strategy="fsdp")
    assert flat(result["before"]) != flat(result["after"])
    assert result["steps"][0] != result["steps"][1]


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "fsdp"},
        {"strategy": "fsdp2"},  # the untied lm_head is a unit of its own; stock verl with fused kernels fails here
        {"strategy": "fsdp", "remove_padding": True},
        {"strategy": "fsdp2", "impl_backend": "auto"},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_the_plugin_trains_as_stock_verl_without_fused_kernels(run, settings):
    result = run(**settings)
    assert close(result, stock(run, strategy="fsdp"))
    assert result["status"]["patch_set"] == "verl_npu"
    assert {row["state"] for row in result["status"]["rows"]} == {"applied"}
    assert "virtual NPU" in result["status"]["device"]
    assert result["fallbacks"] == {}
    forwards = result["calls"]["gated_mlp"] // LAYERS
    assert forwards > 0
    assert result["calls"] == {
        "rms_norm": NORMS * forwards,
        "gated_mlp": LAYERS * forwards,
        "rotary": 2 * LAYERS * forwards,
    }


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_two_ranks_over_hccl_train_as_one(run, strategy):
    """With an untied head as its own FSDP2 unit, where a bare full_tensor() loses the sum over the ranks."""
    assert close(run(world=2, strategy=strategy), stock(run, strategy="fsdp"))


def test_tied_embeddings(run):
    assert close(run(strategy="fsdp2", tied=True), stock(run, strategy="fsdp", tied=True))


def test_liger_in_the_interpreter(run):
    """verl applies Liger a second time, to the instance, after our hook."""
    result = run(strategy="fsdp", use_liger=True, steps=1)
    reference = stock(run, strategy="fsdp")
    assert flat(result["before"]) == pytest.approx(flat(reference["before"]), abs=1e-5, rel=1e-5)
    assert result["steps"][0] == pytest.approx(reference["steps"][0], abs=1e-5, rel=1e-5)
    assert result["status"]["patch_set"] == "liger"
    applied = {row["op"] for row in result["status"]["rows"] if row["state"] == "applied"}
    assert {"rms_norm", "gated_mlp", "rotary"} <= applied


def test_a_mistyped_backend_stops_the_run_when_the_engine_is_built(run):
    with pytest.raises(AssertionError, match=r"impl_backend='tritn' is not one of torch, triton, liger, auto"):
        run(strategy="fsdp", impl_backend="tritn", steps=1)
