"""The reference of the public names, from their signatures and docstrings, as griffe reads them: no module is imported.

conf.py puts it into docs/api.md and docs/zh/api.md, whose texts are those of `zh/translations.json`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import griffe

import npu_backend

ROOT = Path(__file__).resolve().parents[1]
ERRORS = "npu_backend.errors"  # a table of their own: docs/error_messages.md
# The public name that is a module, and what is public in it.
VIRTUAL_NPU = {"virtual_npu.activate": "npu_backend.virtual_npu.launch.activate"}
_WIDE = 100
# One value is returned by all there is, and what is said about it has no name.
_OPTIONS = {"returns_multiple_items": False, "returns_named_value": False}
Translate = Callable[[str], str]


def reference(translate: Translate = str) -> str:
    """A section per public name, in the order of `npu_backend.__all__`; the errors are left out."""
    return "\n\n".join(part for name, found in public() for part in _section(name, found, translate))


def public() -> Iterator[tuple[str, Any]]:
    """Every public function and class under its name below `npu_backend`."""
    package = griffe.load("npu_backend", search_paths=[ROOT], docstring_parser="google", docstring_options=_OPTIONS)
    modules = {name: module for name, module in npu_backend._PUBLIC.items() if module != ERRORS}
    for name, path in {**{name: f"{module}.{name}" for name, module in modules.items()}, **VIRTUAL_NPU}.items():
        found = package[path.removeprefix("npu_backend.")]
        yield name, found.final_target if found.is_alias else found


def _section(name: str, found: Any, translate: Translate) -> Iterator[str]:
    yield f"## {name}"
    yield from _described(f"npu_backend.{name}", found, translate)
    members = [member for member in found.members.values() if found.is_class and not member.is_private]
    documented = [member for member in members if member.docstring and not member.is_special]
    values = [(member.name, member.docstring.value) for member in documented if member.is_attribute]
    calls = [(member.name, member.docstring.value) for member in documented if member.is_function]
    simple = [(f"{called}()", text) for called, text in calls if "\n\n" not in text]
    if values or simple:
        yield _table(translate, ("member", "is"), [*values, *simple])
    for member in documented:
        if member.is_function and f"{member.name}()" not in dict(simple):
            yield from _described(f".{member.name}", member, translate)


def _described(name: str, found: Any, translate: Translate) -> Iterator[str]:
    """A signature, and what the docstring says section by section."""
    if found.is_function or ("__init__" in found.members and "dataclass" not in found.labels):
        yield _signature(name, found)
    for section in found.docstring.parsed:
        if section.kind.value == "text":
            yield from (translate(_one_line(text)) for text in section.value.split("\n\n"))
        elif section.kind.value == "examples":
            yield from (f"```pycon\n{text}\n```" for kind, text in section.value if kind.value == "examples")
        elif section.kind.value == "returns":
            (one,) = section.value
            yield f"**{translate('returns')}** {translate(_one_line(one.description))}"
        elif section.kind.value == "raises":
            rows = [(str(one.annotation).strip("()"), one.description) for one in section.value]
            yield _table(translate, ("raises", "when"), rows)
        else:  # parameters of a function, attributes of a class
            column = "argument" if section.kind.value == "parameters" else "member"
            yield _table(translate, (column, "is"), [(one.name, one.description) for one in section.value])


def _signature(name: str, found: Any) -> str:
    """As Python code, a line per parameter where one line is not enough."""
    function = found if found.is_function else found.members["__init__"]
    shown = re.sub(r"^\w+\((self(, )?)?", "(", function.signature()).removesuffix(" -> None")
    if len(name + shown) > _WIDE:
        parameters, _, result = shown[1:].rpartition(")")
        shown = "(\n    " + re.sub(r", (?=\*|\w+:)", ",\n    ", parameters) + f",\n){result}"
    return f"```python\n{name}{shown}\n```"


def _table(translate: Translate, columns: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [[translate(column) for column in columns], ["---"] * 2]
    lines += [[_names(names), translate(_one_line(text)).replace("|", "\\|")] for names, text in rows]
    return "\n".join(f"| {name} | {text} |" for name, text in lines)


def _names(text: str) -> str:
    return ", ".join(f"`{name}`" for name in text.split(", "))


def _one_line(text: str) -> str:
    return " ".join(text.split())
