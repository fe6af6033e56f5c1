"""Write docs/what_runs_on_your_chip.md from `verdicts.json`; with arguments, make that from reports first.

    npu-backend compile-check --json --dtype bfloat16,float16,float32 > head.json
    npu-backend compile-check --json --liger --seq-len 4096 --soc Ascend910B1 > liger.json
    python docs/chips/update.py head.json liger.json       # in the order of the page's columns

`verdicts.json` holds one entry per report: its toolchain, and for each kernel (ours), or operator and model (Liger's),
the worst verdict of its compile keys.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA, PAGE = HERE / "verdicts.json", HERE.parent / "what_runs_on_your_chip.md"
WORST_FIRST = ("unsupported", "overflow", "suspect", "unstable", "ok")
Row = Mapping[str, Any]

HEAD = """# What runs on your chip

Written by `docs/chips/update.py` from `docs/chips/verdicts.json`, which holds what `npu-backend compile-check` said.
**Nothing here ran on an NPU, and nothing here is a speed.** `ok` means: the vendor's own front end and compiler took
the kernel, every buffer has its place in on-chip memory, and a complete module was handed to the last stage (`hivmc`),
which is closed and not on PyPI. For your own model, chip or release run the command: `docs/compile_check.md`.
"""
OURS = """## The PPO head

{tools}; {dtypes}; {count} published models, which share {keys} compile keys over all chips and dtypes. {ping_pong}
ping-pong (double buffers, so that loads overlap with work). Percent: the largest use of a vector core's unified buffer.

{table}

Models: {models}.
"""
LIGERS = """## Liger-Kernel 0.8.5's Ascend operators

Launches recorded from the models' own layers, forward and backward, with the patch set `liger` applied, at {lengths}
tokens; triton-ascend 3.2.0 with the one module that Liger needs from 3.2.2. Columns: chip, dtype, release of
ascendnpu-ir. `slower`: fits only after the compiler itself gave up double buffers. A refused operator is switched off
by `NPU_BACKEND_SKIP=<model type>.<operator>`. With triton-ascend 3.2.0 as PyPI has it, Liger's whole Ascend backend
cannot be imported and its CUDA kernels stay; `npu-backend compile-check --liger as-installed` shows how those fare.
Empty: the patch set leaves that operator alone on that chip.

{table}

`suspect`, in the experts' backward: `_moe_bwd_down_proj_kernel` adds the router weights' gradient atomically in a
kernel with a matrix product. In the compiler's output the plain stores of that kernel are restricted to one of the two
vector cores of a cube core, and this addition is not. Whether a device adds it twice is not known.

Models: {models}. Vision towers were not run.
"""


def condense(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the page needs of one report of `npu-backend compile-check --json`."""
    by: Callable[[Row], Iterable[str]] = (
        (lambda row: row["models"]) if report["liger"] else (lambda row: [row["kernel"]])
    )
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in report["rows"]:
        for name in by(row):
            groups.setdefault((row["soc"], row["dtype"], row["operator"], name), []).append(row)
    return {
        "liger": report["liger"],
        "toolchain": report["toolchain"],
        "models": report["models"],
        "lengths": report["lengths"],
        "keys": len(report["rows"]),
        "lines": [dict(zip(("soc", "dtype", "operator", "name"), key)) | _worst(rows) for key, rows in groups.items()],
    }


def _worst(rows: list[Row]) -> dict[str, Any]:
    verdicts = sorted((row["verdict"] for row in rows), key=lambda v: (WORST_FIRST.index(v["status"]), -v["need"]))
    worst = verdicts[0]
    used = [v for v in verdicts if v["use"].get("UB")]
    shares = [100 * v["use"]["UB"] / v["capacity"]["UB"] for v in used]
    return {
        "status": worst["status"],
        "need": worst["need"],
        "available": f"{worst['available']} bits of {worst['scope']}" if worst["need"] else "",
        "ub_percent": round(max(shares, default=0)),
        "ping_pong_lost": any(v["ping_pong"] == "lost" for v in verdicts),
        "ping_pong_kept": all(v["ping_pong"] == "kept" for v in verdicts),
    }


