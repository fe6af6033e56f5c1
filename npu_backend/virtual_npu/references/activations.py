"""GELU and its kin, and the masked softmax, with their backward operators."""

from __future__ import annotations

from collections.abc import Callable

import torch

from npu_backend.virtual_npu.references.autograd import gradients
from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.registry import register_reference

_SOFTMAX = "npu_scaled_masked_softmax"


def _gelu(approximate: str) -> Callable[[torch.Tensor], torch.Tensor]:
    need(approximate in ("none", "tanh"), "npu_gelu", f"approximate={approximate!r} is neither 'none' nor 'tanh'")
    return lambda x: torch.nn.functional.gelu(x, approximate=approximate)


def _fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(1.702 x)`, which the vendor writes as `x / (1 + exp(-1.702 |x|)) * exp(0.851 (x - |x|))`."""
    return x * torch.sigmoid(1.702 * x)


def _in_float(function: Callable[[torch.Tensor], torch.Tensor], operator: str, x: torch.Tensor) -> torch.Tensor:
    need_dtype(operator, "input", x, FLOATS)
    return function(x.float()).to(x.dtype)


def _backward(
    function: Callable[[torch.Tensor], torch.Tensor], operator: str, grad: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    need_dtype(operator, "input", x, FLOATS)
    need(grad.shape == x.shape, operator, f"the gradient is {tuple(grad.shape)}, the input {tuple(x.shape)}")
    return gradients(function, [x.float()], grad.float())[0].to(x.dtype)


@register_reference("npu::npu_gelu")
def npu_gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """GELU, exact or by tanh."""
    return _in_float(_gelu(approximate), "npu_gelu", x)


@register_reference("npu::npu_gelu_backward")
def npu_gelu_backward(grad: torch.Tensor, x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Its gradient."""
    return _backward(_gelu(approximate), "npu_gelu_backward", grad, x)


@register_reference("npu::fast_gelu", counted_as="npu::npu_fast_gelu")
@register_reference("npu::npu_fast_gelu")
def npu_fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by a sigmoid."""
    return _in_float(_fast_gelu, "npu_fast_gelu", x)


@register_reference("npu::npu_fast_gelu_backward")
def npu_fast_gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Its gradient."""
    return _backward(_fast_gelu, "npu_fast_gelu_backward", grad, x)


@register_reference("npu::npu_silu")
def npu_silu(x: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(x)`."""
    return _in_float(torch.nn.functional.silu, "npu_silu", x)


@register_reference("npu::npu_silu_")
def npu_silu_(x: torch.Tensor) -> torch.Tensor:
    """The same, in place."""
    return x.copy_(npu_silu(x))


@register_reference("npu::npu_silu_backward")
def npu_silu_backward(grad: torch.Tensor, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Its gradient; the output is not needed."""
    return _backward(torch.nn.functional.silu, "npu_silu_backward", grad, x)


@register_reference("npu::npu_mish")
def npu_mish(x: torch.Tensor) -> torch.Tensor:
    """`x * tanh(softplus(x))`."""
    return _in_float(torch.nn.functional.mish, "npu_mish", x)


