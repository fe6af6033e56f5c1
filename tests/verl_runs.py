"""Starts `verl_engine.py` and hands out its results: many runs in one process, because importing verl takes seconds."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "verl_engine.py"
Run = dict[str, Any]


class Batch:
    """Runs in one process per rank, started when the first result is asked for.

    Args:
        how: "plugin" or "stock".
        runs: settings, as in `verl_engine.DEFAULTS`.
        world: number of ranks.
        python: another interpreter than this one.
        environment: variables to add.
        seconds: how long all of it may take.
    """

    def __init__(
        self,
        how: str,
        runs: Sequence[Run],
        *,
        world: int = 1,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        seconds: float = 1500.0,
    ) -> None:
        self.how, self.runs, self.world, self.python, self.seconds = how, list(runs), world, python, seconds
        self.environment = dict(environment or {})

    def result(self, run: Run) -> Run:
        """What this run gave; fails with its error."""
        found = self._results[self.runs.index(run)]
        assert "error" not in found, found["error"]
        return found

    def error(self, run: Run) -> str:
        """The error that this run ended with; fails if there was none."""
        found = self._results[self.runs.index(run)]
        assert "error" in found, found
        message: str = found["error"]
        return message

    @functools.cached_property
    def _results(self) -> list[Run]:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "WORLD_SIZE": str(self.world), "OMP_NUM_THREADS": "1", **self.environment}
            path = [str(SCRIPT.parent.parent), str(SCRIPT.parent), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
            command = [self.python, str(SCRIPT), folder, self.how, json.dumps(self.runs)]
            logs = [Path(folder, f"log{rank}") for rank in range(self.world)]
            ranks = []
            for rank, log in enumerate(logs):
                with log.open("w") as out:
                    environment["RANK"] = str(rank)
                    ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
            end = time.monotonic() + self.seconds
            status: list[int | None] = [None]
            try:
                while None in status and not any(status) and time.monotonic() < end:
                    time.sleep(0.1)
                    status = [rank.poll() for rank in ranks]
            finally:
                for rank in ranks:  # the others wait for one that has failed
                    rank.kill()
                    rank.wait()
            if any(status) or None in status:
                pytest.fail("\n".join(log.read_text()[-3000:] for log in logs), pytrace=False)
            results: list[Run] = json.loads(Path(folder, "results.json").read_text())
            return results


def flat(rows: list[list[float]]) -> list[float]:
    return [number for row in rows for number in row]


def assert_same(got: Run, reference: Run, tolerance: float = 1e-5) -> None:
    """Loss, gradient norm and log-probs agree to `tolerance`; the steps that both ran."""
    assert got["steps"]
    for key in ("steps", "before", "after"):
        if key in got:
            expected = reference[key][: len(got[key])] if key == "steps" else reference[key]
            assert flat(got[key]) == pytest.approx(flat(expected), abs=tolerance, rel=tolerance), key
