"""Run a command that sees virtual Ascend devices, their arithmetic done by the CPU.

    npu-backend run --virtual-npu=2 -- torchrun --nproc_per_node 2 train.py

The command, and every Python that it starts, finds N devices; nothing is written into site-packages. The exit status
is the command's own; 127 when there is no such command, 126 when it cannot be executed, 2 when the virtual NPU cannot
start.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from npu_backend import soc as socs
from npu_backend.errors import ConfigError
from npu_backend.virtual_npu import LABEL, counting, launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `npu-backend run`."""
    parser.add_argument("--virtual-npu", nargs="?", const="1", metavar="N", help="how many virtual devices (default 1)")
    parser.add_argument("--soc", default=socs.DEFAULT, help="the chip they say they are (default %(default)s)")
    parser.add_argument(
        "--memory", default=launch.DEFAULT_MEMORY, metavar="SIZE", help="what each device has, e.g. 32GiB"
    )
    parser.add_argument("--count", action="store_true", help="at the end: calls and bytes per operator, peak memory")
    parser.add_argument("--force", action="store_true", help="also on a host with a real Ascend driver")
    parser.add_argument("--json", action="store_true", help="announce the devices, and count, on stderr as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what to run")


def run(args: argparse.Namespace) -> int:
    """Replace this process by the command; returns only when it cannot be started.

    Raises:
        ConfigError: an option has no meaning, or the command is missing.
        BackendUnavailableError: the virtual NPU cannot start on this host.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    devices = _devices(args.virtual_npu)
    if not command:
        raise ConfigError("no command; write it after `--`: npu-backend run --virtual-npu -- python train.py")
    variables = launch.environment(devices, args.soc, memory=args.memory, force=args.force)
    if args.count:
        variables[counting.VARIABLE] = "json" if args.json else "table"
    launch.prepare(force=args.force)
    facts = {"devices": devices, "soc": args.soc, "memory": args.memory, "backend": LABEL}
    line = json.dumps(facts) if args.json else f"npu-backend run: {devices} x {args.soc}, {LABEL}"
    print(line, file=sys.stderr, flush=True)
    try:
        os.execvpe(command[0], command, {**os.environ, **variables})
    except OSError as error:
        print(f"npu-backend run: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def _devices(text: str | None) -> int:
    if text is None:
        raise ConfigError("say what to run on: --virtual-npu, or --virtual-npu=N for N devices")
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"--virtual-npu={text!r} is not a number; write --virtual-npu=N -- COMMAND") from error
