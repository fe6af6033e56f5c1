"""Print the completion of this command line for a shell: commands, options, and the values that an option knows.

    source <(npu-backend completion bash)                        # in this shell; add the line to ~/.bashrc
    npu-backend completion zsh > ~/.zfunc/_npu-backend           # a folder of $fpath
    npu-backend completion fish > ~/.config/fish/completions/npu-backend.fish

Needs shtab, which the extra `completion` brings. Print it again after an upgrade.
"""

from __future__ import annotations

import argparse
import importlib
import json

from npu_backend import cli, config, families, soc
from npu_backend.cli import _shared
from npu_backend.errors import BackendUnavailableError

_SHELLS = ("bash", "zsh", "fish")
_FILES, _FOLDERS = ("FILE", "PATH"), ("FOLDER",)  # what a metavar asks for
# Options whose values are checked elsewhere than by argparse; only the completion takes these for all there is.
_VALUES = {
    "--model-type": tuple(families.FAMILIES),
    "--impl-backend": config.IMPL_BACKENDS,
    "--soc": tuple(soc.SOCS),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `npu-backend completion`."""
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=f"{', '.join(_SHELLS[:-1])} or {_SHELLS[-1]}")
    _shared.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the script.

    Raises:
        BackendUnavailableError: shtab is not installed.
    """
    script = completion(args.shell)
    print(json.dumps({"shell": args.shell, "script": script}, indent=2) if args.json else script)
    return 0


def completion(shell: str) -> str:
    """The completion script for `bash`, `zsh` or `fish`.

    Raises:
        BackendUnavailableError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise BackendUnavailableError(
            f"completion is written by shtab, which cannot be imported: {error}; "
            "pip install 'npu-backend[completion]', or pip install shtab (it has no dependencies)"
        ) from error
    parser = argparse.ArgumentParser(prog="npu-backend")
    parser.add_argument("--version", action="version", version="", help="show the version")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name in cli.command_names():
        module = importlib.import_module(f"npu_backend.cli.{name.replace('-', '_')}")
        command = commands.add_parser(name, help=cli.summary(name))
        module.add_arguments(command)
        for action in command._actions:
            _say_values(action, shtab.FILE, shtab.DIRECTORY)
    return str(shtab.complete(parser, shell=shell))


def _say_values(action: argparse.Action, files: object, folders: object) -> None:
    """Tell shtab what an option takes, as far as argparse does not know."""
    for option in action.option_strings:
        action.choices = _VALUES.get(option, action.choices)
    if action.metavar in (*_FILES, *_FOLDERS):
        action.complete = folders if action.metavar in _FOLDERS else files  # type: ignore[attr-defined]
