"""MLIR text to operations, as much of its grammar as the vendor compiler prints.

Every operation stands on a line of its own, so a line is parsed by itself; what a handler needs beyond names and
operands (types, attributes, sizes) it takes from `Operation.text` when it first sees the operation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hivm_emulator.memory import UnsupportedError

_VALUE = re.compile(r"%[\w#-]+")
_LINE = re.compile(r"(?:(%[\w-]+)(?::(\d+))? = )?([\w.]+)(.*)$")
_BLOCK = re.compile(r"(\^bb\d+)(?:\((.*)\))?:")
_MAP = re.compile(r"^(#map\d*) = affine_map<\(([^)]*)\)(?:\[([^\]]*)\])? -> \((.*)\)>$", re.M)
_FUNCTION = re.compile(r"^  func\.func @(\w+)\((.*?)\)(?: -> \S+)? attributes \{.*?\} \{\n(.*?)\n  \}$", re.M | re.S)


@dataclass
class Operation:
    """One operation.

    Attributes:
        name: as printed, `arith.addi`.
        results: names of its results; two and more are `%x#0`, `%x#1`.
        operands: names of the values before the types.
        text: everything after the name.
        regions: of `scf.for` and `scf.if`.
        run: what the core made of it at its first execution.
    """

    name: str
    results: list[str]
    operands: list[str]
    text: str
    regions: list[list[Block]] = field(default_factory=list)
    run: Callable[..., Any] | None = None

    @property
    def types(self) -> str:
        """What follows the last colon at the top level: `i32`, or `(f32, memref<...>) -> ()`."""
        return self.text.split(" : ", 1)[1].strip() if " : " in self.text else ""


@dataclass
class Block:
    """A straight run of operations, with the names of the values that a branch to it brings."""

    label: str
    arguments: list[str]
    operations: list[Operation] = field(default_factory=list)


class Function(NamedTuple):
    """Name, names of the arguments, and the body."""

    name: str
    arguments: list[str]
    blocks: list[Block]


class Module(NamedTuple):
    """A parsed file: affine maps as functions of dimensions then symbols, and functions that have a body."""

    maps: dict[str, Callable[..., tuple[int, ...]]]
    functions: dict[str, Function]


class MemRefType(NamedTuple):
    """Sizes (-1 where dynamic), element type and address space of `memref<...>`."""

    sizes: list[int]
    dtype: str
    space: str


def parse(text: str) -> Module:
    """Parse a whole module.

    Raises:
        UnsupportedError: a line that is no operation in the form of A2's and A3's IR.
    """
    maps = {m[1]: _affine_map(m[2], m[3] or "", m[4]) for m in _MAP.finditer(text)}
    functions = {}
    for name, arguments, body in _FUNCTION.findall(text):
        names = re.findall(r"(%arg\d+): ", arguments)
        functions[name] = Function(name, names, _blocks(body.split("\n")))
    return Module(maps, functions)


def memref_type(text: str) -> MemRefType:
    """The first memref type in a text."""
    found = re.search(r"memref<((?:[\d?]+x)*)(\w+)", text)
    if found is None:
        raise SyntaxError(f"no memref type in {text!r}")
    sizes = [-1 if size == "?" else int(size) for size in found[1].split("x") if size]
    space = re.search(r"address_space<(\w+)>", text)
    return MemRefType(sizes, found[2], space[1] if space else "gm")


def branch_target(text: str) -> tuple[str, list[str]]:
    """Label and values of one successor, `^bb3(%1, %2 : i32, i64)`."""
    label, _, values = text.strip().partition("(")
    return label, _VALUE.findall(values.split(" : ")[0])


def _blocks(lines: list[str]) -> list[Block]:
    root = [Block("^bb0", [])]
    open_regions = [root]
    owners: list[Operation] = []
    for line in map(str.strip, lines):
        if not line or line.startswith("//"):
            continue
        if line.startswith("}"):
            open_regions.pop()
            if line.endswith("else {"):
                owners[-1].regions.append([Block("^bb0", [])])
                open_regions.append(owners[-1].regions[-1])
            else:
                owners.pop()
            continue
        if label := _BLOCK.match(line):
            open_regions[-1].append(Block(label[1], re.findall(r"(%[\w-]+): ", label[2] or "")))
            continue
        operation = _operation(line)
        open_regions[-1][-1].operations.append(operation)
        if line.endswith("{"):
            operation.regions.append([Block("^bb0", [])])
            open_regions.append(operation.regions[-1])
            owners.append(operation)
    return root


def _operation(line: str) -> Operation:
    found = _LINE.match(line)
    if found is None:
        raise UnsupportedError(f"the form of {line[:200]}")
    result, count, name, text = found.groups()
    results = [result] if result and not count else [f"{result}#{i}" for i in range(int(count or 0))]
    return Operation(name, results, _VALUE.findall(text.split(" : ")[0]), text)


def _affine_map(dimensions: str, symbols: str, body: str) -> Callable[..., tuple[int, ...]]:
    names = [name.strip() for name in f"{dimensions},{symbols}".split(",") if name.strip()]
    if not re.fullmatch(r"[\w\s()+*,-]*", body):
        raise SyntaxError(f"affine map {body!r}")
    expression = re.sub(r"\bmod\b", "%", body).replace("floordiv", "//").replace("ceildiv", "* CEILDIV *")
    found: Callable[..., tuple[int, ...]] = eval(
        f"lambda {', '.join(names)}: ({expression},)", {"CEILDIV": _CeilingDivision()}
    )
    return found


class _CeilingDivision:
    """`a * CEILDIV * b`: Python has no such operator, and this one has the precedence of multiplication, as in MLIR."""

    def __init__(self, dividend: int = 0) -> None:
        self.dividend = dividend

    def __rmul__(self, dividend: int) -> _CeilingDivision:
        return _CeilingDivision(dividend)

    def __mul__(self, divisor: int) -> int:
        return -(-self.dividend // divisor)
