"""CPU references of the operators that only Ascend devices have: a module per theme, which declares on import."""

from __future__ import annotations

import importlib

_THEMES = ("attention", "dense", "gradients", "loss", "moe")


def load() -> None:
    """Declare every reference of this package."""
    for theme in _THEMES:
        importlib.import_module(f"{__name__}.{theme}")
