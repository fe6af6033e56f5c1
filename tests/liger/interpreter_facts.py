"""Scenarios about Liger and Triton's interpreter themselves, without a model. Imported by `scenarios.py` once the
interpreter is active.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import torch
import triton
import triton.language as tl
from references import max_error
from triton.language.extra.cann.extension import extract_slice, insert_slice
from triton.language.math import rsqrt, tanh

from npu_backend import liger_interpreter
from npu_backend.errors import NPUBackendError


def signatures() -> Any:
    """Of every autograd function with a generic and an Ascend implementation: the two signatures of `forward`."""
    import liger_kernel.ops as ops
    from liger_kernel.ops.backends._ascend import ops as ascend

    generic: dict[str, type] = {}
    for info in pkgutil.iter_modules(ops.__path__):
        if not info.ispkg:
            module = importlib.import_module(f"{ops.__name__}.{info.name}")
            generic.update({n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__})
    pairs = {}
    for name, function in vars(ascend).items():
        if inspect.isclass(function) and issubclass(function, torch.autograd.Function) and name in generic:
            shapes = [
                [f"{p.name}={p.default!r}" if p.default is not p.empty else p.name for p in _parameters(cls)]
                for cls in (generic[name], function)
            ]
            pairs[name] = {"generic": shapes[0], "ascend": shapes[1]}
    return pairs


def _parameters(function: type) -> list[inspect.Parameter]:
    return list(inspect.signature(inspect.unwrap(function.forward)).parameters.values())


def activation_errors() -> Any:
    errors = {}
    for name in ("Ascend910B3", "Ascend911"):
        try:
            liger_interpreter.activate(name)
        except NPUBackendError as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


@triton.jit
def _scalar_and_loop_kernel(out, scale, n):
    for row in tl.range(0, n):
        tl.store(out + row, row.to(tl.float32) * scale.to(tl.float32))


@triton.jit
def _six_kernel(x, out):
    at = tl.arange(0, 6)
    tl.store(out + at, tanh(rsqrt(tl.load(x + at))))


@triton.jit
def _swap_halves_kernel(x, out):
    at = tl.arange(0, 8)
    value = tl.load(x + at)
    left, right = extract_slice(value, [0], [4], [1]), extract_slice(value, [4], [4], [1])
    tl.store(out + at, insert_slice(insert_slice(value, right, [0], [4], [1]), left, [4], [4], [1]))


@triton.jit
def _bfloat16_kernel(x, y, out):
    at = tl.arange(0, 256)
    left, right = tl.load(x + at), tl.load(y + at)
    result = tl.where(left < right, left * right + left, left / right - tl.exp(left.to(tl.float32)).to(tl.bfloat16))
    tl.store(out + at, result)


def repairs() -> Any:
    """One small kernel for each thing that Triton's interpreter does differently without us."""
    loop = torch.empty(5)
    _scalar_and_loop_kernel[(1,)](loop, 0.5, 5)
    x, six = torch.rand(6) + 0.5, torch.empty(6)
    _six_kernel[(1,)](x, six)
    eight, swapped = torch.randn(8), torch.empty(8)
    _swap_halves_kernel[(1,)](eight, swapped)
    a, b = torch.randn(2, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    narrow = torch.empty_like(a)
    _bfloat16_kernel[(1,)](a, b, narrow)
    expected = torch.where(a < b, (a * b + a).float(), a.float() / b.float() - a.exp().float()).bfloat16()
    return {
        "scalars and loops": max_error(loop, torch.arange(5) * 0.5),
        "any length, functions imported by name": max_error(six, x.rsqrt().tanh()),
        "slices": max_error(swapped, eight.roll(4)),
        "bfloat16": max_error(narrow, expected),
    }


FACTS = {"signatures": signatures, "activation_errors": activation_errors, "repairs": repairs}
