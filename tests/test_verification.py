"""`verify` on a plain CPU over a stand-in for torch_npu: what it must find, and what it must leave alone."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_torch_npu
import interpreted
import pytest
import tiny_checkpoint
import torch
from torch import Tensor

import npu_backend
from npu_backend import families, model_configs
from npu_backend.device import Device
from npu_backend.patches.engine import ENGINE
from npu_backend.report import VerifyReport
from npu_backend.verification import models, verify

FAMILIES = ("llama", "gemma2", "phi3", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_next")


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> fake_torch_npu.FakeTorchNpu:
    """torch_npu's operators under their names, on CPU tensors, and a device that says it is an NPU."""
    monkeypatch.setattr("npu_backend.device.detect", lambda: Device("npu", "a test", name="Ascend910B1"))
    return fake_torch_npu.install(monkeypatch)


def tiny(model_type: str) -> Any:
    return models.tiny_model(model_configs.default_config(model_type))


def verdicts(report: VerifyReport) -> dict[tuple[str, str], str]:
    return {(row.op, row.direction): row.verdict for row in report.rows}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_operator_of_a_family_is_reached_and_agrees(npu: fake_torch_npu.FakeTorchNpu, model_type: str) -> None:
    try:
        model = tiny(model_type)
    except npu_backend.ConfigError as error:
        pytest.skip(str(error))
    report = verify(model=model)
    assert report.ok, str(report)
    assert {row.verdict for row in report.rows if row.op != "sparse_moe"} <= {"ok", "skipped"}, str(report)
    assert {row.share for row in report.rows if row.verdict == "ok"} == {1.0}, str(report)
    assert all(row.calls and not row.fallbacks for row in report.rows if row.verdict == "ok"), str(report)
    assert npu_backend.patch_status().applied == 0


def test_calls_are_counted_per_target(npu: fake_torch_npu.FakeTorchNpu) -> None:
    report = verify(model=tiny("llama"))
    assert {row.op: row.calls for row in report.rows} == {
        "rms_norm": 5,
        "gated_mlp": 2,
        "rotary": 2,
        "ppo_head": 1,
        "model": 1,
    }


