"""The PPO output head's API: log-probs and entropy of given tokens from hidden states and the output embedding.

    scores z = cap(logit_scale * (hidden W^T + bias)) / temperature,   cap(u) = softcap * tanh(u / softcap)
    log_probs = log_softmax(z)[label],   entropy = -sum softmax(z) * log_softmax(z)

The full [N, V] logits never exist, neither in forward nor in backward. Both outputs describe the policy at the given
temperature; temperature=1.0 gives the model's own, unscaled ones, which is what rollout engines usually report.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from npu_backend.config import read_environment
from npu_backend.errors import HeadInputError
from npu_backend.head import backends, inputs, liger, rows_eager, sharded, triton_cuda, triton_npu
from npu_backend.head.chunked import ChunkedHead, Plan
from npu_backend.head.selection import leaves_rows_out

DEFAULT_CHUNK_ROWS = 512
_LARGEST_GIB = sys.float_info.max / 2**30


class LinearLogProbOutput(NamedTuple):
    """What the head returns.

    Attributes:
        log_probs: float32, shaped like the labels; 0 where ignored.
        entropy: float32 in nats, shaped like the labels, 0 where ignored; None with `calculate_entropy=False`.
        backend: the backend that really ran: "torch", "triton" or "liger".
    """

    log_probs: Tensor
    entropy: Tensor | None
    backend: str


def linear_log_prob(
    hidden_states: Tensor,
    vocab_weights: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor | None = 1.0,
    bias: Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    calculate_entropy: bool = True,
    impl_backend: str | None = None,
    process_group: Any = None,
    logits_cache_gib: float | str | None = None,
) -> LinearLogProbOutput:
    """Log-probs of `labels` and entropy of the policy, with gradients for hidden states, weight and bias.

    Args:
        hidden_states: [N, H] or [B, S, H], floating point.
        vocab_weights: [V, H], floating point. Its dtype may differ from the hidden states': inside an autocast region
            the GEMMs run in the autocast dtype, else in the wider of the two. Gradients come in each tensor's dtype.
            A DTensor is FSDP2's: it is gathered, and its gradient is the mean over its mesh (`sharded`). So is `bias`.
        labels: [N] or [B, S], integers: the token whose log-prob is wanted, already shifted.
        temperature: a number, a 0-dim tensor, or one value per row: [N], [N, 1] or shaped like labels. None means 1.
            No gradient flows to it.
        bias: [V] of the output layer, or None.
        logit_scale: factor on the logits (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`), or None.
        softcap: Gemma's `final_logit_softcapping`, applied after the scale, or None.
        ignore_index: label of the rows that get zeros, in both directions, and stay in the graph.
        calculate_entropy: False skips the work for it.
        impl_backend: "torch", "triton", "liger" or "auto"; None means "torch".
        process_group: of a vocabulary-parallel weight (tensor parallel): `vocab_weights` and `bias` are this rank's
            part, `hidden_states` and `labels` the same on every rank of the group. The hidden states' gradient is
            summed over the group (`vocab_parallel` says when not). Liger cannot.
        logits_cache_gib: GiB of logits that may be kept for backward instead of being recomputed. None means
            NPU_BACKEND_LOGITS_CACHE_GIB, else "auto": half of what is free at that moment for the triton backend (which
            keeps scores, in half precision), 0 for the torch backend (where no bit depends on it).

    With NPU_BACKEND_BATCH_INVARIANT=1 the torch backend gives each chunk the same number of rows, the last one padded:
    a row's result, and its hidden state's gradient, are then the same bits alone, moved, or in another batch.

    Raises:
        HeadInputError: wrong shapes, dtypes, devices or options; a label out of range (its position is named: one host
            synchronisation, see `npu_backend.head.inputs.trusted_values`); a temperature that is not finite and
            positive; a weight that FSDP has not gathered.
        ConfigError: no such backend, or an unknown NPU_BACKEND_* variable.
        BackendUnavailableError: the backend cannot be used here, or the release does not have what was asked for.

    Examples:
        >>> import torch, npu_backend
        >>> hidden, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(32, 8, requires_grad=True)
        >>> labels = torch.tensor([[5, 0, -100], [31, -100, 7]])
        >>> output = npu_backend.linear_log_prob(hidden, weight, labels, temperature=0.8)
        >>> output.log_probs.shape, output.entropy.dtype, output.backend
        (torch.Size([2, 3]), torch.float32, 'torch')
        >>> output.log_probs[labels == -100].tolist()
        [0.0, 0.0]
        >>> output.log_probs.sum().backward()
        >>> hidden.grad.shape, weight.grad.shape
        (torch.Size([2, 3, 8]), torch.Size([32, 8]))
    """
    return in_chunks(
        hidden_states,
        vocab_weights,
        labels,
        chunk_rows=DEFAULT_CHUNK_ROWS,
        temperature=temperature,
        bias=bias,
        logit_scale=logit_scale,
        softcap=softcap,
        ignore_index=ignore_index,
        calculate_entropy=calculate_entropy,
        impl_backend=impl_backend,
        process_group=process_group,
        logits_cache_gib=logits_cache_gib,
    )


def in_chunks(
    hidden_states: Tensor,
    vocab_weights: Tensor,
    labels: Tensor,
    *,
    chunk_rows: int,
    temperature: float | Tensor | None = 1.0,
    bias: Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    calculate_entropy: bool = True,
    impl_backend: str | None = None,
    process_group: Any = None,
    logits_cache_gib: float | str | None = None,
) -> LinearLogProbOutput:
    """`linear_log_prob` with so many rows per chunk of the torch backend: more is faster and takes more memory."""
    backends.check_name(impl_backend)
    inputs.check_count("linear_log_prob: chunk_rows", chunk_rows)
    cache_bytes = _cache_bytes(logits_cache_gib)
    given = inputs.prepare(
        hidden_states, vocab_weights, labels, temperature, bias, logit_scale, softcap, ignore_index, process_group
    )
    dtype = _compute_dtype(given.hidden, given.weight)
    device = given.hidden.device
    backend = backends.resolve(impl_backend, device, dtype, vocab_parallel=given.group is not None, given=given).name
    given = _gathered(given, dtype)
    if backend == "liger":
        liger.check_options(given)
    if given.labels.numel() == 0 and (backend == "liger" or device.type == "npu"):
        backend = "torch"  # the others refuse an empty batch; the graph still has to reach the weight
    log_probs, entropy = _run(backend, given, dtype, calculate_entropy, cache_bytes, chunk_rows)
    return LinearLogProbOutput(
        _outgoing(log_probs, given.shape),
        None if entropy is None else _outgoing(entropy, given.shape),
        backend,
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor | None = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy), float32, shaped like `labels`: verl's Triton head, with its positional arguments.

    Args:
        hidden: [..., H], floating point. It may carry dimensions of size 1 that `labels` lacks or has elsewhere
            (Megatron passes [S, 1, H] with [1, S]).
        weight: [V, H], floating point; with a `dist_process_group` this rank's part of the vocabulary.
        labels: [N] or [B, S], integers, already shifted.
        temperature: as in `linear_log_prob`.
        reduction: "none" only.
        dist_process_group: `process_group` of `linear_log_prob`.

    Raises:
        HeadInputError: another reduction than "none"; else as `linear_log_prob`.
    """
    if reduction != "none":
        raise HeadInputError(f"linear_cross_entropy: reduction={reduction!r} is not supported; reduce the result")
    dense = all(isinstance(value, Tensor) and not value.is_nested for value in (hidden, labels))
    if dense and hidden.dim() > 0:
        rows = [size for size in hidden.shape[:-1] if size != 1]
        if rows == [size for size in labels.shape if size != 1]:
            hidden = hidden.reshape(*labels.shape, hidden.shape[-1])
    log_probs, entropy, _ = linear_log_prob(
        hidden, weight, labels, temperature=temperature, process_group=dist_process_group
    )
    assert entropy is not None
    return log_probs, entropy


def _run(
    backend: str,
    given: inputs.HeadInputs,
    dtype: torch.dtype,
    calculate_entropy: bool,
    cache_bytes: int | None,
    chunk_rows: int,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [N] and entropy [N] | None by one backend."""
    if backend == "liger":
        return liger.log_prob_and_entropy(given, dtype, calculate_entropy=calculate_entropy)
    if backend == "triton" and given.hidden.device.type == "npu":
        return triton_npu.log_prob_and_entropy(
            given,
            dtype,
            calculate_entropy=calculate_entropy,
            cache_bytes=cache_bytes,
            chunk_rows=chunk_rows,
            needs_backward=_needs_backward(given),
        )
    if backend == "triton":
        return triton_cuda.log_prob_and_entropy(
            given,
            dtype,
            calculate_entropy=calculate_entropy,
            cache_bytes=cache_bytes if _needs_backward(given) else 0,
        )
    plan = Plan(
        kernels=rows_eager,
        chunk_rows=chunk_rows,
        compute_dtype=dtype,
        logit_scale=given.logit_scale,
        softcap=given.softcap,
        temperature=given.temperature,
        calculate_entropy=calculate_entropy,
        cache_bytes=(cache_bytes or 0) if _needs_backward(given) else 0,
        compact=leaves_rows_out(given.hidden, default=False),
        may_ignore=given.may_ignore,
        multiple=chunk_rows if read_environment().batch_invariant else 1,
        group=given.group,
        sum_hidden=given.sums_hidden,
    )
    return _chunked(given, plan)


def _outgoing(values: Tensor, shape: torch.Size) -> Tensor:
    """The caller's own float32 copy, and no view: it may be changed in place, for backward needs `values` as they are,
    and a hook that FSDP2 puts on it stays (an in-place operation on a view would lose it).
    """
    return values.reshape(shape).to(torch.float32, copy=True)


def _chunked(given: inputs.HeadInputs, plan: Plan) -> tuple[Tensor, Tensor | None]:
    labels, temperatures = given.labels, given.temperatures
    missing = -labels.numel() % plan.multiple
    if missing:  # fill the last chunk up with ignored rows
        labels = pad(labels, (0, missing), value=inputs.IGNORED)
        temperatures = None if temperatures is None else pad(temperatures, (0, missing), value=1.0)
    log_probs, entropy = ChunkedHead.apply(  # type: ignore[no-untyped-call]
        given.hidden, given.weight, given.bias, labels, temperatures, plan
    )
    rows = given.labels.numel()
    return log_probs[:rows], None if entropy is None else entropy[:rows]


def _gathered(given: inputs.HeadInputs, dtype: torch.dtype) -> inputs.HeadInputs:
    """DTensors gathered: the weight in the GEMMs' dtype, the bias, which is added in float32, in its own."""
    if not (sharded.is_dtensor(given.weight) or sharded.is_dtensor(given.bias)):
        return given  # not only for speed: Dynamo of torch 2.5 cannot trace `replace`
    bias = None if given.bias is None else sharded.gather(given.bias, given.bias.dtype)
    return dataclasses.replace(given, weight=sharded.gather(given.weight, dtype), bias=bias)


def _needs_backward(given: inputs.HeadInputs) -> bool:
    tensors = (given.hidden, given.weight, given.bias)
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the GEMMs: autocast's where it is on (it leaves float64 alone), else the wider of the two."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if dtype != torch.float64 and torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return dtype


def _cache_bytes(logits_cache_gib: float | str | None) -> int | None:
    """How many bytes of logits may be kept; None is `auto`, which every backend reads as it can."""
    if logits_cache_gib is None:
        logits_cache_gib = read_environment().logits_cache_gib
    if logits_cache_gib is None or logits_cache_gib == "auto":
        return None
    number = isinstance(logits_cache_gib, (int, float)) and not isinstance(logits_cache_gib, bool)
    if not number or not 0 <= logits_cache_gib <= _LARGEST_GIB:  # type: ignore[operator]
        raise HeadInputError(
            "linear_log_prob: logits_cache_gib must be 'auto' or a number of GiB, 0 or more (and a number of bytes "
            f"that a float can hold), got {logits_cache_gib!r}"
        )
    return int(float(logits_cache_gib) * 2**30)
