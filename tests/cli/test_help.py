"""What somebody sees who types `npu-backend` for the first time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from npu_backend import cli


def test_help_says_what_each_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["--help"])
    assert exited.value.code == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for name in cli.command_names():
        assert cli.summary(name).endswith(".")
        assert f"{name} {cli.summary(name)}" in lines


def test_no_command_is_bad_use_and_shows_the_same_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["-h"])
    told = capsys.readouterr().out
    with pytest.raises(SystemExit) as exited:
        cli.main([])
    assert exited.value.code == 2
    assert capsys.readouterr() == ("", told)


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from npu_backend import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: print([m for m in sys.modules if m.startswith('npu_backend.cli.')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"
