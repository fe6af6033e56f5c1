"""The form of a function or a class: its code without what does not change the result, as one string.

Taken away: names of locals and parameters, parameters that are never read, docstrings, decorators, type hints. Kept:
defaults and kinds of parameters, attributes, constants, the order of operations and casts. A global name becomes what
it stands for: an import its dotted name (`F.silu` and `nn.functional.silu` are one), a helper of transformers the form
of that helper, a method of the same class the form of that method.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator

from npu_backend.recognise.source import Definition, Module

_DROPPED = {"decorator_list", "returns", "annotation", "type_comment", "type_params", "ctx", "kind"}
_DEPTH = 4  # helpers of helpers; what lies deeper keeps its name, so it matches nothing
_STATEMENTS = 20  # an operator is short; what is longer is no operator, and is not read


def digest(form: str) -> str:
    """A short name for a form."""
    return hashlib.sha256(form.encode()).hexdigest()[:12]


def form_of(module: Module, node: Definition, depth: int = 0) -> str:
    """The form of a top-level function, or of a class's `forward` with the methods that it calls.

    A class without a `forward` of its own has the empty form: the class that it inherits from is the operator.
    """
    if isinstance(node, ast.FunctionDef):
        return _Writer(module, {}, depth).function(node)
    methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
    return _Writer(module, methods, depth).function(methods["forward"]) if "forward" in methods else ""


class _Writer:
    """Writes one function; `methods` are those of the class it belongs to."""

    def __init__(self, module: Module, methods: dict[str, ast.FunctionDef], depth: int) -> None:
        self.module = module
        self.methods = methods
        self.depth = depth
        self.names: dict[str, str] = {}

    def function(self, node: ast.FunctionDef) -> str:
        if len(node.body) > _STATEMENTS:
            return f"long {node.name}"
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        read = {n.id for statement in body for n in ast.walk(statement) if isinstance(n, ast.Name)}
        parameters = [parameter for parameter in _parameters(node.args) if parameter[1] in read]
        for name in [name for _, name, _ in parameters] + list(_bound(body)):
            self.names.setdefault(name, f"v{len(self.names)}")
        self.owner = node.args.args[0].arg if self.methods and node.args.args else None
        signature = ",".join(f"{kind}{self.names[name]}={self.write(default)}" for kind, name, default in parameters)
        return f"({signature}){self.write(body)}"

    def write(self, node: object) -> str:
        if isinstance(node, list):
            return f"[{','.join(self.write(item) for item in node)}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        if isinstance(node, ast.Name):
            return self.names.get(node.id) or self.name(node.id)
        if isinstance(node, ast.arg):
            return self.names[node.arg]
        if isinstance(node, ast.Attribute):
            return self.attribute(node)
        fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _DROPPED)
        return (
            f"{type(node).__name__}({','.join(f'{n}={self.write(v)}' for n, v in fields if v is not None and v != [])})"
        )

    def attribute(self, node: ast.Attribute) -> str:
        of_self = isinstance(node.value, ast.Name) and node.value.id == self.owner
        if of_self and node.attr in self.methods and node.attr != "forward" and self.depth < _DEPTH:
            method = _Writer(self.module, self.methods, self.depth + 1).function(self.methods[node.attr])
            return f"<{method}>"
        return f"{self.write(node.value)}.{node.attr}"

    def name(self, name: str) -> str:
        found = self.module.find(name) if self.depth < _DEPTH else None
        if found and isinstance(found[1], ast.FunctionDef):
            return f"<{form_of(*found, self.depth + 1)}>"
        return self.module.imports.get(name, name)


def _parameters(arguments: ast.arguments) -> Iterator[tuple[str, str, ast.expr | None]]:
    """Kind, name and default of every parameter, in order."""
    positional = [*arguments.posonlyargs, *arguments.args]
    without = [None] * (len(positional) - len(arguments.defaults))
    yield from (
        ("", arg.arg, default) for arg, default in zip(positional, [*without, *arguments.defaults], strict=True)
    )
    if arguments.vararg:
        yield "*", arguments.vararg.arg, None
    yield from (
        ("key ", a.arg, default) for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    )
    if arguments.kwarg:
        yield "**", arguments.kwarg.arg, None


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """The names that statements bind, also in lambdas, in the order of their first appearance in the source."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    places = [(n.lineno, n.col_offset, n.arg) for n in nodes if isinstance(n, ast.arg)]
    places += [
        (n.lineno, n.col_offset, n.id) for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    ]
    yield from (name for *_, name in sorted(places))
