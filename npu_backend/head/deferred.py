"""Logits that are never computed: a stand-in for the output head, and a record of what is done to its result.

While `without_head` is active, the model has a stand-in where its output head is. The stand-in takes the hidden states
and returns `DeferredLogits`: a tensor without storage that writes down what the model's own forward does to its logits
(Gemma's softcap, Granite's and Cohere's scale, casts). So whatever a family does before, at and after its head is taken
from the family's code as it runs, and nothing about it has to be known here. What cannot be written down is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from npu_backend.errors import HeadInputError

# By name, because a function of torch and the method of Tensor that does the same are different objects.
_MULTIPLY = ("mul", "multiply", "__mul__", "__rmul__")
_DIVIDE = ("div", "divide", "true_divide", "__truediv__")
_TANH = ("tanh",)
# They change no value beyond rounding, and the head computes in float32 whatever the logits' dtype.
_NO_CHANGE = ("to", "float", "contiguous")
_QUESTIONS = (
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.size,
    Tensor.dim,
)


class DeferredLogits(Tensor):
    """The logits of `hidden`, scaled and perhaps saturated: cap(logit_scale * (hidden W^T + bias)).

    Attributes:
        hidden: [..., H], what the head was given.
        stages: factors as (multiplied, divided), one pair per stage; tanh begins the second stage. Both are kept apart
            so that x / 30 and then * 30 is exactly x.
    """

    hidden: Tensor
    stages: tuple[tuple[float, float], ...]

    @property
    def logit_scale(self) -> float:
        """The factor on the logits, before any saturation."""
        return math.prod(up for up, _ in self.stages) / math.prod(down for _, down in self.stages)

    @property
    def softcap(self) -> float | None:
        """c of c * tanh(logits / c), or None without a tanh."""
        return self.stages[1][0] / self.stages[1][1] if len(self.stages) > 1 else None

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo of torch 2.11 takes tanh for a question
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation on the logits comes here. There is nothing to compute it on: it is recorded or refused."""
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        logits = next((a for a in args if isinstance(a, cls)), None)
        if logits is not None and name in _NO_CHANGE:
            return logits
        number = next((a for a in args if isinstance(a, (int, float))), None)
        if logits is not None and len(args) == 2 and number is not None and not kwargs:
            if name in _MULTIPLY:
                return logits._scaled(float(number), 1.0)
            if name in _DIVIDE and args[0] is logits:
                return logits._scaled(1.0, float(number))
        if logits is not None and name in _TANH and len(logits.stages) == 1:
            return _deferred(logits.hidden, logits.shape, (*logits.stages, (1.0, 1.0)))
        raise _unknown(name)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What got past `__torch_function__` would read the storage that is not there."""
        raise _unknown(str(func))

    def _scaled(self, up: float, down: float) -> Any:
        *before, (multiplied, divided) = self.stages
        return _deferred(self.hidden, self.shape, (*before, (multiplied * up, divided * down)))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # no graph can hold a tensor without storage
def _deferred(hidden: Tensor, shape: torch.Size, stages: tuple[tuple[float, float], ...]) -> DeferredLogits:
    made: DeferredLogits = Tensor._make_wrapper_subclass(
        DeferredLogits, shape, dtype=hidden.dtype, device=hidden.device
    )
    made.hidden, made.stages = hidden, stages
    return made


def _unknown(operation: str) -> HeadInputError:
    return HeadInputError(
        f"the model's forward does {operation!r} with its logits, which the fused head cannot follow (it knows a "
        "number as factor or divisor, tanh, and casts). Set use_fused_kernels=False for this model"
    )


class _StandIn:
    """Takes the place of a linear output head. Everything but the call is the head's own."""

    def __init__(self, head: nn.Module) -> None:
        self._head: Any = head

    def __call__(self, hidden: Tensor) -> Any:
        shape = torch.Size((*hidden.shape[:-1], self._head.out_features))
        return _deferred(hidden, shape, ((1.0, 1.0),))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


def place_of(model: nn.Module, head: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds the head, and the head's name in it.

    Raises:
        HeadInputError: the head is not registered in the model.
    """
    for owner in model.modules():
        for name, child in owner._modules.items():
            if child is head:
                return owner, name
    raise HeadInputError(
        f"{type(model).__name__}: get_output_embeddings() gives a {type(head).__name__} that is not a submodule of "
        "this model, so nothing can stand in its place. Register it (self.lm_head = ...), or set "
        "use_fused_kernels=False"
    )


@contextmanager
def without_head(model: nn.Module, head: nn.Module) -> Iterator[None]:
    """Let the model's code find a stand-in where its output head is. Parameters and submodules stay as they are."""
    owner, name = place_of(model, head)
    with shadowed(owner, name, _StandIn(head)):
        yield


@contextmanager
def shadowed(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Put `value` before a submodule or method of this one module. Python looks into the instance's own dictionary
    before it asks nn.Module for a submodule, so nothing that is registered changes. Not for two threads at a time.
    """
    module.__dict__[name] = value
    try:
        yield
    finally:
        del module.__dict__[name]
