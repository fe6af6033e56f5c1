"""Compile Ascend kernels with the vendor's compiler, without an Ascend: ours, or Liger's with --liger.

    npu-backend compile-check --install                           # the first time: fetch the compiler (500 MB)
    npu-backend compile-check --soc Ascend910B3 --model-type qwen3
    npu-backend compile-check --liger --config path/config.json --seq-len 2048,2049

Says for each kernel: ok with its use of on-chip memory and whether ping-pong was kept, overflow (needed and available),
unsupported, or suspect (compiles, and is known to be wrong). Without a model, all published models of the table are
checked. The exit status is 1 when there is a finding.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from npu_backend import soc as socs
from npu_backend.ascend import toolchain
from npu_backend.ascend.check import DTYPES, LIGER, check
from npu_backend.cli import _shared
from npu_backend.errors import ConfigError

_SOCS = "Ascend910B1,Ascend910B3,Ascend910_9392,Ascend950PR_9579"  # one of each kind
_LENGTHS = "4096,4099"  # Liger has kernels for even and for odd numbers of tokens
_MOST_TOKENS = 2**31 - 1  # what an operator's int32 index can count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    chips = _SOCS.replace(",", ", ")  # with spaces, so that no name is broken over lines
    parser.add_argument("--soc", default=_SOCS, metavar="NAMES", help=f"chips, by comma (default: {chips})")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model-type", metavar="NAME", help="published models of this type, for example qwen3")
    which.add_argument("--config", metavar="FILE", type=Path, help="a model's config.json")
    parser.add_argument("--dtype", default="bfloat16", metavar="NAMES", help=f"of {', '.join(DTYPES)}, by comma")
    parser.add_argument(
        "--liger",
        nargs="?",
        const=LIGER[0],
        choices=LIGER,
        help="Liger's operators as a model launches them; as-installed: without what triton-ascend 3.2.0 lacks",
    )
    parser.add_argument("--seq-len", metavar="N,N,...", help=f"with --liger: tokens of a batch (default {_LENGTHS})")
    parser.add_argument("--toolchain", metavar="FOLDER", type=Path, help="where the compiler is (default: found)")
    parser.add_argument(
        "--compiler", metavar="RELEASE", help=f"of ascendnpu-ir: {', '.join(toolchain.COMPILERS)}, or host (CANN's)"
    )
    parser.add_argument("--install", action="store_true", help="fetch what is missing of the compiler first")
    _shared.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report.

    Raises:
        ConfigError: an option has no meaning.
        BackendUnavailableError: the compiler is not there, or Liger is not.
    """
    chips = [socs.find_soc(name).name for name in _split(args.soc)]
    dtypes = _split(args.dtype)
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if args.seq_len and not args.liger:
        raise ConfigError("--seq-len goes with --liger: the head's kernels are the same for any number of tokens")
    lengths = [_length(text) for text in _split(args.seq_len or _LENGTHS)]
    models = _models(args)
    if args.install:
        toolchain.install(args.compiler, folder=args.toolchain)
    tools = toolchain.find(args.toolchain, args.compiler)
    show = _show if sys.stderr.isatty() else _silent
    report = check(models, chips, dtypes, tools, liger=args.liger, lengths=lengths if args.liger else (), progress=show)
    _shared.emit(report, as_json=args.json)
    return 1 if report.findings else 0


def _models(args: argparse.Namespace) -> list[Any]:
    from npu_backend.ascend import models
    from npu_backend.families import families_of
    from npu_backend.patches import liger

    if args.config is not None:
        return [models.from_config(str(args.config), _shared.read_file(args.config, "--config"))]
    found = models.published(args.model_type)
    if args.liger:
        found = [model for model in found if set(families_of([model.model_type])) & liger.REPLACED.keys()]
        if not found:
            raise ConfigError(f"--liger: the patch set has nothing for the model type {args.model_type!r}")
    return found


def _split(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"a list of names by comma is needed, got {text!r}")
    return parts


def _length(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_TOKENS:
        raise ConfigError(f"--seq-len: {text!r} is not a number of tokens from 1 to {_MOST_TOKENS}")
    return int(text)


def _show(soc: str, done: int, total: int) -> None:
    """A bar on the terminal, in place."""
    filled = 30 * done // max(total, 1)
    end = "\n" if done == total else ""
    print(f"\r{soc:18} [{'#' * filled:30}] {done}/{total} kernels", end=end, file=sys.stderr, flush=True)


def _silent(soc: str, done: int, total: int) -> None:
    return None
