"""Sparse mixture of experts: token permute, two grouped matmuls around npu_swiglu, token unpermute.

Only what lies behind the router is replaced. Softmax, top-k and the routing weights stay exactly the model's: where a
block computes them inline (transformers 4), the same steps run here in the same order and dtypes, because a bfloat16
router picks other experts. Three structures exist, and the original's parameters tell which one it is:

    (self, hidden_states)                                    a block with a list of experts           transformers 4
    (self, hidden_states, routing_weights, router_indices)   weights [E, in, out], routing [T, E]     transformers 4, VL
    (self, hidden_states, top_k_index, top_k_weights)        weights [E, out, in], routing [T, k]     transformers 5

Transformers 5 dispatches the last one through a registry of implementations: `registered` replaces its default entry,
and `experts` the class's forward only where that default is not used (a torch without grouped matmul).

Goes to the original: experts that are not plain SwiGLU with plain weights (biases, adapters, hooks, DTensors, a part of
the experts on this rank), more experts or indices than the operators take, and what `checks.why_not` names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_backend.operators import checks, counters, gated_mlp
from npu_backend.operators.grouped_linear import grouped_linear, grouped_linear_reference, tokens_per_expert

OP = "sparse_moe"
MOST_EXPERTS, MOST_CHOICES, MOST_INDICES, LARGEST_AXIS = 1024, 512, 16777214, 65535

# -- once per process -------------------------------------------------------------------------------------------------


def requires(original: Any, context: Any) -> str | None:
    """Why no experts can be replaced on this host, or in this model."""
    missing = checks.lacks("npu_grouped_matmul", "npu_moe_token_permute", "npu_moe_token_unpermute", "npu_swiglu")
    if missing:
        return missing
    needed = {"group_list", "group_type", "group_list_type", "split_item"}
    if not needed <= (checks.parameters("npu_grouped_matmul") or frozenset()):
        return "torch_npu too old for grouped matmul"
    return checks.not_silu(context.hf_config)


def requires_eager_default(original: Any, context: Any) -> str | None:
    """As `requires`; and transformers' registry, where it exists and is used, is the place to patch."""
    if hasattr(original, "__wrapped__") and (hasattr(F, "grouped_mm") or hasattr(torch, "_grouped_mm")):
        return "transformers dispatches these experts through its registry, whose entry grouped_mm is patched instead"
    return requires(original, context)


# -- factories --------------------------------------------------------------------------------------------------------


