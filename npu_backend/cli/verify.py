"""Check every patched operator and the PPO head against the unpatched ones on this device.

    npu-backend verify --model-type qwen3
    npu-backend verify --model CHECKPOINT_FOLDER --report verified     # verified.json and verified.md
    npu-backend run --virtual-npu -- npu-backend verify --all

Without --model a two-layer model with the structure of the family is built, on the device that there is. The exit
status is 1 when something is too far off, or is patched and never runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from npu_backend import model_configs
from npu_backend.cli import _shared
from npu_backend.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `npu-backend verify`."""
    _shared.add_model_arguments(parser)
    parser.add_argument("--all", action="store_true", help="every family that this release of transformers has")
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="a Hugging Face checkpoint, with its own weights")
    parser.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="also write FILE.json and FILE.md (a suffix .json or .md is dropped)",
    )
    parser.add_argument("--dtype", metavar="NAME", help="float32, bfloat16 or float16 (default: the first two)")


def run(args: argparse.Namespace) -> int:
    """Print the comparison, and write it down.

    Raises:
        ConfigError: an option has no meaning. Whether the report can be written is found out first.
    """
    named = args.model_type is not None or args.config is not None
    if [named, args.model is not None, args.all].count(True) != 1:
        raise ConfigError("say what to verify: --model-type NAME, --config FILE, --model FOLDER, or --all")
    pages = _pages(args.report)
    for page in pages:
        _shared.check_output("--report", page)
    config = _shared.model_config(args)
    if args.model is not None:
        config["hf_config"] = model_configs.checkpoint_config(args.model)
    from npu_backend.verification import verify  # imports torch: after what is bad use is found

    report = verify(config, model=args.model, dtype=args.dtype)
    for page in pages:
        text = json.dumps(report.to_dict(), indent=1) + "\n" if page.suffix == ".json" else report.to_markdown()
        page.write_text(text, encoding="utf-8")
    _shared.emit(report, as_json=args.json)
    return 0 if report.ok else 1


def _pages(report: Path | None) -> list[Path]:
    """verified, verified.json and verified.md all mean verified.json and verified.md."""
    if report is None:
        return []
    if not report.name.strip("."):
        raise ConfigError(f"--report {report}: this names no file; give a name such as verified")
    stem = report.with_suffix("") if report.suffix in (".json", ".md") else report
    return [stem.with_name(stem.name + suffix) for suffix in (".json", ".md")]
