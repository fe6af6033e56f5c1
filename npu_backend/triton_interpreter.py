"""Triton kernels on a host without a device for them: their Python source in Triton's interpreter, on the CPU.

For tests and for the virtual NPU. It shows the arithmetic of a kernel's source, and nothing about speed, memory or what
a compiler makes of it. Upstream Triton's interpreter does some things differently from a compiled kernel; `activate`
repairs them, and each repair below says what goes wrong without it. Not supported: atomic additions in bfloat16.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from npu_backend.errors import BackendUnavailableError

SUPPORTED = "3.9"  # the release of triton whose internals were read for the repairs
_active = False


def why_unsupported() -> str | None:
    """None if `activate` can succeed in a process that has not imported triton, else the reason."""
    if importlib.util.find_spec("triton") is None:
        return f"triton is not installed (`pip install --no-deps triton=={SUPPORTED}.0`)"
    found = importlib.metadata.version("triton")
    if not found.startswith(SUPPORTED):
        return f"Triton's interpreter is repaired for triton {SUPPORTED} only, {found} is installed"
    return None


def why_unusable() -> str | None:
    """None if `activate` can succeed in this process, else the reason."""
    reason = why_unsupported()
    if reason is not None:
        return reason
    if "triton" in sys.modules and not is_interpreting():
        return (
            "triton was imported without its interpreter, which cannot be changed afterwards. Set TRITON_INTERPRET=1 "
            "before anything imports triton"
        )
    return None


def is_interpreting() -> bool:
    """Whether the triton of this process, which this imports, is the interpreter."""
    import triton

    return not isinstance(triton.language.sum, triton.runtime.jit.JITFunction)


def activate() -> None:
    """Interpret every Triton kernel of this process from now on. Before triton is imported; again does nothing.

    Raises:
        BackendUnavailableError: triton is absent, of another release, or was imported too early.
    """
    global _active
    if _active:
        return
    reason = why_unusable()
    if reason is not None:
        raise BackendUnavailableError(f"Triton's interpreter: {reason}")
    os.environ["TRITON_INTERPRET"] = "1"
    import triton  # noqa: F401

    for repair in (_scalars, _ranges, _ranges_of_any_length, _math, _slices, _bfloat16):
        repair()
    _active = True


def _tensor(data: Any, dtype: Any) -> Any:
    """A Triton tensor of the interpreter around a numpy array."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    shape = list(data.shape)
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, shape) if shape else dtype)


