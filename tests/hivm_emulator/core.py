"""One core: walks through a function, operation by operation.

An operation is compiled to a Python function when it first runs and kept on the operation. Values are Python ints and
bools, numpy float32 and `MemRef`s, in one dictionary per call by their names.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hivm_emulator import library
from hivm_emulator.memory import CAPACITY, FLOATS, Memory, MemRef, UnsupportedError, item_size
from hivm_emulator.parser import Block, Module, Operation, branch_target, memref_type
from hivm_emulator.pipes import Pipes
from hivm_emulator.scalar import compile_scalar

if TYPE_CHECKING:
    from hivm_emulator.launch import Flags

Values = dict[str, Any]
_IGNORED = {
    "hivm.hir.set_mask_norm", "hivm.hir.set_ffts_base_addr", "annotation.mark", "memref.assume_alignment",
}  # fmt: skip


class Core:
    """A cube or vector core.

    Attributes:
        module: what it runs.
        program: the block's index, which is the program's.
        sub_block: 0 or 1 for the two vector cores of a block.
        kind: "CUBE" or "VECTOR".
        flags: between the cores of the block.
        pipes: its clocks and flags.
        memories: UB, L1 and L0C, by the names of their address spaces.
    """

    def __init__(self, module: Module, program: int, kind: str, sub_block: int, flags: Flags) -> None:
        self.module, self.program, self.kind, self.sub_block, self.flags = module, program, kind, sub_block, flags
        self.name = f"program {program}, {kind.lower()} core {sub_block}"
        self.pipes = Pipes(self.name)
        self.memories = {space: Memory.poisoned(space, size, self.pipes) for space, size in CAPACITY.items()}

    def run(self, function: str, arguments: list[Any]) -> None:
        """Run a function of the module to its end, and check that no flag is left."""
        found = self.module.functions[function]
        self.body(found.blocks, dict(zip(found.arguments, arguments, strict=True)))
        self.pipes.finish()

    def body(self, blocks: list[Block], values: Values) -> list[Any]:
        """Run a region; what it yields or returns."""
        labels = {block.label: block for block in blocks}
        block = blocks[0]
        while True:
            target = None
            for operation in block.operations:
                if operation.name in ("scf.yield", "return", "func.return"):
                    return [values[name] for name in operation.operands]
                if operation.name in ("cf.br", "cf.cond_br"):
                    target, brought = _branch(operation, values)
                    break
                self.execute(operation, values)
            if target is None:
                return []
            block = labels[target]
            values.update(zip(block.arguments, brought, strict=True))

    def execute(self, operation: Operation, values: Values) -> None:
        if operation.run is None:
            operation.run = _compile(operation, self.module)
        found = operation.run(self, values)
        if len(operation.results) == 1:
            values[operation.results[0]] = found[0] if isinstance(found, list) else found
        elif operation.results:
            values.update(zip(operation.results, found, strict=True))


def _branch(operation: Operation, values: Values) -> tuple[str, list[Any]]:
    targets = re.findall(r"\^bb\d+(?:\([^)]*\))?", operation.text)
    if operation.name == "cf.cond_br" and not values[operation.operands[0]]:
        targets = targets[1:]
    label, names = branch_target(targets[0])
    return label, [values[name] for name in names]


def _compile(operation: Operation, module: Module) -> Callable[[Core, Values], Any]:
    name, operands = operation.name, operation.operands
    if name in _IGNORED:
        return lambda core, values: None
    if name in _BUILDERS:
        return _BUILDERS[name](operation)
    function = compile_scalar(operation, module)
    return lambda core, values: function(*[values[operand] for operand in operands])


def _for(operation: Operation) -> Callable[[Core, Values], Any]:
    found = re.match(r" (%\w+) = (\S+) to (\S+) step (\S+)(?: iter_args\((.*?)\))?", operation.text)
    if found is None:
        raise UnsupportedError(f"scf.for{operation.text}")
    index, *bounds = found.group(1, 2, 3, 4)
    carried = re.findall(r"(%[\w-]+) = (%[\w#-]+)", found[5] or "")

    def run(core: Core, values: Values) -> list[Any]:
        start, stop, step = (int(values[name]) for name in bounds)
        current = [values[initial] for _, initial in carried]
        for values[index] in range(start, stop, step):
            values.update(zip((name for name, _ in carried), current))
            current = core.body(operation.regions[0], values)
        return current

    return run


def _if(operation: Operation) -> Callable[[Core, Values], Any]:
    def run(core: Core, values: Values) -> list[Any]:
        if values[operation.operands[0]]:
            return core.body(operation.regions[0], values)
        return core.body(operation.regions[1], values) if len(operation.regions) > 1 else []

    return run


def _call(operation: Operation) -> Callable[[Core, Values], Any]:
    found = re.match(r" @(\w+)\((.*?)\)", operation.text)
    if found is None:
        raise UnsupportedError(f"{operation.name}{operation.text}")
    pipe, function = library.find(found[1])

    def run(core: Core, values: Values) -> None:
        core.pipes.issue(pipe)
        with np.errstate(all="ignore"):  # NaN goes where it goes
            function(core, *[values[name] for name in operation.operands])

    return run


def _pointer_cast(operation: Operation) -> Callable[[Core, Values], Any]:
    kind = memref_type(operation.types)

    def run(core: Core, values: Values) -> MemRef:
        byte = int(values[operation.operands[0]])
        offset = byte * 8 if kind.dtype == "i1" else byte // item_size(kind.dtype)
        return MemRef(core.memories[kind.space], offset, kind.dtype, kind.sizes)

    return run


def _alloc(operation: Operation) -> Callable[[Core, Values], Any]:
    """A buffer that the planner forgot: memory of its own, so that only what is wrong with its contents shows."""
    kind = memref_type(operation.types)

    def run(core: Core, values: Values) -> MemRef:
        width = 1 if kind.dtype == "i1" else item_size(kind.dtype)
        name = f"unplanned {operation.results[0]}"
        return MemRef(Memory.poisoned(name, math.prod(kind.sizes) * width, core.pipes), 0, kind.dtype, kind.sizes)

    return run


def _numbers(text: str) -> list[str]:
    return re.findall(r"%[\w#-]+|-?\d+", text)


def _values(names: list[str], values: Values) -> list[int]:
    return [int(values[name]) if name[0] == "%" else int(name) for name in names]


def _subview(operation: Operation) -> Callable[[Core, Values], Any]:
    offsets, sizes, strides = map(_numbers, re.findall(r"\[([^\]]*)\]", operation.text.split(" : ")[0])[:3])
    wanted = memref_type(operation.types.split(" to ")[-1]).sizes
    kept = _kept_axes(sizes, wanted)

    def run(core: Core, values: Values) -> MemRef:
        source = values[operation.operands[0]]
        at, new_sizes, steps = (_values(part, values) for part in (offsets, sizes, strides))
        if min(new_sizes, default=0) < 0:
            raise IndexError(f"subview of {source!r} with sizes {new_sizes}")
        offset = source.offset + sum(a * s for a, s in zip(at, source.strides))
        new_strides = [a * s for a, s in zip(steps, source.strides)]
        return MemRef(source.memory, offset, source.dtype, [new_sizes[i] for i in kept], [new_strides[i] for i in kept])

    return run


def _kept_axes(sizes: list[str], wanted: list[int]) -> list[int]:
    """The axes that the result keeps: it may drop some whose size is the constant 1."""
    kept: list[int] = []
    surplus = len(sizes) - len(wanted)
    for axis, size in enumerate(sizes):
        expected = wanted[len(kept)] if len(kept) < len(wanted) else None
        matches = expected is not None and (size == str(expected) or (expected == -1 and size[0] == "%"))
        if matches or not surplus:
            kept.append(axis)
        else:
            surplus -= 1
    return kept


def _reinterpret_cast(operation: Operation) -> Callable[[Core, Values], Any]:
    parts = [re.search(rf"{key}: \[([^\]]*)\]", operation.text) for key in ("offset", "sizes", "strides")]
    names = [_numbers(part[1]) if part else [] for part in parts]

    def run(core: Core, values: Values) -> MemRef:
        source = values[operation.operands[0]]
        offset, sizes, strides = (_values(part, values) for part in names)
        return MemRef(source.memory, offset[0], source.dtype, sizes, strides)

    return run


def _collapse_shape(operation: Operation) -> Callable[[Core, Values], Any]:
    groups = _groups(operation)

    def run(core: Core, values: Values) -> MemRef:
        source = values[operation.operands[0]]
        sizes, strides = [], []
        for group in groups:
            size, stride = 1, 1
            for axis in group:
                size *= source.sizes[axis]
                stride = source.strides[axis] if source.sizes[axis] != 1 else stride
            sizes.append(size)
            strides.append(stride)
        return MemRef(source.memory, source.offset, source.dtype, sizes, strides)

    return run


def _expand_shape(operation: Operation) -> Callable[[Core, Values], Any]:
    groups = _groups(operation)
    shape = re.search(r"output_shape \[([^\]]*)\]", operation.text)
    names = _numbers(shape[1]) if shape else []

    def run(core: Core, values: Values) -> MemRef:
        source = values[operation.operands[0]]
        sizes = _values(names, values)
        strides = [1] * len(sizes)
        for group, stride in zip(groups, source.strides):
            for axis in reversed(group):
                strides[axis] = stride
                stride *= sizes[axis]
        return MemRef(source.memory, source.offset, source.dtype, sizes, strides)

    return run


def _groups(operation: Operation) -> list[list[int]]:
    found = re.search(r"\[(?:\[[\d, ]*\](?:, )?)*\]", operation.text)
    if found is None:
        raise UnsupportedError(f"{operation.name}{operation.text}")
    groups: list[list[int]] = ast.literal_eval(found[0])
    return groups


def _view(operation: Operation) -> Callable[[Core, Values], Any]:
    kind = memref_type(operation.types.split(" to ")[-1])

    def run(core: Core, values: Values) -> MemRef:
        source, byte, *sizes = (values[name] for name in operation.operands)
        dynamic = iter(sizes)
        shape = [int(next(dynamic)) if size < 0 else size for size in kind.sizes]
        return MemRef(source.memory, int(byte) // item_size(kind.dtype), kind.dtype, shape)

    return run


def _element(operation: Operation, operand: int) -> Callable[[Values], MemRef]:
    found = re.search(r"\[([^\]]*)\]", operation.text)
    names = _numbers(found[1]) if found else []

    def at(values: Values) -> MemRef:
        source = values[operation.operands[operand]]
        offset = source.offset + sum(a * s for a, s in zip(_values(names, values), source.strides, strict=True))
        return MemRef(source.memory, offset, source.dtype, [])

    return at


def _load(operation: Operation) -> Callable[[Core, Values], Any]:
    at = _element(operation, 0)

    def run(core: Core, values: Values) -> Any:
        core.pipes.issue("S")
        element = at(values)
        value = element.read(scalar=True)[()]
        return value if element.dtype in FLOATS else bool(value) if element.dtype == "i1" else int(value)

    return run


def _store(operation: Operation) -> Callable[[Core, Values], Any]:
    at = _element(operation, 1)

    def run(core: Core, values: Values) -> None:
        core.pipes.issue("S")
        at(values).write(values[operation.operands[0]], program=core.program)

    return run


def _flag(operation: Operation) -> Callable[[Core, Values], Any]:
    method = operation.name.rsplit(".", 1)[1]
    found = re.match(r"\[<PIPE_(\w+)>, <PIPE_(\w+)>, (?:<EVENT_ID(\d+)>|(%\w+))\]", operation.text)
    if found is None:
        raise UnsupportedError(f"{operation.name}{operation.text}")
    source, target, event, value = found.groups()

    def run(core: Core, values: Values) -> None:
        getattr(core.pipes, method)(source, target, int(event if value is None else values[value]))

    return run


def _barrier(operation: Operation) -> Callable[[Core, Values], Any]:
    pipe = re.findall(r"<PIPE_(\w+)>", operation.text)[0]
    return lambda core, values: core.pipes.barrier(pipe)


def _cross_core(operation: Operation) -> Callable[[Core, Values], Any]:
    method = operation.name.rsplit("_", 1)[1]
    found = re.search(r"flag = (%\w+|\d+)", operation.text)
    if found is None:
        raise UnsupportedError(f"{operation.name}{operation.text}")
    names = [found[1]]

    def run(core: Core, values: Values) -> None:
        getattr(core.flags, method)(core.kind, core.sub_block, *_values(names, values))

    return run


_BUILDERS: dict[str, Callable[[Operation], Callable[[Core, Values], Any]]] = {
    "scf.for": _for,
    "scf.if": _if,
    "call": _call,
    "func.call": _call,
    "hivm.hir.pointer_cast": _pointer_cast,
    "hivm.hir.get_block_idx": lambda operation: lambda core, values: core.program,
    "hivm.hir.get_sub_block_idx": lambda operation: lambda core, values: core.sub_block,
    "hivm.hir.set_flag": _flag,
    "hivm.hir.wait_flag": _flag,
    "hivm.hir.pipe_barrier": _barrier,
    "hivm.hir.sync_block_set": _cross_core,
    "hivm.hir.sync_block_wait": _cross_core,
    "memref.alloc": _alloc,
    "memref.cast": lambda operation: lambda core, values: values[operation.operands[0]],
    "memref.subview": _subview,
    "memref.reinterpret_cast": _reinterpret_cast,
    "memref.collapse_shape": _collapse_shape,
    "memref.expand_shape": _expand_shape,
    "memref.view": _view,
    "memref.load": _load,
    "memref.store": _store,
}
