"""What the compile check found: text, JSON, and the advice that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_backend.ascend.verdict import Verdict
from npu_backend.families import families_of
from npu_backend.report import table

LABEL = "compiled up to the vendor's closed last stage (hivmc); no machine code was made, nothing ran on a device"

_COLUMNS = ("soc", "dtype", "operator", "kernel", "keys", "verdict", "UB", "L1", "L0C", "ping-pong", "models")

_COLUMNS = ("soc", "dtype", "operator", "kernel", "keys", "verdict", "UB", "L1", "L0C", "ping-pong", "models")


@dataclass
class CheckReport:
    """Rows as the worker sends them.

    Attributes:
        toolchain: Versions of what compiled.
        models: Name and model type of every model.
        liger: Empty for our own kernels, else which of Liger's.
        lengths: Numbers of tokens that Liger's launches were recorded at; compiled at the first and the last.
        rows: One per kernel, chip and dtype: what it is, who launches it, and its verdict.
        notes: What the patch set leaves alone in a model and why, or why nothing could be recorded (a finding).
        recompiles: For each model and operator of Liger: its kernels for one number of tokens and for all of them, and
            the constants of a kernel that hold that number.
    """

    toolchain: dict[str, str]
    models: dict[str, str]
    liger: str = ""
    lengths: tuple[int, ...] = ()
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    recompiles: list[dict[str, Any]] = field(default_factory=list)

    def add(self, message: Mapping[str, Any]) -> None:
        """Take in one message of the worker; what does not depend on the chip is kept once."""
        if "row" in message:
            self.rows.append(message["row"])
        for kind, kept in (("note", self.notes), ("recompiles", self.recompiles)):
            if kind in message and message[kind] not in kept:
                kept.append(message[kind])

    def sort(self) -> None:
        """Bring the rows into an order that does not depend on which compilation ended first."""
        order = ("soc", "dtype", "operator", "kernel")
        self.rows.sort(key=lambda row: (*(row[name] for name in order), sorted(row["constants"].items())))

    @property
    def findings(self) -> list[str]:
        """A line for everything that is not in order."""
        found = [f"{note['model']}: {note['text']}".lstrip(": ") for note in self.notes if note["finding"]]
        for row in self.rows:
            verdict = Verdict(**row["verdict"])
            if verdict.status != "ok":
                what = f"{row['soc']} {row['dtype']} {row['operator']} {row['kernel']}"
                skips = self._skips(row["models"], row["operator"]) if self.liger else []
                cure = f"; NPU_BACKEND_SKIP={','.join(skips)}" if skips else ""
                found.append(f"{what}: {verdict.short()} [{', '.join(row['models'])}]{cure}")
        return found

    @property
    def skip(self) -> dict[str, str]:
        """Chip and dtype -> the NPU_BACKEND_SKIP under which no operator of Liger's is used that is refused there."""
        names: dict[str, set[str]] = {}
        for row in self.rows if self.liger else ():
            if row["verdict"]["status"] != "ok":
                where = f"{row['soc']} {row['dtype']}"
                names.setdefault(where, set()).update(self._skips(row["models"], row["operator"]))
        return {where: ",".join(sorted(skip)) for where, skip in names.items()}

    def _skips(self, models: list[str], operator: str) -> list[str]:
        families = families_of(self.models[model] for model in models)
        return [f"{family}.{operator}" for family in families]

    @property
    def advice(self) -> list[str]:
        """What to do about operators of Liger that are compiled anew for other numbers of tokens."""
        lines = []
        for row in self.recompiles:
            if row["kernels"] == row["each"]:
                continue
            what = f"{row['model']} {row['dtype']} {row['operator']}: "
            what += f"{row['kernels']} kernels for {row['lengths']} numbers of tokens, at most {row['each']} for one"
            if row["token_constants"]:
                names, skip = ", ".join(row["token_constants"]), ",".join(self._skips([row["model"]], row["operator"]))
                what += f"; {names} is part of the compile key, so every new number of tokens compiles again: "
                what += f"NPU_BACKEND_SKIP={skip}, or pad batches to few lengths"
            else:
                what += "; a few variants for kinds of lengths, each compiled once"
            lines.append(what)
        return lines

    def _left_alone(self) -> list[str]:
        models: dict[str, list[str]] = {}
        for note in self.notes:
            if not note["finding"]:
                models.setdefault(note["text"], []).append(note["model"])
        return [f"{text} [{', '.join(names)}]" for text, names in models.items()]

    def _alike(self) -> dict[tuple[str, ...], list[dict[str, Any]]]:
        found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in self.rows:
            verdict = row["verdict"]
            names = tuple(row[name] for name in ("soc", "dtype", "operator", "kernel"))
            found.setdefault((*names, verdict["status"], verdict["ping_pong"], verdict["message"]), []).append(row)
        return found

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "what": LABEL,
            "toolchain": self.toolchain,
            "models": self.models,
            "liger": self.liger,
            "lengths": list(self.lengths),
            "kernels": len(self.rows),
            "rows": self.rows,
            "notes": self.notes,
            "recompiles": self.recompiles,
            "findings": self.findings,
            "skip": self.skip,
        }

    def __str__(self) -> str:
        whose = {"": "the PPO head's kernels", "ascend": "Liger's Ascend kernels"}.get(self.liger, "Liger as installed")
        versions = ", ".join(f"{name} {version}" for name, version in self.toolchain.items())
        lines = [f"{whose}, {LABEL}", f"with {versions}", ""]
        lines += table(_COLUMNS, [_cells(rows) for rows in self._alike().values()])
        lines += [
            "",
            f"{len(self.rows)} compile keys (each once, however many of the {len(self.models)} models share it)",
        ]
        lines += [f"left alone: {line}" for line in self._left_alone()]
        lines += [f"recompiled: {line}" for line in self.advice]
        lines += [f"finding: {line}" for line in self.findings] or ["no findings"]
        lines += [f"on {where}: NPU_BACKEND_SKIP={names}" for where, names in self.skip.items()]
        return "\n".join(lines)


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    """One line for rows that differ in their constants only: the largest use of each memory."""
    verdicts = [Verdict(**row["verdict"]) for row in rows]
    models = sorted({model for row in rows for model in row["models"]})
    needs = [verdict.short() for verdict in sorted(verdicts, key=lambda verdict: -verdict.need)]
    return [
        *(rows[0][name] for name in ("soc", "dtype", "operator", "kernel")),
        str(len(rows)),
        needs[0] if len(needs[0]) < 70 else verdicts[0].status,
        *(_share(verdicts, scope) for scope in ("UB", "L1", "L0C")),
        verdicts[0].ping_pong,
        models[0] if len(models) == 1 else f"{models[0]} and {len(models) - 1} more",
    ]


def _share(verdicts: list[Verdict], scope: str) -> str:
    shares = [v.use[scope] / v.capacity[scope] for v in verdicts if v.use.get(scope) and v.capacity.get(scope)]
    return f"{max(shares):.0%}" if shares else ""
