"""What the PPO head accepts, checked, and brought into the one form that the backends take.

Everything that can be seen without reading a tensor's values is checked first and costs nothing. What remains (labels
in range, temperatures finite and positive) takes one host synchronisation per call; it is left out while torch.compile
traces, and inside `trusted_values()`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from npu_backend.errors import HeadInputError
from npu_backend.head import sharded, vocab_parallel

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_TINY = torch.finfo(torch.float32).tiny  # of what is smaller the kernels would take the inverse, and find infinity
_LARGEST = sys.float_info.max  # a global, because Dynamo of torch 2.5 cannot read an attribute of sys.float_info
IGNORED = -1  # the label of an ignored row, inside the head

_trusted: ContextVar[bool] = ContextVar("npu_backend_trusted_values", default=False)


@contextmanager
def trusted_values() -> Iterator[None]:
    """Skip the checks that read values: no host synchronisation. The caller vouches for labels and temperatures."""
    token = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(token)


@dataclass(frozen=True)
class HeadInputs:
    """Checked and flattened inputs.

    Attributes:
        hidden: [N, H].
        weight: [V, H], as given, DTensor included; with a `group`, V is this rank's part of the vocabulary.
        bias: [V] or None, as given.
        labels: [N] int64; `IGNORED` where the row is ignored, V where the label is in another rank's part.
        temperature: a number; 1.0 where `temperatures` are given.
        temperatures: [N], one per row, contiguous, in float32 (float64 if given so), or None.
        logit_scale: 1.0 for none.
        softcap: None for none.
        shape: of the caller's labels, which the outputs get too.
        group: the process group among whose ranks the vocabulary is divided; None where it is not.
        may_ignore: False where the check of values found no ignored row.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    temperature: float
    temperatures: Tensor | None
    logit_scale: float
    softcap: float | None
    shape: torch.Size
    group: Any
    may_ignore: bool

    @property
    def sums_hidden(self) -> bool:
        """Whether the head has to sum the hidden states' gradient over `group`."""
        return self.group is not None and not vocab_parallel.summed_upstream(self.hidden)


