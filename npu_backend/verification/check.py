"""`verify`: run every patched operator and the PPO head beside the unpatched one and report how far they are apart."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from npu_backend import device, families, model_configs
from npu_backend.config import read_config
from npu_backend.errors import ConfigError
from npu_backend.head.linear_log_prob import linear_log_prob
from npu_backend.manager import apply_npu_fsdp_patches, patch_status
from npu_backend.patches.engine import ENGINE, Change, Row
from npu_backend.patches.targets import ItemSlot
from npu_backend.report import PatchReport, VerifyReport, VerifyRow
from npu_backend.verification import models, whole_model
from npu_backend.verification.replay import Call, Comparison, compare, recording

TINY_DTYPES = (torch.float32, torch.bfloat16)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OWN_DTYPE: tuple[torch.dtype | None, ...] = (None,)


def verify(model_config: Any = None, *, model: Any = None, dtype: torch.dtype | str | None = None) -> VerifyReport:
    """Compare every patched operator and the PPO head with the unpatched one, forward and gradients, on this device.

    With a patch set in force it checks that; otherwise it applies the one that `model_config` chooses and takes it back
    afterwards. The result of an operator may differ from a float64 reference by a small multiple of what the unpatched
    operator differs from it in the same dtype.

    Args:
        model_config: as for `apply_npu_fsdp_patches`. Without `hf_config` every family that this transformers has is
            checked, or those of the patches in force.
        model: check with the calls that this model makes, on its device; a folder is loaded as a Hugging Face
            checkpoint once the patches are in place. Without one a two-layer model of each family is built.
        dtype: run the operators in this dtype. None means the model's own, and float32 and bfloat16 for built models.

    Returns:
        One row per target, dtype and direction, and one per dtype for the model's log-probs as a whole; `calls` of one
        forward pass. The verdict is `ok`, `fail`, `not reached` (the model has the module and never called the
        replacement), `absent` (it has no such module) or `skipped`.

    Raises:
        ConfigError: `model` is neither a model of transformers nor a checkpoint's folder, `dtype` is none of float16,
            bfloat16, float32 and float64, no model can be built from `hf_config`, or as `apply_npu_fsdp_patches`.
        PatchConflictError, PatchTargetError, BackendUnavailableError: as `apply_npu_fsdp_patches`.
    """
    is_folder = isinstance(model, (str, os.PathLike))
    dtypes = _dtypes(dtype, built=model is None or is_folder)
    if model is not None and not is_folder:
        _check_is_hf_model(model)
    if model is not None and model_config is None and not _in_force():
        model_config = {"hf_config": model_configs.checkpoint_config(model) if is_folder else model.config}
    with _patched(model_config) as report:
        rows: list[VerifyRow] = []
        notes: list[str] = []
        for subject in _subjects(read_config(model_config).hf_config, model, report, notes):
            rows += _check_model(subject, dtypes)
        rows += [_row(row.op, row.target, verdict="skipped", reason=row.reason) for row in _left_alone(report)]
    return VerifyReport(tuple(rows), report.device, report.patch_set, tuple(notes), device.versions())


def _dtypes(dtype: torch.dtype | str | None, *, built: bool) -> Sequence[torch.dtype | None]:
    if dtype is None:
        return TINY_DTYPES if built else _OWN_DTYPE
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in _DTYPES:
        raise ConfigError(f"verify: dtype {dtype!r} is not one of {', '.join(map(str, _DTYPES))}")
    return (found,)


def _check_is_hf_model(model: Any) -> None:
    needed = ("config", "get_input_embeddings", "get_output_embeddings")
    missing = [name for name in needed if not hasattr(model, name)]
    if not isinstance(model, nn.Module) or missing:
        why = f"it has no {', '.join(missing)}" if missing else "it is no torch.nn.Module"
        raise ConfigError(
            f"verify: model must be a language model of transformers, got {type(model).__name__}: {why}. To name one, "
            "give model_config={'hf_config': ...} instead"
        )


def _in_force() -> bool:
    return any(transaction.patch_set for transaction in ENGINE.ledger)


@contextlib.contextmanager
def _patched(model_config: Any) -> Iterator[PatchReport]:
    """The patches to be checked; what had to be applied for that is taken back."""
    with ENGINE.lock:
        before = tuple(ENGINE.ledger)  # not their number: those of models that are gone leave the ledger
        if model_config is None and _in_force():
            yield patch_status()
            return
        try:
            yield apply_npu_fsdp_patches(model_config)
        finally:
            ENGINE.revert(keep=before)


def _subjects(hf_config: Any, model: Any, report: PatchReport, notes: list[str]) -> Iterator[nn.Module]:
    """The models whose calls are compared: the given one, or a tiny one of each family in question."""
    if isinstance(model, (str, os.PathLike)):
        yield _placed(models.checkpoint(model))
    elif model is not None:
        yield model
    elif hf_config is not None:
        yield _placed(models.tiny_model(hf_config))
    else:
        found = dict.fromkeys(row.model_type for row in report.rows if row.state in ("applied", "stale"))
        for family in found or {"llama": None}:  # the head can be checked on any model
            try:
                config = model_configs.default_config(family)
            except ConfigError as error:
                notes.append(str(error))
                continue
            yield _placed(models.tiny_model(config))


def _placed(model: nn.Module) -> nn.Module:
    return model.to(device.detect().type)


def _left_alone(report: PatchReport) -> Iterable[Row]:
    states = ("skipped", "unavailable", "disabled", "failed")
    return (row for row in report.rows if row.state in states and row.op in families.OPERATORS)


def _check_model(model: nn.Module, dtypes: Sequence[torch.dtype | None]) -> list[VerifyRow]:
    concerned = _changes_of(model)
    changes = [change for change in concerned if change.slot.holds(change.after)]
    expected = {change.row.target: models.expected_calls(model, change) for change in changes}
    ran: list[nn.Module] = []
    note_module = nn.modules.module.register_module_forward_pre_hook(lambda module, args: ran.append(module))
    with recording(model, changes) as seen, note_module:
        head_inputs = _run_forward(model)
    made = {change.row.target: models.expected_calls(model, change, [model, *ran]) for change in changes}
    originals, where = _Originals(model, changes), next(model.parameters()).device
    compared = functools.partial(_compared, dtypes=dtypes, where=where)
    overwritten = "somebody has overwritten this replacement"
    rows = [_row(c.row.op, c.row.target, verdict="fail", reason=overwritten) for c in concerned if c not in changes]
    for change in changes:
        target = change.row.target
        row = functools.partial(
            _row,
            change.row.op,
            target,
            calls=seen.counts[target],
            fallbacks=seen.fallbacks[target],
            share=_share(seen.counts[target], seen.fallbacks[target], made[target]),
        )
        if target in seen.calls:
            rows += compared(seen.calls[target], originals.of(change), _replacement(change), row)
        elif expected[target]:
            reason = f"none of {expected[target]} expected calls; was the model built before the patch?"
            rows.append(row(verdict="not reached", reason=reason))
        else:
            rows.append(row(verdict="absent", reason="this model has no such module"))
    if head_inputs:
        call = Call(head_inputs, {})
        row = functools.partial(_row, "ppo_head", f"{type(model).__name__}:linear_log_prob", calls=1, share=1.0)
        rows += compared([call], _full_logits, _fused_head, row)
    if seen.calls:
        rows += _whole_model(model, originals, dtypes)
    return rows


def _whole_model(model: nn.Module, originals: _Originals, dtypes: Sequence[torch.dtype | None]) -> list[VerifyRow]:
    """The model's log-probs with everything patched, as a trainer would compare them with a rollout engine's.

    The mean decides, not the worst token: in bfloat16 a router's tie can send one token to another expert either way.
    """
    rows, target = [], f"{type(model).__name__}:log_probs"
    for dtype, worst in whole_model.compare(model, originals.in_place, originals.fresh_model, dtypes):
        verdict = "ok" if worst.mean <= worst.mean_allowed else "fail"
        row = _row("model", target, calls=1, share=1.0, dtype=dtype, direction="forward", verdict=verdict)
        rows.append(dataclasses.replace(row, error=worst.error, mean=worst.mean, allowed=worst.mean_allowed))
    return rows


def _share(calls: int, fallbacks: int, made: int) -> float:
    """The part of an operator's calls in one forward pass, of which `made` are known, that its replacement computed."""
    return (calls - fallbacks) / max(calls, made, 1)


