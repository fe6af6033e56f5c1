"""What results are compared with: a float64 reference, and a tolerance that comes from eager's own error.

The rule everywhere: a result in some dtype may be off from the float64 reference by a small multiple of what plain
eager code in that same dtype is off, plus the rounding of the dtype that it is returned in. No magic numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

ALLOWED_NATS = 2e-5  # of log-probs and entropies from given logits, whatever the vocabulary: issue 5's figure


def max_error(value: Tensor, reference: Tensor) -> float:
    """Largest absolute difference to a float64 reference; 0 for empty tensors, inf where one of them is not finite."""
    if value.shape != reference.shape:
        raise AssertionError(f"shape {list(value.shape)}, reference {list(reference.shape)}")
    difference = (value.detach().double() - reference.detach().double()).abs()
    return float(difference.nan_to_num(nan=torch.inf).max()) if difference.numel() else 0.0


def error_bound(eager: Tensor, reference: Tensor, out_dtype: torch.dtype, times: float = 3.0) -> float:
    """`times` the error of eager in the same dtype, plus one rounding of the largest value to `out_dtype`."""
    if not reference.numel():
        return 0.0
    scale = float(reference.detach().abs().max())
    return times * max_error(eager, reference) + torch.finfo(out_dtype).eps * scale


def assert_close_to(
    value: Tensor,
    reference: Tensor,
    eager: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    what: str = "",
    times: float = 3.0,
) -> None:
    """Fail unless `value` is as close to the float64 `reference` as the tolerance rule asks."""
    bound = error_bound(eager, reference, out_dtype or value.dtype, times)
    error = max_error(value, reference)
    assert error <= bound, f"{what}: error to float64 {error:.3e}, allowed {bound:.3e}"


def largest_by_kind(results: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest value of each kind among a model's results; a result's kind is the first word of its name."""
    largest: dict[str, float] = {}
    for name, value in results.items():
        kind = name.split()[0]
        largest[kind] = max(largest.get(kind, 0.0), float(value.abs().max()) if value.numel() else 0.0)
    return largest


def what_differs(
    got: Mapping[str, Tensor], eager: Mapping[str, Tensor], exact: Mapping[str, Tensor], moved: Mapping[str, Tensor]
) -> str:
    """What of a whole float32 model's results is further from float64 than eager's own, and than the results of the
    `nudged` float64 model are; "" where nothing is.

    The tolerance is the rule, and one more rounding of the largest exact value of the result's kind in the model: some
    gradients are zero in exact arithmetic (that of a key's bias, under softmax), and hold nothing but such roundings.
    """
    if got.keys() != eager.keys():
        return f"not on both: {_first_of(got.keys() ^ eager.keys())}"
    largest = largest_by_kind(exact)
    worse = [
        name
        for name, value in got.items()
        if max_error(value, exact[name])
        > max(error_bound(peer[name], exact[name], torch.float32) for peer in (eager, moved))
        + torch.finfo(torch.float32).eps * largest[name.split()[0]]
    ]
    return f"further from float64 than eager is: {_first_of(worse)}" if worse else ""