def prepare(
    hidden_states: Tensor,
    vocab_weights: Tensor,
    labels: Tensor,
    temperature: float | Tensor | None,
    bias: Tensor | None,
    logit_scale: float | None,
    softcap: float | None,
    ignore_index: int,
    process_group: Any = None,
) -> HeadInputs:
    """Check and flatten. Nothing is computed, and nothing is on its way to a device, when this raises.

    A `process_group` of more than one rank must see the call on each of them: it counts the vocabulary together.

    Raises:
        HeadInputError: names the argument, what is wrong with it, and the fix.
    """
    _check_no_transform()
    _check_tensor("hidden_states", hidden_states, _FLOATS)
    _check_tensor("vocab_weights", vocab_weights, _FLOATS, hidden_states.device)
    _check_tensor("labels", labels, _INTEGERS, hidden_states.device)
    _check_gathered(vocab_weights)
    _check_shapes(hidden_states, vocab_weights, labels)
    columns = vocab_weights.shape[0]
    if bias is not None:
        _check_tensor("bias", bias, _FLOATS, hidden_states.device)
        if tuple(bias.shape) != (columns,):
            raise _error(f"bias must be [V] = [{columns}] like vocab_weights, got {list(bias.shape)}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int) or not -(2**63) <= ignore_index < 2**63:
        raise _error(f"ignore_index must be an integer of 64 bits, got {ignore_index!r}")
    if logit_scale is not None and not _is_finite(logit_scale):
        raise _error(f"logit_scale must be a finite number or None, got {logit_scale!r}")
    if softcap is not None and not (_is_finite(softcap) and softcap > 0):
        raise _error(f"softcap must be a finite number above 0 or None, got {softcap!r}")
    number, temperatures = _temperature(temperature, labels)
    shard = vocab_parallel.locate(columns, process_group, hidden_states.device)
    if shard is not None:
        sharded.check_mesh("vocab_weights", vocab_weights, shard.group)
    vocab_size = columns if shard is None else shard.total
    given = labels.reshape(-1).long()
    ignored = given == ignore_index
    may_ignore = True
    if not torch.compiler.is_compiling() and not _trusted.get():
        may_ignore = _check_values(given, ignored, temperatures, vocab_size, ignore_index)
    # A copy in any case: the caller may change labels before backward.
    given = given.masked_fill(ignored, IGNORED) if may_ignore else given.clone()
    return HeadInputs(
        hidden=hidden_states.reshape(-1, hidden_states.shape[-1]),
        weight=vocab_weights,
        bias=bias,
        labels=given if shard is None else shard.local(given),
        temperature=number,
        temperatures=temperatures,
        logit_scale=1.0 if logit_scale is None else float(logit_scale),
        softcap=None if softcap is None else float(softcap),
        shape=labels.shape,
        group=None if shard is None else shard.group,
        may_ignore=may_ignore,
    )


def check_count(name: str, value: object) -> None:
    """Raise HeadInputError unless `value` is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise HeadInputError(f"{name} must be a positive integer, got {value!r}")


def _error(problem: str) -> HeadInputError:
    return HeadInputError(f"linear_log_prob: {problem}")


def _check_tensor(name: str, value: Any, dtypes: tuple[torch.dtype, ...], device: torch.device | None = None) -> None:
    if value is None:
        hint = {
            "labels": "pass the next token of each row (FusedLinearForPPO calls it input_ids)",
            "vocab_weights": "pass the output embedding's weight (model.get_output_embeddings().weight; "
            "with tied embeddings that is the input embedding's)",
        }.get(name, "pass a tensor")
        raise _error(f"{name} is missing: {hint}")
    if not isinstance(value, Tensor):
        raise _error(f"{name} must be a tensor, got {type(value).__name__}")
    if name not in ("vocab_weights", "bias") and sharded.is_dtensor(value):
        raise _error(
            f"{name} is a DTensor, but the head computes with this rank's own rows. "
            f"Pass {name}.to_local(), or full_tensor() where every rank shall compute all rows"
        )
    if value.is_nested or value.layout != torch.strided:
        fill = 1.0 if name == "temperature" else 0.0
        got, dense = ("a nested one", f"to_padded_tensor({fill})") if value.is_nested else (value.layout, "to_dense()")
        raise _error(f"{name} must be a dense tensor, got {got}; pass {name}.{dense}")
    if device is None and value.device.type == "meta":
        raise _error(f"{name} is on the meta device and has no values to compute with; move it to a real device")
    if value.dtype not in dtypes:
        kind = "a floating-point" if dtypes is _FLOATS else "an integer"
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise _error(f"{name} must have {kind} dtype ({known}), got {value.dtype}")
    if device is not None and value.device != device:
        raise _error(f"{name} is on {value.device}, but hidden_states is on {device}; move one of them")


def _check_no_transform() -> None:
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise _error(
            "torch.func and torch.vmap cannot transform the head, which works through its rows in chunks of its own. "
            "Use torch.autograd.grad for gradients, and one call with all rows instead of vmap"
        )


def _check_gathered(weight: Tensor) -> None:
    if torch.compiler.is_compiling() or sharded.is_dtensor(weight):
        return
    freed = weight.numel() > 0 and weight.untyped_storage().nbytes() == 0
    if freed or (weight.dim() == 1 or weight.numel() == 0):
        what = "its storage has been freed" if freed else f"its shape is {list(weight.shape)}, not [V, H]"
        raise _error(
            f"vocab_weights holds no gathered weight: {what}. That is what FSDP leaves of a parameter outside the "
            "forward of the module that owns it. Call the head inside that forward (patch_forward_with_backends does), "
            "or gather first: FullyShardedDataParallel.summon_full_params(module), or module.unshard() with FSDP2."
        )


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    if hidden.dim() not in (2, 3):
        raise _error(f"hidden_states must be [N, H] or [B, S, H], got {list(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise _error(
            f"vocab_weights must be [V, H] with H = {hidden.shape[-1]} like hidden_states {list(hidden.shape)}, "
            f"got {list(weight.shape)}"
        )
    if labels.shape != hidden.shape[:-1]:
        raise _error(
            f"labels must be {list(hidden.shape[:-1])} like hidden_states {list(hidden.shape)} without its last "
            f"dimension, got {list(labels.shape)}"
        )


def _is_finite(value: object) -> bool:
    # By comparison: torch.compile makes a symbol of a float that changes, and cannot trace math.isfinite of one.
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) <= _LARGEST  # type: ignore[operator]


def _temperature(temperature: float | Tensor | None, labels: Tensor) -> tuple[float, Tensor | None]:
    """A number and None, or 1.0 and one per row [N]: never anything that could broadcast over the vocabulary."""
    if temperature is None:
        return 1.0, None
    if isinstance(temperature, Tensor):
        rows = _row_temperatures(temperature, labels)
        if temperature.dim() or temperature.device.type != "cpu" or torch.compiler.is_compiling():
            return 1.0, rows
        temperature = temperature.item()  # a number already on the host
    if not (_is_finite(temperature) and temperature >= _TINY):
        raise _error(f"temperature must be a finite number above 0 (at least {_TINY:.3g}), got {temperature!r}")
    return float(temperature), None


def _row_temperatures(temperature: Tensor, labels: Tensor) -> Tensor:
    if temperature.requires_grad and torch.is_grad_enabled():
        raise _error("temperature requires a gradient, which the head does not compute; pass temperature.detach()")
    if temperature.dtype not in (*_FLOATS, *_INTEGERS):
        raise _error(f"temperature must be real numbers, got {temperature.dtype}")
    _check_tensor("temperature", temperature, (temperature.dtype,))
    count, shape = labels.numel(), tuple(temperature.shape)
    if shape not in ((), (count,), (count, 1), tuple(labels.shape), (*labels.shape, 1)):
        raise _error(
            f"temperature must be a number or a tensor of one value per row, [{count}], [{count}, 1] or "
            f"{list(labels.shape)} like labels, got {list(shape)}"
        )
    if temperature.device != labels.device and shape != ():
        raise _error(f"temperature is on {temperature.device}, but labels is on {labels.device}; move one of them")
    dtype = torch.float64 if temperature.dtype == torch.float64 else torch.float32
    rows = temperature.detach().to(labels.device, dtype).reshape(-1).expand(count)
    return rows.clone(memory_format=torch.contiguous_format)  # kernels count on it, and callers may change theirs


def _check_values(
    labels: Tensor, ignored: Tensor, temperatures: Tensor | None, vocab_size: int | Tensor, ignore_index: int
) -> bool:
    """Whether any row may be ignored. One host synchronisation when all is well; the rest happens to word the error."""
    if labels.numel() == 0:
        return False
    # Few small kernels: nothing else runs on the device before this is answered. Outside the vocabulary either the
    # label or its distance to the last entry is negative, and so is what has the bits of both; inside, one of them is
    # positive. (In a vocabulary of one entry neither is: then rows may be ignored.)
    codes = (vocab_size - 1 - labels).bitwise_or_(labels).masked_fill_(ignored, 0)
    if temperatures is not None:
        bad_temperatures = ~(torch.isfinite(temperatures) & (temperatures >= _TINY))
        codes.masked_fill_(bad_temperatures, -1)
    lowest = int(codes.min())
    if lowest >= 0:
        return lowest == 0
    bad_labels = ((labels < 0) | (labels >= vocab_size)) & ~ignored
    if bool(bad_labels.any()):
        row = int(bad_labels.nonzero()[0])
        raise _error(
            f"labels[{row}] = {int(labels[row])} (counted in the flattened labels; {int(bad_labels.sum())} in all) is "
            f"outside the vocabulary [0, {int(vocab_size)}) and is not ignore_index={ignore_index}. Mark such rows "
            "with ignore_index, or check that the tokenizer belongs to this model."
        )
    assert temperatures is not None
    row = int(bad_temperatures.nonzero()[0])
    raise _error(
        f"temperature[{row}] = {float(temperatures[row])} (counted in the flattened temperature) is not a finite "
        f"number above 0 (at least {_TINY:.3g})"
    )
