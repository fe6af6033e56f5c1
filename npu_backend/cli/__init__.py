"""The command line: `npu-backend COMMAND ...`, also `python -m npu_backend`.

Each command is a module of this package with `add_arguments(parser)` and `run(args) -> int`, imported only when it is
the one asked for; the module's docstring is its help text. Exit status: 0 fine, 1 a finding, 2 bad use, 130
interrupted.
"""

from __future__ import annotations

import argparse
import ast
import errno
import importlib
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from npu_backend import __version__
from npu_backend.errors import BackendUnavailableError, ConfigError, NPUBackendError

_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EBADF, errno.EIO)


def command_names() -> list[str]:
    """Names of the commands that this installation has, sorted, as they are typed (`compile-check`)."""
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def summary(name: str) -> str:
    """What a command does, in one line: the first of its module's docstring, read without importing the module."""
    source = Path(__file__).with_name(f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the arguments after the program's name; `sys.argv[1:]` when None.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = _parse_command(arguments[:1])
    module = importlib.import_module(f"npu_backend.cli.{name.replace('-', '_')}")
    command = argparse.ArgumentParser(
        prog=f"npu-backend {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(command)
    args = command.parse_args(arguments[1:])
    try:
        status = int(module.run(args))
        _finish_output()
        return status
    except NPUBackendError as error:
        print(f"npu-backend {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, BackendUnavailableError)) else 1
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(
            f"npu-backend {name}: this command needs torch, which is not installed. Install the torch that your "
            "torch_npu names (`npu-backend doctor` lists tested pairs), or any torch for a CPU",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        print(f"npu-backend {name}: the output cannot be written: {error.strerror}", file=sys.stderr)
        _drop_output()
        return 2
    except KeyboardInterrupt:
        print(f"npu-backend {name}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _parse_command(first: Sequence[str]) -> str:
    """The command that the first argument names; help, the version and bad use end the process here."""
    names = command_names()
    if first and first[0] in names:
        return first[0]
    width = max(map(len, names))
    lines = "\n".join(f"  {name.ljust(width)}  {summary(name)}" for name in names)
    parser = argparse.ArgumentParser(
        prog="npu-backend",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        description=f"Ascend-first hardware backend for RL and LLM training.\n\ncommands:\n{lines}",
        epilog="`npu-backend COMMAND --help` explains a command and its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"npu-backend {__version__}")
    parser.add_argument("command", choices=names, metavar="COMMAND", help=argparse.SUPPRESS)
    if not first:
        parser.print_help(sys.stderr)
        parser.exit(2)
    return str(parser.parse_args(first).command)


def _finish_output() -> None:
    """Write what is buffered now, where an error can still be reported; Python has no stdout if it was closed."""
    if sys.stdout is None:
        raise OSError(errno.EBADF, "stdout is closed")
    sys.stdout.flush()


def _drop_output() -> None:
    """Send what stdout still buffers nowhere: Python would write it once more at exit, and complain again."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
