"""The PPO head against every other head installed: time, TFLOPS, share of the floor, memory, error.

`--end-to-end` times a whole actor update around each head instead, on as many ranks as torchrun starts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_backend.cli import _shared
from npu_backend.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from npu_backend.bench.contestants import Contestant
    from npu_backend.bench.measure import Result
    from npu_backend.device import Device

_Document = dict[str, Any]
_SHAPES = {
    "cuda": [(16384, 1024, 151936), (8192, 4096, 151936), (32768, 2560, 151936)],
    "npu": [(8192, 1024, 151936)],
    "cpu": [(128, 64, 4096)],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--shape", action="append", metavar="N,H,V", help="rows, hidden size, vocabulary; repeatable")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds after 2 to warm up (default 9)")
    parser.add_argument("--silent", type=float, default=0.5, help="share of rows with zero gradients (default 0.5)")
    parser.add_argument("--error-rows", type=int, default=4096, help="rows compared with float64 (default 4096)")
    parser.add_argument("--only", metavar="TEXT", help="only heads whose name contains this")
    parser.add_argument(
        "--free-gib", type=float, help="only so much device memory is free while times are taken (CUDA)"
    )
    parser.add_argument(
        "--cost", action="store_true", help="count bytes, launches and FLOPs per token instead; needs no device"
    )
    parser.add_argument(
        "--end-to-end",
        action="store_true",
        help="time whole actor updates of a Qwen3-0.6B (on a CPU a tiny one) instead",
    )
    parser.add_argument(
        "--seeds", type=int, default=4, help="--end-to-end: fresh weights and data so often (default 4)"
    )
    parser.add_argument(
        "--updates", type=int, default=100, help="--end-to-end: updates of a loss curve, 0 for none (default 100)"
    )
    parser.add_argument(
        "--store",
        action="store_true",
        help="keep the times on this host: impl_backend=auto then takes the fastest here",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument(
        "--read", metavar="FILE", type=Path, help="measure nothing; show a document that --output wrote"
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="also write the JSON document there")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="also draw the times as a PNG (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and exit 0; 1 if a head that is ours failed.

    Raises:
        ConfigError: an option has no meaning, or a file cannot be read or written. Measuring takes long, so this is
            found out before.
        BackendUnavailableError: a plot is wanted without matplotlib.
    """
    from npu_backend.bench import actor_report, report

    _check(args)
    if args.cost:
        return _cost(args)
    if args.plot is not None:
        report.check_plot()
    form = actor_report if args.end_to_end else report
    measure = _measure_updates if args.end_to_end else _measure
    found = report.read(args.read, form.to_text) if args.read is not None else measure(args)
    if found is None:  # rank 0 tells
        return 0
    _write(found, args.output)
    if args.plot is not None:
        form.plot(found, args.plot)
    print(json.dumps(found, indent=1) if args.json else form.to_text(found))
    return 1 if any(name.startswith("npu-backend") for result in found["results"] for name in result["failures"]) else 0


def _write(found: _Document, output: Path | None) -> None:
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _cost(args: argparse.Namespace) -> int:
    import torch

    from npu_backend.bench import cost_table

    shapes = [_parse_shape(text) for text in args.shape or ()] or cost_table.SHAPES
    found = cost_table.count(shapes, getattr(torch, args.dtype), args.only)
    text = json.dumps(found, indent=1)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")
    print(text if args.json else cost_table.to_text(found))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.cost and (args.read is not None or args.plot is not None):
        raise ConfigError("--cost counts and draws nothing: leave --read and --plot out")
    if args.end_to_end and (args.cost or args.shape or args.free_gib is not None):
        raise ConfigError("--end-to-end trains one model: leave --cost, --shape and --free-gib out")
    for option, count in (("--rounds", args.rounds), ("--error-rows", args.error_rows), ("--seeds", args.seeds)):
        if count < 1:
            raise ConfigError(f"{option} {count}: at least one")
    if args.updates < 0:
        raise ConfigError(f"--updates {args.updates}: none or more")
    if args.store and (args.cost or args.end_to_end or args.read is not None or args.free_gib is not None):
        raise ConfigError("--store keeps times of the head alone, taken now: leave the other modes and --free-gib out")
    if not 0 <= args.silent < 1:
        raise ConfigError(f"--silent {args.silent}: a share of the rows from 0 up to, but not including, 1")
    if args.free_gib is not None and not 0 < args.free_gib < float("inf"):
        raise ConfigError(f"--free-gib {args.free_gib}: a positive number of GiB")
    if args.output is not None:
        _shared.check_output("--output", args.output)
    if args.plot is not None:
        _shared.check_picture("--plot", args.plot)


