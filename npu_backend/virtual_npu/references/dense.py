"""RMSNorm, SwiGLU, rotary embedding and the dtype cast, with their backward operators."""

from __future__ import annotations

import torch

from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.registry import register_reference

# ---- RMSNorm: arithmetic and rstd in float32, result in the input's dtype ----


def _check_rms_norm(operator: str, x: torch.Tensor, gamma: torch.Tensor) -> tuple[int, ...]:
    """Check, and return the dimensions that are normalised: the trailing ones that gamma covers."""
    need_dtype(operator, "input", x, FLOATS)
    need(gamma.dtype == x.dtype, operator, f"gamma is {gamma.dtype}, input is {x.dtype}; they must have one dtype")
    need(
        1 <= gamma.dim() <= x.dim() <= 8,
        operator,
        f"input has {x.dim()} dimensions and gamma {gamma.dim()}; 1 to 8, gamma no more",
    )
    trailing = tuple(x.shape[x.dim() - gamma.dim() :])
    need(
        tuple(gamma.shape) == trailing,
        operator,
        f"gamma {tuple(gamma.shape)} must be the last sizes of input {tuple(x.shape)}",
    )
    return tuple(range(x.dim() - gamma.dim(), x.dim()))


@register_reference("npu::npu_rms_norm")
def npu_rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """`x / sqrt(mean(x^2) + epsilon) * gamma`, and the reciprocal root for backward."""
    dims = _check_rms_norm("npu_rms_norm", x, gamma)
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(dims, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


@register_reference("npu::npu_rms_norm_backward")
def npu_rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input and gamma; gamma's in float32, as the device gives it."""
    dims = _check_rms_norm("npu_rms_norm_backward", x, gamma)
    grad = dy.float()
    normalised = x.float() * rstd
    scaled = grad * gamma.float()
    dx = rstd * (scaled - normalised * (scaled * normalised).mean(dims, keepdim=True))
    return dx.to(x.dtype), (grad * normalised).sum_to_size(gamma.shape)


# ---- SwiGLU ----


def _check_swiglu(operator: str, x: torch.Tensor, dim: int) -> None:
    need_dtype(operator, "input", x, FLOATS)
    need(1 <= x.dim() <= 8, operator, f"input has {x.dim()} dimensions, 1 to 8 are allowed")
    need(-x.dim() <= dim < x.dim(), operator, f"dim={dim} is out of range for {x.dim()} dimensions")
    need(x.shape[dim] % 2 == 0, operator, f"size {x.shape[dim]} of dimension {dim} is odd; it is split into two halves")


@register_reference("npu::npu_swiglu")
def npu_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """`silu(a) * b` of the two halves a, b along `dim`."""
    _check_swiglu("npu_swiglu", x, dim)
    a, b = (half.float() for half in x.chunk(2, dim))
    return (torch.nn.functional.silu(a) * b).to(x.dtype)


@register_reference("npu::npu_swiglu_backward")
def npu_swiglu_backward(grad: torch.Tensor, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Gradient of the input."""
    _check_swiglu("npu_swiglu_backward", x, dim)
    a, b = (half.float() for half in x.chunk(2, dim))
    gate, dy = torch.sigmoid(a), grad.float()
    return torch.cat((dy * b * gate * (1 + a * (1 - gate)), dy * a * gate), dim).to(x.dtype)


# ---- rotary embedding: limits of torch_npu 7.0 and later (torch 2.5 on); 6.0 took head size 128 only ----


def _check_rotary(operator: str, x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, mode: str) -> None:
    need(mode in ("half", "interleave"), operator, f"rotary_mode={mode!r} is neither 'half' nor 'interleave'")
    for name, tensor in (("input", x), ("r1", r1), ("r2", r2)):
        need_dtype(operator, name, tensor, FLOATS)
        need(tensor.dim() == 4, operator, f"{name} has {tensor.dim()} dimensions, 4 are needed")
    need(
        r1.shape == r2.shape and r1.dtype == r2.dtype,
        operator,
        f"r1 {tuple(r1.shape)} and r2 {tuple(r2.shape)} must be alike",
    )
    head = x.shape[-1]
    need(head % 2 == 0 and head < 896, operator, f"head size {head} must be even and below 896")
    need(r1.shape[-1] == head, operator, f"r1's last size {r1.shape[-1]} must be the head size {head}")
    fits = all(size in (1, full) for size, full in zip(r1.shape, x.shape))
    need(fits, operator, f"r1 {tuple(r1.shape)} does not broadcast to input {tuple(x.shape)}")
    # B and N of the layouts BNSD, BSND, SBND: the sequence is where r1 has its rows.
    others = [size for size, rotary in zip(x.shape[:3], r1.shape[:3]) if rotary == 1]
    if mode == "half":
        need(
            all(size < 1000 for size in others),
            operator,
            f"batch and heads of {tuple(x.shape)} must be below 1000 each",
        )
    elif len(others) == 2:
        need(
            others[0] * others[1] < 1000,
            operator,
            f"batch times heads of {tuple(x.shape)} must be below 1000 in interleave mode",
        )


def _rotate(x: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "half":
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@register_reference("npu::npu_rotary_mul")
def npu_rotary_mul(
    x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half", rotate: torch.Tensor | None = None
) -> torch.Tensor:
    """`x * r1 + rotated(x) * r2`; r1 is the cosine, r2 the sine."""
    _check_rotary("npu_rotary_mul", x, r1, r2, rotary_mode)
    wide = x.float()
    rotated = _rotate(wide, rotary_mode) if rotate is None else wide @ rotate.float()
    return (wide * r1.float() + rotated * r2.float()).to(x.dtype)


_LAYOUTS = {"BSND": 2, "SBND": 2, "BNSD": 1, "TND": 1}  # where the heads are, which share a cosine


@register_reference("npu::npu_apply_rotary_pos_emb")
def npu_apply_rotary_pos_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key rotated in place, and returned; no gradient."""
    name = "npu_apply_rotary_pos_emb"
    need(layout in _LAYOUTS, name, f"layout={layout!r} is not one of {', '.join(_LAYOUTS)}")
    need(rotary_mode in ("half", "interleave"), name, f"rotary_mode={rotary_mode!r} has no reference")
    for what, tensor in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        need_dtype(name, what, tensor, FLOATS)
        need(tensor.dtype == query.dtype, name, f"{what} is {tensor.dtype}, query is {query.dtype}")
        need(tensor.dim() == len(layout), name, f"{what} has {tensor.dim()} dimensions, {layout} has {len(layout)}")
        shape = list(query.shape)
        shape[_LAYOUTS[layout]] = tensor.shape[_LAYOUTS[layout]]
        need(list(tensor.shape) == shape, name, f"{what} is {tuple(tensor.shape)}, {tuple(shape)} is needed")
    need(cos.shape[_LAYOUTS[layout]] == sin.shape[_LAYOUTS[layout]] == 1, name, "cos and sin have one head")
    need(query.shape[-1] % 2 == 0, name, f"head size {query.shape[-1]} must be even")
    for tensor in (query, key):
        wide = tensor.float()
        tensor.copy_(wide * cos.float() + _rotate(wide, rotary_mode) * sin.float())
    return query, key


@register_reference("npu::npu_rotary_mul_backward")
def npu_rotary_mul_backward(
    grad: torch.Tensor, x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of input, r1 and r2."""
    _check_rotary("npu_rotary_mul_backward", x, r1, r2, rotary_mode)
    dy, wide = grad.float(), x.float()
    # The transpose of a rotation by a quarter turn is minus itself.
    dx = dy * r1.float() - _rotate(dy * r2.float(), rotary_mode)
    dr1, dr2 = (dy * wide).sum_to_size(r1.shape), (dy * _rotate(wide, rotary_mode)).sum_to_size(r2.shape)
    return dx.to(x.dtype), dr1.to(r1.dtype), dr2.to(r2.dtype)
