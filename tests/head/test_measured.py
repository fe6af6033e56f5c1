"""What the choice of a backend rests on: `auto` follows what `bench --store` measured on this host, and reports say so.

The devices are stand-ins, nothing is timed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import npu_backend
from npu_backend import cli, device, log
from npu_backend.bench import contestants, measure
from npu_backend.head import backends, measured
from npu_backend.operators import counters


class OfType(NamedTuple):
    """In the place of a torch.device: torch alone knows no `npu`."""

    type: str


NPU, CUDA = OfType("npu"), OfType("cuda")
CHIPS = {"npu": "Ascend910B1", "cuda": "a GPU"}
TIMES = {"triton": 9.0, "torch": 7.0, "liger": 8.0}


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host with an empty cache folder on which every backend can run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured, "_chip", lambda on: CHIPS[on.type])
    monkeypatch.setattr(backends.virtual_npu, "is_active", lambda: False)
    monkeypatch.setattr(backends.triton_npu, "why_unusable", lambda *_: None)
    monkeypatch.setattr(backends.triton_cuda, "why_unusable", lambda *_: None)
    monkeypatch.setattr(backends.liger, "why_unusable", lambda: None)
    monkeypatch.setattr(counters, "_choices", {})
    log.forget_warnings()
    measured._order.cache_clear()
    yield
    measured._order.cache_clear()


def auto(on: OfType, dtype: torch.dtype = torch.bfloat16, **options: object) -> backends.Choice:
    return backends.resolve("auto", on, dtype, **options)


def test_the_fastest_here_is_taken_and_the_report_says_why() -> None:
    assert auto(NPU).name == "triton"
    file = measured.store(NPU, torch.bfloat16, TIMES)
    choice = auto(NPU)
    assert choice.name == "torch"
    assert "measured on this host" in choice.reason
    assert "torch 7.0 ms, liger 8.0 ms, triton 9.0 ms" in choice.reason
    assert any(choice.reason in note for note in npu_backend.patch_status().notes)
    assert json.loads(file.read_text())["Ascend910B1"]["milliseconds"] == {"torch.bfloat16": TIMES}


def test_the_report_says_what_liger_is_on_an_npu() -> None:
    assert backends.resolve("liger", CUDA) == backends.Choice("liger")
    choice = backends.resolve("liger", NPU)
    assert choice.reason == "on npu Liger's function is a chunked loop in torch, no kernel"
    assert f"PPO head: 'liger' ({choice.reason})" in npu_backend.patch_status().notes


def test_it_holds_for_the_chip_and_the_dtype_that_were_measured() -> None:
    measured.store(NPU, torch.bfloat16, TIMES)
    assert auto(NPU, torch.float16).name == "triton"
    assert auto(CUDA).name == "triton"
    measured.store(NPU, torch.float16, {"triton": 1.0, "torch": 2.0})
    measured.store(CUDA, torch.bfloat16, {"triton": 2.0, "torch": 1.0})
    assert [auto(NPU).name, auto(NPU, torch.float16).name, auto(CUDA).name] == ["torch", "triton", "torch"]


def test_times_of_other_versions_count_for_nothing_and_are_replaced(monkeypatch, caplog) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(device, "versions", lambda: {"torch": "2.9.0"})
        measured.store(NPU, torch.bfloat16, TIMES)
        measured.store(NPU, torch.float16, TIMES)
    with caplog.at_level(logging.WARNING, logger="npu_backend"):
        assert [auto(NPU).name for _ in range(3)] == ["triton"] * 3
    (record,) = caplog.records
    assert "torch 2.9.0" in record.getMessage()
    assert "bench --store" in record.getMessage()
    measured.store(NPU, torch.bfloat16, TIMES)
    assert auto(NPU).name == "torch"
    assert auto(NPU, torch.float16).name == "triton"  # of the old versions


def test_the_next_one_is_taken_where_the_fastest_cannot_run(monkeypatch) -> None:
    measured.store(NPU, torch.bfloat16, {"liger": 1.0, "triton": 2.0, "torch": 3.0})
    assert auto(NPU).name == "liger"
    with_bias = types.SimpleNamespace(bias=object(), softcap=None, logit_scale=1.0, temperatures=None)
    choice = auto(NPU, given=with_bias)
    assert choice.name == "triton"
    assert choice.reason == "auto on npu: not 'liger': it has no bias"
    monkeypatch.setattr(backends.triton_npu, "why_unusable", lambda *_: "the compiler said so")
    assert auto(NPU, given=with_bias) == backends.Choice(
        "torch", "auto on npu: not 'liger': it has no bias; not 'triton': the compiler said so"
    )


def test_ranks_that_share_a_vocabulary_choose_alike_whatever_their_hosts_measured() -> None:
    measured.store(NPU, torch.bfloat16, TIMES)
    assert auto(NPU, vocab_parallel=True).name == "triton"


def test_without_a_folder_for_caches_nothing_was_measured(monkeypatch, caplog) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does for a user that is not listed
    assert measured.order(NPU, torch.bfloat16) == ((), "")
    assert "set XDG_CACHE_HOME" in caplog.text


def test_a_file_that_is_no_json_is_said_and_left_alone(caplog) -> None:
    measured.file().parent.mkdir(parents=True)
    measured.file().write_text("{")
    with caplog.at_level(logging.WARNING, logger="npu_backend"):
        assert auto(NPU).name == "triton"
    assert str(measured.file()) in caplog.text
    assert measured.file().read_text() == "{"


@pytest.mark.parametrize("failing", [None, "npu-backend torch"])
def test_bench_stores_what_it_measured(monkeypatch, capsys, failing: str | None) -> None:
    """The command, with times that are made up: `torch` faster than `triton`, in every round."""
    heads = [
        contestants.Contestant("npu-backend torch", None, "", ours=True, impl_backend="torch"),
        contestants.Contestant("npu-backend triton", None, "", ours=True, impl_backend="triton"),
        contestants.Contestant("somebody's", None, ""),
    ]

    class Bench:
        def __init__(self, case: measure.Case, *_: object, **__: object) -> None:
            self.case = {**dataclasses.asdict(case), "silent_rows": 0, "dtype": "bfloat16"}

        def run(self, heads: list[contestants.Contestant], *_: int) -> measure.Result:
            timings = [
                measure.Timing(head.name, mode, 10.0 + place, 1.0, 99.0, 1.0, 1.0, 1.0)
                for place, head in enumerate(heads)
                for mode in ("no_grad", "train", "train_silent")
                if head.name != failing
            ]
            return measure.Result(self.case, {}, timings)

    monkeypatch.setattr(device, "detect", lambda: device.Device("npu", "a stand-in", name="Ascend910B1"))
    monkeypatch.setattr(torch, "device", lambda name: NPU)
    monkeypatch.setattr(contestants, "find", lambda on: (heads, []))
    monkeypatch.setattr(measure, "Bench", Bench)
    assert cli.main(["bench", "--store", "--shape", "8,16,32", "--shape", "8,32,32"]) == 0
    assert ("'triton'" if failing else "'torch'") in capsys.readouterr().err
    expected = {"triton": 22.0} if failing else {"torch": 20.0, "triton": 22.0}
    assert json.loads(measured.file().read_text())["Ascend910B1"]["milliseconds"]["torch.bfloat16"] == expected
    assert cli.main(["bench", "--store", "--only", "torch"]) == 2
    assert "nothing to choose from, only torch is measured" in capsys.readouterr().err
