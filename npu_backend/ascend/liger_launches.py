"""What Liger's operators would launch for a model: its real layers run on tensors without data, launches are recorded.

Runs in the worker. The model is built by transformers with the sizes of its configuration and one layer of each kind,
on torch's device `meta`; the patch set `liger` is applied as on an NPU, and a forward and a backward pass over text are
made (a vision tower is not run). Host reads of data that is not there get fixed answers (`_answer_host_reads`).
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from npu_backend.ascend import front_end
from npu_backend.ascend.front_end import Launch
from npu_backend.config import BackendConfig, model_types_of
from npu_backend.device import Device
from npu_backend.families import families_of
from npu_backend.manager import Context
from npu_backend.patches import liger
from npu_backend.patches.engine import ENGINE
from npu_backend.soc import Soc

# Liger's file of kernels -> our name of the operator
OPERATORS = {
    "rms_norm": "rms_norm",
    "swiglu": "gated_mlp",
    "geglu": "gated_mlp",
    "rope": "rotary",
    "qwen2vl_mrope": "rotary",
    "llama4_rope": "rotary",
    "fused_moe_kernels": "sparse_moe",
}
_MODULE_OF_3_2_2 = "triton.language.extra.cann.extension"
_tile_bound = [1]  # what a count of MoE tiles is answered with: at most that many


def prepare(soc: Soc, *, as_installed: bool) -> str:
    """Make Liger choose its kernels as on this chip, and record instead of launch, in this process from now on.

    Args:
        soc: The chip.
        as_installed: Leave triton-ascend as it is. Otherwise a module that Liger 0.8.5 imports and that triton-ascend
            3.2.0 lacks is supplied from its own functions, as 3.2.2 has it.

    Returns:
        Why Liger keeps its CUDA kernels here; empty if it takes those for Ascend.
    """
    import torch
    import triton

    os.environ["ASCEND_UB_CAPACITY_BITS"] = str(soc.ub_bytes * 8)  # what CANN answers on this chip
    if not as_installed:
        _supply_module()
    triton.runtime.driver.set_active(_Driver(soc))
    triton.compiler.compile = _compile  # looked up by each kernel at its first launch
    if not hasattr(torch, "npu"):
        torch.utils.rename_privateuse1_backend("npu")  # type: ignore[attr-defined]
        device = types.ModuleType("torch.npu")
        device.is_available = lambda: False  # type: ignore[attr-defined]
        device.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # type: ignore[attr-defined]
        torch._register_device_module("npu", device)
    _answer_host_reads()
    importlib.import_module("liger_kernel.utils").is_npu_available = lambda: True  # type: ignore[attr-defined]
    importlib.import_module("liger_kernel.ops")
    from npu_backend.errors import BackendUnavailableError

    try:
        liger.check_ascend_operators()
    except BackendUnavailableError as error:
        if as_installed:
            liger.check_ascend_operators = lambda: None  # the rest of the check shows what these kernels do
        return str(error)
    return ""


def record(
    content: Mapping[str, Any], soc: Soc, dtype: str, lengths: list[int]
) -> tuple[dict[int, list[Launch]], list[str]]:
    """Launches of one model, for each number of tokens in a packed batch; each once. With them, what the patch set
    leaves alone and why.

    Args:
        content: The model's configuration.
        soc: The chip that `prepare` was given.
        dtype: Of parameters and activations, torch's name.
        lengths: Numbers of tokens.

    Raises:
        NPUBackendError: the patch set cannot be applied.
    """
    import torch

    config = _one_layer_of_each_kind(content)
    with _patched(config, soc) as notes, torch.device("meta"):
        model = _build(config, getattr(torch, dtype))
        found = {}
        for length in lengths:
            text = config.get_text_config()
            experts, chosen = (getattr(text, name, None) or 0 for name in ("num_experts", "num_experts_per_tok"))
            _tile_bound[0] = length * chosen // 32 + experts + 1
            _RECORDED.clear()
            _run(model, length)
            found[length] = list({(launch.key(), launch.grid): launch for launch in _RECORDED}.values())
    return found, notes


def operator_of(launch: Launch) -> str:
    """Our name of the operator that a kernel belongs to."""
    file = str(launch.kernel.fn.__module__).rpartition(".")[2]
    return OPERATORS.get(file, file)


def recompilations(found: Mapping[int, list[Launch]]) -> list[dict[str, Any]]:
    """For each operator: its kernels at one number of tokens, at all of them together, and the constants that hold it.

    A constant holds the number of tokens if it is the same multiple of it at every length; known from two lengths on.
    """
    rows = []
    for operator in dict.fromkeys(operator_of(launch) for launches in found.values() for launch in launches):
        keys: set[str] = set()
        per_length, multiples = [], []
        for length, launches in found.items():
            mine = [launch for launch in launches if operator_of(launch) == operator]
            keys.update(launch.key() for launch in mine)
            per_length.append(len({launch.key() for launch in mine}))
            numbers = [(n, v) for launch in mine for n, v in launch.constants.items() if isinstance(v, int) and v > 1]
            multiples.append({(name, value // length) for name, value in numbers if value % length == 0})
        held = sorted({name for name, _ in set.intersection(*multiples)}) if len(found) > 1 else []
        counts = {"lengths": len(found), "each": max(per_length), "kernels": len(keys)}
        rows.append({"operator": operator, **counts, "token_constants": held})
    return rows


# -- the model -------------------------------------------------------------------------------------------------------


def _one_layer_of_each_kind(content: Mapping[str, Any]) -> Any:
    from npu_backend.model_configs import config_of

    config = config_of(copy.deepcopy(dict(content)))
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    count = max(kinds.index(kind) for kind in set(kinds)) + 1 if kinds else 1
    text.num_hidden_layers = count
    if kinds:
        text.layer_types = list(kinds[:count])
    return config


@contextmanager
def _patched(config: Any, soc: Soc) -> Iterator[list[str]]:
    """The patch set `liger`, applied as on the chip; taken back at the end. Yields what it leaves alone."""
    backend = BackendConfig(use_liger=True, model_types=model_types_of(config), hf_config=config)
    context = Context(backend, Device("npu", "compile-check", name=soc.name))
    with ENGINE.lock:
        plan = ENGINE.plan(liger.PATCH_SET, families_of(backend.model_types), context=context, asked_by=str(backend))
        rows = ENGINE.apply(plan)
        try:
            yield [f"{row.op} {row.target.rpartition(':')[2]}: {row.reason}" for row in rows if row.state != "applied"]
        finally:
            ENGINE.revert()


def _build(config: Any, dtype: Any) -> Any:
    """The model that a trainer builds, patched the second time as verl does it on a built one."""
    import transformers

    factories = (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM)
    factory = next(factory for factory in factories if type(config) in factory._model_mapping)
    model = factory.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
    patch = importlib.import_module("liger_kernel.transformers.monkey_patch")
    patch._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)
    return model


def _run(model: Any, length: int) -> None:
    """Forward and backward over one packed sequence of text, without the output layer."""
    import torch

    text = model.config.get_text_config()
    embedded = torch.empty(1, length, text.hidden_size, dtype=model.dtype, requires_grad=True)
    positions = torch.empty(1, length, dtype=torch.int64)
    if hasattr(model.config, "vision_config"):  # one for time, height and width
        positions = torch.empty(3, 1, length, dtype=torch.int64)
    output = model.base_model(inputs_embeds=embedded, position_ids=positions, use_cache=False)
    output.last_hidden_state.sum().backward()


# -- in place of a device --------------------------------------------------------------------------------------------

_RECORDED: list[Launch] = []


class _Driver:
    """What Triton's launcher, and Liger's choice of tiles, ask the driver for."""

    def __init__(self, soc: Soc) -> None:
        self.soc = soc
        self.utils = self

    def get_current_target(self) -> Any:
        return front_end.target_of(self.soc)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"num_aicore": self.soc.cube_cores, "num_vectorcore": self.soc.vector_cores, "max_shared_mem": 1}

    def get_arch(self) -> str:
        return self.soc.name

    def get_aicore_num(self) -> int:
        return self.soc.cube_cores

    def get_aivector_core_num(self) -> int:
        return self.soc.vector_cores

    def get_benchmarker(self) -> Any:
        return lambda *args, **options: [0.0, 0.0, 0.0]


class _Compiled:
    """In place of a compiled kernel: being launched means being recorded."""

    function = packed_metadata = None

    def __init__(self, source: Any, options: Mapping[str, Any]) -> None:
        self.source = source
        self.options = dict(options)

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def _init_handles(self) -> None:
        return None

    def run(self, first: int, second: int, third: int, *arguments: Any) -> None:
        source = self.source
        grid = (first, second, third)
        _RECORDED.append(
            Launch(source.fn.__name__, source.fn, source.signature, source.constants, grid, self.options, source.attrs)
        )


def _compile(source: Any, target: Any = None, options: Mapping[str, Any] | None = None) -> _Compiled:
    return _Compiled(source, options or {})


def _supply_module() -> None:
    import triton.language as tl

    try:
        importlib.import_module(_MODULE_OF_3_2_2)
    except ImportError:
        package = types.ModuleType(_MODULE_OF_3_2_2.rpartition(".")[0])
        package.__path__ = []
        extension = types.ModuleType(_MODULE_OF_3_2_2)
        for name in ("extract_slice", "insert_slice", "get_element"):
            setattr(extension, name, getattr(tl, name))
        package.extension = extension  # type: ignore[attr-defined]
        sys.modules.update({package.__name__: package, extension.__name__: extension})


def _answer_host_reads() -> None:
    """A tensor without data, read by the host: a number is 1, or for an integer the largest number of MoE tiles; a
    single boolean is false with `item()` (Liger: "no target is invalid") and true in a condition; two are never equal.
    """
    import torch

    item, truth, equal = torch.Tensor.item, torch.Tensor.__bool__, torch.equal

    def answer(tensor: Any) -> Any:
        if tensor.device.type != "meta":
            return item(tensor)
        if tensor.dtype == torch.bool:
            return False
        return 1.0 if tensor.dtype.is_floating_point else _tile_bound[0]

    torch.Tensor.item = answer  # type: ignore[assignment, method-assign]
    torch.Tensor.__bool__ = lambda self: self.device.type == "meta" or truth(self)  # type: ignore[method-assign]
    torch.equal = lambda one, other: one.device.type != "meta" and equal(one, other)  # type: ignore[assignment]
