"""The set `verl_npu`: our operators on top of torch_npu's, wherever a model's code is one that we know.

RMSNorm, gated MLP, rotary embedding and the experts of transformers 5 are recognised in the family's source
(`npu_backend.recognise`); `recognised` makes records of what it finds. Records by hand are left for what has no form of
its own: the expert blocks of transformers 4, which hold the router as well.
"""

from __future__ import annotations

from typing import Any

from npu_backend import recognise
from npu_backend.patches.engine import Patch, PatchSet

_OPERATORS = "npu_backend.operators"
_HUB = "transformers integrations/hub_kernels.py: the npu entries of the kernel hub are for inference only"
_MOVED = "transformers#43255 dropped position_ids in 5.2; the kernel hub has no npu entry for rotary_pos_emb"
_EXPERTS = "verl#6707, ms-swift#8207: experts became fused parameters in transformers 5, stored [E, out, in]"

# operator -> why, upstream, remove when
_REASONS = {
    "rms_norm": (
        "five elementwise kernels and a float32 copy become one kernel, npu_rms_norm",
        _HUB,
        "the kernel hub has an RMSNorm for training on npu",
    ),
    "gated_mlp": (
        "the activation and the product with the up projection become one kernel, npu_swiglu or npu_geglu",
        _HUB,
        "the kernel hub has a gated MLP for training on npu",
    ),
    "rotary": (
        "slicing, negating, concatenating and two products become one kernel, npu_rotary_mul",
        _MOVED,
        "the kernel hub has a rotary_pos_emb for npu",
    ),
    "sparse_moe": (
        "torch's grouped_mm has no npu kernel: transformers would run a loop of small products",
        _EXPERTS,
        "transformers registers an experts implementation for npu",
    ),
}

# variant -> why, where it differs from the operator's
_OWN_REASONS = {
    "gated": "npu_rms_norm for the norm of the linear attention; its gate stays as it is, in float32",
    "fused": "its projection already is [gate, up], as npu_swiglu wants it",
    "partial": "only part of each head rotates; npu_rotary_mul takes that part",
}


def recognised(family: str) -> tuple[Patch, ...]:
    """A record for everything in a family's code that is an operator, or is named as if it were one.

    Where the installed transformers lacks the family, one record that says so.
    """
    absent = recognise.Found(f"{recognise.modeling(family)}:forward", "", "", "")
    found = recognise.operators(family) if family in recognise.families() else (absent,)
    return tuple(_record(family, one) for one in found)


def _record(family: str, found: recognise.Found) -> Patch:
    why, upstream, remove_when = _REASONS.get(found.op, ("", "", ""))
    module = f"{_OPERATORS}.{found.op}"
    known = bool(found.variant)
    experts = found.op == "sparse_moe"
    return Patch(
        target="transformers.integrations.moe:ALL_EXPERTS_FUNCTIONS[grouped_mm]" if experts else found.target,
        replacement=f"{module}:{found.variant}" if known else "",
        requires=f"{module}:requires" if known else f"{__name__}:unknown_form",
        op=found.op,
        family=family,
        why=_OWN_REASONS.get(found.variant, why),
        upstream=upstream,
        remove_when=remove_when,
    )


def unknown_form(original: Any, context: Any) -> str:
    """Why what only has an operator's name is left alone."""
    return "its code is none of the known forms of this operator (npu_backend.recognise)"


def _block(family: str, name: str, *aliases: str) -> Patch:
    return Patch(
        target=f"transformers.models.{family}.modeling_{family}:{name}.forward",
        replacement=f"{_OPERATORS}.sparse_moe:experts",
        requires=f"{_OPERATORS}.sparse_moe:requires_eager_default",
        op="sparse_moe",
        family=family,
        why="a loop over experts with index_add becomes two grouped matmuls between permute and unpermute",
        upstream="verl#4888, verl#6707: two structures, with different routing weights and return types",
        remove_when="transformers 4, and torch without grouped_mm, are no longer supported",
        aliases=tuple(f"{alias}.forward" for alias in aliases),
    )


PATCH_SET = PatchSet(
    "verl_npu",
    (
        _block("qwen3_moe", "Qwen3MoeExperts", "Qwen3MoeSparseMoeBlock"),
        _block("qwen3_vl_moe", "Qwen3VLMoeTextExperts"),
        _block("qwen3_next", "Qwen3NextExperts", "Qwen3NextSparseMoeBlock"),
        _block("qwen3_5_moe", "Qwen3_5MoeExperts"),
    ),
    find="npu_backend.patches.verl_npu:recognised",
)
