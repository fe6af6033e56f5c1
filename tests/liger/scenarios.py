"""What the tests of the patch set `liger` look at, run in one process of its own: Liger's Ascend sources in Triton's
interpreter, on CPU tensors. Triton's interpreter must be on before anything imports triton, and importing Liger takes
seconds, so every scenario runs here once and leaves what it saw as JSON; `test_liger_scenarios.py` judges it.

    TRITON_INTERPRET=1 PYTHONPATH=.:tests python tests/liger/scenarios.py RESULTS.json [SCENARIO ...]
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import npu_backend
from npu_backend import device, liger_interpreter
from npu_backend.errors import NPUBackendError

if __name__ == "__main__":
    liger_interpreter.activate()  # before references imports torch, which imports triton

import torch
from interpreter_facts import FACTS
from liger_kernel.transformers import monkey_patch
from references import error_bound, max_error
from transformers import AutoModelForCausalLM, Qwen2_5_VLForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SCENARIOS: dict[str, Callable[[], Any]] = {}
NPU = device.Device("npu", "a fake device of this test", name="Ascend910B1")
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8}


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def tiny(model_type: str, **settings: Any) -> Any:
    """A two-layer configuration of a model type; eager attention, so that only patched operators differ."""
    config = CONFIG_MAPPING[model_type](**{**TEXT, **settings})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # transformers' grouped one has no float64
    return config


def rows_of(report: Any) -> list[dict[str, str]]:
    return report.to_dict()["rows"]


@contextlib.contextmanager
def on(where: device.Device, **environment: str) -> Iterator[None]:
    """Let the manager see this device and environment; whatever was applied is taken back at the end."""
    before = device.detect
    device.detect = lambda: where
    os.environ.update(environment)
    try:
        yield
    finally:
        with contextlib.suppress(NPUBackendError):
            npu_backend.revert_patches()
        device.detect = before
        for name in environment:
            del os.environ[name]


def everything() -> dict[str, Any]:
    """Every attribute of the modeling modules and of Liger's patching module that are loaded now."""
    found = {}
    for name, module in list(sys.modules.items()):
        if (name.startswith("transformers.models.") and ".modeling_" in name) or name == monkey_patch.__name__:
            found.update({f"{name}:{key}": value for key, value in vars(module).items()})
    return found


def changed(before: dict[str, Any]) -> list[str]:
    now = everything()
    return sorted(name for name in before if now.get(name) is not before[name])


# -- parity ----------------------------------------------------------------------------------------------------------


def run(model: Any) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of all parameters that are not frozen, of two packed sequences of 5 and 4 tokens."""
    ids = torch.randint(3, TEXT["vocab_size"], (1, 9), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None]
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def randomised(config: Any, dtype: torch.dtype) -> Any:
    """The unpatched model, its norms away from one, its embedding frozen."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.get_input_embeddings().requires_grad_(False)
    return model


