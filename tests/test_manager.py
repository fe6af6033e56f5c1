"""Choice and exclusivity: one patch set per process, chosen by use_liger, reported on rank 0."""

from __future__ import annotations

import json
import logging
import sys
import types

import pytest

import npu_backend
from npu_backend import log, manager
from npu_backend.device import Device
from npu_backend.errors import BackendUnavailableError, ConfigError, PatchConflictError, PatchTargetError
from npu_backend.patches.engine import ENGINE, Patch, PatchSet

NPU = Device("npu", "a test says so", "Ascend910B1")
CUDA = Device("cuda", "a test says so", "H200")
CPU = Device("cpu", "a test says so")
QWEN3 = {"hf_config": {"model_type": "qwen3"}}
QWEN2 = {"hf_config": {"model_type": "qwen2"}}

MODELING = """
class Norm:
    def forward(self, x):
        return x
def rope(q, k):
    return q, k
"""
OURS = """
def forward(original, context):
    def forward(self, x):
        return original(self, x) + 1
    return forward
def rope(original, context):
    def rope(q, k):
        return k, q
    return rope
def install(plan):
    import sys
    for family in plan.families:
        library = sys.modules.get(f"mlib.{family}")
        if library is not None:
            library.Norm = type("TheirNorm", (), {"forward": lambda self, x: -x})
    return []
"""


@pytest.fixture(autouse=True)
def world(monkeypatch):
    """A library `mlib` with two families, both sets over it, and an NPU."""

    def module(name: str, source: str = "", **values: object) -> types.ModuleType:
        made = types.ModuleType(name)
        exec(source, made.__dict__)
        made.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    def records(target: str, replacement: str, op: str) -> list[Patch]:
        return [Patch(f"mlib.{f}:{target}", replacement, op, f, "w", "u", "r") for f in ("qwen3", "qwen2", "qwen3_5")]

    module("mlib")
    libraries = {family: module(f"mlib.{family}", MODELING) for family in ("qwen3", "qwen2")}
    module("mours", OURS)
    norm, rope = records("Norm.forward", "mours:forward", "rms_norm"), records("rope", "mours:rope", "rotary")
    module("npu_backend.patches.verl_npu", PATCH_SET=PatchSet("verl_npu", (*norm, *rope)))
    liger = PatchSet("liger", tuple(records("Norm", "", "rms_norm")), install="mours:install")
    module("npu_backend.patches.liger", PATCH_SET=liger)
    monkeypatch.setattr(manager.device, "detect", lambda: NPU)
    log.forget_warnings()
    yield libraries
    ENGINE.revert()


def on(monkeypatch, device: Device) -> None:
    monkeypatch.setattr(manager.device, "detect", lambda: device)


def test_plan_then_apply_then_status_then_revert(world):
    original = vars(world["qwen3"].Norm)["forward"]
    assert npu_backend.plan_patches(QWEN3).applied == 0
    assert vars(world["qwen3"].Norm)["forward"] is original
    report = npu_backend.apply_npu_fsdp_patches(QWEN3)
    assert (report.applied, report.patch_set, report.status) == (2, "verl_npu", "applied")
    assert {row.model_type for row in report.rows} == {"qwen3"}  # scoped by the model
    assert "Ascend910B1" in report.device
    assert npu_backend.patch_status().applied == 2
    assert npu_backend.patch_status().patch_set == "verl_npu"
    reverted = npu_backend.revert_patches()
    assert [row.state for row in reverted.rows] == ["reverted", "reverted"]
    assert vars(world["qwen3"].Norm)["forward"] is original
    assert npu_backend.patch_status().patch_set is None


@pytest.mark.case("A27", "A26")
def test_the_same_choice_again_changes_nothing_and_another_family_joins(world):
    npu_backend.apply_npu_fsdp_patches(QWEN3)
    replacement = vars(world["qwen3"].Norm)["forward"]
    again = npu_backend.apply_npu_fsdp_patches(QWEN3)
    assert (again.status, again.applied) == ("already applied", 2)
    assert vars(world["qwen3"].Norm)["forward"] is replacement
    joined = npu_backend.apply_npu_fsdp_patches(QWEN2)  # the new configuration in full, never the old one's
    assert (joined.status, joined.applied) == ("applied", 2)
    assert npu_backend.patch_status().applied == 4


@pytest.mark.parametrize("first", [True, False])
def test_the_other_choice_is_refused_until_reverted(world, first):
    npu_backend.apply_npu_fsdp_patches({**QWEN3, "use_liger": first})
    before = dict(vars(world["qwen3"]))
    with pytest.raises(PatchConflictError) as error:
        npu_backend.apply_npu_fsdp_patches({**QWEN2, "use_liger": not first})
    assert f"use_liger={first}" in str(error.value)
    assert f"use_liger={not first}" in str(error.value)
    assert "revert_patches" in str(error.value)
    assert dict(vars(world["qwen3"])) == before
    npu_backend.revert_patches()
    assert npu_backend.apply_npu_fsdp_patches({**QWEN2, "use_liger": not first}).applied