def _measure(args: argparse.Namespace) -> _Document:
    import torch

    from npu_backend import device as devices
    from npu_backend.bench import measure, report

    shapes = [_parse_shape(text) for text in args.shape or ()]
    found = devices.detect()
    device = torch.device(found.type)
    heads, absent = _heads(args, device)
    if args.store:
        _check_store(found, heads)
    about = report.describe(device, str(found), heads, absent)
    dtype = getattr(torch, args.dtype)
    results = []
    for rows, hidden, vocab in shapes or _SHAPES[found.type]:
        case = measure.Case(rows, hidden, vocab, args.silent, dtype)
        results.append(measure.Bench(case, device, free_gib=args.free_gib).run(heads, args.rounds, args.error_rows))
    if args.store:
        _store(device, dtype, heads, results)
    return report.document(about, results)


def _check_store(found: Device, heads: list[Contestant]) -> None:
    if found.type == "cpu" or found.virtual:
        raise ConfigError(f"bench --store: times of {found} say nothing about a device, and 'auto' is 'torch' there")
    backends = {head.impl_backend for head in heads} - {""}
    if len(backends) < 2:
        raise ConfigError(
            f"bench --store: nothing to choose from, only {', '.join(backends) or 'no backend'} is measured"
        )


def _store(device: torch.device, dtype: torch.dtype, heads: list[Contestant], results: list[Result]) -> None:
    """Keep the times of the backends that came through every shape, and say on stderr what `auto` takes from now on."""
    from npu_backend.head import measured

    times = {}
    for head in heads:
        found = [t.ms for r in results for t in r.timings if (t.contestant, t.mode) == (head.name, "train")]
        if head.impl_backend and len(found) == len(results):
            times[head.impl_backend] = sum(found)
    if not times:
        print("bench --store: no backend came through every shape; nothing is kept", file=sys.stderr)
        return
    try:
        file = measured.store(device, dtype, times)
    except OSError as error:
        print(f"bench --store: the times cannot be kept: {error}", file=sys.stderr)
        return
    print(f"impl_backend=auto takes {min(times, key=times.__getitem__)!r} here from now on: {file}", file=sys.stderr)


def _measure_updates(args: argparse.Namespace) -> _Document | None:
    """The document, also written to --output after each part; None on all ranks but the first."""
    import torch

    from npu_backend import device as devices
    from npu_backend.bench import actor_update, report

    found = devices.detect()
    dtype = getattr(torch, args.dtype)
    setting = actor_update.Setting(actor_update.QWEN3_06B, 16, 4, 1024, args.silent, dtype)
    if found.type == "cpu":
        setting = actor_update.Setting(actor_update.TINY, 2, 2, 32, args.silent, dtype)
    with actor_update.on_ranks(found.type) as device:
        heads, absent = _heads(args, device)
        heads = actor_update.contestants(heads)
        about = report.describe(device, str(found), heads, absent)

        def save(part: _Document) -> None:
            if actor_update.rank() == 0:
                _write(report.finite(part), args.output)

        measured = actor_update.run(setting, heads, args.seeds, args.rounds, args.updates, device, about, save)
        return report.finite(measured) if actor_update.rank() == 0 else None


def _heads(args: argparse.Namespace, device: torch.device) -> tuple[list[Contestant], list[str]]:
    from npu_backend.bench import contestants

    heads, absent = contestants.find(device)
    heads = [head for head in heads if args.only is None or args.only in head.name]
    if not heads:
        raise ConfigError(f"--only {args.only!r} matches no head that can run here")
    return heads, absent


def _parse_shape(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--shape {text!r} is not three positive numbers N,H,V")
    rows, hidden, vocab = (int(part) for part in parts)
    return rows, hidden, vocab