def parity(config: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The patched model against float64: the worst error as a share of what the tolerance rule allows."""
    model = randomised(config, dtype)
    reference, eager = run(copy.deepcopy(model).double()), run(model)
    report = liger_interpreter.apply_liger_in_interpreter(config)
    try:
        patched = AutoModelForCausalLM.from_config(config).to(dtype)
        patched.load_state_dict(model.state_dict())
        patched.get_input_embeddings().requires_grad_(False)
        got = run(patched)
    finally:
        npu_backend.revert_patches()
    shares = {
        n: max_error(got[n], reference[n]) / error_bound(eager[n], reference[n], dtype) for n in reference if n in got
    }
    return {
        "rows": rows_of(report),
        "device": report.device,
        "missing": sorted(set(reference) - set(got)),
        "worst": max(shares.items(), key=lambda item: item[1]),
        "classes": sorted({type(m).__name__ for m in patched.modules() if "Liger" in type(m).__name__}),
    }


@scenario
def parity_llama() -> Any:
    return parity(tiny("llama"))


@scenario
def parity_qwen3() -> Any:
    return parity(tiny("qwen3", head_dim=12, num_hidden_layers=1))


@scenario
def parity_qwen3_moe() -> Any:
    return parity(tiny("qwen3_moe", head_dim=8, num_hidden_layers=1, **MOE))


@scenario
def parity_gemma2() -> Any:
    return parity(tiny("gemma2", head_dim=8, num_hidden_layers=1))


@scenario
def parity_qwen3_5() -> Any:
    return parity(tiny("qwen3_5_text", **LINEAR))


@scenario
def parity_llama_bfloat16() -> Any:
    return parity(tiny("llama", num_hidden_layers=1), torch.bfloat16)


@scenario
def parity_phi3_partial_rotary() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return parity(tiny("phi3", num_hidden_layers=1, rope_parameters=rope))


@scenario
def partial_rotary_without_the_predicate() -> Any:
    """The Ascend kernel on a half-rotated head, to show that the predicate is needed."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    q, k = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
    angle = torch.rand(1, 6, 4).repeat(1, 1, 2)
    right, liger = (
        apply_rotary_pos_emb(q, k, angle.cos(), angle.sin()),
        liger_rotary_pos_emb(q, k, angle.cos(), angle.sin()),
    )
    return {"error": max_error(liger[0], right[0])}


# -- applying and taking back ----------------------------------------------------------------------------------------


@scenario
def identity() -> Any:
    """Apply for two families, again, and revert."""
    importlib.import_module("transformers.models.llama.modeling_llama")
    importlib.import_module("transformers.models.gemma2.modeling_gemma2")
    before = everything()
    first = liger_interpreter.apply_liger_in_interpreter(tiny("llama"))
    again = liger_interpreter.apply_liger_in_interpreter(tiny("llama"))
    other = liger_interpreter.apply_liger_in_interpreter(tiny("gemma2"))
    in_force = changed(before)
    npu_backend.revert_patches()
    return {
        "first": rows_of(first),
        "again": rows_of(again),
        "other": rows_of(other),
        "in_force": in_force,
        "left": changed(before),
    }


def verl_calls_liger(model: Any) -> None:
    """What verl's FSDP engine does after it has built the model."""
    monkey_patch._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)


def compose(config: Any, where: device.Device = NPU, **environment: str) -> dict[str, Any]:
    """Our hook, then the model, then verl's call; then revert."""
    model_type = config.model_type.removesuffix("_text")
    importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    before = everything()
    with on(where, **environment):
        report = npu_backend.apply_npu_fsdp_patches({"use_liger": True, "hf_config": config})
        model = AutoModelForCausalLM.from_config(config)
        verl_calls_liger(model)
        status = npu_backend.patch_status()
        in_force = changed(before)
        mlp_bound = "forward" in vars(model.model.layers[0].mlp)
        finite = bool(run(model)["logits"].isfinite().all())
        npu_backend.revert_patches()
    return {
        "rows": rows_of(report),
        "status": rows_of(status),
        "in_force": in_force,
        "mlp_bound": mlp_bound,
        "finite": finite,
        "left": changed(before),
    }


@scenario
def composition() -> Any:
    return compose(tiny("qwen3", head_dim=8))


@scenario
def composition_with_skip() -> Any:
    return compose(tiny("qwen3", head_dim=8), NPU_BACKEND_SKIP="rotary,qwen3.gated_mlp")


@scenario
def skip_taken_back() -> Any:
    """An operator is skipped at first and not the second time; then verl's call."""
    config = tiny("qwen3", head_dim=8)
    before = everything()
    with on(NPU, NPU_BACKEND_SKIP="rotary"):
        npu_backend.apply_npu_fsdp_patches({"use_liger": True, "hf_config": config})
        os.environ["NPU_BACKEND_SKIP"] = ""
        npu_backend.apply_npu_fsdp_patches({"use_liger": True, "hf_config": config})
        model = AutoModelForCausalLM.from_config(config)
        verl_calls_liger(model)
        norm_bound = "forward" in vars(model.model.norm)
        in_force = changed(before)
    return {"norm_bound": norm_bound, "in_force": in_force, "left": changed(before)}


