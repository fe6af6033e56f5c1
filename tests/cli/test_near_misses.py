"""A name that is mistyped on the command line is answered by the one that was probably meant; a file is named once."""

from __future__ import annotations

import pytest

from npu_backend import cli


@pytest.mark.parametrize("name", ["qwen33", "Qwen3", "QWEN_3"])
def test_a_model_type(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert cli.main(["plan", "--model-type", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"npu-backend plan: --model-type: model type {name!r} is unknown")
    assert error.endswith("; did you mean 'qwen3'?\n")


def test_a_model_type_of_the_compiler_s_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile-check", "--model-type", "Qwen3"]) == 2
    assert capsys.readouterr().err.endswith("; did you mean 'qwen3'?\n")


@pytest.mark.parametrize(
    ("name", "hint"), [("ascend910b1", "; did you mean 'Ascend910B1'? (known: "), ("foo", "'foo' (known: ")]
)
def test_a_chip(capsys: pytest.CaptureFixture[str], name: str, hint: str) -> None:
    assert cli.main(["run", "--virtual-npu", "--soc", name, "--", "true"]) == 2
    assert hint in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "compile-check"):
        assert cli.main([command, "--config", "nofile.yaml"]) == 2
        message = f"npu-backend {command}: --config: nofile.yaml cannot be read: No such file or directory\n"
        assert capsys.readouterr().err == message


def test_a_folder_that_is_not_there_is_said_by_verify_once(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert cli.main(["verify", "--model", "nofolder"]) == 2
    assert capsys.readouterr().err.startswith("npu-backend verify: 'nofolder' is no checkpoint's folder")