def test_liger_after_verl_never_writes_into_ligers_class(world):
    """style_anchors fact 4: verl's table wrote its forward into LigerRMSNorm itself."""
    npu_backend.apply_npu_fsdp_patches({**QWEN3, "use_liger": True})
    theirs = vars(world["qwen3"].Norm)["forward"]
    with pytest.raises(PatchConflictError):
        npu_backend.apply_npu_fsdp_patches(QWEN3)
    assert vars(world["qwen3"].Norm)["forward"] is theirs


@pytest.mark.parametrize(
    ("device", "use_liger", "state"),
    [
        (CPU, False, "skipped"),
        (CPU, True, "skipped"),
        (CUDA, False, "skipped"),
        (CUDA, True, "applied"),
        (NPU, True, "applied"),
    ],
)
def test_what_each_device_takes(monkeypatch, world, device, use_liger, state):
    on(monkeypatch, device)
    report = npu_backend.apply_npu_fsdp_patches({**QWEN3, "use_liger": use_liger})
    assert {row.state for row in report.rows} == {state}
    if state == "skipped":
        assert all(device.type in row.reason for row in report.rows)
        npu_backend.apply_npu_fsdp_patches({**QWEN3, "use_liger": not use_liger})  # nothing in force, nothing decided


@pytest.mark.case("A01", "A22")
def test_a_family_that_this_transformers_lacks_is_unavailable_and_says_so_quietly(world, caplog):
    with caplog.at_level(logging.INFO, "npu_backend"):
        report = npu_backend.apply_npu_fsdp_patches(None)
    by_family = {row.model_type: row.state for row in report.rows}
    assert by_family == {"qwen3": "applied", "qwen2": "applied", "qwen3_5": "unavailable"}
    assert [r.levelname for r in caplog.records] == ["INFO"]
    caplog.clear()
    npu_backend.revert_patches()
    with caplog.at_level(logging.INFO, "npu_backend"):
        npu_backend.apply_npu_fsdp_patches(QWEN3)
    assert "qwen3_5" not in caplog.text


@pytest.mark.case("A18")
def test_an_unknown_model_type(world, monkeypatch, caplog):
    gpt2 = {"hf_config": {"model_type": "gpt2"}}
    report = npu_backend.apply_npu_fsdp_patches(gpt2)
    assert report.applied == 0
    assert [row.state for row in report.rows] == ["unavailable"]
    assert "gpt2" in caplog.text
    assert len(caplog.records) == 1
    monkeypatch.setenv("NPU_BACKEND_STRICT", "1")
    with pytest.raises(BackendUnavailableError, match="gpt2.*qwen2.*qwen3"):
        npu_backend.apply_npu_fsdp_patches(gpt2)


@pytest.mark.case("A19")
def test_nothing_applied_is_a_warning_and_strictly_an_error(world, monkeypatch, caplog):
    absent = {"hf_config": {"model_type": "qwen3_5"}}
    report = npu_backend.apply_npu_fsdp_patches(absent)
    assert report.applied == 0
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "nothing was patched" in caplog.text
    npu_backend.revert_patches()
    monkeypatch.setenv("NPU_BACKEND_STRICT", "1")
    with pytest.raises(BackendUnavailableError, match="nothing was patched"):
        npu_backend.apply_npu_fsdp_patches(absent)
    assert ENGINE.ledger == []


