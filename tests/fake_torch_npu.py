"""A stand-in for torch_npu on a plain CPU: the operators' CPU references, which check what the documentation rules out,
under the names that torch_npu gives them. For tests of wiring and predicates; values and gradients through torch_npu's
own dispatch and autograd are tested in tests/virtual_npu.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from npu_backend.operators import checks, counters, rotary
from npu_backend.virtual_npu.references import activations, dense, grouped_matmul, moe

OPERATORS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": dense.npu_rms_norm,
    "npu_swiglu": dense.npu_swiglu,
    "npu_geglu": activations.npu_geglu,
    "npu_rotary_mul": dense.npu_rotary_mul,
    "npu_grouped_matmul": grouped_matmul.npu_grouped_matmul,
    "npu_moe_token_permute": moe.npu_moe_token_permute,
    "npu_moe_token_unpermute": moe.npu_moe_token_unpermute,
}


class FakeTorchNpu(types.ModuleType):
    """The module; `seen` keeps the arguments of every call, as (name, args, kwargs)."""

    def __init__(self, operators: dict[str, Callable[..., Any]]) -> None:
        super().__init__("torch_npu")
        self.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
        self.__version__ = "2.13.0"
        self.seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        for name, function in operators.items():
            setattr(self, name, self._recording(name, function))

    def _recording(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen.append((name, args, kwargs))
            return function(*args, **kwargs)

        call.__wrapped__ = function  # type: ignore[attr-defined]  # its signature stays the operator's
        return call

    def operands(self, name: str) -> list[Tensor]:
        """Every tensor that the operator was given, in order."""
        found: list[Tensor] = []
        for called, args, kwargs in self.seen:
            for value in (*args, *kwargs.values()) if called == name else ():
                found += [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Tensor)]
        return found

    def count(self, name: str, **kwargs: Any) -> int:
        """How often the operator was called with these keyword arguments."""
        return sum(n == name and all(k.get(key) == v for key, v in kwargs.items()) for n, _, k in self.seen)


def install(monkeypatch: pytest.MonkeyPatch, operators: dict[str, Callable[..., Any]] = OPERATORS) -> FakeTorchNpu:
    """Let the operators find this torch_npu, and take CPU tensors for the device's."""
    module = FakeTorchNpu(operators)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(checks, "DEVICE", "cpu")
    rotary.limits.cache_clear()
    counters.reset()
    return module
