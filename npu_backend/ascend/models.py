"""Published models whose kernels are checked, by their configuration files; or the one that a user gives.

Figures are those of the config.json files on the Hugging Face hub. Depth is left out: layers repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npu_backend.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Model:
    """A model's name and the content of its config.json."""

    name: str
    config: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def text(self) -> Mapping[str, Any]:
        """The configuration of the language model."""
        part = self.config.get("text_config")
        return part if isinstance(part, Mapping) else self.config

    @property
    def vocab_size(self) -> int:
        return int(self.text["vocab_size"])

    @property
    def hidden_size(self) -> int:
        return int(self.text["hidden_size"])

    @property
    def bias(self) -> bool:
        """Whether the output layer has one. No configuration says so; it is the model's code."""
        return self.model_type in ("codegen", "gptj", "phi")

    @property
    def softcap(self) -> bool:
        return bool(self.text.get("final_logit_softcapping"))


def published(model_type: str | None = None) -> list[Model]:
    """All models of the table, or those of one type.

    Raises:
        ConfigError: none is of that type.
    """
    found = [model for model in _MODELS if model_type in (None, model.model_type)]
    if not found:
        known = list(dict.fromkeys(model.model_type for model in _MODELS))
        raise ConfigError(
            f"--model-type {model_type!r}: no such model is in the table ({', '.join(known)}); give --config FILE"
            f"{did_you_mean(model_type, known)}"
        )
    return found


def from_config(name: str, content: Mapping[str, Any]) -> Model:
    """A model from its config.json; what the file leaves out is transformers' default.

    Raises:
        ConfigError: it gives no vocabulary or hidden size, and transformers does not know it either.
    """
    from npu_backend.model_configs import config_of

    model = Model(name, content)
    if not {"vocab_size", "hidden_size"} <= set(model.text):
        model = Model(name, config_of(content).to_dict())
    for key in ("vocab_size", "hidden_size"):
        size = model.text.get(key)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"--config {name}: {key} must be a positive number, got {size!r}")
    return model


def _model(
    name: str, model_type: str, vocab: int, hidden: int, intermediate: int, heads: tuple[int, int, int], **others: Any
) -> Model:
    """`heads`: of queries, of keys and values, channels of one."""
    text = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
    }
    nested = others.pop("nested", None)
    if nested is not None:
        return Model(name, {"model_type": model_type, "text_config": {**text, **others}, **nested})
    return Model(name, {"model_type": model_type, **text, **others})


def _experts(count: int, chosen: int, size: int, **others: Any) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": size, **others}


def _vision(model_type: str, hidden: int, intermediate: int, out: int, **others: Any) -> dict[str, Any]:
    tower = {"hidden_size": hidden, "intermediate_size": intermediate, "num_heads": 16, "out_hidden_size": out}
    return {"vision_config": {"model_type": model_type, **tower, **others}}


_CAP = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
_SHARED = {"shared_expert_intermediate_size": 512}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
_MROPE3 = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}}

