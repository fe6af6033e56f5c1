"""The patch manager: which patch set this process gets, and the four public calls around it.

`use_liger` chooses between two sets that replace the same operators, never both. What can be applied depends on the
device: both sets on an NPU (real or virtual), Liger's on CUDA, neither on a plain CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, replace
from typing import Any

from npu_backend import device, families, log
from npu_backend.config import BackendConfig, Environment, read_config, read_environment
from npu_backend.errors import BackendUnavailableError
from npu_backend.operators import counters
from npu_backend.patches.engine import ENGINE, Patch, PatchSet, Row
from npu_backend.report import PatchReport

# set -> the devices it can be applied on
_DEVICES = {"verl_npu": ("npu",), "liger": ("npu", "cuda")}


@dataclass(frozen=True)
class Context:
    """What the predicates and factories of a table may look at."""

    config: BackendConfig
    device: device.Device

    @property
    def hf_config(self) -> Any:
        return self.config.hf_config


@dataclass(frozen=True)
class _Choice:
    """The decision for one `model_config`, before any target is looked at."""

    context: Context
    environment: Environment
    patch_set: PatchSet
    families: tuple[str, ...]
    unknown: str  # why no family is concerned, if so
    barred: str  # why this device cannot take the set, if so


def plan_patches(model_config: Any = None) -> PatchReport:
    """What `apply_npu_fsdp_patches` would do with this configuration; nothing is changed.

    Args:
        model_config: `None` (every family), a mapping, an OmegaConf node, verl's frozen config, or an object.

    Raises:
        ConfigError: the configuration or an NPU_BACKEND_* variable is not valid.
        PatchConflictError: the other set is in force, or somebody else has replaced a target.
        PatchTargetError: a target is missing or its replacement does not fit.
        BackendUnavailableError: a device asked for by name, or Liger, cannot be used.

    Examples:
        >>> import npu_backend
        >>> report = npu_backend.plan_patches({"hf_config": {"model_type": "qwen3"}, "use_liger": False})
        >>> sorted({row.op for row in report.rows}), report.applied
        (['gated_mlp', 'rms_norm', 'rotary'], 0)
    """
    choice = _choose(model_config)
    rows = _rows_without_engine(choice)
    return _report(choice, ENGINE.plan(**_plan_arguments(choice)).rows if rows is None else rows, "planned")


def apply_npu_fsdp_patches(model_config: Any = None) -> PatchReport:
    """Apply the patch set that `model_config.use_liger` chooses, before the model is built. verl's engine calls it.

    The first call decides for the process. The same choice again changes nothing and returns the report (a further
    model family is added to the set); the other choice is refused. All checks come before the first change, and either
    every change is made or none.

    Args:
        model_config: As for `plan_patches`.

    Raises:
        ConfigError, PatchConflictError, PatchTargetError, BackendUnavailableError: as `plan_patches`; nothing changed.
    """
    choice = _choose(model_config)
    rows = _rows_without_engine(choice)
    status = "nothing applied"
    if rows is None:
        with ENGINE.lock:
            plan = ENGINE.plan(**_plan_arguments(choice))
            states = {row.state for row in plan.rows}
            if choice.environment.strict and not states & {"planned", "applied"}:
                raise BackendUnavailableError(f"{_nothing(_report(choice, plan.rows, status))}")
            rows = ENGINE.apply(plan)
        if any(row.state == "applied" for row in rows):
            status = "applied" if "planned" in states else "already applied"
    report = _report(choice, rows, status)
    _say(choice, report)
    return report


def patch_status() -> PatchReport:
    """What is in force in this process now; a replacement that somebody overwrote since is `stale`."""
    return _current(ENGINE.status(), "in force" if ENGINE.ledger else "nothing applied")


def revert_patches() -> PatchReport:
    """Put back every original object, last in first out, and forget the choice of a patch set.

    Raises:
        PatchConflictError: somebody replaced one of our replacements since; nothing is reverted.
    """
    before = _current([], "reverted")
    return replace(before, rows=tuple(ENGINE.revert()))


def _choose(model_config: Any) -> _Choice:
    config, environment = read_config(model_config), read_environment()
    log.show(environment.log)
    where = device.detect_unless_disabled()
    name = "liger" if config.use_liger else "verl_npu"
    patch_set: PatchSet = importlib.import_module(f"npu_backend.patches.{name}").PATCH_SET
    wanted = families.families_of(config.model_types) if config.model_types else tuple(families.FAMILIES)
    unknown = ""
    known = (patch.replacement or patch_set.install for patch in patch_set.of(wanted))  # not only named like operators
    if not environment.disable and not any(known):
        covered = "what it recognises in a model's code" if patch_set.find else "the families of its table"
        unknown = (
            f"patch set {name!r} has no patches for model type {', '.join(config.model_types)}; it covers {covered}, "
            f"among them {', '.join(f for f in families.FAMILIES if patch_set.of((f,)))}"
        )
        if environment.strict:
            raise BackendUnavailableError(f"{unknown}. Train without NPU_BACKEND_STRICT=1 to go on unpatched")
    barred = ""
    if where.type not in _DEVICES[name]:
        barred = f"{name} does not run on this device: {where.type} ({where.reason})"
    if environment.disable:
        barred = "NPU_BACKEND_DISABLE=1"
    return _Choice(Context(config, where), environment, patch_set, wanted, unknown, barred)


def _rows_without_engine(choice: _Choice) -> list[Row] | None:
    """The rows where the device, or the model, settles the matter before any target is looked at."""
    if choice.unknown:
        target = ", ".join(choice.context.config.model_types)
        return [Row(target, "", target, choice.patch_set.name, "unavailable", choice.unknown)]
    if choice.barred:
        state = "disabled" if choice.environment.disable else "skipped"
        patches = choice.patch_set.of(choice.families)
        owner = choice.patch_set.name
        return [Row(p.target, p.op, p.family, owner, state, choice.barred, p.why) for p in patches]
    return None


def _plan_arguments(choice: _Choice) -> dict[str, Any]:
    def disabled(patch: Patch) -> str | None:
        names = {patch.op, patch.family, f"{patch.family}.{patch.op}"} & set(choice.environment.skip)
        return f"NPU_BACKEND_SKIP={','.join(sorted(names))}" if names else None

    return {
        "patch_set": choice.patch_set,
        "families": choice.families,
        "context": choice.context,
        "disabled": disabled,
        "asked_by": str(choice.context.config),
    }


def _report(choice: _Choice, rows: list[Row], status: str) -> PatchReport:
    return PatchReport(
        rows=tuple(rows),
        patch_set=choice.patch_set.name,
        device=str(choice.context.device),
        status=status,
        notes=_remote_code(choice.context.hf_config),
        versions=device.versions(),
    )


def _remote_code(hf_config: Any) -> tuple[str, ...]:
    """What is to be said of a configuration that transformers loaded from a checkpoint's own code."""
    kind = type(hf_config)
    if not kind.__module__.startswith("transformers_modules."):
        return ()
    return (
        f"{kind.__name__} is code of the checkpoint (trust_remote_code): a model of that code has classes of its own, "
        "which these patches of transformers' classes do not reach",
    )


