"""`npu-backend bench`: what it refuses before it measures anything, and that a document can be shown again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npu_backend import cli

pytest.importorskip("torch")
SMALL = ["--shape", "8,16,32", "--rounds", "1", "--error-rows", "4", "--only", "torch"]


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("this was to be refused before anything is measured")

    monkeypatch.setattr("npu_backend.bench.measure.Bench", measured)
    monkeypatch.setattr("npu_backend.bench.actor_update.run", measured)


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rounds", "0"], "--rounds 0"),
        (["--rounds", "-3"], "--rounds -3"),
        (["--error-rows", "0"], "--error-rows 0"),
        (["--silent", "1"], "--silent 1.0"),
        (["--silent", "-0.1"], "--silent -0.1"),
        (["--silent", "nan"], "--silent nan"),
        (["--free-gib", "0"], "--free-gib 0"),
        (["--output", "missing/found.json"], "--output missing/found.json"),
        (["--output", "."], "--output ."),
        (["--plot", "missing/found.png"], "--plot missing/found.png"),
        (["--shape", "8,16,32", "--shape", "8,16"], "--shape '8,16'"),
        (["--only", "no such head"], "no such head"),
        (["--cost", "--only", "no such head"], "no such head"),
        (["--cost", "--plot", "found.png"], "--cost"),
        (["--end-to-end", "--cost"], "--end-to-end"),
        (["--end-to-end", "--shape", "8,16,32"], "--end-to-end"),
        (["--end-to-end", "--seeds", "0"], "--seeds 0"),
        (["--end-to-end", "--updates", "-1"], "--updates -1"),
        (["--end-to-end", "--only", "no such head"], "no such head"),
        (["--cost", "--read", "found.json"], "--cost"),
        (["--store", "--cost"], "--store"),
        (["--store", "--free-gib", "8"], "--store"),
        (["--store"], "--store"),  # on a CPU `auto` has nothing to choose from
    ],
)
def test_an_option_that_means_nothing_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


HEADER = '"device": "cpu", "torch": "2", "triton": null, "python": "3", "contestants": {}, "absent": []'
FOREIGN = {
    "missing": (None, "No such file"),
    "not JSON": ("{", "JSON"),
    "not text": (b"\xff\xfe\x00", "JSON"),
    "a list": ("[]", "not a document"),
    "a number": ("3", "not a document"),
    "another tool's": ('{"results": []}', "not a document"),
    "part of ours": (
        f'{{{HEADER}, "results": [{{"case": {{"rows": "x", "hidden": 1, "vocab": 1}}, "gemm_ms": {{}}}}]}}',
        "not a document",
    ),
    "nothing measured": (
        f'{{{HEADER}, "results": []}}',
        "not a document",
    ),
}


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("kind", [[], ["--end-to-end"]], ids=["head", "update"])
@pytest.mark.parametrize(("content", "named"), FOREIGN.values(), ids=FOREIGN)
def test_a_file_that_bench_did_not_write_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | bytes | None, named: str, kind: list[str]
) -> None:
    file = tmp_path / "found.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert cli.main(["bench", *kind, "--read", str(file)]) == 2
    captured = capsys.readouterr()
    assert str(file) in captured.err
    assert named in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_what_was_measured_can_be_written_and_shown_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert cli.main(["bench", *SMALL, "--output", str(file)]) == 0
    measured = capsys.readouterr().out
    assert "## N=8 H=16 V=32" in measured
    assert json.loads(file.read_text())["results"]
    assert cli.main(["bench", "--read", str(file)]) == 0
    assert capsys.readouterr().out == measured


@pytest.mark.parametrize("arguments", [["--read", "h200_head.json"], ["--end-to-end", "--read", "h200_actor.json"]])
def test_what_is_committed_can_be_drawn(tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(Path(__file__).parents[2] / "docs" / "benchmarks")
    picture = tmp_path / "times.png"
    assert cli.main(["bench", *arguments, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