def page(entries: list[Mapping[str, Any]]) -> str:
    """The whole page."""
    parts = [HEAD]
    parts += [_ours(entry) for entry in entries if not entry["liger"]]
    parts.append(_ligers([entry for entry in entries if entry["liger"]]))
    return "\n".join(parts)


def _ours(entry: Mapping[str, Any]) -> str:
    lines = entry["lines"]
    socs = list(dict.fromkeys(line["soc"] for line in lines))
    rows = []
    for kernel in dict.fromkeys(line["name"] for line in lines):
        cells = [_our_cell([x for x in lines if (x["name"], x["soc"]) == (kernel, soc)]) for soc in socs]
        rows.append([f"`{kernel}`", *cells])
    return OURS.format(
        tools=", ".join(f"{name} {version}" for name, version in entry["toolchain"].items()),
        dtypes=", ".join(dict.fromkeys(line["dtype"] for line in lines)),
        count=len(entry["models"]),
        keys=entry["keys"],
        ping_pong="Every one keeps" if all(line["ping_pong_kept"] for line in lines) else "Not every one keeps",
        table=_table(["kernel", *socs], rows),
        models=", ".join(entry["models"]),
    )


def _our_cell(lines: list[Row]) -> str:
    bad = [f"{line['dtype']}: {_said([line])}" for line in lines if line["status"] != "ok"]
    return "; ".join(bad) or f"ok, {max(line['ub_percent'] for line in lines)} %"


def _ligers(entries: list[Mapping[str, Any]]) -> str:
    columns = [(entry, soc) for entry in entries for soc in dict.fromkeys(line["soc"] for line in entry["lines"])]
    titles = [f"{soc}, {entry['lines'][0]['dtype']}, {entry['toolchain']['ascendnpu-ir']}" for entry, soc in columns]
    operators: dict[tuple[str, str], None] = {}
    for entry in entries:
        for line in entry["lines"]:
            operators[entry["models"][line["name"]], line["operator"]] = None
    rows = []
    for family, operator in sorted(operators):
        cells = [_liger_cell(entry, soc, family, operator) for entry, soc in columns]
        rows.append([family, operator, *cells])
    lengths = sorted({length for entry in entries for length in entry["lengths"]})
    return LIGERS.format(
        lengths=" and ".join(map(str, lengths)),
        table=_table(["model type", "operator", *titles], rows),
        models=", ".join(dict.fromkeys(name for entry in entries for name in entry["models"])),
    )


def _liger_cell(entry: Mapping[str, Any], soc: str, family: str, operator: str) -> str:
    lines = [
        line
        for line in entry["lines"]
        if line["soc"] == soc and line["operator"] == operator and entry["models"][line["name"]] == family
    ]
    if not lines:
        return ""
    alike: dict[tuple[str, bool], list[Row]] = {}
    for line in lines:
        alike.setdefault((line["status"], line["status"] == "ok" and line["ping_pong_lost"]), []).append(line)
    if len(alike) == 1:
        return _said(lines)
    return "; ".join(f"{_said(some)}: {', '.join(line['name'] for line in some)}" for some in alike.values())


def _said(lines: list[Row]) -> str:
    """The verdict that all these lines have; of overflows, how much is needed from the least to the most."""
    status, available = lines[0]["status"], lines[0]["available"]
    if status == "ok":
        return "ok, slower" if lines[0]["ping_pong_lost"] else "ok"
    needs = [line["need"] for line in lines]
    if not any(needs):
        return status
    return f"{status}, needs {' to '.join(map(str, dict.fromkeys((min(needs), max(needs)))))} of {available}"


def _table(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [columns, ["---"] * len(columns), *rows])


def main(*reports: str) -> None:
    """Take in the reports, if any, and write the page."""
    if reports:
        entries = [condense(json.loads(Path(report).read_text(encoding="utf-8"))) for report in reports]
        DATA.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
