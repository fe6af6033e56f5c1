"""Tiny causal language models of many families, with random weights large enough that logits differ.

`build("gemma2")` is the model; the options that change its logits are set to values that matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import npu_backend

VOCAB = 131
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MROPE = {"rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [2, 1, 1]}, "head_dim": 8}
_VISION_TOKENS = {
    "image_token_id": 120,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3, "bos_token_id": 1}

# family -> (config class, model class, options)
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _DECODER),
    "qwen2_tied": ("Qwen2Config", "Qwen2ForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_DECODER, "head_dim": 8}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_DECODER, **_EXPERTS}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_DECODER, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    ),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {**_DECODER, "logits_scaling": 3.0}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {**_DECODER, "logit_scale": 0.3}),
    "phi": ("PhiConfig", "PhiForCausalLM", _DECODER),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {**_GPT, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "eos_token_id": 2},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _DECODER),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**_DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3, "dropout": 0.0},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {
            **_VISION_TOKENS,
            "tie_word_embeddings": False,
            "text_config": {**_DECODER, **_MROPE},
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 32,
            },
        },
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {
            **_VISION_TOKENS,
            "tie_word_embeddings": False,
            "text_config": {**_DECODER, **_MROPE},
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 32,
                "deepstack_visual_indexes": [0],
            },
        },
    ),
}
FAMILIES = tuple(_FAMILIES)


def build(family: str, seed: int = 0, **options: Any) -> Any:
    """The family's model in float32 and evaluation mode."""
    config_class, model_class, defaults = _FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**defaults, **options})
    model: nn.Module = getattr(transformers, model_class)(config).eval()
    head = model.get_output_embeddings()
    if head.bias is not None:
        nn.init.normal_(head.bias)
    return model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Token ids without the special ones."""
    return torch.randint(3, 120, shape, generator=torch.Generator().manual_seed(seed))


def patched(family: str = "qwen2", **options: Any) -> Any:
    """The family's model with the fused head, backend torch."""
    model = build(family, **options)
    assert npu_backend.patch_forward_with_backends(model, use_fused_kernels=True).applied == 1
    return model


def full_log_probs(model: Any, ids: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Through the logits, which a patched model still gives when it is asked for a cache."""
    logits = model(input_ids=ids, use_cache=True).logits / temperature
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0].detach()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These models are so small that a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