def registered(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for an entry of transformers' registry, which serves every family's fused experts."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        reason = _why_not_fused(self) or _why_not(hidden_states, top_k_index, self.gate_up_proj, self.num_experts)
        if reason:
            counters.fell_back(OP, reason)
            return original(self, hidden_states, top_k_index, top_k_weights)
        out_in = not getattr(self, "is_transposed", False)
        return _run_fused(self, hidden_states, top_k_index, top_k_weights, out_in=out_in)

    return forward


def experts(original: Callable[..., Any], context: Any) -> Callable[..., Any]:
    """Factory for the forward of an experts class, or of a block with a list of experts."""
    fused = registered(original, context)

    def forward_top_k(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        dispatched = hasattr(original, "__wrapped__") and self.config._experts_implementation != "eager"
        return (original if dispatched else fused)(self, hidden_states, top_k_index, top_k_weights)

    forms = {
        ("self", "hidden_states"): _block(original),
        ("self", "hidden_states", "routing_weights", "router_indices"): _dense_routing(original),
        ("self", "hidden_states", "top_k_index", "top_k_weights"): forward_top_k,
    }
    return checks.pick(original, forms)


def _dense_routing(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Experts that get their routing weights as [T, E], zero for the experts a token does not go to."""

    def forward(self: Any, hidden_states: Tensor, routing_weights: Tensor, router_indices: Tensor) -> Tensor:
        reason = _why_not_fused(self) or _why_not(hidden_states, router_indices, self.gate_up_proj, self.num_experts)
        if reason:
            counters.fell_back(OP, reason)
            return original(self, hidden_states, routing_weights, router_indices)
        probs = routing_weights.gather(1, router_indices)  # unpermute wants one weight per choice, not one per expert
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return _run_fused(self, rows, router_indices, probs, out_in=False).view(hidden_states.shape)

    return forward


def _block(original: Callable[..., Any]) -> Callable[..., Any]:
    """A block with a linear router `gate`, a list `experts`, perhaps a `shared_expert`; returns router logits too."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        reason = _why_not_listed(self.experts) or _why_not(
            hidden_states, None, self.experts[0].up_proj.weight, len(self.experts)
        )
        if reason:
            counters.fell_back(OP, reason)
            result: tuple[Tensor, Tensor] = original(self, hidden_states)
            return result
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        router_logits, probs, index = _route(self, rows)
        up = [getattr(expert, name).weight for expert in self.experts for name in ("gate_proj", "up_proj")]
        down = [expert.down_proj.weight for expert in self.experts]
        routed = routed_experts(rows, index, probs, up, down, len(self.experts), out_in=True)
        if hasattr(self, "shared_expert"):
            routed = routed + F.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        return routed.view(hidden_states.shape), router_logits

    return forward


def _route(self: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Router logits, routing weights and chosen experts, as transformers 4 computes them: float32 until the end."""
    router_logits: Tensor = self.gate(rows)
    probs, index = torch.topk(F.softmax(router_logits, dim=1, dtype=torch.float), self.top_k, dim=-1)
    if self.norm_topk_prob:
        probs /= probs.sum(dim=-1, keepdim=True)
    return router_logits, probs.to(rows.dtype), index


# -- one input --------------------------------------------------------------------------------------------------------


def _why_not(hidden_states: Tensor, index: Tensor | None, weight: Tensor, experts: int) -> str | None:
    """Why this input goes to the original: hidden_states [..., H], index [T, k] if it is known yet."""
    if any(checks.is_dtensor(tensor) for tensor in (hidden_states, index, weight)):
        return "a DTensor"
    if not 2 <= experts <= MOST_EXPERTS:
        return f"{experts} experts"
    if index is not None and (index.shape[-1] > MOST_CHOICES or index.numel() > MOST_INDICES):
        return "more expert indices than the operators take"
    if max(weight.shape[-2:]) > LARGEST_AXIS:
        return f"an axis longer than {LARGEST_AXIS}"
    return checks.why_not(hidden_states, weight)


def _why_not_fused(self: Any) -> str | None:
    """Why these fused experts are not plain SwiGLU over all experts. Its flags come from transformers' decorator."""
    activation = getattr(self, "act_fn", None)  # GPT-OSS has its own, and no such attribute
    if not checks.is_silu(activation):
        return f"activation {type(activation).__name__}"
    if not getattr(self, "has_gate", True) or not getattr(self, "is_concatenated", True):
        return "experts that are not gate and up side by side"
    if getattr(self, "has_bias", False):
        return "experts with biases"
    gate = getattr(type(self), "_apply_gate", None)
    if gate is not None and gate.__qualname__ != "_default_apply_gate":
        return "experts with a gate of their own"
    if checks.is_dtensor(self.down_proj) or self.gate_up_proj.dim() != 3:
        return "sharded experts"
    total = _total_experts(self)
    if total is not None and total != self.gate_up_proj.shape[0]:
        return "a part of the experts on this rank"
    return None


def _total_experts(self: Any) -> int | None:
    """How many experts the configuration speaks of; under expert parallelism this rank has fewer."""
    config = getattr(self, "config", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)), None)


def _why_not_listed(listed: Any) -> str | None:
    """Why these are not plain SwiGLU experts of plain Linear layers: adapters and hooks would be passed over."""
    for expert in listed:
        if not checks.is_silu(expert.act_fn):
            return f"activation {type(expert.act_fn).__name__}"
        for layer in (expert.gate_proj, expert.up_proj, expert.down_proj):
            if type(layer) is not nn.Linear or layer.bias is not None or _has_hooks(layer):
                return "experts that are not plain Linear layers"
            if checks.is_dtensor(layer.weight) or layer.weight.dim() != 2:
                return "sharded experts"
        if _has_hooks(expert):
            return "experts with hooks"
    return None


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(hooks) or "forward" in vars(module)


# -- the operators ----------------------------------------------------------------------------------------------------


def _run_fused(self: Any, rows: Tensor, index: Tensor, probs: Tensor, *, out_in: bool) -> Tensor:
    weights = ([self.gate_up_proj], [self.down_proj])
    return routed_experts(rows, index, probs, *weights, self.gate_up_proj.shape[0], out_in=out_in)


def routed_experts(
    rows: Tensor,
    index: Tensor,
    probs: Tensor,
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    experts: int,
    *,
    out_in: bool,
) -> Tensor:
    """Every token through its experts, weighted and summed.

    Args:
        rows: [T, H].
        index: [T, k] integers, the experts of each token.
        probs: [T, k], their weights; any float dtype, never rounded here.
        up: gate and up projections side by side, as `grouped_linear` takes them.
        down: down projections.
        experts: E.
        out_in: how the matrices are stored, see `grouped_linear`.

    Returns:
        [T, H] in the dtype of `rows`. The products run in the weights' dtype, or in autocast's where that is on.
    """
    counters.ran(OP)
    torch_npu = importlib.import_module("torch_npu")
    dtype = _compute_dtype(up[0])
    up, down = [w.to(dtype) for w in up], [w.to(dtype) for w in down]
    permuted, places = torch_npu.npu_moe_token_permute(rows.to(dtype), index.to(torch.int32))
    counts = tokens_per_expert(index, experts)
    hidden = gated_mlp.swiglu(grouped_linear(permuted, counts, up, out_in=out_in))
    result = grouped_linear(hidden, counts, down, out_in=out_in)
    combined: Tensor = torch_npu.npu_moe_token_unpermute(result, places, probs=probs)
    return combined.to(rows.dtype)


def _compute_dtype(weight: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


def routed_experts_reference(
    rows: Tensor,
    index: Tensor,
    probs: Tensor,
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    experts: int,
    *,
    out_in: bool,
) -> Tensor:
    """The same in plain torch."""
    order = index.reshape(-1).argsort(stable=True)
    counts = tokens_per_expert(index, experts)
    repeated = rows[order // index.shape[1]]
    hidden = gated_mlp.swiglu_reference(grouped_linear_reference(repeated, counts, up, out_in=out_in))
    result = grouped_linear_reference(hidden, counts, down, out_in=out_in)[order.argsort()].view(*index.shape, -1)
    return (result * probs.unsqueeze(-1)).sum(1).to(rows.dtype)