@scenario
def wrong_soc() -> Any:
    chip = device.Device("npu", "a fake device of this test", name="Ascend310P3")
    return {"llama": compose(tiny("llama"), chip), "gemma2": compose(tiny("gemma2", head_dim=8), chip)}


@scenario
def two_engines() -> Any:
    config = tiny("qwen3")
    before = everything()
    with on(NPU):
        npu_backend.apply_npu_fsdp_patches({"use_liger": True, "hf_config": config})
        in_force = changed(before)
        try:
            npu_backend.apply_npu_fsdp_patches({"use_liger": False, "hf_config": config})
            message = ""
        except NPUBackendError as error:
            message = f"{type(error).__name__}: {error}"
        still = changed(before)
    return {"message": message, "in_force": in_force, "still": still, "left": changed(before)}


@scenario
def unfit_models() -> Any:
    """Models that Liger's classes cannot hold: another activation, biases in the MLP."""
    configs = {
        "activation": tiny("llama", hidden_act="gelu"),
        "bias": tiny("llama", mlp_bias=True),
        "gemma": tiny("gemma2", hidden_activation="gelu"),
    }
    seen = {}
    for name, config in configs.items():
        parameters = set(AutoModelForCausalLM.from_config(config).state_dict())
        report = liger_interpreter.apply_liger_in_interpreter(config)
        patched = AutoModelForCausalLM.from_config(config)
        npu_backend.revert_patches()
        seen[name] = {"rows": rows_of(report), "same_parameters": set(patched.state_dict()) == parameters}
    return seen


@scenario
def every_option() -> Any:
    """No model named: every family, every operator."""
    before = everything()
    with on(NPU):
        report = npu_backend.apply_npu_fsdp_patches({"use_liger": True})
        cross_entropy = torch.nn.functional.cross_entropy.__module__
        forwards = {
            name: vars(value)["forward"].__module__
            for name, value in everything().items()
            if name.endswith(("ForCausalLM", "ForConditionalGeneration"))
            if isinstance(value, type) and "forward" in vars(value)
        }
        npu_backend.revert_patches()
    foreign = sorted(name for name, module in forwards.items() if not module.startswith("transformers"))
    return {
        "rows": rows_of(report),
        "cross_entropy": cross_entropy,
        "foreign_forwards": foreign,
        "left": changed(before),
    }


@scenario
def both_switches() -> Any:
    """use_liger and use_fused_kernels on a VLM: the log-probs, and what is said about it."""
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = CONFIG_MAPPING["qwen2_5_vl"](text_config=text, vision_config=vision)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration._from_config(config).float()
    ids = torch.randint(3, TEXT["vocab_size"], (1, 9))
    labels = ids.roll(-1, dims=1)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    expected = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("npu_backend")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    with on(NPU):
        npu_backend.apply_npu_fsdp_patches({"use_liger": True, "use_fused_kernels": True, "hf_config": config})
        patched = Qwen2_5_VLForConditionalGeneration._from_config(config).float()
        patched.load_state_dict(model.state_dict())
        forward_of = type(patched).forward.__module__
        verl_calls_liger(patched)
        npu_backend.patch_forward_with_backends(patched, use_fused_kernels=True, fused_kernels_backend="torch")
        with torch.no_grad():
            log_probs = patched(input_ids=ids, shift_labels=labels, use_cache=False).log_probs
        classes = sorted({type(m).__name__ for m in patched.modules() if "Liger" in type(m).__name__})
    logger.removeHandler(handler)
    return {
        "error": max_error(log_probs, expected),
        "forward_of": forward_of,
        "lines": [line for line in said if "use_fused_kernels" in line],
        "classes": classes,
    }


def main(path: str, names: list[str]) -> None:
    SCENARIOS.update(FACTS)
    results = {}
    for name in names or SCENARIOS:
        start = time.perf_counter()
        try:
            results[name] = {"value": SCENARIOS[name]()}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        results[name]["seconds"] = round(time.perf_counter() - start, 1)
    Path(path).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
