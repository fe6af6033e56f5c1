"""The cost model: what is counted for an operator and for a kernel, and that the published table is what is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import interpreted
import pytest
import torch

from npu_backend.bench import cost_table
from npu_backend.bench.cost import CostCounter

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs/benchmarks/cost_model.json"
REWRITE = "other bytes than published: npu-backend bench --cost --output docs/benchmarks/cost_model.json; the page too"
OURS, VERL = cost_table.OURS, "verl chunked"


def counted(function: Any, *args: torch.Tensor) -> dict[str, tuple[int, int, int]]:
    """Launches, read and written bytes by operator."""
    with CostCounter() as counter:
        function(*args)
    return {name: (t.launches, t.read, t.written) for name, t in counter.by_name.items()}


def floats(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def test_result_is_written_and_operands_are_read():
    assert counted(lambda x, y: x + y, floats(8, 4), floats(8, 4)) == {"add": (1, 256, 128)}


def test_in_place_is_read_and_written():
    assert counted(lambda x, y: x.add_(y), floats(8, 4), floats(8, 4)) == {"add_": (1, 256, 128)}


def test_overwritten_is_not_read():
    assert counted(lambda x, y: x.copy_(y), floats(8, 4), floats(8, 4).half()) == {"copy_": (1, 64, 128)}
    assert counted(lambda x: x.zero_(), floats(8, 4)) == {"zero_": (1, 0, 128)}
    assert counted(lambda x, y: torch.exp(x, out=y), floats(8, 4), floats(8, 4)) == {"exp": (1, 128, 128)}


def test_views_and_allocations_are_free():
    def views(x: torch.Tensor) -> None:
        x.t()[1:].unsqueeze(0).expand(3, -1, -1).detach()
        torch.empty_like(x)
        x.new_empty(3)

    assert counted(views, floats(8, 4)) == {}


def test_templates_are_not_read():
    assert counted(torch.zeros_like, floats(8, 4)) == {"zeros_like": (1, 0, 128)}


def test_broadcast_operand_counts_once():
    assert counted(lambda x, y: x - y[:, None], floats(8, 4), floats(8)) == {"sub": (1, 128 + 32, 128)}
    assert counted(lambda x, y: x - y.expand(8, 4), floats(8, 4), floats(8, 1)) == {"sub": (1, 128 + 32, 128)}


def test_indexed_operators_touch_what_they_index():
    at = torch.zeros(8, 1, dtype=torch.int64)
    assert counted(lambda x: x.gather(1, at), floats(8, 4)) == {"gather": (1, 64 + 32, 32)}
    assert counted(lambda x, y: x.scatter_(1, at, y), floats(8, 4), floats(8, 1)) == {"scatter_": (1, 64 + 32, 32)}
    assert counted(lambda x: x.scatter_(1, at, 1.0), floats(8, 4)) == {"scatter_": (1, 64, 32)}


def test_gemm_has_flops():
    x, y = floats(8, 4), floats(4, 2)
    with CostCounter() as counter:
        torch.mm(x, y)
    gemms, others = counter.totals()
    assert (gemms.flops, gemms.read, gemms.written) == (2 * 8 * 4 * 2, 128 + 32, 64)
    assert others.launches == 0


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return json.loads(run(str(Path(__file__).with_name("cost_in_interpreter.py"))))


def run(*arguments: str) -> str:
    paths = [str(ROOT), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@interpreted.supported
def test_masked_lanes_of_a_kernel_do_not_count(facts: dict[str, Any]):
    assert facts["masked_lanes"] == {
        "launches": 2, "read": 2 * 100 * (2 + 4), "written": 2 * 100 * 4, "flops": 0, "changed": 0,
    }  # fmt: skip


@interpreted.supported
def test_two_rows_stand_for_all(facts: dict[str, Any]):
    whole, from_two = facts["rows"]
    assert whole == from_two
    assert all(traffic["read"] for traffic in whole)


@interpreted.supported
def test_published_table_is_what_is_counted():
    pytest.importorskip("verl.utils.experimental.torch_functional")
    published = json.loads(TABLE.read_text())
    rows, hidden, vocab = cost_table.SHAPES[0]
    found = json.loads(run("-m", "npu_backend", "bench", "--cost", "--json", "--shape", f"{rows},{hidden},{vocab}"))
    if (found["torch"].split("+")[0], found["verl"]) != (published["torch"].split("+")[0], published["verl"]):
        pytest.skip(f"published for torch {published['torch']} and verl {published['verl']}")
    same_shape = [r for r in published["results"] if (r["hidden"], r["vocab"]) == (hidden, vocab)]
    assert found["results"] == same_shape, REWRITE


def test_ours_moves_at_least_6_times_fewer_bytes_than_verl():
    results = json.loads(TABLE.read_text())["results"]
    moved = {
        (r["head"], r["hidden"], r["vocab"], r["mode"]): r["read_per_token"] + r["written_per_token"] for r in results
    }
    cases = {key[1:] for key in moved}
    assert len(cases) == 2 * len(cost_table.SHAPES)
    for case in cases:
        assert moved[(VERL, *case)] >= 6 * moved[(OURS, *case)], case


def test_page_shows_the_table():
    page = (ROOT / "docs/cost_model.md").read_text()
    for line in cost_table.to_text(json.loads(TABLE.read_text())).splitlines():
        if line.startswith(("| ", "## ")):
            assert line.removeprefix("## ") in page, REWRITE