def _current(rows: list[Row], status: str) -> PatchReport:
    """A report of the process, not of a configuration."""
    name = next((t.patch_set for t in ENGINE.ledger if t.patch_set), None)
    return PatchReport(
        rows=tuple(rows),
        patch_set=name,
        device=str(device.detect_unless_disabled()),
        status=status,
        notes=counters.choices(),
        versions=device.versions(),
    )


def _say(choice: _Choice, report: PatchReport) -> None:
    """One line on rank 0; a warning when patches were expected and none is in force."""
    for row in report.rows:
        log.logger.debug("%s %s %s %s", row.state, row.op, row.target, row.reason)
    for note in report.notes if report.applied else ():
        log.warn_rank0(f"npu-backend: {note}")
    if report.applied or (choice.barred and not _npu_is_lost(choice)):
        log.info_rank0(f"npu-backend: {report.summary()}" + (f" ({choice.barred})" if choice.barred else ""))
        return
    log.warn_rank0(_nothing(report))


def _npu_is_lost(choice: _Choice) -> bool:
    """Whether torch_npu is installed, no NPU can be used, and nobody asked for it to be so."""
    asked = choice.environment.disable or choice.environment.device is not None
    return choice.context.device.type == "cpu" and not asked and importlib.util.find_spec("torch_npu") is not None


def _nothing(report: PatchReport) -> str:
    reasons = "; ".join(dict.fromkeys(row.reason for row in report.rows if row.reason))
    return f"npu-backend: {report.summary()}: nothing was patched ({reasons})"
