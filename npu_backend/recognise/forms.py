"""The known forms: which operator, and which variant of it, a piece of code is. One line per form.

A variant is a factory of `npu_backend.operators`. Each form was read, and is checked against its variant on every model
of the installed transformers that has it (tests/virtual_npu/test_recognised.py). To add one: print the forms that
nobody knows with `python -m npu_backend.recognise`, read the code, write the variant if there is none, add the line.
"""

from __future__ import annotations

# digest of the form -> (operator, variant)
FORMS: dict[str, tuple[str, str]] = {
    # RMSNorm; what differs: the name of epsilon, 1 + weight, a gate, and when the result is rounded
    "3b2d6b5774d9": ("rms_norm", "plain"),  # llama: LlamaRMSNorm
    "14c1d822f535": ("rms_norm", "plain_eps"),  # llama4: Llama4TextRMSNorm
    "86caf9a6d6bc": ("rms_norm", "offset"),  # gemma: GemmaRMSNorm
    "2c26c28a818d": ("rms_norm", "rounded_last"),  # olmo2: Olmo2RMSNorm
    "61013ac1c04f": ("rms_norm", "rounded_last"),  # helium: HeliumRMSNorm
    "5f7870198646": ("rms_norm", "rounded_last_eps"),  # moshi: MoshiRMSNorm
    "0a7835f2d787": ("rms_norm", "rounded_last_eps"),  # gemma3n of transformers 4: Gemma3nRMSNorm
    "7922eb33e36b": ("rms_norm", "scaled"),  # gemma3n: Gemma3nRMSNorm
    "8a5bc7043041": ("rms_norm", "weightless"),  # nanochat: NanoChatRMSNorm
    "6071030adff0": ("rms_norm", "gated"),  # qwen3_next: Qwen3NextRMSNormGated
    "47bf0ada77ce": ("rms_norm", "gated_input"),  # bamba: BambaRMSNormGated
    # gated MLP; what differs: one or two projections, and their names
    "48b38390ce87": ("gated_mlp", "split"),  # llama: LlamaMLP
    "45f99f8d52ba": ("gated_mlp", "split"),  # qwen2_5_vl: Qwen2_5_VLMLP
    "c3e69d332d42": ("gated_mlp", "fused"),  # phi3: Phi3MLP
    "41d7f022321c": ("gated_mlp", "fused_linear"),  # granitemoeshared: GraniteMoeSharedMLP
    "9d4319c1636c": ("gated_mlp", "split_numbered"),  # lfm2: Lfm2MLP
    # rotary position embedding; what differs: which channels rotate, how they pair, the dtype of the arithmetic
    "410de534bcf6": ("rotary", "standard"),  # llama: apply_rotary_pos_emb
    "afe9109ffdd4": ("rotary", "standard_cast"),  # olmo: apply_rotary_pos_emb
    "d394ca6dc279": ("rotary", "standard_float"),  # modernbert: apply_rotary_pos_emb
    "52220c946446": ("rotary", "partial"),  # glm4_moe: apply_rotary_pos_emb
    "7a4e44e6f9b8": ("rotary", "partial"),  # phi3: apply_rotary_pos_emb
    "83a8573d3c5a": ("rotary", "multimodal"),  # qwen2_vl: apply_multimodal_rotary_pos_emb
    "26a38e78d010": ("rotary", "vision"),  # qwen2_vl: apply_rotary_pos_emb_vision
    "09b434057c2c": ("rotary", "one"),  # gemma4: apply_rotary_pos_emb
    "2dc1d9b349bf": ("rotary", "one"),  # glm_moe_dsa: apply_rotary_pos_emb
    "06fbca96c472": ("rotary", "halves"),  # gpt_oss: apply_rotary_pos_emb
    "9a3f72be8cf7": ("rotary", "deinterleaved"),  # deepseek_v3: apply_rotary_pos_emb_interleave
    "7bc4ad4ee4fb": ("rotary", "interleaved_partial"),  # glm: apply_rotary_pos_emb
    "182a110f269d": ("rotary", "interleaved_float"),  # cohere: apply_rotary_pos_emb
    "1a371a4a8d79": ("rotary", "interleaved_repeated_float"),  # ernie4_5: apply_rotary_pos_emb
}
