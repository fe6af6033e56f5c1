"""What every operator asks: of this torch_npu, of the model's activation, of an input, of the original's signature."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from npu_backend.errors import PatchTargetError

DEVICE = "npu"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


# -- torch_npu --------------------------------------------------------------------------------------------------------


def parameters(name: str) -> frozenset[str] | None:
    """The argument names of `torch_npu.<name>`, of all its overloads together, or None if this torch_npu lacks it."""
    function = getattr(importlib.import_module("torch_npu"), name, None)
    if function is None:
        return None
    if hasattr(function, "overloads"):
        schemas = [getattr(function, overload)._schema for overload in function.overloads()]
        return frozenset(argument.name for schema in schemas for argument in schema.arguments)
    return frozenset(inspect.signature(function).parameters)


def lacks(*names: str) -> str | None:
    """Why these operators cannot be called here, if one is missing."""
    missing = [name for name in names if parameters(name) is None]
    return f"this torch_npu has no {', '.join(missing)}" if missing else None


# -- the model --------------------------------------------------------------------------------------------------------


# class of an activation module -> what gates; under the names that torch and transformers have for it
_GATES = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}
# the same in a configuration
_GATE_NAMES = {"silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh"}


def gate_of(activation: Any) -> str | None:
    """What a module's activation is, of those that the operators compute: "silu", "gelu", "gelu_tanh", or None."""
    if activation is torch.nn.functional.silu:
        return "silu"
    kind = _GATES.get(type(activation).__name__)
    if kind == "gelu" and getattr(activation, "approximate", "none") == "tanh":
        return "gelu_tanh"
    return kind


def is_silu(activation: Any) -> bool:
    """Whether a module's activation is SiLU."""
    return gate_of(activation) == "silu"


def not_silu(hf_config: Any) -> str | None:
    """Why no part of a model gates with SiLU, if its configuration says so; None where it does not say."""
    return _not_among(hf_config, {"silu", "swish"}, "npu_swiglu computes SiLU only")


def not_gated(hf_config: Any) -> str | None:
    """Why no part of a model gates with SiLU or GELU, if its configuration says so; None where it does not say."""
    return _not_among(hf_config, _GATE_NAMES, "npu_swiglu and npu_geglu compute SiLU and GELU only")


def _not_among(hf_config: Any, known: set[str], why: str) -> str | None:
    names = sorted({name for name in _activations(hf_config) if isinstance(name, str)})
    if not names or known & set(names):
        return None
    return f"the model's activation is {', '.join(names)}, and {why}"


def _activations(config: Any, depth: int = 0) -> Iterator[Any]:
    fields = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    for name, value in fields.items():
        if name in ("hidden_act", "hidden_activation"):
            yield value
        elif depth < 3 and (isinstance(value, Mapping) or hasattr(value, "model_type")):
            yield from _activations(value, depth + 1)


# -- one input --------------------------------------------------------------------------------------------------------


def why_not(*tensors: Tensor) -> str | None:
    """Why none of the operators may take these tensors: device, dtype, or nothing to compute."""
    for tensor in tensors:
        if tensor.device.type != DEVICE:
            return f"a tensor is on {tensor.device.type}"
        if tensor.dtype not in DTYPES:
            return f"dtype {str(tensor.dtype).removeprefix('torch.')}"
        if tensor.numel() == 0:
            return "empty input"
    return None


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor; without anybody having imported DTensor, it is not."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(value, kind)


# -- the original's signature -----------------------------------------------------------------------------------------

ONE_INPUT = (("self", "x"), ("self", "hidden_states"), ("self", "hidden_state"))


def argument_names(original: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's parameters, in order."""
    return tuple(inspect.signature(original).parameters)


def unlike(original: Any, *known: tuple[str, ...]) -> str | None:
    """Why there is no replacement for this original: it is no plain function, or has none of these parameters. None
    stands for somebody else's object, about which nothing is said.
    """
    if original is None:
        return None
    if not inspect.isfunction(original):
        return f"it is no plain function but a {type(original).__name__}"
    names = argument_names(original)
    return None if names in known else f"there is no replacement with its parameters ({', '.join(names)})"


def one_input(original: Callable[..., Any], run: Callable[[Any, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A method that calls `run(self, x)` and names its one input as the original does.

    Raises:
        PatchTargetError: the original has other parameters than one known input.
    """

    def forward_x(self: Any, x: Tensor) -> Tensor:
        return run(self, x)

    def forward_hidden_states(self: Any, hidden_states: Tensor) -> Tensor:
        return run(self, hidden_states)

    def forward_hidden_state(self: Any, hidden_state: Tensor) -> Tensor:
        return run(self, hidden_state)

    return pick(original, dict(zip(ONE_INPUT, (forward_x, forward_hidden_states, forward_hidden_state), strict=True)))


def pick(original: Callable[..., Any], forms: Mapping[tuple[str, ...], Callable[..., Any]]) -> Callable[..., Any]:
    """The hand-written form whose parameters are the original's.

    Raises:
        PatchTargetError: there is none.
    """
    names = argument_names(original)
    if names not in forms:
        known = "; ".join(f"({', '.join(form)})" for form in forms)
        raise PatchTargetError(
            f"{original.__module__}:{original.__qualname__} has the parameters ({', '.join(names)}), for which there "
            f"is no replacement; known: {known}. Leave this operator out with NPU_BACKEND_SKIP until one is written"
        )
    return forms[names]