@register_reference("npu::npu_mish_backward")
def npu_mish_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Its gradient."""
    return _backward(torch.nn.functional.mish, "npu_mish_backward", grad, x)


# ---- gated activations ----


@register_reference("npu::npu_clipped_swiglu")
def npu_clipped_swiglu(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    """`a sigmoid(alpha a) (b + bias)` of clipped a, b, which alternate along `dim` or are its halves (gpt-oss)."""
    name = "npu_clipped_swiglu"
    need_dtype(name, "x", x, FLOATS)
    need(x.dim() > 1, name, f"x has {x.dim()} dimensions, more than 1 are needed")
    need(-x.dim() <= dim < x.dim(), name, f"dim={dim} is out of range for {x.dim()} dimensions")
    need(x.shape[dim] % 2 == 0, name, f"size {x.shape[dim]} of dimension {dim} is odd; it is split in two")
    need(group_index is None, name, "group_index has no reference")
    wide = x.float().movedim(dim, -1)
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return (a * torch.sigmoid(alpha * a) * (b + bias)).movedim(-1, dim).to(x.dtype)


@register_reference("npu::npu_gelu_mul")
def npu_gelu_mul(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """`gelu(first half) * second half` of the last dimension."""
    need(2 <= x.dim() <= 8, "npu_gelu_mul", f"input has {x.dim()} dimensions, 2 to 8 are needed")
    first, second = _halves("npu_gelu_mul", x, -1, True)
    return (_gelu(approximate)(first) * second).to(x.dtype)


# ---- GEGLU ----


def _halves(operator: str, x: torch.Tensor, dim: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The half that is activated, and the other one."""
    need_dtype(operator, "input", x, FLOATS)
    need(-x.dim() <= dim < x.dim(), operator, f"dim={dim} is out of range for {x.dim()} dimensions")
    need(x.shape[dim] % 2 == 0, operator, f"size {x.shape[dim]} of dimension {dim} is odd; it is split into two halves")
    first, second = x.float().chunk(2, dim)
    return (first, second) if left else (second, first)


@register_reference("npu::npu_geglu")
def npu_geglu(
    x: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`other * gelu(activated)` of the two halves, and the gelu itself."""
    activated, other = _halves("npu_geglu", x, dim, activate_left)
    gelu = _gelu("tanh" if approximate else "none")(activated)
    return (other * gelu).to(x.dtype), gelu.to(x.dtype)


@register_reference("npu::npu_geglu_grad")
def npu_geglu_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    gelu: torch.Tensor,
    dim: int = -1,
    approximate: int = 1,
    activate_left: bool = False,
) -> torch.Tensor:
    """Its gradient."""

    def forward(whole: torch.Tensor) -> torch.Tensor:
        activated, other = _halves("npu_geglu_grad", whole, dim, activate_left)
        return other * _gelu("tanh" if approximate else "none")(activated)

    return gradients(forward, [x.float()], grad.float())[0].to(x.dtype)


# ---- softmax of scaled and masked scores ----


def _scaled_masked(x: torch.Tensor, mask: torch.Tensor, scale: float, triangular: bool) -> torch.Tensor:
    need_dtype(_SOFTMAX, "x", x, FLOATS)
    need(x.dim() == 4, _SOFTMAX, f"x has {x.dim()} dimensions, [N, C, H, W] is needed")
    for size in x.shape[2:]:
        need(32 <= size <= 4096 and size % 32 == 0, _SOFTMAX, f"H and W of {tuple(x.shape)}: multiples of 32 to 4096")
    if triangular:
        mask = torch.ones(x.shape[2:], dtype=torch.bool).triu(1)
    need_dtype(_SOFTMAX, "mask", mask, (torch.bool,))
    fits = all(size in (1, full) for size, full in zip(mask.shape[::-1], x.shape[::-1])) and mask.dim() <= 4
    need(fits, _SOFTMAX, f"mask {tuple(mask.shape)} does not broadcast to x {tuple(x.shape)}")
    return (x.float() * scale).masked_fill(mask, -10000.0)


@register_reference(f"npu::{_SOFTMAX}")
def npu_scaled_masked_softmax(
    x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0, fixed_triu_mask: bool = False
) -> torch.Tensor:
    """`softmax(x * scale)` over the last dimension, masked places at -10000."""
    return torch.softmax(_scaled_masked(x, mask, scale, fixed_triu_mask), -1).to(x.dtype)


@register_reference(f"npu::{_SOFTMAX}_backward")
def npu_scaled_masked_softmax_backward(
    grad: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, scale: float, fixed_triu_mask: bool
) -> torch.Tensor:
    """Gradient of x from the output y; nothing reaches masked places."""
    probabilities, dy = y.float(), grad.float()
    scores = probabilities * (dy - (dy * probabilities).sum(-1, keepdim=True))
    masked = torch.ones(y.shape[2:], dtype=torch.bool).triu(1) if fixed_triu_mask else mask
    return (scores * scale).masked_fill(masked, 0.0).to(y.dtype)
