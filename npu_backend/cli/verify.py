"""Check every patched operator and the PPO head against the unpatched ones on this device.

    npu-backend verify --model-type qwen3
    npu-backend run --virtual-npu -- npu-backend verify --all

A two-layer model with the structure of the family is built, on the device that there is. The exit status is 1 when
something is too far off, or is patched and never runs.
"""

from __future__ import annotations

import argparse

from npu_backend.cli import _shared
from npu_backend.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `npu-backend verify`."""
    _shared.add_model_arguments(parser)
    parser.add_argument("--all", action="store_true", help="every family that this release of transformers has")
    parser.add_argument("--dtype", metavar="NAME", help="float32, bfloat16 or float16 (default: the first two)")


def run(args: argparse.Namespace) -> int:
    """Print the comparison."""
    named = args.model_type is not None or args.config is not None
    if named == args.all:
        raise ConfigError("say what to verify: --model-type NAME, --config FILE, or --all")
    from npu_backend.verification import verify

    report = verify(_shared.model_config(args), dtype=args.dtype)
    _shared.emit(report, as_json=args.json)
    return 0 if report.ok else 1
