"""A made-up library to patch, so that the engine is tested without torch or transformers."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest

LIBRARY = """
class Norm:
    def forward(self, x):
        return x

class Child(Norm):
    pass

def rope(q, k, cos, sin, unsqueeze_dim=1):
    return q, k

REGISTRY = {"grouped": rope}
"""

FACTORIES = """
def forward(original, context):
    def forward(self, x):
        return original(self, x) + 1
    return forward

def rope(original, context):
    def rope(q, k, cos, sin, unsqueeze_dim=1):
        return original(q, k, cos, sin, unsqueeze_dim) + ("patched",)
    return rope

def old_rope(original, context):
    def rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        return original(q, k, cos, sin, unsqueeze_dim)
    return rope

def broken(original, context):
    raise RuntimeError("this factory is broken")

def reason(original, context):
    return "not for this original"

def too_old(original, context):
    raise ImportError("this release is too old")
"""


@pytest.fixture
def make_module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """Create an importable module from source; gone after the test."""

    def make(name: str, source: str = "") -> types.ModuleType:
        module = types.ModuleType(name)
        exec(source, module.__dict__)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


@pytest.fixture
def library(make_module: Callable[..., types.ModuleType]) -> types.ModuleType:
    """`lib.modeling`, the library that gets patched, and `ours`, the factories."""
    make_module("lib")
    make_module("ours", FACTORIES)
    return make_module("lib.modeling", LIBRARY)


@pytest.fixture
def load_anew(library: types.ModuleType) -> Callable[[], None]:
    """What importlib.reload does to the library: its source runs once more in the same module."""
    return lambda: exec(LIBRARY, vars(library))
