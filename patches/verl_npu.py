"""The set `verl_npu`: our operators on top of torch_npu's, in the families that verl trains and a few more.

A table. `_norm`, `_mlp`, `_rotary` and `_moe` only spell out what records of one kind share; a record has a reason of
its own where its family has one. Gemma 2's MLP has no record: it gates with GELU, which npu_swiglu does not compute.
"""

from __future__ import annotations

from npu_backend.patches.engine import Patch, PatchSet

_OPERATORS = "npu_backend.operators"
_HUB = "transformers integrations/hub_kernels.py: the npu entries of the kernel hub are for inference only"


def _modeling(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


def _norm(family: str, name: str, kind: str = "plain", *, why: str = "", aliases: tuple[str, ...] = ()) -> Patch:
    return Patch(
        target=f"{_modeling(family)}:{name}.forward",
        replacement=f"{_OPERATORS}.rms_norm:{kind}",
        requires=f"{_OPERATORS}.rms_norm:requires",
        op="rms_norm",
        family=family,
        why=why or "five elementwise kernels and a float32 copy become one kernel, npu_rms_norm",
        upstream=_HUB,
        remove_when="the kernel hub has an RMSNorm for training on npu",
        aliases=tuple(f"{alias}.forward" for alias in aliases),
    )


def _mlp(family: str, name: str, kind: str = "split", *, why: str = "") -> Patch:
    return Patch(
        target=f"{_modeling(family)}:{name}.forward",
        replacement=f"{_OPERATORS}.gated_mlp:{kind}",
        requires=f"{_OPERATORS}.gated_mlp:requires",
        op="gated_mlp",
        family=family,
        why=why or "SiLU and the product with the up projection become one kernel, npu_swiglu",
        upstream=_HUB,
        remove_when="the kernel hub has a gated MLP for training on npu",
    )


def _rotary(family: str, kind: str = "standard", name: str = "apply_rotary_pos_emb", *, why: str = "") -> Patch:
    return Patch(
        target=f"{_modeling(family)}:{name}",
        replacement=f"{_OPERATORS}.rotary:{kind}",
        requires=f"{_OPERATORS}.rotary:requires",
        op="rotary",
        family=family,
        why=why or "slicing, negating, concatenating and two products become one kernel, npu_rotary_mul",
        upstream="transformers#43255 dropped position_ids in 5.2; the kernel hub has no npu entry for rotary_pos_emb",
        remove_when="the kernel hub has a rotary_pos_emb for npu",
    )


_PARTIAL = "only part of each head rotates; npu_rotary_mul takes that part"
_GATED = "npu_rms_norm for the norm of the linear attention; its gate stays as it is, in float32"


def _moe(family: str, name: str, *aliases: str) -> tuple[Patch, Patch]:
    """Transformers 5 has a registry of implementations, with one entry for all families; transformers 4 has none."""
    registry = Patch(
        target="transformers.integrations.moe:ALL_EXPERTS_FUNCTIONS[grouped_mm]",
        replacement=f"{_OPERATORS}.sparse_moe:registered",
        requires=f"{_OPERATORS}.sparse_moe:requires",
        op="sparse_moe",
        family=family,
        why="torch's grouped_mm has no npu kernel: transformers would run a loop of small products",
        upstream="verl#6707, ms-swift#8207: experts became fused parameters in transformers 5, stored [E, out, in]",
        remove_when="transformers registers an experts implementation for npu",
    )
    experts = Patch(
        target=f"{_modeling(family)}:{name}.forward",
        replacement=f"{_OPERATORS}.sparse_moe:experts",
        requires=f"{_OPERATORS}.sparse_moe:requires_eager_default",
        op="sparse_moe",
        family=family,
        why="a loop over experts with index_add becomes two grouped matmuls between permute and unpermute",
        upstream="verl#4888, verl#6707: two structures, with different routing weights and return types",
        remove_when="transformers 4, and torch without grouped_mm, are no longer supported",
        aliases=tuple(f"{alias}.forward" for alias in aliases),
    )
    return registry, experts


PATCH_SET = PatchSet(
    "verl_npu",
    (
        _norm("llama", "LlamaRMSNorm"),
        _mlp("llama", "LlamaMLP"),
        _rotary("llama"),
        _norm("mistral", "MistralRMSNorm"),
        _mlp("mistral", "MistralMLP"),
        _rotary("mistral"),
        _norm("gemma2", "Gemma2RMSNorm", "offset"),
        _rotary("gemma2"),
        _norm("phi3", "Phi3RMSNorm"),
        _mlp("phi3", "Phi3MLP", "fused", why="its projection already is [gate, up], as npu_swiglu wants it"),
        _rotary("phi3", "partial", why=_PARTIAL),
        _norm("qwen2", "Qwen2RMSNorm"),
        _mlp("qwen2", "Qwen2MLP"),
        _rotary("qwen2"),
        # In transformers 4 the model borrows Qwen2RMSNorm (verl#5788); its text MLP is Qwen2MLP in both.
        _norm("qwen2_5_vl", "Qwen2_5_VLRMSNorm", aliases=("Qwen2RMSNorm",)),
        _mlp("qwen2_5_vl", "Qwen2MLP"),
        _mlp("qwen2_5_vl", "Qwen2_5_VLMLP", why="the vision tower gates with SiLU as well"),
        _rotary("qwen2_5_vl", "multimodal", "apply_multimodal_rotary_pos_emb"),
        _rotary("qwen2_5_vl", "vision", "apply_rotary_pos_emb_vision"),
        _norm("qwen3", "Qwen3RMSNorm"),
        _mlp("qwen3", "Qwen3MLP"),
        _rotary("qwen3"),
        _norm("qwen3_moe", "Qwen3MoeRMSNorm"),
        _mlp("qwen3_moe", "Qwen3MoeMLP", why="the dense layers between sparse ones (mlp_only_layers)"),
        _rotary("qwen3_moe"),
        *_moe("qwen3_moe", "Qwen3MoeExperts", "Qwen3MoeSparseMoeBlock"),
        _norm("qwen3_vl", "Qwen3VLTextRMSNorm"),
        _mlp("qwen3_vl", "Qwen3VLTextMLP"),
        _rotary("qwen3_vl"),
        _rotary("qwen3_vl", "vision", "apply_rotary_pos_emb_vision"),
        _norm("qwen3_vl_moe", "Qwen3VLMoeTextRMSNorm"),
        _mlp("qwen3_vl_moe", "Qwen3VLMoeTextMLP", why="the dense layers between sparse ones (mlp_only_layers)"),
        _rotary("qwen3_vl_moe"),
        _rotary("qwen3_vl_moe", "vision", "apply_rotary_pos_emb_vision"),
        *_moe("qwen3_vl_moe", "Qwen3VLMoeTextExperts"),
        _norm("qwen3_next", "Qwen3NextRMSNorm", "offset"),
        _norm("qwen3_next", "Qwen3NextRMSNormGated", "gated", why=_GATED),
        _mlp("qwen3_next", "Qwen3NextMLP"),
        _rotary("qwen3_next", "partial", why=_PARTIAL),
        *_moe("qwen3_next", "Qwen3NextExperts", "Qwen3NextSparseMoeBlock"),
        _norm("qwen3_5", "Qwen3_5RMSNorm", "offset"),
        _norm("qwen3_5", "Qwen3_5RMSNormGated", "gated", why=_GATED),
        _mlp("qwen3_5", "Qwen3_5MLP"),
        _rotary("qwen3_5", "partial", why=_PARTIAL),
        _rotary("qwen3_5", "vision", "apply_rotary_pos_emb_vision"),
        _norm("qwen3_5_moe", "Qwen3_5MoeRMSNorm", "offset"),
        _norm("qwen3_5_moe", "Qwen3_5MoeRMSNormGated", "gated", why=_GATED),
        _mlp("qwen3_5_moe", "Qwen3_5MoeMLP", why="the shared expert"),
        _rotary("qwen3_5_moe", "partial", why=_PARTIAL),
        _rotary("qwen3_5_moe", "vision", "apply_rotary_pos_emb_vision"),
        *_moe("qwen3_5_moe", "Qwen3_5MoeExperts"),
    ),
)
