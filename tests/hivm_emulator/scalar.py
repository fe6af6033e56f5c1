"""Scalar arithmetic: what `arith.*` and `affine.*` compute, on Python ints, bools and numpy float32.

`compile_scalar` turns an operation into a function of its operands' values, once; integers wrap around at their width,
so an address that overflows 32 bits goes wrong here as it would there.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from hivm_emulator.memory import FLOATS, UnsupportedError, bf16_bits, round_to
from hivm_emulator.parser import Module, Operation

_INTEGER: dict[str, Callable[[int, int], int]] = {
    "addi": operator.add, "subi": operator.sub, "muli": operator.mul, "andi": operator.and_, "ori": operator.or_,
    "xori": operator.xor, "minsi": min, "maxsi": max,
    "divsi": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "remsi": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "ceildivsi": lambda a, b: -(-a // b), "floordivsi": operator.floordiv,
    "shli": operator.lshift, "shrsi": operator.rshift,
}  # fmt: skip
_FLOAT: dict[str, Callable[[Any, Any], Any]] = {
    "addf": operator.add, "subf": operator.sub, "mulf": operator.mul, "divf": operator.truediv,
    "maximumf": np.maximum, "minimumf": np.minimum, "maxnumf": np.fmax, "minnumf": np.fmin,
}  # fmt: skip
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
_MATH: dict[str, Callable[[Any], Any]] = {"exp": np.exp, "log": np.log, "sqrt": np.sqrt, "absf": np.abs}


def compile_scalar(operation: Operation, module: Module) -> Callable[..., Any]:
    """A function from the values of the operands to that of the result.

    Raises:
        UnsupportedError: an operation that is not known.
    """
    dialect, _, name = operation.name.partition(".")
    dtype = operation.types.split(" to ")[-1].strip()
    if dialect == "affine":
        return _affine(name, module.maps[operation.text.split("(")[0].strip()], operation)
    if dialect == "math" and name in _MATH:
        unary = _MATH[name]
        return lambda a: _quietly(dtype, unary, a)
    if dialect != "arith":
        raise UnsupportedError(f"operation {operation.name}{operation.text}")
    if name == "constant":
        value = constant(operation.text)
        return lambda: value
    if name in ("cmpi", "cmpf"):
        return _comparison(name, operation.text.split(",")[0].strip())
    if name == "select":
        return lambda condition, a, b: a if condition else b
    if name in _INTEGER:
        integer = _INTEGER[name]
        return lambda a, b: _wrap(dtype, integer(int(a), int(b)))
    if name in _FLOAT:
        binary = _FLOAT[name]
        return lambda a, b: _quietly(dtype, binary, a, b)
    if name == "negf":
        return lambda a: -a
    return _conversion(operation, name, dtype)


def constant(text: str) -> Any:
    """The value of an `arith.constant`, rounded to its type.

    Raises:
        UnsupportedError: a constant that is no scalar.
    """
    literal, _, dtype = text.strip().partition(" : ")
    literal = literal.split("{")[0].strip()
    if literal in ("true", "false"):
        return literal == "true"
    if dtype in FLOATS:
        if not literal.startswith("0x"):
            return round_to(dtype, float(literal))
        bits = int(literal, 16)
        if dtype == "bf16":
            return np.uint32(bits << 16).view(np.float32)
        return np.uint32(bits).view(np.float32) if dtype == "f32" else np.float32(np.uint16(bits).view(np.float16))
    if dtype == "index" or re.fullmatch(r"i\d+", dtype):
        return int(literal)
    raise UnsupportedError(f"constant {text.strip()}")


def _affine(name: str, function: Callable[..., tuple[int, ...]], operation: Operation) -> Callable[..., int]:
    choose = {"apply": operator.itemgetter(0), "min": min, "max": max}.get(name)
    if choose is None:
        raise UnsupportedError(f"operation {operation.name}{operation.text}")
    return lambda *values: int(choose(function(*map(int, values))))


def _comparison(name: str, predicate: str) -> Callable[[Any, Any], bool]:
    """Signed integers; ordered floats (NaN compares false), and `une`, the one unordered that compilers print."""
    if name == "cmpi":
        compare = _COMPARE.get(predicate if predicate in ("eq", "ne") else predicate.removeprefix("s"))
    else:
        compare = _COMPARE.get("ne" if predicate == "une" else predicate.removeprefix("o"))
    if compare is None or predicate == "one":
        raise UnsupportedError(f"arith.{name} {predicate}")
    return lambda a, b: bool(compare(a, b))


def _conversion(operation: Operation, name: str, dtype: str) -> Callable[[Any], Any]:
    source = operation.types.split(" to ")[0].strip()
    if name in ("extsi", "index_cast") and source == "i1":
        return lambda a: _wrap(dtype, -int(a))
    if name == "extui":
        width = int(source[1:])
        return lambda a: int(a) % (1 << width)
    if name in ("index_cast", "extsi", "trunci"):
        return lambda a: _wrap(dtype, int(a))
    if name in ("extf", "truncf", "sitofp"):
        return lambda a: round_to(dtype, a)
    if name == "fptosi":
        return lambda a: _wrap(dtype, int(a))
    if name == "bitcast" and (source, dtype) == ("bf16", "i16"):
        return lambda a: int(bf16_bits(a).view(np.int16).reshape(())[()])
    raise UnsupportedError(f"operation {operation.name}{operation.text}")


def _wrap(dtype: str, value: int) -> Any:
    if dtype == "i1":
        return bool(value & 1)
    width = 64 if dtype == "index" else int(dtype[1:])
    return (value + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))


def _quietly(dtype: str, function: Callable[..., Any], *values: Any) -> np.float32:
    with np.errstate(all="ignore"):
        return round_to(dtype, function(*values))
