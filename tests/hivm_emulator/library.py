"""The vendor's library functions: vector and copy ones on unified buffer (UB), cube ones on L1 and L0C.

A name says what and on what types (`vadds_vs_1d_float`: vector plus scalar). `find` matches it against one table; each
entry names the pipe that runs it. Arguments are `MemRef`s and scalars in the order of the call. What follows the result
is scratch: it is clobbered, for the real function may leave anything there.

Assumed, for want of sources: a copy into UB writes whole 32-byte granules, the rest being the pad value in pad mode 2
and anything at all in mode 0; `nd2nz` fills a fractal's columns with zeros and leaves the rows after the last alone;
`mma_tile` reads and writes just m x k, k x n and m x n of its tiles, so the rest of an accumulator is what it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hivm_emulator.memory import FLOATS, MemRef, UnsupportedError

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
_UNARY: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp, "ln": np.log, "sqrt": np.sqrt, "abs": np.abs, "not": np.invert,
}  # fmt: skip
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_NEAREST_EVEN, _TOWARDS_ZERO = 0, 4
_NO_PAD, _PAD_VALUE = 0, 2
_ATOMIC = {0: None, 1: np.add}


class Entry(NamedTuple):
    """A compiled name: the pipe, and the function of core and arguments."""

    pipe: str
    run: Callable[..., None]


def find(name: str) -> Entry:
    """The function of that name.

    Raises:
        UnsupportedError: it is not in the table.
    """
    for pattern, pipe, build in _TABLE:
        if found := re.match(pattern, name):
            return Entry(pipe, build(*found.groups()))
    raise UnsupportedError(f"library function {name}")


def _elementwise(function: Callable[..., Any], inputs: int) -> Callable[..., None]:
    """Any mix of views and scalars in, one view out, then scratch."""

    def run(core: Any, *arguments: Any) -> None:
        result, scratch = arguments[inputs], arguments[inputs + 1 :]
        values = [a.read() if isinstance(a, MemRef) else a for a in arguments[:inputs]]
        kinds = [v.dtype for v in values if isinstance(v, np.ndarray) and v.dtype != bool]
        if kinds:  # a scalar takes the vectors' type, so that integers wrap as theirs do
            values = [v if isinstance(v, np.ndarray) else kinds[-1].type(v) for v in values]
        _clobber(scratch)
        result.write(function(*values))

    return run


def _select() -> Callable[..., None]:
    def where(condition: Any, a: Any, b: Any) -> Any:
        return np.where(condition, np.float32(a), np.float32(b))

    return _elementwise(where, 3)


def _reduce(name: str, layout: str) -> Callable[..., None]:
    function = {"sum": np.sum, "max": np.max, "min": np.min}[name]

    def run(core: Any, source: MemRef, result: MemRef, *rest: Any) -> None:
        values = source.read()
        _clobber(rest)
        if layout == "ar":
            result.write(function(values, axis=-1, keepdims=True))
        else:
            result.write(function(values).reshape(result.sizes))

    return run


def _cast() -> Callable[..., None]:
    def run(core: Any, source: MemRef, result: MemRef, *rest: Any) -> None:
        mode = int(rest[-1])
        if source.dtype in FLOATS and source.dtype != result.dtype != "f32":
            wanted = _NEAREST_EVEN if result.dtype in FLOATS else _TOWARDS_ZERO
            if mode != wanted:
                raise UnsupportedError(f"cast of {source.dtype} to {result.dtype} with round mode {mode}")
        values = source.read()
        _clobber(rest)
        result.write(values)

    return run


def _broadcast_axis() -> Callable[..., None]:
    def run(core: Any, source: MemRef, result: MemRef, *scratch: Any) -> None:
        values = source.read()
        _clobber(scratch)
        result.write(values)

    return run


def _fill() -> Callable[..., None]:
    return lambda core, value, result: result.write(value)


def _arange() -> Callable[..., None]:
    def run(core: Any, result: MemRef, start: int, *steps: int) -> None:
        axes = np.meshgrid(*(np.arange(n) * step for n, step in zip(result.sizes, steps)), indexing="ij")
        result.write(start + sum(axes))

    return run


def _load() -> Callable[..., None]:
    def run(core: Any, source: MemRef, result: MemRef, pad_mode: int, pad: Any, left: int) -> None:
        if pad_mode not in (_NO_PAD, _PAD_VALUE) or left != 0 or source.sizes != result.sizes:
            raise UnsupportedError(f"load of {source.sizes} to {result.sizes}, pad mode {pad_mode}, left {left}")
        result.write(source.read())
        if len(result.sizes) == 1:
            result.poison_tail(pad if pad_mode == _PAD_VALUE else None)

    return run


def _copy() -> Callable[..., None]:
    def run(core: Any, source: MemRef, result: MemRef, *_: Any) -> None:
        if source.sizes != result.sizes:
            raise UnsupportedError(f"copy of {source.sizes} to {result.sizes}")
        result.write(source.read())

    return run


def _store() -> Callable[..., None]:
    def run(core: Any, source: MemRef, result: MemRef, atomic: int) -> None:
        if atomic not in _ATOMIC or source.sizes != result.sizes:
            raise UnsupportedError(f"store of {source.sizes} to {result.sizes}, atomic kind {atomic}")
        function = _ATOMIC[atomic]
        if function is None:
            result.write(source.read(), program=core.program)
        else:
            result.write(function(result.read(), source.read()))

    return run


def _nd2nz() -> Callable[..., None]:
    """Rows to fractals: [M, K] in global memory to [K / k0, M / 16, 16, k0] in L1."""

    def run(core: Any, source: MemRef, result: MemRef) -> None:
        values = source.read()
        rows, columns = values.shape
        outer, _, inner, width = result.sizes
        padded = np.zeros((rows, outer * width), np.float32)
        padded[:, :columns] = values
        for first in range(0, rows, inner):
            part = padded[first : first + inner]
            fractal = part.reshape(len(part), outer, width).transpose(1, 0, 2)
            offset = result.offset + first // inner * result.strides[1]
            sizes, strides = [outer, len(part), width], [result.strides[0], result.strides[2], result.strides[3]]
            MemRef(result.memory, offset, result.dtype, sizes, strides).write(fractal)

    return run


def _mma(left: str | None, right: str | None) -> Callable[..., None]:
    """C = A B, or C + A B: loads from L1 on pipe MTE1, awaiting and setting the flags it is given, then the cube."""

    def run(core: Any, a: MemRef, b: MemRef, init: bool, m: int, k: int, n: int, c: MemRef, *events: int) -> None:
        awaited, done = [e for e in events[:2] if e >= 0], [e for e in events[2:4] if e >= 0]
        for event in awaited:
            core.pipes.wait_flag("MTE2", "MTE1", event)
        core.pipes.issue("MTE1")
        x, y = _matrix(a), _matrix(b)
        x, y = (x.T if left else x)[:m, :k], (y.T if right else y)[:k, :n]
        for event in done:
            core.pipes.set_flag("MTE1", "MTE2", event)
        core.pipes.barrier("M")  # its own, between two on one accumulator
        core.pipes.issue("M")
        full = _matrix(c)
        full[:m, :n] = x @ y if init else full[:m, :n] + x @ y
        outer, blocks, inner, width = c.sizes
        c.write(full.reshape(blocks, inner, outer, width).transpose(2, 0, 1, 3))

    return run


def _matrix(tile: MemRef) -> np.ndarray:
    """Fractals [columns / n0, rows / 16, 16, n0] as a matrix [rows, columns]."""
    values = tile.read().transpose(1, 2, 0, 3)
    return values.reshape(values.shape[0] * values.shape[1], -1)


def _fixpipe() -> Callable[..., None]:
    """L0C to global memory; its options (scaling, activation) must be off."""

    def run(core: Any, source: MemRef, result: MemRef, *options: Any) -> None:
        if any(options):
            raise UnsupportedError(f"fixpipe with options {options}")
        rows, columns = result.sizes
        result.write(_matrix(source)[:rows, :columns], program=core.program)

    return run


def _clobber(scratch: Any) -> None:
    for argument in scratch:
        if isinstance(argument, MemRef):
            argument.clobber()


# Pattern of the whole name, pipe, and what makes the function from the pattern's groups.
_TABLE: list[tuple[str, str, Callable[..., Callable[..., None]]]] = [
    (r"v(add|sub|mul|div|max|min|and|or|xor)s?(?:_vs)?_[12]d_\w+$", "V", lambda name: _elementwise(_BINARY[name], 2)),
    (r"v(exp|ln|sqrt|abs|not)_[12]d_\w+$", "V", lambda name: _elementwise(_UNARY[name], 1)),
    (r"vcmps?_(eq|ne|lt|le|gt|ge)_[12]d_\w+$", "V", lambda name: _elementwise(_COMPARE[name], 2)),
    (r"vsel_(?:vv|vs|sv|ss)_[12]d_\w+$", "V", _select),
    (r"vcast_\w+_to_\w+_[12]d_with_(?:mode|temp|overflow)$", "V", _cast),
    (r"enablevc_reduce_(sum|max|min)_(r|ar)_\w+$", "V", _reduce),
    (r"broadcast_scalar_\w+_to_[12]d$", "V", _fill),
    (r"broadcast_(?:first|last)_axis_\w*[23]d_\w+$", "V", _broadcast_axis),
    (r"arange_[12]d_\w+$", "V", _arange),
    (r"copy_ubuf_to_ubuf_[12]d_\w+$", "V", _copy),
    (r"load_gm_to_ubuf_[12]d_\w+$", "MTE2", _load),
    (r"store_ubuf_to_gm_[12]d_\w+$", "MTE3", _store),
    (r"set_l1_2d_\w+$", "MTE2", _fill),
    (r"nd2nz_\w+$", "MTE2", _nd2nz),
    (r"mma_tile_\w+?_to_float(_ta)?(_tb)?$", "M", _mma),
    (r"fixpipe_nz2nd_\w+_4d_to_2d$", "FIX", _fixpipe),
]
