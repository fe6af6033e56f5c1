"""Every recognised operator of every family, patched against unpatched on a virtual NPU (arithmetic by the CPU).

    npu-backend run --virtual-npu -- python tests/virtual_npu/recognised_sweep.py [family ...]
    (with tests/ on PYTHONPATH)

writes tests/recognised/transformers-<version>.json, or these families' part of it: for each family each operator with
its variant, and how it compared with the original in float32 and bfloat16, forward and gradients, in a call of its own.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import recognised_calls
import torch

import npu_backend
from npu_backend import recognise
from npu_backend.operators import counters
from npu_backend.patches.engine import ENGINE
from npu_backend.verification.replay import compare

FOLDER = Path(__file__).parents[1] / "recognised"
DTYPES = (torch.float32, torch.bfloat16)
NPU = torch.device("npu:0")


def of_family(family: str) -> list[dict[str, Any]]:
    """One entry per operator of a family: name, op, variant, verdict and, where it was left alone, the reason."""
    report = npu_backend.apply_npu_fsdp_patches({"hf_config": {"model_type": family}})
    changes = {change.row.target: change for transaction in ENGINE.ledger for change in transaction.changes}
    reasons = {row.target: row.reason for row in report.rows}
    entries = []
    try:
        for found in recognise.operators(family):
            if found.variant and found.op != "sparse_moe":  # experts are compared within whole models
                entry = {"name": found.target.rpartition(":")[2], "op": found.op, "variant": found.variant}
                change = changes.get(found.target)
                result = _result(family, found, change) if change else f"left alone: {reasons.get(found.target)}"
                entries.append({**entry, "result": result})
    finally:
        npu_backend.revert_patches()
    return entries


def _result(family: str, found: recognise.Found, change: Any) -> str:
    try:
        call = recognised_calls.call_of(family, found, change)
    except recognised_calls.CannotBuild as error:
        return f"not compared: {error}"
    for dtype in DTYPES:
        counters.reset()
        for direction, comparison in zip(
            ("forward", "gradients"), compare(call, change.before, change.after, dtype, NPU), strict=True
        ):
            if comparison.error > comparison.allowed:
                return f"{direction} in {dtype}: {comparison.error:.1e}, allowed {comparison.allowed:.1e}"
        if not counters.calls().get(found.op):
            return f"not reached: {counters.fallbacks().get(found.op)}"
    return "equal"


def main(families: list[str]) -> None:
    import transformers

    warnings.simplefilter("ignore")
    path = FOLDER / f"transformers-{transformers.__version__}.json"
    table = json.loads(path.read_text()) if families else {}
    for family in families or recognise.families():
        entries = of_family(family) if any(f.variant for f in recognise.operators(family)) else []
        if entries:
            table[family] = entries
            print(family, *(f"{e['name']}={e['result']}" for e in entries), flush=True)
    for op in ("rms_norm", "gated_mlp", "rotary"):
        print(op, sum(any(e["op"] == op and e["result"] == "equal" for e in entries) for entries in table.values()))
    print(Counter(e["result"].partition(":")[0] for entries in table.values() for e in entries))
    FOLDER.mkdir(exist_ok=True)
    path.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n", encoding="ascii")


if __name__ == "__main__":
    main(sys.argv[1:])
