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
        head_alone = self.patch_set is None and {row.op for row in self.rows} == {"ppo_head"}
        what = "PPO head" if head_alone else f"patch set {self.patch_set or 'none'}"
        return f"{what} on {self.device}: {counts}"

    def __str__(self) -> str:
        columns = ["state", "op", "model_type", "target", "reason"]
        reasons, shared = {row.reason for row in self.rows}, []
        if len(self.rows) > 1 and len(reasons) == 1:  # said once, not in every row
            columns.remove("reason")
            shared = [f"every row: {reason}" for reason in reasons if reason]
        rows = [[_shorten(getattr(row, c)) if c == "target" else getattr(row, c) for c in columns] for row in self.rows]
        return "\n".join([self.summary(), *shared, *table(columns, rows), *self.notes])


_VERIFY_COLUMNS = (
    *("verdict", "op", "where", "dtype", "direction", "error", "mean", "allowed"),
    *("calls", "fallbacks", "share", "reason"),
)


@dataclass(frozen=True)
class VerifyRow:
    """One operator, the PPO head, or the model's log-probs as a whole (`op` is model), patched against unpatched.

    `error` and `mean` are the replacement's largest and mean difference to a float64 reference, relative to the largest
    entry; `allowed` is the bound of `error` (for a model, of `mean`), from the unpatched operator's own difference.
    `calls` is how often one forward pass called the replacement, `fallbacks` how often it handed the input back to the
    original, `share` the part of the operator's calls that the replacement computed. `verdict` is ok, fail, not
    reached, absent (the model has no such module) or skipped.
    """

    op: str
    where: str
    dtype: str
    direction: str
    error: float
    mean: float
    allowed: float
    calls: int
    fallbacks: int
    share: float
    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` returns. `str()` gives a table, `to_dict()` something that `json.dumps` takes.

    Attributes:
        rows: One per operator, dtype and direction: `verdict`, `error`, `allowed`, `calls` and more (`VerifyRow`).
        device: The device that it ran on, with the words "virtual NPU" where it is one.
        patch_set: `"verl_npu"`, `"liger"`, or `None` when none was in force.
        notes: What else the reader should know.
        versions: Installed versions of what matters.
    """

    rows: tuple[VerifyRow, ...] = ()
    device: str = ""
    patch_set: str | None = None
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """False as soon as one row failed, a replacement was not reached, or there is no row."""
        return bool(self.rows) and all(row.verdict not in ("fail", "not reached") for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists, dictionaries, strings and numbers."""
        return {**dataclasses.asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        return "\n".join([self._title(), *table(_VERIFY_COLUMNS, self._cells()), *self.notes])

    def to_markdown(self) -> str:
        """The report as a page, with what its columns mean."""
        lines = [_VERIFY_COLUMNS, ["---"] * len(_VERIFY_COLUMNS), *self._cells()]
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts = [
            f"# npu-backend {self._title()}",
            f"Versions: {versions or 'unknown'}.",
            "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines),
            "\n".join(f"* {note}" for note in self.notes),
            f"Columns: {' '.join((VerifyRow.__doc__ or '').split())}",
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _title(self) -> str:
        return f"verify {self.patch_set or 'nothing'} on {self.device}: {'ok' if self.ok else 'NOT ok'}"

    def _cells(self) -> list[list[str]]:
        return [[_cell(row, column) for column in _VERIFY_COLUMNS] for row in self.rows]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a plain text table; nothing for no rows."""
    if not rows:
        return []
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (columns, *rows)]


def _shorten(target: str) -> str:
    """transformers.models.qwen3.modeling_qwen3:X.forward -> modeling_qwen3:X.forward; what is no path stays."""
    module, colon, path = target.partition(":")
    return f"{module.rpartition('.')[2]}:{path}" if colon else target


def _cell(row: VerifyRow, column: str) -> str:
    """What a table shows of a row; nothing was measured where there is no dtype."""
    value = getattr(row, column)
    if not row.dtype and column in ("error", "mean", "allowed", "share"):
        return "-"
    if isinstance(value, float):
        return f"{value:.0%}" if column == "share" else f"{value:.1e}"
    return str(value)
