"""What is reported: the rows of a plan, an application, a verification. Printable, and JSON through `to_dict`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from npu_backend.patches.engine import Row


@dataclass(frozen=True)
class PatchReport:
    """What `plan_patches`, `apply_npu_fsdp_patches`, `patch_status`, `revert_patches` and
    `patch_forward_with_backends` return. `str()` gives a table, `to_dict()` something that `json.dumps` takes.

    Attributes:
        rows: One per patch: `target`, `op`, `model_type`, `owner`, `state`, `reason`, `why`.
        patch_set: `"verl_npu"`, `"liger"`, or `None` when none is in force.
        device: The device that the decision was made for, with the words "virtual NPU" where it is one.
        status: `planned`, `applied`, `already applied`, `nothing applied`, `reverted` or `in force`.
        notes: What else the reader should know: the choice of a head, dropped options.
        versions: Installed versions of what matters.
    """

    rows: tuple[Row, ...] = ()
    patch_set: str | None = None
    device: str = ""
    status: str = ""
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def applied(self) -> int:
        """How many targets hold a replacement; families may share one."""
        return len({row.target for row in self.rows if row.state == "applied"})

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists, dictionaries, strings and numbers."""
        return {**dataclasses.asdict(self), "applied": self.applied}

    def summary(self) -> str:
        """One line: the set, the device, and how many rows are in each state."""
        states: dict[str, int] = {}
        for row in self.rows:
            states[row.state] = states.get(row.state, 0) + 1
        counts = ", ".join(f"{count} {state}" for state, count in states.items()) or "no patches"
        return f"patch set {self.patch_set or 'none'} on {self.device}: {counts}"

    def __str__(self) -> str:
        columns = ("state", "op", "model_type", "target", "reason")
        rows = [[_shorten(getattr(row, c)) if c == "target" else getattr(row, c) for c in columns] for row in self.rows]
        return "\n".join([self.summary(), *table(columns, rows), *self.notes])


@dataclass(frozen=True)
class VerifyRow:
    """One operator, patched against unpatched. `error` is the replacement's largest difference to a float64 reference,
    relative to the largest entry; `allowed` the bound it was held to, from the unpatched operator's own difference;
    `calls` how often the replacement ran, `fallbacks` how often it handed the input back to the original. `verdict` is
    ok, fail, not reached, absent (the model has no such module) or skipped.
    """

    op: str
    where: str
    dtype: str
    direction: str
    error: float
    allowed: float
    calls: int
    fallbacks: int
    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` returns. `ok` is False as soon as one row failed or nothing was reached."""

    rows: tuple[VerifyRow, ...] = ()
    device: str = ""
    patch_set: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.verdict not in ("fail", "not reached") for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists, dictionaries, strings and numbers."""
        return {**dataclasses.asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        columns = ("verdict", "op", "where", "dtype", "direction", "error", "allowed", "calls", "fallbacks", "reason")
        rows = [[_number(getattr(row, c)) for c in columns] for row in self.rows]
        head = f"verify {self.patch_set or 'nothing'} on {self.device}: {'ok' if self.ok else 'NOT ok'}"
        return "\n".join([head, *table(columns, rows), *self.notes])


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a plain text table; nothing for no rows."""
    if not rows:
        return []
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (columns, *rows)]


def _shorten(target: str) -> str:
    """transformers.models.qwen3.modeling_qwen3:X.forward -> modeling_qwen3:X.forward."""
    module, _, path = target.partition(":")
    return f"{module.rpartition('.')[2]}:{path}"


def _number(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) else str(value)
