"""Memory that remembers what was written: on-chip memories full of NaN, global memory with sharp edges, and views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from hivm_emulator.pipes import Pipes

# A2 and A3, bytes.
CAPACITY = {"ub": 196608, "cbuf": 524288, "cc": 131072}
GRANULE = 32  # bytes; buffers are aligned to it, and a DMA writes whole ones
# Every byte 0xFF is NaN in all three float formats.
POISON = 0xFF

_STORAGE: dict[str, Any] = {
    "f32": np.float32, "bf16": np.uint16, "f16": np.float16, "i64": np.int64, "i32": np.int32, "i16": np.int16,
    "i8": np.int8,
}  # fmt: skip
_OF_TORCH = {
    torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64", torch.int32: "i32",
}  # fmt: skip
FLOATS = ("f32", "bf16", "f16")


class EmulationError(Exception):
    """The kernel did what it must not do."""


class OutOfBoundsError(EmulationError):
    """An access outside its memory or tensor."""


class UninitialisedError(EmulationError):
    """An integer, a flag or a scalar was read from memory that nobody wrote. (Floats show as NaN.)"""


class RaceError(EmulationError):
    """Two accesses of the same bytes, at least one of them a write, that nothing orders."""


class FlagError(EmulationError):
    """A flag was awaited before it was set, or set and never awaited."""


class DeadlockError(EmulationError):
    """Every core waits."""


class UnsupportedError(NotImplementedError):
    """An operation or a form of one that the emulator does not know."""


class Memory:
    """Bytes with a name.

    Attributes:
        name: for messages.
        data: uint8.
        written: which bytes hold something; None for tensors of the caller, which all do.
        pipes: of the core whose memory it is, or None for global memory.
        writers: for tensors of the caller, the program that wrote each byte last, or -1.
    """

    def __init__(self, name: str, data: np.ndarray, *, initialised: bool, pipes: Pipes | None = None) -> None:
        self.name, self.data, self.pipes = name, data, pipes
        self.written = None if initialised else np.zeros(data.size, bool)
        self.writers = np.full(data.size, -1, np.int32) if initialised else None

    @classmethod
    def poisoned(cls, name: str, size: int, pipes: Pipes | None = None) -> Memory:
        return cls(name, np.full(size, POISON, np.uint8), initialised=False, pipes=pipes)

    @classmethod
    def of_tensor(cls, name: str, tensor: torch.Tensor) -> MemRef:
        """The elements of a tensor and those between them, [n] of its dtype; nothing before or after."""
        count = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
        flat = tensor.detach().as_strided((count,), (1,))
        return MemRef(cls(name, flat.view(torch.uint8).numpy(), initialised=True), 0, _OF_TORCH[tensor.dtype], [count])


class MemRef:
    """A strided view of a memory: offset and strides in elements (bits for `i1`)."""

    __slots__ = ("dtype", "memory", "offset", "sizes", "strides")

    def __init__(
        self, memory: Memory, offset: int, dtype: str, sizes: Sequence[int], strides: Sequence[int] | None = None
    ) -> None:
        self.memory, self.offset, self.dtype, self.sizes = memory, offset, dtype, list(sizes)
        self.strides = contiguous(sizes) if strides is None else list(strides)

    def __repr__(self) -> str:
        return f"{self.memory.name}[{self.offset} + {self.sizes} * {self.strides}] {self.dtype}"

    def read(self, *, scalar: bool = False) -> np.ndarray:
        """Values: float32 for every float, bool for `i1`, else integers."""
        if 0 in self.sizes:
            return np.zeros(self.sizes, np.float32 if self.dtype in FLOATS else bool)
        first, last = self._bytes()
        if self.memory.pipes is not None:
            self.memory.pipes.reads(self.memory, first, last)
        written = self.memory.written
        if written is not None and (scalar or self.dtype not in FLOATS) and not self._view(written, bool).all():
            raise UninitialisedError(f"read of {self!r}, which was never written (all of it)")
        if self.dtype == "i1":
            bits = np.unpackbits(self.memory.data[first:last], bitorder="little")
            start = self.offset - first * 8
            return bits[start : start + math.prod(self.sizes)].reshape(self.sizes).astype(bool)
        stored = self._view(self.memory.data, _STORAGE[self.dtype])
        if self.dtype == "bf16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32) if self.dtype == "f16" else stored.copy()

    def write(self, values: Any, *, program: int | None = None) -> None:
        """Round `values`, broadcast to the sizes, to the element type and store them.

        `program` is who writes to a tensor of the caller; None for who may write where others do (an atomic addition).
        """
        if 0 in self.sizes:
            return
        first, last = self._bytes()
        memory = self.memory
        if memory.pipes is not None:
            memory.pipes.writes(memory, first, last)
        if memory.written is not None:
            self._view(memory.written, bool)[...] = True
        if memory.writers is not None and program is not None:
            self._claim(memory.writers, program)
        values = np.broadcast_to(values, self.sizes)
        if self.dtype == "i1":
            bits = np.unpackbits(memory.data[first:last], bitorder="little")
            start = self.offset - first * 8
            bits[start : start + values.size] = values.reshape(-1)
            memory.data[first:last] = np.packbits(bits, bitorder="little")
            return
        with np.errstate(all="ignore"):
            stored = bf16_bits(values) if self.dtype == "bf16" else values.astype(_STORAGE[self.dtype])
        self._view(memory.data, _STORAGE[self.dtype])[...] = stored

    def clobber(self) -> None:
        """Leave nothing of use here: a library function had it for scratch."""
        if 0 not in self.sizes and self.dtype != "i1":
            first, last = self._bytes()
            if self.memory.pipes is not None:
                self.memory.pipes.writes(self.memory, first, last)
            self.memory.data[first:last] = POISON
            if self.memory.written is not None:
                self.memory.written[first:last] = False

    def poison_tail(self, pad: float | None) -> None:
        """What a DMA into this 1-D view leaves in the rest of its last granule: the pad value, or anything."""
        if self.dtype == "i1" or not self.sizes or 0 in self.sizes:
            return
        _, last = self._bytes()
        end = -(-last // GRANULE) * GRANULE
        width = item_size(self.dtype)
        if end == last or self.strides[-1] != 1:
            return
        tail = MemRef(self.memory, last // width, self.dtype, [(end - last) // width])
        if pad is not None:
            tail.write(pad)
        else:
            self.memory.data[last:end] = POISON
            if self.memory.written is not None:
                self.memory.written[last:end] = False

    def _claim(self, writers: np.ndarray, program: int) -> None:
        owners = self._view(writers, np.int32)
        others = owners[(owners >= 0) & (owners != program)]
        if others.size:
            raise RaceError(f"programs {int(others[0])} and {program} both write {self!r}")
        owners[...] = program

    def _bytes(self) -> tuple[int, int]:
        """First byte and the one after the last; checks that both exist."""
        last = self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides))
        first, last = min(self.offset, last), max(self.offset, last) + 1
        if self.dtype == "i1":
            first, last = first // 8, -(-last // 8)
        else:
            first, last = first * item_size(self.dtype), last * item_size(self.dtype)
        if first < 0 or last > self.memory.data.size:
            raise OutOfBoundsError(f"{self!r} is outside of its {self.memory.data.size} bytes")
        return first, last

    def _view(self, array: np.ndarray, kind: Any) -> np.ndarray:
        """The elements in `data`; in an array with one entry per byte, the entries of each, along one more axis."""
        if self.dtype == "i1":
            first, last = self._bytes()
            return array[first:last]
        width = item_size(self.dtype)
        entry = array.dtype.itemsize
        strides = [s * width * entry for s in self.strides]
        if array is self.memory.data:
            return np.ndarray(self.sizes, kind, array, self.offset * width, strides)
        return np.ndarray([*self.sizes, width], kind, array, self.offset * width * entry, [*strides, entry])


def contiguous(sizes: Sequence[int]) -> list[int]:
    """Row-major strides."""
    strides = [1] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * sizes[axis + 1]
    return strides


def item_size(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        UnsupportedError: an element type that no kernel has used yet.
    """
    if dtype not in _STORAGE:
        raise UnsupportedError(f"element type {dtype}")
    return int(np.dtype(_STORAGE[dtype]).itemsize)


def bf16_bits(values: Any) -> np.ndarray:
    """bfloat16 of float32 values, to nearest even, as uint16."""
    floats = np.ascontiguousarray(values, np.float32)
    bits = floats.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(floats), np.uint16(0x7FC0), rounded)


def round_to(dtype: str, value: Any) -> np.float32:
    """A float scalar as its type can hold it."""
    if dtype == "bf16":
        return (bf16_bits(np.float32(value)).astype(np.uint32) << 16).view(np.float32).reshape(())[()]
    with np.errstate(over="ignore"):
        return np.float32(np.float16(value)) if dtype == "f16" else np.float32(value)
