"""What can be patched, as names: the operators, and the model families with the model types that belong to each.

A family is a folder of transformers.models. `FAMILIES` are those that are meant where no model is named; any other one
is found in the installed transformers by looking at its files, so that configuration and command line can check a name
without importing a table or a model.
"""

from __future__ import annotations

from collections.abc import Iterable

from npu_backend.recognise import source

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
    """The families that a model with these types (its own and its sub-configs') is made of, each once.

    >>> families_of(["qwen3_5_text", "qwen3", "qwen3"])
    ('qwen3_5', 'qwen3')
    """
    found = (_FAMILY_OF.get(model_type) or source.family_of(model_type) for model_type in model_types)
    return tuple(dict.fromkeys(family for family in found if family))


def all_families() -> tuple[str, ...]:
    """Those that the package or the installed transformers knows, each once."""
    return tuple(dict.fromkeys((*FAMILIES, *source.families())))


def is_family(name: str) -> bool:
    """Whether this is a family that the package or the installed transformers knows."""
    return name in FAMILIES or name in source.families()
