"""A tiny model of every causal language model type of transformers: its default configuration with small sizes.

`causal_lm_types()` names the types, `build("mamba2")` makes the model, `UNBUILDABLE` says why a type has none.
Structure stays as the default configuration has it; sizes go by the rules of `_SIZES`, and by `_SPECIAL` where a type
needs more. Written for transformers 5.10.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCAB, HIDDEN, HEADS, LAYERS = 131, 64, 4, 2
HEAD = HIDDEN // HEADS

_SIZES: dict[str, int] = {
    name: size
    for names, size in {
        "vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size": VOCAB,
        "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size word_embed_proj_dim hidden_dim lru_width"
        " embedding_dim hidden_size_global": HIDDEN,
        "intermediate_size ffn_dim n_inner d_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff dff"
        " intermediate_size_mlp": 96,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers depth"
        " num_blocks": LAYERS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim d_head dim_head kv_channels v_head_dim": HEAD,
        "max_position_embeddings n_positions max_seq_len n_ctx": 128,
        # windows shorter than the sequences of tests
        "sliding_window attention_window_size window_size attention_chunk_size local_attention": 8,
        # experts
        "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
        "num_experts_per_tok moe_k moe_top_k moe_topk num_experts_per_token": 2,
        "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"
        " shared_intermediate_size expert_ffn_hidden_size": 32,
        "first_k_dense_replace": 1,
        "n_group topk_group": 1,
        # attention with low-rank projections
        "q_lora_rank kv_lora_rank": 32,
        "qk_rope_head_dim qk_nope_head_dim rotary_dim": 8,
        # linear attention and state spaces
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim linear_value_head_dim mamba_d_state state_size ssm_state_size": 16,
        "mamba_d_ssm": 128,
        "mamba_n_heads mamba_num_heads": 8,
        "mamba_d_head mamba_head_dim": HEAD,
        "chunk_size mamba_chunk_size": 8,
        "index_head_dim": 16,
        "index_topk index_n_heads": 4,
    }.items()
    for name in names.split()
}
# Within the small vocabulary; other special tokens take its last ids.
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# What a type needs besides: arguments that its default configuration lacks, or derives from one another.
_SPECIAL: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 97},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": HIDDEN, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "head_dim": 8},
    "deepseek_v3": {"head_dim": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
    },
    "glm_moe_dsa": {"head_dim": 8, "num_key_value_heads": HEADS},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": HEAD},
    "hunyuan_v1_moe": {"head_dim": HEAD},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": HEAD, "n_groups": 2},
    "ministral": {"head_dim": HEAD},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attention_head_size": HEAD,
        "feed_forward_size": 96,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 11,
        "lsh_attn_chunk_length": 11,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "xmod": {"default_language": "en_XX"},
    "youtu": {"head_dim": 8},
    "zamba": {"num_hidden_layers": 5, "attn_layer_period": 2, "attn_layer_offset": 0, "use_mamba_kernels": False},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "num_query_groups": HEADS},
}

UNBUILDABLE = {
    "gemma3n": "its vision tower is timm's, which is not installed",
    "gemma4_assistant": "drafts for another model: reads that model's hidden states and keys",
    "gemma4_unified_assistant": "drafts for another model: reads that model's hidden states and keys",
    "musicgen": "the default configuration has no text encoder; the language model reads audio codebooks",
    "musicgen_melody": "the default configuration has no text encoder; the language model reads audio codebooks",
}


def causal_lm_types() -> tuple[str, ...]:
    """Every model type for which `AutoModelForCausalLM` has a class, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def buildable_types() -> tuple[str, ...]:
    """Those that `build` can make."""
    return tuple(name for name in causal_lm_types() if name not in UNBUILDABLE)


def config_of(model_type: str) -> Any:
    """The type's default configuration with small sizes."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    return type(default)(**small_arguments(default))


def small_arguments(default: Any) -> dict[str, Any]:
    """With these its class makes a small configuration of what is a default one."""
    return {**_small(default), **_SPECIAL.get(default.model_type, {})}


def build(model_type: str, seed: int = 0) -> nn.Module:
    """The type's model in float32 and training mode, without dropout, every weight off its initial value."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(config_of(model_type), dtype=torch.float32)
    for parameter in model.parameters():  # norms start at 1 or 0, biases at 0: a fault there would not show
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model.train()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Token ids without the special ones."""
    return torch.randint(3, 120, shape, generator=torch.Generator().manual_seed(seed))


def _small(config: Any) -> dict[str, Any]:
    """The arguments that differ from the default configuration's; sub-configurations as dictionaries."""
    small: dict[str, Any] = {}
    last_ids = iter(range(VOCAB - 1, 0, -1))
    for name, value in vars(config).items():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            small[name] = _small(value)
        elif name in _SIZES and isinstance(value, int):
            small[name] = _SIZES[name]
        elif name in _TOKENS:
            small[name] = _TOKENS[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            small[name] = next(last_ids)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            small[name] = 0.0
    kinds = vars(config).get("layer_types")
    if kinds:  # a layer of each kind
        kinds = list(dict.fromkeys(kinds))
        small["layer_types"] = (kinds * LAYERS)[: max(LAYERS, len(kinds))]
        small["num_hidden_layers"] = len(small["layer_types"])
    return small
