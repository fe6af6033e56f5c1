"""Recognise a model's operators by their code, not by their names. Standard library only; transformers is not imported.

`source` finds and parses a family's modeling file, `normalise` turns each function and class into its form, `forms`
says which forms are known. A new family is covered when its code is a known form, and left alone when it is not.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from npu_backend.recognise import normalise, source
from npu_backend.recognise.forms import FORMS
from npu_backend.recognise.source import families, modeling

__all__ = ["Found", "families", "modeling", "operators"]


@dataclass(frozen=True)
class Found:
    """One operator of a family. `variant` is empty where only the name promises one: the code is no known form."""

    target: str
    op: str
    variant: str
    form: str


@functools.cache
def operators(family: str) -> tuple[Found, ...]:
    """What a family's modeling module defines, or imports from other families, that is or looks like an operator."""
    module = source.load(source.modeling(family))
    if module is None:
        return ()
    imported = (name for name, origin in module.imports.items() if origin.startswith("transformers.models."))
    return tuple(found for name in (*module.definitions, *imported) for found in _look(module, name))


def _look(module: source.Module, name: str) -> Iterator[Found]:
    where = module.find(name)
    if where is None:
        return
    origin, node = where
    form = "" if _overridden(module, node) else _form(origin.name, node.name)
    op, variant = FORMS.get(form, (_named_like(name), ""))
    is_class = isinstance(node, ast.ClassDef)
    if is_class and any("use_experts_implementation" in ast.unparse(d) for d in node.decorator_list):
        op, variant = "sparse_moe", "registered"
    if op:
        yield Found(f"{module.name}:{name}" + (".forward" if is_class else ""), op, variant, form)


@functools.cache
def _form(module: str, name: str) -> str:
    origin = source.load(module)
    form = normalise.form_of(origin, origin.definitions[name]) if origin else ""
    return normalise.digest(form) if form else ""


def _overridden(module: source.Module, node: source.Definition) -> bool:
    """Whether a subclass next to it changes a method that the class's forward may call."""
    own = {m.name for m in node.body if isinstance(m, ast.FunctionDef)} - {"__init__", "forward", "extra_repr"}
    if not isinstance(node, ast.ClassDef) or not own:
        return False
    heirs = (
        c for c in module.definitions.values() if isinstance(c, ast.ClassDef) and node.name in map(ast.unparse, c.bases)
    )
    return any(isinstance(m, ast.FunctionDef) and m.name in own for heir in heirs for m in heir.body)


def _named_like(name: str) -> str:
    """The operator that a name promises, if any: only so that a report can say that it was left alone."""
    if "RMSNorm" in name:
        return "rms_norm"
    if name.endswith("MLP"):
        return "gated_mlp"
    return "rotary" if name.startswith("apply_") and "rot" in name else ""