def _run_forward(model: nn.Module) -> tuple[Any, ...]:
    """One forward pass that computes logits and lets every activation require a gradient, also in a frozen model.

    Returns:
        What the output head was given: hidden states [N, H], weight, bias; nothing for a model without one.
    """
    given: list[tuple[Any, ...]] = []

    def note(head: Any, args: tuple[Any, ...]) -> None:
        tensors = (args[0].flatten(0, -2), head.weight, head.bias)
        given.append(tuple(t if t is None else t.detach().requires_grad_() for t in tensors))

    def require_grad(embedding: Any, args: Any, output: Tensor) -> Tensor:
        return output if output.requires_grad else output.requires_grad_()

    parts: Any = model
    head, embedding = parts.get_output_embeddings(), parts.get_input_embeddings()
    hooks = [embedding.register_forward_hook(require_grad)]
    if head is not None:
        hooks.append(head.register_forward_pre_hook(note))
    try:
        with torch.enable_grad():
            # the class's forward computes logits, whatever has been put on the instance
            type(model).forward(model, **models.inputs(model), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return given[0] if given else ()


def _changes_of(model: nn.Module) -> list[Change]:
    """The changes in force that concern this model's families. A registry's entry concerns all of them."""
    wanted = families.families_of(read_config({"hf_config": model.config}).model_types)
    in_force = (change for transaction in ENGINE.ledger if transaction.patch_set for change in transaction.changes)
    operators = (change for change in in_force if change.row.op in families.OPERATORS)
    return [c for c in operators if c.row.model_type in wanted or isinstance(c.slot, ItemSlot)]


class _Originals:
    """What stood in a target before, callable with the arguments of a recorded call."""

    def __init__(self, model: Any, changes: Sequence[Change]) -> None:
        self.model = model
        self.changes = changes

    def of(self, change: Change) -> Callable[..., Any]:
        if isinstance(change.after, type):
            return functools.partial(self._as_class, change.before)
        if isinstance(change.slot, ItemSlot):  # an entry for accelerators; the class's own loop serves every device
            return lambda module, *args, **kwargs: inspect.unwrap(type(module).forward)(module, *args, **kwargs)
        original: Callable[..., Any] = change.before
        return original

    def _as_class(self, before: type, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a module of the original class with this module's parameters."""
        template = next(m for m in self._plain.modules() if type(m) is before and _shapes(m) == _shapes(module))
        return torch.func.functional_call(template, dict(module.named_parameters()), args, kwargs)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While it lasts, the originals stand where they stood."""
        for change in self.changes:
            change.slot.put(self.of(change) if isinstance(change.slot, ItemSlot) else change.before)
        try:
            yield
        finally:
            for change in self.changes:
                change.slot.put(change.after)

    def fresh_model(self) -> nn.Module:
        """A copy of the model; while the originals are in place, one of their classes."""
        if not any(isinstance(change.after, type) for change in self.changes):
            same: nn.Module = copy.deepcopy(self.model)
            return same
        fresh: nn.Module = type(self.model)(self.model.config)
        fresh.load_state_dict(self.model.state_dict())
        return fresh

    @functools.cached_property
    def _plain(self) -> nn.Module:
        """The model as the original classes build it, without memory."""
        with self.in_place(), torch.device("meta"):
            plain: nn.Module = type(self.model)(self.model.config)
        return plain


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def _replacement(change: Change) -> Callable[..., Any]:
    replacement: Callable[..., Any] = _call_module if isinstance(change.after, type) else change.after
    return replacement


def _call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _full_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy as a trainer without the fused head computes them."""
    scores = nn.functional.linear(hidden, weight, bias)
    log_p = scores.float().log_softmax(-1)
    return log_p.gather(-1, _labels(hidden, weight)[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _fused_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return linear_log_prob(hidden, weight, _labels(hidden, weight), bias=bias)[:2]


def _labels(hidden: Tensor, weight: Tensor) -> Tensor:
    """Labels all over the vocabulary, the same on every device."""
    return (torch.arange(len(hidden)) * 7919 % len(weight)).to(hidden.device)


def _compared(
    calls: Sequence[Call],
    original: Callable[..., Any],
    replacement: Callable[..., Any],
    row: Callable[..., VerifyRow],
    *,
    dtypes: Sequence[torch.dtype | None],
    where: torch.device,
) -> list[VerifyRow]:
    """Two rows for each dtype: forward and gradient, the worst of these calls."""
    rows = []
    for dtype in dtypes:
        results = [compare(call, original, replacement, dtype, where) for call in calls]
        recorded = next(t.dtype for t in calls[0].args if isinstance(t, Tensor) and t.is_floating_point())
        for direction, column in zip(("forward", "gradient"), zip(*results)):
            worst = functools.reduce(Comparison.worse, column)
            rows.append(
                row(
                    dtype=str(dtype or recorded).removeprefix("torch."),
                    direction=direction,
                    error=worst.error,
                    mean=worst.mean,
                    allowed=worst.allowed,
                    verdict="ok" if worst.error <= worst.allowed else "fail",
                )
            )
    return rows


def _row(op: str, target: str, **values: Any) -> VerifyRow:
    module, _, path = target.rpartition(":")
    where = f"{module.rpartition('.')[2]}:{path}" if module else path
    blank = {"dtype": "", "direction": "", "error": 0.0, "mean": 0.0, "allowed": 0.0}
    blank |= {"calls": 0, "fallbacks": 0, "share": 0.0}
    return VerifyRow(op=op, where=where, **{**blank, **values})
