"""The PPO head against every other head installed: time, TFLOPS, share of the floor, memory, error."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from npu_backend.errors import ConfigError

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
    parser.add_argument("--free-gib", type=float, help="leave only this much device memory free (CUDA)")
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
    from npu_backend.bench import report

    _check(args)
    if args.plot is not None:
        report.check_plot()
    found = report.read(args.read) if args.read is not None else _measure(args)
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        report.plot(found, args.plot)
    print(json.dumps(found, indent=1) if args.json else report.to_text(found))
    return 1 if any(name.startswith("npu-backend") for result in found["results"] for name in result["failures"]) else 0


def _check(args: argparse.Namespace) -> None:
    for option, count in (("--rounds", args.rounds), ("--error-rows", args.error_rows)):
        if count < 1:
            raise ConfigError(f"{option} {count}: at least one")
    if not 0 <= args.silent < 1:
        raise ConfigError(f"--silent {args.silent}: a share of the rows from 0 up to, but not including, 1")
    if args.free_gib is not None and not 0 < args.free_gib < float("inf"):
        raise ConfigError(f"--free-gib {args.free_gib}: a positive number of GiB")
    for option, file in (("--output", args.output), ("--plot", args.plot)):
        if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
            raise ConfigError(f"{option} {file}: no file can be written there; name one in a folder that exists")


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from npu_backend import device as devices
    from npu_backend.bench import contestants, measure, report

    shapes = [_parse_shape(text) for text in args.shape or ()]
    found = devices.detect()
    device = torch.device(found.type)
    heads, absent = contestants.find(device)
    heads = [head for head in heads if args.only is None or args.only in head.name]
    if not heads:
        raise ConfigError(f"--only {args.only!r} matches no head that can run here")
    about = report.describe(device, str(found), heads, absent)
    results = []
    for rows, hidden, vocab in shapes or _SHAPES[found.type]:
        case = measure.Case(rows, hidden, vocab, args.silent, getattr(torch, args.dtype))
        bench = measure.Bench(case, device)
        with measure.only_free(device, args.free_gib):
            results.append(bench.run(heads, args.rounds, args.error_rows))
        del bench
    return report.document(about, results)


def _parse_shape(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--shape {text!r} is not three positive numbers N,H,V")
    rows, hidden, vocab = (int(part) for part in parts)
    return rows, hidden, vocab