def _first_of(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first


def exactly(model: nn.Module) -> nn.Module:
    """The model in float64, but for the norms, which transformers computes in float32 whatever it is given."""
    twin = copy.deepcopy(model).double()
    for module in twin.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"  # grouped_mm has no float64
    return twin


def nudged(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with each weight off by at most one rounding to `dtype`: how far that moves a result is what rounding
    can do to it. Where few values are compared, the error that eager happens to make may be far below that.
    """
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.mul_(1 + torch.finfo(dtype).eps * (2 * noise - 1))
    return twin


@dataclass(frozen=True)
class HeadCase:
    """Inputs of the PPO head and the upstream gradients of its two outputs (None: that output is not used)."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    temperature: float | Tensor = 1.0
    bias: Tensor | None = None
    logit_scale: float | None = None
    softcap: float | None = None
    ignore_index: int = -100
    grad_log_probs: Tensor | None = None
    grad_entropy: Tensor | None = None

    def to(self, dtype: torch.dtype) -> HeadCase:
        """The same numbers with every floating-point input in another dtype."""
        cast = {
            name: value.detach().to(dtype)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        return replace(self, **cast)

    def on(self, device: str) -> HeadCase:
        """The same case on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def spaced(self) -> HeadCase:
        """The same numbers as views of every second element of tensors twice as large."""
        views = {
            name: torch.stack((value, value + 1), dim=-1)[..., 0]
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and value.dim()
        }
        return replace(self, **views)

    def options(self) -> dict[str, object]:
        names = ("temperature", "bias", "logit_scale", "softcap", "ignore_index")
        return {name: getattr(self, name) for name in names}


def head_case(
    *shape: int,
    hidden_size: int = 64,
    vocab_size: int = 101,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spread: float = 2.0,
    **fields: object,
) -> HeadCase:
    """A random case with labels of `shape`; the logits have standard deviation `spread`. Gradients have both signs."""
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random)

    case = HeadCase(
        hidden=normal(*shape, hidden_size).to(dtype),
        weight=(normal(vocab_size, hidden_size) * spread / hidden_size**0.5).to(dtype),
        labels=torch.randint(0, vocab_size, shape, generator=random),
        grad_log_probs=normal(*shape),
        grad_entropy=normal(*shape),
    )
    return replace(case, **fields)  # type: ignore[arg-type]


def full_logits_head(case: HeadCase) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy through the full logits, computed as a model does in the inputs' own dtype.

    The softmax is float32 for the narrow dtypes, as every trainer does it.
    """
    logits = case.hidden @ case.weight.t()
    if case.bias is not None:
        logits = logits + case.bias
    if case.logit_scale is not None:
        logits = logits * case.logit_scale
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    if logits.dtype != torch.float64:
        logits = logits.float()
    temperature = case.temperature
    if isinstance(temperature, Tensor) and temperature.dim():
        temperature = temperature.reshape(*case.labels.shape, 1)
    log_p = (logits / temperature).log_softmax(-1)
    ignored = case.labels == case.ignore_index
    log_probs = log_p.gather(-1, case.labels.masked_fill(ignored, 0)[..., None])[..., 0]
    terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p.clamp(min=-1e30))
    return log_probs.masked_fill(ignored, 0.0), -terms.sum(-1).masked_fill(ignored, 0.0)


def assert_within_nats(case: HeadCase, log_probs: Tensor, entropy: Tensor) -> None:
    """Fail if a head that keeps its logits in float32 is off by more than `ALLOWED_NATS`.

    In float32 the products of narrow operands are exact, so no rounding of the operands' dtype is in its results.
    """
    for value, reference in zip((log_probs, entropy), full_logits_head(case.to(torch.float64)), strict=True):
        assert max_error(value, reference) <= ALLOWED_NATS


def run_head(case: HeadCase, head: Callable[[HeadCase], tuple[Tensor, Tensor | None]]) -> dict[str, Tensor]:
    """Outputs of `head` and the gradients of hidden, weight and bias, by name. Leaves are fresh copies."""
    leaves = {
        name: value.detach().clone().requires_grad_()
        for name, value in (("hidden", case.hidden), ("weight", case.weight), ("bias", case.bias))
        if value is not None
    }
    log_probs, entropy = head(replace(case, **leaves))
    outputs = {"log_probs": log_probs}
    upstream = [(log_probs, case.grad_log_probs)]
    if entropy is not None:
        outputs["entropy"] = entropy
        upstream.append((entropy, case.grad_entropy))
    used = [(out, grad.to(out.dtype)) for out, grad in upstream if grad is not None]
    if used:
        grads = torch.autograd.grad([out for out, _ in used], list(leaves.values()), [grad for _, grad in used])
        outputs |= {f"grad_{name}": grad for name, grad in zip(leaves, grads)}
    return {name: value.detach() for name, value in outputs.items()}


def assert_head_matches(
    case: HeadCase,
    head: Callable[[HeadCase], tuple[Tensor, Tensor | None]],
    *,
    eager_dtype: torch.dtype | None = None,
    times: float = 3.0,
) -> Mapping[str, Tensor]:
    """Compare a head with the float64 full-logits reference, within the tolerance of eager in `eager_dtype`.

    Returns what `head` gave, by name. `eager_dtype` is the hidden states' dtype if not given.
    """
    got = run_head(case, head)
    reference = run_head(case.to(torch.float64), full_logits_head)
    eager = run_head(case.to(eager_dtype or case.hidden.dtype), full_logits_head)
    for name, value in got.items():
        assert_close_to(value, reference[name], eager[name], what=name, times=times)
    return got