def _scalars() -> None:
    """A float argument stays a Python float; the kernels call `eps.to(tl.float32)`."""
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def convert_floats_too(value: Any) -> Any:
        if isinstance(value, float):
            handle = interpreter.TensorHandle(numpy.array([value], dtype=numpy.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(value)

    interpreter._implicit_cvt = convert_floats_too


def _ranges() -> None:
    """The variable of a `tl.range` loop is a Python int; when compiled it is a tensor, and `row.to(...)` is used."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_core

    def loop(first: Any, last: Any = None, step: Any = 1, **options: Any) -> Iterator[Any]:
        bounds = (0, first) if last is None else (first, last)
        return map(interpreter._implicit_cvt, range(*(int(getattr(b, "value", b)) for b in (*bounds, step))))

    def patch_with_tensor_loops(lang: Any, scope: Any) -> None:
        patch(lang, scope)
        scope.set_attr(lang, "range", loop)

    interpreter._patch_lang_core = patch_with_tensor_loops


def _ranges_of_any_length() -> None:
    """Blocks must have a power of two of elements; triton-ascend takes any (the MoE kernels use 192 and 240)."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    def arange(self: Any, start: int, end: int, *, ret_ty: Any = None) -> Any:
        kind = ret_ty or tl.block_type(tl.int32, [end - start])
        return self.tensor(self.builder.create_make_range(kind.to_ir(self.builder), start, end), kind)

    TritonSemantic.arange = arange
    tl.core.validate_block_shape = math.prod


def _math() -> None:
    """`from triton.language.math import rsqrt` binds a builtin that only works when looked up through `tl`, and
    upstream has no `tanh` there. Plain functions put in their place before Liger is imported work both ways.
    """
    import numpy
    import triton.language as tl

    def elementwise(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: tl.tensor(type(x.handle)(function(x.handle.data), x.handle.dtype), x.type)

    tl.math.rsqrt = elementwise(lambda data: 1 / numpy.sqrt(data))
    tl.math.tanh = elementwise(numpy.tanh)


def _slices() -> None:
    """triton-ascend's `extract_slice` and `insert_slice`, which upstream Triton lacks."""
    import numpy

    def index(offsets: Any, sizes: Any, strides: Any) -> tuple[slice, ...]:
        triples = zip(*([int(getattr(v, "value", v)) for v in values] for values in (offsets, sizes, strides)))
        return tuple(slice(offset, offset + size * stride, stride) for offset, size, stride in triples)

    def extract_slice(full: Any, offsets: Any, sizes: Any, strides: Any) -> Any:
        return _tensor(numpy.ascontiguousarray(full.handle.data[index(offsets, sizes, strides)]), full.dtype)

    def insert_slice(full: Any, part: Any, offsets: Any, sizes: Any, strides: Any) -> Any:
        data = full.handle.data.copy()
        data[index(offsets, sizes, strides)] = part.handle.data
        return _tensor(data, full.dtype)

    package = types.ModuleType("triton.language.extra.cann")
    package.__path__ = []
    extension = types.ModuleType(f"{package.__name__}.extension")
    extension.extract_slice, extension.insert_slice = extract_slice, insert_slice  # type: ignore[attr-defined]
    package.extension = extension  # type: ignore[attr-defined]
    sys.modules.update({package.__name__: package, extension.__name__: extension})


def _bfloat16() -> None:
    """bfloat16 is stored as its bits in a uint16, and arithmetic is done on those bits as if they were integers. Here
    an operation with bfloat16 operands is done in float32 and rounded back, to the nearest even.
    """
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    handle_of, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    convert, cast = interpreter._convert_float, builder.cast_impl

    def widen(bits: Any) -> Any:
        return (numpy.asarray(bits).astype(numpy.uint32) << 16).view(numpy.float32)

    def narrow(data: Any) -> Any:
        bits = numpy.ascontiguousarray(data, dtype=numpy.float32).view(numpy.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return numpy.where(numpy.isnan(data), 0x7FC0, rounded).astype(numpy.uint16).reshape(numpy.shape(data))

    def is_bfloat16(value: Any) -> bool:
        return isinstance(value, handle_of) and value.dtype.scalar == tl.bfloat16 and value.data.dtype == numpy.uint16

    def in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            narrow_operands = [is_bfloat16(a) for a in args if isinstance(a, handle_of)]
            if not any(narrow_operands):
                return method(self, *args)
            result = method(self, *(handle_of(widen(a.data), tl.float32) if is_bfloat16(a) else a for a in args))
            if all(narrow_operands) and result.data.dtype == numpy.float32:  # a comparison gives booleans
                return handle_of(narrow(result.data), tl.bfloat16)
            return result

        return run

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return widen(data)
        if (source, target) == (tl.float32, tl.bfloat16):
            return narrow(data)
        return convert(data, source, target, rounding)

    def cast_through_float32(self: Any, source: Any, target: Any) -> Any:
        pair = {source.dtype.scalar, target.scalar}
        if tl.bfloat16 in pair and len(pair) == 2 and tl.float32 not in pair:
            source = cast(self, source, tl.float32)
        return cast(self, source, target)

    interpreter._convert_float = convert_float
    builder.cast_impl = cast_through_float32
    for name in ("binary_op", "unary_op", "create_fma", "create_rsqrt", "create_erf", "create_dot"):
        setattr(builder, name, in_float32(getattr(builder, name)))
