"""What can be patched, as names: the operators, and the model families with the model types that belong to each.

Data only, so that configuration and command line can check a name without importing a table or a model.
"""

from __future__ import annotations

from collections.abc import Iterable

# Operators of the patch sets, in the order in which reports show them.
OPERATORS = ("rms_norm", "gated_mlp", "rotary", "sparse_moe", "ppo_head")

# What else people call them.
ALIASES = {"rope": "rotary", "mlp": "gated_mlp", "moe": "sparse_moe"}

# family (= the folder in transformers.models) -> other model types whose code is that family's
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": (),
    "mistral": (),
    "gemma2": (),
    "phi3": (),
    "qwen2": (),
    "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen3": (),
    "qwen3_moe": (),
    "qwen3_vl": ("qwen3_vl_text",),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
    "qwen3_next": (),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}

_FAMILY_OF = {model_type: family for family, others in FAMILIES.items() for model_type in (family, *others)}


def families_of(model_types: Iterable[str]) -> tuple[str, ...]:
    """The families that a model with these types (its own and its sub-configs') is made of, each once."""
    return tuple(dict.fromkeys(_FAMILY_OF[t] for t in model_types if t in _FAMILY_OF))
