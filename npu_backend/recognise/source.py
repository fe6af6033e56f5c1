"""transformers' modeling files as syntax trees, found and read without importing transformers.

A family is a folder of `transformers.models`. A tree knows its top-level functions and classes and what each imported
name stands for, so that a name can be followed to the file that defines it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

Definition = ast.FunctionDef | ast.ClassDef
_MODELS = "transformers.models"


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, what it defines at the top level, and the dotted name behind each import."""

    name: str
    definitions: dict[str, Definition]
    imports: dict[str, str]

    def find(self, name: str) -> tuple[Module, Definition] | None:
        """The definition that a global name stands for, here or in the transformers module it is imported from."""
        if name in self.definitions:
            return self, self.definitions[name]
        module, _, attribute = self.imports.get(name, "").rpartition(".")
        if not module.startswith("transformers."):
            return None
        origin = load(module)
        return origin.find(attribute) if origin else None


def modeling(family: str) -> str:
    """The dotted name of a family's modeling module."""
    return f"{_MODELS}.{family}.modeling_{family}"


@functools.cache
def _package() -> Path | None:
    """The folder of the installed transformers."""
    spec = importlib.util.find_spec("transformers")
    return Path(spec.origin).parent if spec and spec.origin else None


@functools.cache
def families() -> tuple[str, ...]:
    """Every family of the installed transformers that has a modeling file; empty without transformers."""
    package = _package()
    if package is None:
        return ()
    folders = (package / "models").iterdir()
    return tuple(sorted(f.name for f in folders if (f / f"modeling_{f.name}.py").is_file()))


@functools.cache
def _family_of_types() -> dict[str, str]:
    """model type -> family, from the `model_type = "..."` lines of the configuration files."""
    package = _package()
    found: dict[str, str] = {}
    for family in families() if package else ():
        for path in (package / "models" / family).glob("configuration_*.py"):  # type: ignore[operator]
            text = path.read_text(encoding="utf-8")
            for model_type in re.findall(r'^ +model_type(?:: *\w+)? *= *"([^"]+)"', text, re.MULTILINE):
                found.setdefault(model_type, family)
    return found


def family_of(model_type: str) -> str | None:
    """The family whose code a model type runs, or None if the installed transformers has none."""
    folder = model_type.replace("-", "_")
    return folder if folder in families() else _family_of_types().get(model_type)


@functools.cache
def load(name: str) -> Module | None:
    """The module of that dotted name within transformers; None where there is no such file."""
    package = _package()
    if package is None:
        return None
    path = package.joinpath(*name.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return None
    definitions: dict[str, Definition] = {}
    imports: dict[str, str] = {}
    parent = name if path.is_dir() else name.rpartition(".")[0]
    for node in _top_level(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            definitions[node.name] = node
        elif isinstance(node, ast.Import):
            imports |= {
                a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parent.split(".")[: len(parent.split(".")) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            imports |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}
    return Module(name, definitions, imports)


def _top_level(tree: ast.Module) -> list[ast.stmt]:
    """The module's statements, with those under a top-level `if` or `try` in their place."""
    found: list[ast.stmt] = []
    for node in tree.body:
        found += (
            [node, *getattr(node, "body", ()), *getattr(node, "orelse", ())]
            if isinstance(node, (ast.If, ast.Try))
            else [node]
        )
    return found
