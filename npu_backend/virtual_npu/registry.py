"""The table of references: what the virtual NPU computes for an operator that only Ascend devices have.

A reference is a plain function on CPU tensors with the operator's arguments; it returns CPU tensors, and raises
`OperatorError` for inputs that the operator's documentation rules out:

    from npu_backend import virtual_npu

    @virtual_npu.register_reference("npu::npu_my_op")
    def my_op(x, scale=1.0):
        return x * scale

torch_npu's own autograd formulas call `..._backward` operators: they are registered the same way. This module imports
neither torch nor torch_npu, so that references can be declared before either is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from npu_backend.errors import ConfigError, NPUBackendError

Function = TypeVar("Function", bound=Callable[..., Any])


class OperatorError(NPUBackendError, RuntimeError):
    """A call that the operator's documentation rules out, or of one without a reference (torch_npu: RuntimeError)."""


@dataclass(frozen=True)
class Reference:
    """One operator's CPU function.

    `differentiable`: torch_npu has no usable autograd formula for it (it calls device kernels directly), so the
    gradient is that of the reference, which is recomputed on the CPU in backward. `counted_as`: the name in `calls()`,
    where torch_npu calls an inner operator of another name.
    """

    name: str
    function: Callable[..., Any]
    differentiable: bool = False
    counted_as: str = ""


REFERENCES: dict[str, Reference] = {}
_calls: Counter[str] = Counter()
_listeners: list[Callable[[Reference], None]] = []


def register_reference(
    name: str, *, differentiable: bool = False, counted_as: str = "", replace: bool = False
) -> Callable[[Function], Function]:
    """Declare a function as the CPU reference of an operator; a decorator.

    Args:
        name: the dispatcher's name, `npu::npu_swiglu` or `npu::npu_grouped_matmul.List`.
        differentiable: take the gradient from the reference instead of torch_npu's own formula.
        counted_as: the name in `calls()`, when it is not `name`.
        replace: allow that the operator has a reference already.

    Raises:
        ConfigError: the name is not a dispatcher's name, or is taken.
    """
    if "::" not in name:
        raise ConfigError(f"{name!r} is not an operator's name; write namespace::name, for example npu::npu_swiglu")
    if name in REFERENCES and not replace:
        raise ConfigError(f"{name} has a reference already ({REFERENCES[name].function.__module__}); pass replace=True")

    def declare(function: Function) -> Function:
        REFERENCES[name] = Reference(name, function, differentiable, counted_as or name)
        for listener in _listeners:
            listener(REFERENCES[name])
        return function

    return declare


def on_register(listener: Callable[[Reference], None]) -> None:
    """Call `listener` for every reference that is there, and for each that is declared later."""
    _listeners.append(listener)
    for reference in list(REFERENCES.values()):
        listener(reference)


def count(name: str) -> None:
    """Note one call of an operator."""
    _calls[name] += 1


def calls() -> dict[str, int]:
    """How often each operator ran since the start or the last reset: `{"npu::npu_rms_norm": 61, ...}`."""
    return dict(_calls)


def reset_calls() -> None:
    """Start counting operators from zero."""
    _calls.clear()