def test_a_lost_npu_is_a_warning_and_one_that_nobody_expects_is_not(world, monkeypatch, caplog):
    on(monkeypatch, Device("cpu", "torch_npu finds no device"))
    monkeypatch.setattr(manager.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level("INFO", logger="npu_backend"):
        npu_backend.apply_npu_fsdp_patches(QWEN3)
        monkeypatch.setattr(manager.importlib.util, "find_spec", lambda name: object())
        npu_backend.apply_npu_fsdp_patches(QWEN3)
        monkeypatch.setenv("NPU_BACKEND_DEVICE", "cpu")
        npu_backend.apply_npu_fsdp_patches(QWEN3)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
    assert "torch_npu finds no device" in caplog.records[1].getMessage()


@pytest.mark.case("A35")
@pytest.mark.parametrize(
    ("skip", "disabled"),
    [("rotary", {"rotary"}), ("qwen3", {"rotary", "rms_norm"}), ("qwen3.rms_norm", {"rms_norm"}), ("qwen2", set())],
)
def test_the_user_switches_off_operators_or_families(world, monkeypatch, skip, disabled):
    monkeypatch.setenv("NPU_BACKEND_SKIP", skip)
    rows = npu_backend.apply_npu_fsdp_patches(QWEN3).rows
    assert {row.op for row in rows if row.state == "disabled"} == disabled
    assert all("NPU_BACKEND_SKIP" in row.reason for row in rows if row.state == "disabled")
    assert (world["qwen3"].rope(1, 2) == (2, 1)) == ("rotary" not in disabled)


def test_disable_turns_everything_off(world, monkeypatch):
    monkeypatch.setenv("NPU_BACKEND_DISABLE", "1")
    report = npu_backend.apply_npu_fsdp_patches(QWEN3)
    assert {row.state for row in report.rows} == {"disabled"}
    assert world["qwen3"].rope(1, 2) == (1, 2)


def test_disable_wins_over_a_device_that_is_not_here(monkeypatch):
    def missing() -> Device:
        raise BackendUnavailableError("no such device")

    monkeypatch.setattr(manager.device, "detect", missing)
    with pytest.raises(BackendUnavailableError, match="no such device"):
        npu_backend.apply_npu_fsdp_patches(None)
    monkeypatch.setenv("NPU_BACKEND_DISABLE", "1")
    assert {row.state for row in npu_backend.apply_npu_fsdp_patches(None).rows} == {"disabled"}
    assert not npu_backend.patch_status().rows
    assert not npu_backend.revert_patches().rows


def test_a_plan_that_is_turned_off_asks_no_other_set(world, monkeypatch):
    npu_backend.apply_npu_fsdp_patches({**QWEN3, "use_liger": True})
    monkeypatch.setenv("NPU_BACKEND_DISABLE", "1")
    assert npu_backend.plan_patches({"hf_config": {"model_type": "nosuch"}}).rows == ()


def test_code_of_the_checkpoint_is_not_reached_and_the_report_says_so(world, caplog):
    remote = type("OwnConfig", (), {"__module__": "transformers_modules.own.configuration", "model_type": "qwen3"})()
    with caplog.at_level(logging.WARNING, "npu_backend"):
        report = npu_backend.apply_npu_fsdp_patches({"hf_config": remote})
    assert report.applied
    (note,) = report.notes
    assert note.startswith("OwnConfig is code of the checkpoint")
    assert note in caplog.text
    assert note in str(report)
    npu_backend.revert_patches()
    assert npu_backend.plan_patches(QWEN3).notes == ()


@pytest.mark.case("A40")
def test_status_is_json_with_a_reason_for_whatever_is_not_applied(world, monkeypatch):
    monkeypatch.setenv("NPU_BACKEND_SKIP", "qwen3.rotary")
    npu_backend.apply_npu_fsdp_patches(None)
    status = npu_backend.patch_status().to_dict()
    rows = json.loads(json.dumps(status))["rows"]
    assert {row["state"] for row in rows} == {"applied", "disabled", "unavailable"}
    assert all(row["reason"] for row in rows if row["state"] != "applied")
    assert "applied" in str(npu_backend.patch_status())


def test_a_bad_configuration_changes_nothing(world, monkeypatch):
    for bad in ({"use_liger": "maybe"}, {"fused_kernel_options": 3}, {"fused_kernel_options": {"impl_backend": "gpu"}}):
        with pytest.raises(ConfigError):
            npu_backend.apply_npu_fsdp_patches({**QWEN3, **bad})
    monkeypatch.setenv("NPU_BACKEND_WRONG", "1")
    with pytest.raises(ConfigError, match="NPU_BACKEND_WRONG"):
        npu_backend.apply_npu_fsdp_patches(QWEN3)
    assert ENGINE.ledger == []


@pytest.mark.case("A10", "A11")
def test_a_missing_or_foreign_target_stops_before_the_first_change(world):
    library = world["qwen3"]
    rope = library.rope
    del library.rope
    with pytest.raises(PatchTargetError, match="rope"):
        npu_backend.apply_npu_fsdp_patches(QWEN3)
    library.rope = types.FunctionType(rope.__code__, {"__name__": "somebody.else"})
    with pytest.raises(PatchConflictError, match=r"somebody\.else"):
        npu_backend.apply_npu_fsdp_patches(QWEN3)
    assert library.Norm().forward(1) == 1


@pytest.mark.case("A21", "A22")
def test_one_line_on_rank_0_and_none_elsewhere(world, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "npu_backend"):
        npu_backend.apply_npu_fsdp_patches(QWEN3)
        assert len(caplog.records) == 1  # no process group counts as rank 0
        assert "2 applied" in caplog.text
        monkeypatch.setenv("RANK", "1")
        npu_backend.revert_patches()
        npu_backend.apply_npu_fsdp_patches(QWEN3)
        assert len(caplog.records) == 1
