"""Small models with the structure of a family, their inputs, and what they should call.

Sizes shrink, structure stays: the activation, kinds of layers, tied weights and rotary settings are those of the given
configuration, or of the family's default one.
"""

from __future__ import annotations

import copy
import inspect
import os
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from npu_backend.errors import ConfigError
from npu_backend.model_configs import checkpoint_config, config_of, one_line
from npu_backend.patches.engine import Change
from npu_backend.patches.targets import ItemSlot

VOCABULARY, HEAD_DIM, LAYERS = 128, 64, 2
SEQUENCE = 13  # odd on purpose
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 2 * HEAD_DIM,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "sliding_window": 32,
    # experts: one dense layer, one sparse layer, where the family can have both
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    # linear attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    # vision towers
    "depth": LAYERS,
    "num_heads": 2,
    "out_hidden_size": 2 * HEAD_DIM,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "window_size": 16,
    # special tokens must lie within the small vocabulary
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vision_start_token_id": 120,
    "vision_end_token_id": 121,
    "image_token_id": 122,
    "video_token_id": 123,
}


def tiny_model(hf_config: Any) -> nn.Module:
    """A two-layer float32 model with the structure of `hf_config` on the CPU, its weights the same every time.

    Raises:
        ConfigError: transformers has no causal language model for this configuration, or cannot build it.
    """
    config = shrunk(hf_config)
    factory = _factory(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _built(factory, config)
        for parameter in model.parameters():  # norms start at 1 or 0, biases at 0: a fault there would not show
            parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    return model.train()


def checkpoint(folder: str | os.PathLike[str]) -> nn.Module:
    """The model in a checkpoint's folder, in its own dtype, on the CPU.

    Raises:
        ConfigError: as `checkpoint_config`, or the weights cannot be loaded.
    """
    factory = _factory(checkpoint_config(folder))
    try:
        model: nn.Module = factory.from_pretrained(folder, dtype="auto", local_files_only=True)
    except Exception as error:
        raise ConfigError(f"transformers cannot load the checkpoint {str(folder)!r}: {one_line(error)}") from error
    return model.train()


def _factory(config: Any) -> Any:
    """The auto class of transformers that builds a language model of this configuration."""
    import transformers

    for auto in ("AutoModelForImageTextToText", "AutoModelForCausalLM"):
        factory = getattr(transformers, auto, None)
        if factory is not None and type(config) in factory._model_mapping:
            return factory
    raise ConfigError(
        f"no language model can be built from {type(config).__name__} (model_type {config.model_type!r}); give the "
        "whole model's configuration, not that of a part"
    )


def _built(factory: Any, config: Any) -> nn.Module:
    try:
        model: nn.Module = factory.from_config(config)
    except Exception as error:
        raise ConfigError(f"transformers cannot build a small {config.model_type} model: {one_line(error)}") from error
    return model


def shrunk(hf_config: Any) -> Any:
    """A copy of a configuration with small sizes, also in its sub-configurations."""
    config = config_of(hf_config) if isinstance(hf_config, Mapping) else copy.deepcopy(hf_config)
    for part in _parts(config):
        for name, size in _SIZES.items():
            if getattr(part, name, None) is not None:
                setattr(part, name, copy.copy(size))
        kinds = getattr(part, "layer_types", None)
        if kinds:
            part.layer_types = (list(dict.fromkeys(kinds)) * LAYERS)[:LAYERS]
        if getattr(config, "vision_config", None) is not None:
            _divide_rotary(part)
    return config


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from _parts(value)


def _divide_rotary(part: Any) -> None:
    """Multimodal rotary embedding divides half of the rotating channels among time, height and width."""
    if not hasattr(part, "num_key_value_heads"):  # a vision tower
        return
    name = "rope_parameters" if hasattr(part, "rope_parameters") else "rope_scaling"
    settings = dict(getattr(part, name, None) or {"rope_type": "default"})
    share = settings.get("partial_rotary_factor") or getattr(part, "partial_rotary_factor", None) or 1.0
    third = int(HEAD_DIM * share) // 6
    settings["mrope_section"] = [int(HEAD_DIM * share) // 2 - 2 * third, third, third]
    setattr(part, name, settings)


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """Two sequences of odd length; with an image in the second one where the model has a vision tower."""
    noise = torch.Generator().manual_seed(1)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(3, min(vocabulary, 120), (2, SEQUENCE), generator=noise)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    vision = getattr(model.config, "vision_config", None)
    if vision is not None and getattr(model.config, "image_token_id", None) is not None:
        merge, patch = vision.spatial_merge_size, vision.patch_size
        side = 2 * merge
        ids[1, 2] = model.config.vision_start_token_id
        ids[1, 3:7] = model.config.image_token_id
        channels = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * patch * patch
        given["pixel_values"] = torch.randn(side * side, channels, generator=noise)
        given["image_grid_thw"] = torch.tensor([[1, side, side]])
        if "mm_token_type_ids" in inspect.signature(type(model).forward).parameters:
            given["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    return {name: value.to(model.device) for name, value in given.items()}


def expected_calls(model: nn.Module, change: Change, ran: Collection[nn.Module] | None = None) -> int:
    """How often one forward pass should call a patched target, from the model's structure alone; or from the modules
    that ran in one, where they are given (a patched block does not call the experts inside it).

    A method is called once per module of its class, and so is a class that took another one's place; a function once
    per module whose forward names it; an entry of transformers' experts registry once per module that dispatches to it.
    """
    slot = change.slot
    modules = list(model.modules()) if ran is None else ran
    if isinstance(slot, ItemSlot):
        return sum(_dispatches_experts(module) for module in modules)
    if isinstance(slot.owner, type):
        return sum(type(module).forward is change.after for module in modules)
    if isinstance(change.after, type):
        return sum(type(module) in (change.before, change.after) for module in modules)
    return sum(_names(type(module).forward, slot.name, slot.owner) for module in modules)


def _dispatches_experts(module: nn.Module) -> bool:
    """Whether transformers' decorator of experts is on this module's class: it notes the layout of the weights."""
    return "is_transposed" in vars(module) and hasattr(type(module).forward, "__wrapped__")


def _names(forward: Any, name: str, module: Any) -> bool:
    function = inspect.unwrap(forward)
    if not isinstance(function, types.FunctionType):
        return False
    return name in function.__code__.co_names and function.__globals__ is vars(module)