def change_operator(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    module = sys.modules["torch_npu"]
    changed = change(getattr(module, name))
    changed.__wrapped__ = fake_torch_npu.OPERATORS[name]  # type: ignore[attr-defined]
    monkeypatch.setattr(module, name, changed)


def slightly_wrong(operator: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: operator(*args, **kwargs) * (1 + 1e-4)


def without_part_of_the_gradient(operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return operator(torch.cat((x[..., :1].detach(), x[..., 1:]), -1), *args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("change", "forward"), [(slightly_wrong, "fail"), (without_part_of_the_gradient, "ok")], ids=["value", "gradient"]
)
def test_an_operator_that_is_wrong_is_found_and_no_other_one_is_accused(
    npu: fake_torch_npu.FakeTorchNpu,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Callable[..., Any]], Callable[..., Any]],
    forward: str,
) -> None:
    change_operator(monkeypatch, "npu_swiglu", change)
    report = verify(model=tiny("llama"))
    found = verdicts(report)
    assert not report.ok
    assert found["gated_mlp", "forward"] == forward
    assert found["gated_mlp", "gradient"] == "fail"
    assert found["model", "forward"] == forward
    assert {verdict for (op, _), verdict in found.items() if op not in ("gated_mlp", "model")} == {"ok"}


def test_a_patch_that_is_never_reached_fails(npu: fake_torch_npu.FakeTorchNpu) -> None:
    model = tiny("llama")
    originals = type(model.model.norm).forward
    for module in model.modules():
        if type(module) is type(model.model.norm):
            module.forward = originals.__get__(module)  # hides what is put on the class
    report = verify(model=model)
    row = next(row for row in report.rows if row.op == "rms_norm")
    assert not report.ok
    assert (row.verdict, row.calls) == ("not reached", 0)
    assert "none of 5 expected calls" in row.reason


def test_a_replacement_that_somebody_has_overwritten_fails(npu: fake_torch_npu.FakeTorchNpu) -> None:
    model = tiny("llama")
    npu_backend.apply_npu_fsdp_patches({"hf_config": model.config})
    kind = type(model.model.norm)
    ours = kind.forward
    theirs = kind.forward = lambda self, x: x
    try:
        report = verify(model=model)
        assert kind.forward is theirs
    finally:
        kind.forward = ours
    row = next(row for row in report.rows if row.op == "rms_norm")
    assert not report.ok
    assert "overwritten" in row.reason


def test_it_changes_nothing_that_was_in_force(npu: fake_torch_npu.FakeTorchNpu) -> None:
    model = tiny("llama")
    npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)  # an instance patch, outside every set
    ledger = list(ENGINE.ledger)
    weights = copy.deepcopy(model.state_dict())
    assert verify(model=model).ok
    assert ledger == ENGINE.ledger
    npu_backend.apply_npu_fsdp_patches({"hf_config": model.config})
    ledger = list(ENGINE.ledger)
    assert verify(model=model).ok
    assert ledger == ENGINE.ledger
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_share_of_calls_that_the_replacement_computed(
    npu: fake_torch_npu.FakeTorchNpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    first = model.model.layers[0].mlp
    monkeypatch.setattr(first, "gate_proj", torch.nn.utils.parametrizations.weight_norm(first.gate_proj))
    hidden = model.model.layers[1].mlp
    hidden.forward = type(hidden).forward.__get__(hidden)  # hides what is put on the class
    rows = [row for row in verify(model=model).rows if row.op == "gated_mlp"]
    assert {(row.calls, row.fallbacks, row.share) for row in rows} in ({(1, 0, 0.5)}, {(1, 1, 0.0)}), rows
    assert all("50%" in str(VerifyReport((row,))) for row in rows if row.share)


@pytest.mark.case("D33")
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_the_whole_models_log_probs_are_compared_with_max_mean_and_verdict(
    npu: fake_torch_npu.FakeTorchNpu, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """Users who saw log-probs of training and rollout drift apart had to bisect the stack by hand."""
    monkeypatch.setattr("npu_backend.verification.check._placed", lambda model: model)  # the device is a stand-in's
    config = {"hf_config": model_configs.default_config(model_type)}
    rows = {row.dtype: row for row in verify(config).rows if row.op == "model"}
    assert set(rows) == {"float32", "bfloat16"}
    assert all(0 < row.mean < row.error and row.mean <= row.allowed for row in rows.values()), rows
    assert {row.verdict for row in rows.values()} == {"ok"}

    change_operator(monkeypatch, "npu_rms_norm", lambda operator: lambda *args, **kw: [operator(*args, **kw)[0] * 1.1])
    wrong = [row for row in verify(config).rows if row.op == "model" and row.dtype == "float32"]
    assert [row.verdict for row in wrong] == ["fail"]
    assert wrong[0].mean > 100 * rows["float32"].mean


def test_a_checkpoints_folder_is_verified_with_its_own_weights(
    npu: fake_torch_npu.FakeTorchNpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_backend.verification.check._placed", lambda model: model)  # the device is a stand-in's
    folder = tiny_checkpoint.write(tmp_path)
    report = verify(model=folder)
    assert report.ok, str(report)
    assert {row.dtype for row in report.rows} == {"float32", "bfloat16"}
    assert {"rms_norm", "gated_mlp", "rotary", "ppo_head", "model"} == {row.op for row in report.rows}
    assert report.versions["torch"]
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(npu_backend.ConfigError, match="cannot load the checkpoint"):
        verify(model=str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(npu_backend.ConfigError, match="refuses"):
        verify(model=folder)
    assert not ENGINE.ledger


def test_a_frozen_model_is_compared_too(npu: fake_torch_npu.FakeTorchNpu) -> None:
    model = tiny("llama").requires_grad_(False)
    report = verify(model=model)
    assert report.ok
    assert {row.direction for row in report.rows} == {"forward", "gradient"}


def test_a_dtype_can_be_chosen(npu: fake_torch_npu.FakeTorchNpu) -> None:
    for dtype in ("bfloat16", torch.bfloat16):
        report = verify(model=tiny("llama"), dtype=dtype)
        assert report.ok, str(report)
        assert {row.dtype for row in report.rows} == {"bfloat16"}
    with pytest.raises(npu_backend.ConfigError, match="int32"):
        verify(model=tiny("llama"), dtype=torch.int32)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", torch.float8_e5m2, "int8", torch.int64, "nn", "nosuch", 3])
def test_a_dtype_that_nothing_is_computed_in_is_refused(dtype: Any) -> None:
    with pytest.raises(npu_backend.ConfigError, match="torch.float64"):
        verify({"hf_config": {"model_type": "qwen3"}}, dtype=dtype)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("x", "'x' is no checkpoint's folder: it has no config.json"),
        (torch.nn.Linear(2, 2), "got Linear: it has no config"),
        ({"model_type": "qwen3"}, "got dict"),
    ],
)
@pytest.mark.parametrize("model_config", [None, {"hf_config": {"model_type": "qwen3"}}])
def test_what_is_no_model_of_transformers_is_refused_before_anything_is_applied(
    npu: fake_torch_npu.FakeTorchNpu, model_config: Any, model: Any, why: str
) -> None:
    with pytest.raises(npu_backend.ConfigError, match=why):
        verify(model_config, model=model)
    assert npu_backend.patch_status().applied == 0


@pytest.mark.parametrize(
    ("hf_config", "named"),
    [
        ({"hidden_size": 64}, "model_type"),
        (3, "model_type"),
        ({"model_type": "nosuch"}, "nosuch"),
        ({"model_type": "qwen3", "layer_types": ["nope"]}, "layer_types"),
        ({"model_type": "qwen3", "hidden_act": "nosuch"}, "nosuch"),
    ],
)
def test_a_configuration_that_no_model_can_be_built_from_is_refused(hf_config: Any, named: str) -> None:
    with pytest.raises(npu_backend.ConfigError, match=named):
        verify({"hf_config": hf_config})
    assert npu_backend.patch_status().applied == 0


def test_on_a_plain_cpu_the_head_is_compared_and_the_rest_is_skipped_with_the_reason() -> None:
    report = verify({"hf_config": model_configs.default_config("qwen3")})
    assert report.ok
    assert {row.op for row in report.rows if row.verdict == "ok"} == {"ppo_head"}
    assert all("cpu" in row.reason for row in report.rows if row.verdict == "skipped")


def test_an_error_while_verifying_leaves_nothing_applied(
    npu: fake_torch_npu.FakeTorchNpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_backend.verification.models.inputs", lambda model: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        verify(model=tiny("llama"))
    assert not ENGINE.ledger


@pytest.mark.parametrize("model_type", families.FAMILIES)
def test_a_tiny_model_keeps_the_structure_of_its_family(model_type: str) -> None:
    try:
        config = model_configs.default_config(model_type)
    except npu_backend.ConfigError:
        pytest.skip("this transformers does not have the family")
    model = models.tiny_model(config)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000
    small = model.config.get_text_config()
    large = config.get_text_config()
    for setting in ("hidden_act", "hidden_activation", "tie_word_embeddings", "partial_rotary_factor"):
        assert getattr(small, setting, None) == getattr(large, setting, None)
    assert set(getattr(small, "layer_types", None) or ()) == set(getattr(large, "layer_types", None) or ())
    out = type(model).forward(model, **models.inputs(model))
    assert out.logits.isfinite().all()


@interpreted.supported
def test_liger_in_the_interpreter_is_compared_with_the_classes_that_it_took_the_place_of() -> None:
    """In a process of its own, because triton must be told before it is imported."""
    pytest.importorskip("liger_kernel")
    code = (
        "from npu_backend import liger_interpreter; liger_interpreter.activate()\n"
        "from npu_backend import model_configs\n"
        "from npu_backend import model_configs\n"
        "from npu_backend.verification import models, verify\n"
        "models.SEQUENCE = 3\n"  # the interpreter takes a tenth of a second for a token in a layer
        "config = models.shrunk(model_configs.default_config('qwen3'))\n"
        "report = liger_interpreter.apply_liger_in_interpreter(config)\n"
        "print(verify(model=models.tiny_model(config)))\n"
        "import npu_backend; npu_backend.revert_patches()\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("verify liger on cpu: ok"), found.stdout
    for op in ("rms_norm", "gated_mlp", "rotary"):
        assert f"ok       {op}" in found.stdout, found.stdout
