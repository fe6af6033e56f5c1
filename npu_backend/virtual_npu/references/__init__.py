"""CPU references of the operators that only Ascend devices have: a module per theme, which declares on import."""

from __future__ import annotations

import importlib

_THEMES = (
    "activations",
    "attention",
    "dense",
    "fusion_attention",
    "gradients",
    "grouped_matmul",
    "inference_attention",
    "linear_loss",
    "loss",
    "moe",
    "moe_gating",
    "moe_routing",
    "moe_routing_map",
    "norms",
    "older",
    "optimizers",
)


def load() -> None:
    """Declare every reference of this package."""
    for theme in _THEMES:
        importlib.import_module(f"{__name__}.{theme}")
