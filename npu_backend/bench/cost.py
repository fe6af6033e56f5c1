"""Counts what a PPO head does to device memory: bytes read and written, kernel launches, GEMM FLOPs. Nothing is timed.

Two sources, both at the point where work is handed to a device:

* torch: every operator that reaches the dispatcher, at full size on fake tensors. An operator is taken for one kernel
  that reads each operand once and writes its result once. Views and allocations are free; what is updated in place is
  read and written; a broadcast operand counts once; gather and scatter touch what they index. No operator can do with
  less, and many do with more (a softmax over a row that does not fit on chip reads it twice): a lower bound.
* Triton: every element that the kernel's loads and stores touch, masked ones left out, in Triton's interpreter on
  memory of the launch's shapes. The kernels here load each value once, so these bytes are device memory's too. (Those
  of a tiled GEMM would not be: it loads operands again and again from the cache.)
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_ALLOCATIONS = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh")
)
_OVERWRITES = frozenset(f"aten::{name}" for name in ("copy_", "fill_", "zero_"))  # the target's old values do not count
_TEMPLATES = re.compile(r"aten::(?:new_\w+|\w+_like)$")  # read no more than a shape


@dataclass
class Traffic:
    """Of one operator or kernel, summed over its launches; bytes and floating-point operations."""

    launches: int = 0
    read: int = 0
    written: int = 0
    flops: int = 0

    def add(self, other: Traffic) -> None:
        self.launches += other.launches
        self.read += other.read
        self.written += other.written
        self.flops += other.flops

    @property
    def moved(self) -> int:
        return self.read + self.written


class CostCounter(TorchDispatchMode):
    """A context whose operators and Triton launches are counted, in `by_name`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_name: dict[str, Traffic] = defaultdict(Traffic)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        traffic = traffic_of(func, args, kwargs, result)
        if traffic is not None:
            self.by_name[func._schema.name.removeprefix("aten::")].add(traffic)
        return result

    def totals(self) -> tuple[Traffic, Traffic]:
        """Of the GEMMs (what torch's own formulas give FLOPs for), and of everything else."""
        gemms, others = Traffic(), Traffic()
        for traffic in self.by_name.values():
            (gemms if traffic.flops else others).add(traffic)
        return gemms, others


def traffic_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Traffic | None:
    """What one operator moves; None for a view, an allocation, or what is no work on tensors."""
    name = func._schema.name
    if func.is_view or name in _ALLOCATIONS or not name.startswith("aten::"):  # prim::device and the like
        return None
    from torch.utils.flop_counter import flop_registry  # imports triton, which must not be before its interpreter is on

    formula = flop_registry.get(func._overloadpacket)
    flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
    traffic = Traffic(launches=1, flops=flops)
    indexed = _indexed_bytes(name, args, result)
    if indexed is not None:
        traffic.read, traffic.written = indexed
        return traffic
    updated = False
    for argument, value in _arguments(func, args, kwargs):
        is_target = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            if is_target:
                updated = True
                traffic.written += touched_bytes(tensor)
            if not (is_target and (argument.is_out or name in _OVERWRITES)) and not _TEMPLATES.match(name):
                traffic.read += touched_bytes(tensor)
    if not updated:
        traffic.written += sum(map(touched_bytes, _tensors(result)))
    return traffic


def touched_bytes(tensor: Tensor) -> int:
    """Bytes of the distinct elements of a tensor: a dimension that is expanded holds one."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride()) if stride != 0)
    return math.prod(sizes) * tensor.element_size() if tensor.numel() else 0


def _indexed_bytes(name: str, args: tuple[Any, ...], result: Any) -> tuple[int, int] | None:
    """Read and written bytes of an operator that touches only what it indexes."""
    if name in ("aten::gather", "aten::index_select"):
        return touched_bytes(args[2]) + touched_bytes(result), touched_bytes(result)
    if name == "aten::scatter_":
        source = args[3] if isinstance(args[3], Tensor) else None
        read = touched_bytes(args[2]) + (touched_bytes(source) if source is not None else 0)
        return read, args[2].numel() * args[0].element_size()
    return None


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for position, argument in enumerate(func._schema.arguments):
        yield argument, args[position] if position < len(args) else kwargs.get(argument.name)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


@contextmanager
def triton_launches(counter: CostCounter) -> Iterator[None]:
    """Count Triton launches too. They must be interpreted (`triton_interpreter.activate`), and compute nothing of use.

    Each kernel runs on fresh memory, once for all launches whose arguments differ in no shape or number. Where it has
    an argument M, the number of rows that its programs share among them, it runs on one row and on two: what the second
    adds holds for each of the others, because no address depends on what is loaded but that of the label.
    """
    from triton.runtime.interpreter import GridExecutor

    execute, seen = GridExecutor.__call__, {}

    def counted_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        name = self.fn.__name__
        key = (name, tuple(self.grid), tuple(map(_description, args)), tuple(sorted(kwargs.items())))
        if key not in seen:
            rows_at = self.arg_names.index("M") if "M" in self.arg_names else None
            with _disable_current_modes():
                if rows_at is None:
                    seen[key] = _interpreted(execute, self, args, kwargs)
                else:
                    one, two = (_interpreted(execute, self, _replaced(args, rows_at, rows), kwargs) for rows in (1, 2))
                    more = args[rows_at] - 1
                    read, written = (a + more * (b - a) for a, b in ((one.read, two.read), (one.written, two.written)))
                    seen[key] = Traffic(launches=1, read=read, written=written)
        counter.by_name[name].add(seen[key])

    GridExecutor.__call__ = counted_launch
    try:
        yield
    finally:
        GridExecutor.__call__ = execute


def _interpreted(execute: Callable[..., None], launch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traffic:
    """What one interpreted launch loads and stores."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    load, store, atomic = Builder.create_masked_load, Builder.create_masked_store, Builder.create_atomic_rmw
    traffic = Traffic(launches=1)

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        found = load(self, pointers, mask, *rest)
        traffic.read += int(mask.data.sum()) * found.data.dtype.itemsize
        return found

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.written += int(mask.data.sum()) * value.data.dtype.itemsize
        return store(self, pointers, value, mask, *rest)

    def refused_atomic(self: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{launch.fn.__name__}: what an atomic moves is not counted")

    Builder.create_masked_load, Builder.create_masked_store = counted_load, counted_store
    Builder.create_atomic_rmw = refused_atomic
    try:
        execute(launch, *_fresh(args), **kwargs)
    finally:
        Builder.create_masked_load, Builder.create_masked_store = load, store
        Builder.create_atomic_rmw = atomic
    return traffic


def _replaced(args: tuple[Any, ...], position: int, value: Any) -> tuple[Any, ...]:
    return (*args[:position], value, *args[position + 1 :])


def _description(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    return argument


def _fresh(args: tuple[Any, ...]) -> list[Any]:
    """Memory of the same shapes, full of ones; one tensor that is passed twice stays one."""
    made: dict[int, Tensor] = {}
    for argument in args:
        if isinstance(argument, Tensor) and id(argument) not in made:
            size = sum((n - 1) * s for n, s in zip(argument.shape, argument.stride())) + 1
            memory = torch.ones(size, dtype=argument.dtype)
            made[id(argument)] = memory.as_strided(argument.shape, argument.stride())
    return [made.get(id(argument), argument) if isinstance(argument, Tensor) else argument for argument in args]
