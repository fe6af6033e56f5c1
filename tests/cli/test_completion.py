"""Completion as the shells do it: the printed script is sourced, and what the shell then offers is read back.

bash is on every machine that runs the tests; zsh and fish are asked where they are installed, as by `make test-system`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from npu_backend import cli, config, families, soc
from npu_backend.cli.completion import completion

needs = {name: pytest.mark.skipif(not shutil.which(name), reason=f"not run: no {name}") for name in ("fish", "zsh")}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts as a user would save them."""
    folder = tmp_path_factory.mktemp("scripts")
    for shell in ("bash", "zsh", "fish"):
        (folder / shell).write_text(completion(shell) + "\n", encoding="utf-8")
    return folder


def offered(scripts: Path, line: str) -> set[str]:
    """What bash offers at the end of `npu-backend <line>`, a Tab pressed after its last character."""
    words = ["npu-backend", *line.split(" ")]
    code = f"""
        source {shlex.quote(str(scripts / "bash"))}
        COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}
        read -r _ function name <<< "$(complete -p npu-backend | sed 's/.* -F/-F/')"
        [ "$name" = npu-backend ] || exit 1
        $function && printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    command = ["bash", "--norc", "--noprofile", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def options(command: str) -> set[str]:
    """The options that a command declares, from its parser."""
    parser = argparse.ArgumentParser()
    importlib.import_module(f"npu_backend.cli.{command.replace('-', '_')}").add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


def test_bash_offers_the_commands(scripts: Path) -> None:
    assert offered(scripts, "") == set(cli.command_names())
    assert offered(scripts, "co") == {"compile-check", "completion"}
    assert offered(scripts, "--v") == {"--version"}
    assert offered(scripts, "no-such") == set()


@pytest.mark.parametrize("command", cli.command_names())
def test_bash_offers_the_options_of_each_command(scripts: Path, command: str) -> None:
    assert offered(scripts, f"{command} -") == options(command)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("completion ", {"bash", "zsh", "fish"}),
        ("bench --dtype ", {"bfloat16", "float16", "float32"}),
        ("compile-check --liger as", {"ascend", "as-installed"}),
        ("demo --impl-backend ", set(config.IMPL_BACKENDS)),
        ("plan --use-liger --model-type ", set(families.FAMILIES)),
        ("run --virtual-npu=2 --soc Ascend910B", {name for name in soc.SOCS if name.startswith("Ascend910B")}),
    ],
)
def test_bash_offers_the_values_of_an_option(scripts: Path, line: str, values: set[str]) -> None:
    assert offered(scripts, line) == values


def test_bash_offers_files_and_folders_where_they_are_wanted(scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").touch()
    (tmp_path / "verified").mkdir()
    assert offered(scripts, f"plan --config {tmp_path}/ver") == {f"{tmp_path}/verl.yaml", f"{tmp_path}/verified"}
    assert offered(scripts, f"verify --model {tmp_path}/ver") == {f"{tmp_path}/verified"}


@needs["fish"]
def test_fish_offers_commands_options_and_values(scripts: Path) -> None:
    def fish(line: str) -> set[str]:
        code = (
            f"source {shlex.quote(str(scripts / 'fish'))}; complete --do-complete {shlex.quote('npu-backend ' + line)}"
        )
        done = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True)
        return {text.partition("\t")[0] for text in done.stdout.splitlines()}

    assert fish("") == set(cli.command_names())
    assert fish("plan --") == {option for option in options("plan") | {"--help"} if option.startswith("--")}
    assert fish("demo --impl-backend ") == set(config.IMPL_BACKENDS)


@needs["zsh"]
def test_zsh_finds_the_script_in_its_path(scripts: Path, tmp_path: Path) -> None:
    shutil.copy(scripts / "zsh", tmp_path / "_npu-backend")
    code = f"""
        fpath=({shlex.quote(str(tmp_path))} $fpath)
        autoload -U compinit && compinit -D -u
        autoload +X _npu-backend && print $_comps[npu-backend]
    """
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "_npu-backend"


def test_what_is_printed_is_that_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.strip() == completion("bash").strip()
    assert cli.main(["completion", "fish", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"shell": "fish", "script": completion("fish")}


def test_an_unknown_shell_is_bad_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["completion", "tcsh"])
    assert exited.value.code == 2
    assert re.search(r"bash'?, '?zsh'?, '?fish", capsys.readouterr().err)


def test_without_shtab_the_error_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert "pip install 'npu-backend[completion]'" in captured.err