_MODELS = (
    _model("Qwen2.5-0.5B", "qwen2", 151936, 896, 4864, (14, 2, 64)),
    _model("Qwen2.5-1.5B", "qwen2", 151936, 1536, 8960, (12, 2, 128)),
    _model("Qwen2.5-3B", "qwen2", 151936, 2048, 11008, (16, 2, 128)),
    _model("Qwen2.5-7B", "qwen2", 152064, 3584, 18944, (28, 4, 128)),
    _model("Qwen2.5-14B", "qwen2", 152064, 5120, 13824, (40, 8, 128)),
    _model("Qwen2.5-32B", "qwen2", 152064, 5120, 27648, (40, 8, 128)),
    _model("Qwen2.5-72B", "qwen2", 152064, 8192, 29568, (64, 8, 128)),
    _model("Qwen3-0.6B", "qwen3", 151936, 1024, 3072, (16, 8, 128)),
    _model("Qwen3-1.7B", "qwen3", 151936, 2048, 6144, (16, 8, 128)),
    _model("Qwen3-4B", "qwen3", 151936, 2560, 9728, (32, 8, 128)),
    _model("Qwen3-8B", "qwen3", 151936, 4096, 12288, (32, 8, 128)),
    _model("Qwen3-14B", "qwen3", 151936, 5120, 17408, (40, 8, 128)),
    _model("Qwen3-32B", "qwen3", 151936, 5120, 25600, (64, 8, 128)),
    _model("Qwen3-30B-A3B", "qwen3_moe", 151936, 2048, 6144, (32, 4, 128), **_experts(128, 8, 768)),
    _model("Qwen3-235B-A22B", "qwen3_moe", 151936, 4096, 12288, (64, 4, 128), **_experts(128, 8, 1536)),
    _model("Qwen3-Next-80B-A3B", "qwen3_next", 151936, 2048, 5120, (16, 2, 256), **_experts(512, 10, 512, **_SHARED)),
    _model(
        "Qwen2.5-VL-7B", "qwen2_5_vl", 152064, 3584, 18944, (28, 4, 128), **_MROPE,
        nested=_vision("qwen2_5_vl", 1280, 3420, 3584),
    ),
    _model(
        "Qwen3-VL-8B", "qwen3_vl", 151936, 4096, 12288, (32, 8, 128), **_MROPE3,
        nested=_vision("qwen3_vl", 1152, 4304, 4096),
    ),
    _model("Qwen3.5-9B", "qwen3_5", 248320, 4096, 12288, (16, 4, 256), nested={}),
    _model(
        "Qwen3.5-35B-A3B", "qwen3_5_moe", 248320, 2048, 512, (16, 2, 256), **_experts(256, 8, 512, **_SHARED),
        nested={},
    ),
    _model("Llama-2-7B", "llama", 32000, 4096, 11008, (32, 32, 128)),
    _model("Llama-3.2-1B", "llama", 128256, 2048, 8192, (32, 8, 64)),
    _model("Llama-3.2-3B", "llama", 128256, 3072, 8192, (24, 8, 128)),
    _model("Llama-3.1-8B", "llama", 128256, 4096, 14336, (32, 8, 128)),
    _model("Llama-3.1-70B", "llama", 128256, 8192, 28672, (64, 8, 128)),
    _model("SmolLM2-135M", "llama", 49152, 576, 1536, (9, 3, 64)),
    _model("SmolLM2-360M", "llama", 49152, 960, 2560, (15, 5, 64)),
    _model("SmolLM2-1.7B", "llama", 49152, 2048, 8192, (32, 32, 64)),
    _model("Mistral-7B-v0.3", "mistral", 32768, 4096, 14336, (32, 8, 128)),
    _model("Mistral-Nemo-12B", "mistral", 131072, 5120, 14336, (32, 8, 128)),
    _model("Gemma-2-2B", "gemma2", 256000, 2304, 9216, (8, 4, 256), **_CAP),
    _model("Gemma-2-9B", "gemma2", 256000, 3584, 14336, (16, 8, 256), **_CAP),
    _model("Gemma-2-27B", "gemma2", 256000, 4608, 36864, (32, 16, 128), **_CAP),
    _model("Gemma-3-1B", "gemma3_text", 262144, 1152, 6912, (4, 1, 256)),
    _model("Gemma-3-27B", "gemma3_text", 262208, 5376, 21504, (32, 16, 128)),
    _model("GLM-4-9B-0414", "glm4", 151552, 4096, 13696, (32, 2, 128)),
    _model("GLM-4-32B-0414", "glm4", 151552, 6144, 23040, (48, 2, 128)),
    _model("DeepSeek-V3", "deepseek_v3", 129280, 7168, 18432, (128, 128, 64)),
    _model("Phi-2", "phi", 51200, 2560, 10240, (32, 32, 80)),
    _model("Phi-3-mini", "phi3", 32064, 3072, 8192, (32, 32, 96), pad_token_id=0),
    _model("Phi-4", "phi3", 100352, 5120, 17920, (40, 10, 128), pad_token_id=0),
)  # fmt: skip
