"""The main job on a real checkpoint: plan, apply, verify, score, four GRPO steps, revert.

    npu-backend demo
    npu-backend demo --use-liger
    npu-backend demo --model /path/to/a/hugging/face/folder --steps 8 --plot training.png

It runs on an NPU if there is one, else on CUDA, else on a virtual NPU, and says where it ran and what that does not
show. The exit status is 1 when something is not as it should be; the findings are then the last lines.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_backend.cli import _shared
from npu_backend.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `npu-backend demo`."""
    parser.add_argument(
        "--model", metavar="PATH", help="a Hugging Face model's folder (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--use-liger", action="store_true", help="the patch set of Liger-Kernel instead of ours")
    parser.add_argument(
        "--impl-backend", metavar="NAME", help="the PPO head: torch, triton, liger or auto (default: torch)"
    )
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="GRPO steps, two updates each (default: 4)")
    parser.add_argument("--plot", metavar="FILE", help="draw reward, loss and entropy (needs matplotlib)")
    _shared.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: at least one step")
    if args.plot is not None:
        _shared.check_picture("--plot", Path(args.plot))
    from npu_backend.demo.job import Options, run_demo

    options = Options(args.model, args.use_liger, args.impl_backend, args.steps, args.plot)
    report = run_demo(options, quiet=args.json)
    if args.json:
        _shared.emit(report, as_json=True)
    return 0 if report.ok else 1
