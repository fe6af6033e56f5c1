"""Record the calls that a model makes to patched operators, and run a recorded call again with something else.

The rule for how far a replacement may be off: a small multiple of what the original itself is off in the same dtype
from a float64 reference, plus one rounding of the result. The reference runs on the CPU, with the upcasts to float32
that models write into their norms and routers widened to float64.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from npu_backend.operators import counters
from npu_backend.patches.engine import Change

TIMES = 4.0  # how many times the original's own error a replacement may have
SHAPES = 4  # so many differently shaped calls of one operator are kept


@dataclass(frozen=True)
class Call:
    """One call of a patched operator: `args` begins with the module where the operator is a method."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Recording:
    """What a model called: how often each target ran, how often it handed its input back to the original, and one call
    of every combination of shapes and dtypes.
    """

    counts: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    _seen: set[tuple[Any, ...]] = field(default_factory=set)

    def add(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.counts[target] += 1
        key = (target, *(_form(value) for value in (*args, *kwargs.values())))
        kept = self.calls.setdefault(target, [])
        if key not in self._seen and len(kept) < SHAPES:
            self._seen.add(key)
            kept.append(Call(_detached(args), _detached(kwargs)))


@dataclass(frozen=True)
class Comparison:
    """The worst of some results: its largest and its mean error to float64 and what each may be, all relative to the
    largest entry.
    """

    error: float = 0.0
    allowed: float = 0.0
    mean: float = 0.0
    mean_allowed: float = 0.0

    def worse(self, other: Comparison) -> Comparison:
        def excess(one: Comparison) -> float:
            return one.error / one.allowed if one.allowed else one.error

        return max(self, other, key=excess)


@contextlib.contextmanager
def recording(model: nn.Module, changes: Sequence[Change]) -> Iterator[Recording]:
    """While it lasts, note every call that `model` makes to what these changes put in place."""
    seen = Recording()
    with contextlib.ExitStack() as stack:
        for change in changes:
            if isinstance(change.after, type):
                note = functools.partial(seen.add, change.row.target)
                for module in model.modules():
                    if type(module) is change.after:
                        hook = module.register_forward_pre_hook(
                            lambda module, args, kwargs, note=note: note((module, *args), kwargs), with_kwargs=True
                        )
                        stack.callback(hook.remove)
            else:
                change.slot.put(_noting(change.after, change.row.target, seen))
                stack.callback(change.slot.put, change.after)
        yield seen


def _noting(function: Callable[..., Any], target: str, seen: Recording) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        seen.add(target, args, kwargs)
        before = counters.fallbacks()
        result = function(*args, **kwargs)
        seen.fallbacks[target] += counters.fallbacks() != before
        return result

    return call


def compare(
    call: Call,
    original: Callable[..., Any],
    replacement: Callable[..., Any],
    dtype: torch.dtype | None,
    device: torch.device,
) -> tuple[Comparison, Comparison]:
    """(forward, gradients) of a replacement for one call.

    Args:
        call: the recorded arguments.
        original: what stood there before.
        replacement: what stands there now.
        dtype: run the call in this dtype; None keeps what was recorded.
        device: where original and replacement run.
    """
    with Float32IsFloat64():
        reference = _run(call, original, torch.float64, torch.device("cpu"))
    eager = _run(call, original, dtype, device)
    patched = _run(call, replacement, dtype, device)
    forward, gradients = (
        functools.reduce(Comparison.worse, map(compare_one, *results), Comparison())
        for results in zip(patched, eager, reference)
    )
    return forward, gradients


def _run(
    call: Call, function: Callable[..., Any], dtype: torch.dtype | None, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients for what required one when the call was recorded, from fresh copies of the arguments."""
    leaves: list[Tensor] = []

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            if not value.is_floating_point():
                return value.detach().to(device)
            fresh = value.detach().to(device, dtype or value.dtype, copy=True)
            if value.requires_grad:
                leaves.append(fresh.requires_grad_())
            return fresh
        if isinstance(value, nn.Module):
            module = copy.deepcopy(value).to(device, dtype)
            leaves.extend(parameter for parameter in module.parameters() if parameter.requires_grad)
            return module
        if isinstance(value, (tuple, list)):
            return type(value)(map(copied, value))
        return value

    args, kwargs = copied(call.args), {name: copied(value) for name, value in call.kwargs.items()}
    with torch.enable_grad():
        outputs = _floating(function(*args, **kwargs))
        noise = torch.Generator().manual_seed(0)
        upstream = [torch.randn(o.shape, generator=noise, dtype=torch.float64).to(o.device, o.dtype) for o in outputs]
        gradients = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True) if leaves else ()
    filled = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, gradients)]
    return [out.detach() for out in outputs], filled


def compare_one(patched: Tensor, eager: Tensor, reference: Tensor) -> Comparison:
    """What a replacement and the original computed in one dtype, by their distances to a float64 reference."""
    if not reference.numel():
        return Comparison()
    scale = float(reference.abs().max()) or 1.0
    rounding = torch.finfo(patched.dtype).eps if patched.dtype == eager.dtype else 0.0
    errors, own = (_distances(value, reference) / scale for value in (patched, eager))
    return Comparison(
        error=float(errors.max()),
        allowed=TIMES * float(own.max()) + rounding,
        mean=float(errors.mean()),
        mean_allowed=TIMES * float(own.mean()) + rounding,
    )


def _distances(value: Tensor, reference: Tensor) -> Tensor:
    return (value.detach().cpu().double() - reference).abs().nan_to_num(nan=torch.inf)


def _floating(value: Any) -> list[Tensor]:
    """The floating-point tensors in an operator's result."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [tensor for part in value for tensor in _floating(part)] if isinstance(value, (tuple, list)) else []


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)):
        return type(value)(map(_detached, value))
    return {key: _detached(part) for key, part in value.items()} if isinstance(value, dict) else value


def _form(value: Any) -> Any:
    """What makes two calls different to an operator: shapes and dtypes, also of a module's own parameters."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, nn.Module):
        return tuple((tuple(p.shape), p.dtype) for p in value.parameters(recurse=False))
    return type(value).__name__


class Float32IsFloat64(TorchFunctionMode):
    """Turns every cast to float32 into one to float64, so that a model's own upcasts do not round the reference."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            func = Tensor.double
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})
