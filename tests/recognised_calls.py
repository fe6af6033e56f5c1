"""A call for every operator that is recognised: a small module of its class, or q, k, cos and sin, as it wants."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import tiny_zoo
import torch
from torch import Tensor, nn

from npu_backend.patches.engine import Change
from npu_backend.recognise import Found
from npu_backend.verification.replay import Call

B, S, N, KV, D, H = 2, 5, 4, 2, 16, tiny_zoo.HIDDEN
# what constructors call the things that a norm or an MLP is built from
_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "dim", "embed_dim", "in_features", "input_size"), H),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "inner_dim"), 96),
    **dict.fromkeys(("eps", "norm_eps", "layer_norm_eps"), 1e-6),
    "layer_idx": 0,
    "hidden_act": "silu",
}


class CannotBuild(Exception):
    """No module of this class could be built, so the operator was not compared on its own."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def call_of(family: str, found: Found, change: Change) -> Call:
    """Arguments for one call of a recognised operator, float32 on the CPU, everything requiring a gradient."""
    if found.op == "rotary":
        return Call(tuple(t.requires_grad_() for t in _rotary(found.variant)), _keywords(found.variant, change.before))
    module = _module(family, change.slot.owner)
    inputs = [normal(B, S, _width(module))]
    if found.variant.startswith("gated"):
        inputs.append(normal(B, S, _width(module), seed=1))
    return Call((module, *(x.requires_grad_() for x in inputs)), {})


def _rotary(variant: str) -> Iterator[Tensor]:
    """q [B, N, S, D] as a view of [B, S, N, D], k with fewer heads, cos and sin."""
    vision = variant == "vision"
    channels = D // 2 if variant in ("partial", "interleaved_partial") else D
    angle = normal(B, S, channels // 2, seed=7)
    angle = angle if variant == "halves" else torch.cat((angle, angle), -1)
    if variant == "interleaved_float":  # its angles come in pairs of neighbours already
        angle = normal(B, S, channels // 2, seed=7).repeat_interleave(2, -1)
    if variant == "multimodal":
        angle = angle.expand(3, B, S, D) + normal(3, 1, 1, D // 2, seed=8).repeat(1, 1, 1, 2)
    for seed, heads in ((1, N), (2, KV)) if variant != "one" else ((1, N),):
        yield normal(B, S, heads, D, seed=seed)[0] if vision else normal(B, S, heads, D, seed=seed).transpose(1, 2)
    yield (angle[0] if vision else angle).cos()
    yield (angle[0] if vision else angle).sin()


def _keywords(variant: str, original: Any) -> dict[str, Any]:
    sections = {"mrope_section": [2, 3, 3]} if "mrope_section" in inspect.signature(original).parameters else {}
    return sections if variant == "multimodal" else {}


def _module(family: str, kind: type[nn.Module]) -> nn.Module:
    """A module of this class with weights that are not their initial values.

    Raises:
        CannotBuild: no configuration of the family fits its constructor.
    """
    reasons = []
    for config in _configs(kind.__module__.split(".")[2]) if family else ():
        try:
            module = kind(**_arguments(kind, config))
        except Exception as error:  # of many kinds: a configuration of another part of the model
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        for seed, parameter in enumerate(module.parameters()):
            parameter.data = normal(*parameter.shape, seed=seed) * parameter.shape[-1] ** -0.5 + parameter.data.mean()
        return module
    raise CannotBuild(f"{kind.__name__}: {reasons[0] if reasons else 'no configuration'}")


def _arguments(kind: type[nn.Module], config: Any) -> dict[str, Any]:
    given = {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if name == "config":
            given[name] = config
        elif name in _ARGUMENTS and parameter.default is parameter.empty:
            given[name] = _ARGUMENTS[name]
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            raise CannotBuild(f"its constructor wants {name}")
    return given


def _configs(family: str) -> list[Any]:
    """Small configurations of every part of a family; the text model's first."""
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    kinds = sorted((k for k in kinds if hasattr(k, "model_type")), key=lambda k: "Text" not in k.__name__)
    found = []
    for kind in kinds:
        try:
            found.append(kind())  # a norm's size is an argument: any configuration does
            found.insert(0, kind(**tiny_zoo.small_arguments(found[-1])))
        except Exception:  # a part that has no default, or that cannot be made small
            continue
    return found


def _width(module: nn.Module) -> int:
    """The size of the last axis that a module takes."""
    linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
    if linear is not None:
        return linear.in_features
    weight = getattr(module, "weight", None)
    return H if weight is None or weight.dim() == 0 else weight.shape[-1]
