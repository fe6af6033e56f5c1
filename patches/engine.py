"""The patch engine: plan, check, apply, report, revert. Standard library only; it knows no model and no device.

A patch set is a table of frozen `Patch` records whose targets and replacements are strings, so reading a table imports
nothing. `Engine.plan` resolves them on the untouched state and makes every check; `Engine.apply` then only assigns.
Whatever was changed stands in the ledger, newest last, and is undone from the end with the very objects put back.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from npu_backend.errors import PatchConflictError
from npu_backend.patches.observe import record, unreached
from npu_backend.patches.targets import (
    InstanceSlot,
    Slot,
    check_owner,
    check_signature,
    foreign_owner,
    load,
    owner_of,
    put_all,
    resolve,
)

_MOVED = "its name leads elsewhere now: the module was loaded anew, or its class was swapped"


@dataclass(frozen=True)
class Patch:
    """One replacement. `target` is "module:attr" or "module:Class.attr"; `replacement` names a factory
    "module:factory", called as `factory(original, context)` and returning what takes the original's place (empty in a
    set with an installer). `requires` names a predicate "module:predicate", called the same way and returning the
    reason why this original must be left alone, or None; an ImportError from it means "unavailable". Its `original` is
    None where somebody else's object stands: only what holds whatever stands there may then be a reason, all else is a
    conflict. `aliases` are the attribute's names in other releases.
    """

    target: str
    replacement: str
    op: str
    family: str
    why: str
    upstream: str
    remove_when: str
    requires: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class PatchSet:
    """Patches that belong together. `find` names a callable "module:function" of a family that returns further patches,
    for what is found by looking. `install` is for code we do not own: it names a callable of the plan that does the
    replacing itself and returns further rows to report, while the engine records what it changes in the targets'
    modules and in `touches`.
    """

    name: str
    patches: tuple[Patch, ...] = ()
    find: str = ""
    install: str = ""
    touches: tuple[str, ...] = ()

    def of(self, families: Sequence[str]) -> tuple[Patch, ...]:
        """The patches of these families."""
        found = (patch for family in families for patch in load(self.find)(family)) if self.find else ()
        return (*found, *(patch for patch in self.patches if patch.family in families))


@dataclass(frozen=True)
class Row:
    """One line of a report; `state` is planned, applied, skipped, unavailable, disabled, failed, stale or reverted."""

    target: str
    op: str
    model_type: str
    owner: str
    state: str
    reason: str = ""
    why: str = ""


@dataclass
class Change:
    """One assignment: what a slot held before and what was put there."""

    slot: Slot
    before: Any
    after: Any
    row: Row


@dataclass
class Plan:
    """What `apply` would do. `changes` is empty when nothing is left to do; `rows` says what happens to each patch."""

    patch_set: PatchSet
    families: tuple[str, ...]
    asked_by: str
    context: Any
    rows: list[Row] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


@dataclass(eq=False)
class Transaction:
    """One applied plan."""

    patch_set: str
    asked_by: str
    changes: list[Change]
    rows: list[Row]


class Engine:
    """The process-wide ledger of what was replaced. One instance serves a process, `ENGINE`; tests make their own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.ledger: list[Transaction] = []

    def plan(
        self,
        patch_set: PatchSet,
        families: Sequence[str],
        *,
        context: Any = None,
        disabled: Callable[[Patch], str | None] = lambda patch: None,
        asked_by: str = "",
    ) -> Plan:
        """Resolve and check the set's patches for these families; nothing is changed.

        Raises:
            PatchConflictError: another set is in force, or somebody else already replaced a target.
            PatchTargetError: a target does not exist, or its replacement has another signature.
        """
        with self.lock:
            active = next((t for t in self.ledger if t.patch_set), None)
            if active is not None and active.patch_set != patch_set.name:
                raise PatchConflictError(
                    f"patch set {patch_set.name!r} ({asked_by}) cannot be applied: {active.patch_set!r} "
                    f"({active.asked_by}) is in force in this process, and both replace the same operators. Give every "
                    "engine of the process the same use_liger, or call npu_backend.revert_patches() first"
                )
            plan = Plan(patch_set, tuple(families), asked_by, context)
            for patch in patch_set.of(families):
                self._plan_one(plan, patch, disabled(patch))
            return plan

    def _plan_one(self, plan: Plan, patch: Patch, disabled: str | None) -> None:
        target = patch.target

        def row(state: str, reason: str = "") -> Row:
            return Row(target, patch.op, patch.family, plan.patch_set.name, state, reason, patch.why)

        in_force = {(c.row.op, c.row.model_type, c.row.owner) for c in self._changes()}
        if disabled and (patch.op, patch.family, plan.patch_set.name) not in in_force:
            plan.rows.append(row("disabled", disabled))
            return
        try:
            slot, original = resolve(patch.target, patch.aliases)
        except ImportError as error:
            plan.rows.append(row("unavailable", f"{type(error).__name__}: {error}"))
            return
        target = str(slot)  # the name that this release has
        mine = next((c for c in self._changes() if c.slot.same_place(slot) and c.slot.holds(c.after)), None)
        if mine is not None:
            if mine.row.owner != plan.patch_set.name:
                owners = f"{mine.row.owner!r} and {plan.patch_set.name!r}"
                raise PatchConflictError(
                    f"{patch.target}: both {owners} want to replace it; narrow one of the two sets"
                )
            plan.rows.append(row("applied", "already applied"))
            return
        if any(change.slot.same_place(slot) for change in plan.changes):  # two families share this place
            plan.rows.append(row("planned"))
            return
        owner = foreign_owner(patch.target, slot, original)
        try:
            reason = load(patch.requires)(None if owner else original, plan.context) if patch.requires else None
        except ImportError as error:
            plan.rows.append(row("unavailable", f"{type(error).__name__}: {error}"))
            return
        if reason:  # what is left alone may belong to anyone, who is then named
            plan.rows.append(row("skipped", f"{reason}; what stands there is of {owner!r}" if owner else reason))
            return
        check_owner(patch.target, owner)
        plan.rows.append(row("planned"))
        if not plan.patch_set.install:
            replacement = load(patch.replacement)(original, plan.context)
            check_signature(patch.target, original, replacement)
            plan.changes.append(Change(slot, slot.get(), replacement, plan.rows[-1]))

    def _changes(self, keep: Sequence[Transaction] = ()) -> list[Change]:
        """Every change in the ledger, the newest first."""
        return [c for t in reversed(self.ledger) if t not in keep for c in reversed(t.changes)]

    def apply(self, plan: Plan) -> list[Row]:
        """Make the plan's changes, all of them or none, and return the rows as they then are."""
        with self.lock:
            for change in plan.changes:
                if not change.slot.holds(change.before):
                    owner = owner_of(change.slot.get())
                    raise PatchConflictError(
                        f"{change.row.target} was replaced by {owner!r} after the plan; plan again"
                    )
            if plan.patch_set.install and any(row.state == "planned" for row in plan.rows):
                changes, rows = self._install(plan)
            else:
                changes, rows = plan.changes, plan.rows
                put_all(changes)
                rows = [replace(row, state="applied") if row.state == "planned" else row for row in rows]
            for change in changes:
                change.row = replace(change.row, state="applied")
            new = Transaction(plan.patch_set.name, plan.asked_by, changes, rows)
            self._enter(new)  # first: a Ctrl-C in the search for what is not reached must not lose the changes
            new.rows = [*rows, *unreached(changes)]
            return new.rows

    def _enter(self, new: Transaction) -> None:
        """Put a transaction into the ledger, and take out the older changes of its places: they were undone or
        overwritten by somebody else since, or are what a new change stands on, which then takes back both.
        """
        for old in self.ledger:
            for change in old.changes:
                for over in new.changes:
                    if over.slot.same_place(change.slot) and over.before is change.after:
                        over.before = change.before
            old.changes = [c for c in old.changes if not any(n.slot.same_place(c.slot) for n in new.changes)]
        self._forget_gone()
        same = next((t for t in self.ledger if t.patch_set and t.patch_set == new.patch_set), None)
        if same is None or new.changes:
            self.ledger.append(new)
        else:
            same.rows += [row for row in new.rows if row not in same.rows]

    def _forget_gone(self) -> None:
        """Drop the changes of live objects that are no more."""
        for transaction in self.ledger:
            transaction.changes = [c for c in transaction.changes if c.slot.owner is not None]
        self.ledger[:] = [t for t in self.ledger if t.changes or t.patch_set]

    def _install(self, plan: Plan) -> tuple[list[Change], list[Row]]:
        """Run somebody else's patcher and record what it changes; if it fails, put everything back."""
        planned = {row.target: row for row in plan.rows if row.state == "planned"}
        modules = {*plan.patch_set.touches, *(target.partition(":")[0] for target in planned)}
        extra, changed_slots = record(modules, lambda: load(plan.patch_set.install)(plan))
        changes = []
        for slot, old, new in changed_slots:
            row = planned.get(str(slot)) or Row(str(slot), "", "", plan.patch_set.name, "applied", "changed as well")
            changes.append(Change(slot, old, new, row))
        changed = {change.row.target for change in changes}
        rows = [replace(r, state="applied") if r.target in changed else r for r in plan.rows]
        left = f"{plan.patch_set.name} leaves it as it is"
        rows = [replace(r, state="skipped", reason=left) if r.state == "planned" else r for r in rows]
        rows += [change.row for change in changes if change.row.target not in planned]
        return changes, [*rows, *extra]

    def put(self, slot: Slot, value: Any, row: Row) -> Row:
        """Enter one replacement of a live object's attribute into the ledger, outside every patch set."""
        with self.lock:
            change = Change(slot, slot.get(), value, replace(row, state="applied"))
            slot.put(value)
            if isinstance(slot, InstanceSlot):  # a bound method would keep its instance alive
                change.after = weakref.WeakMethod(value) if isinstance(value, types.MethodType) else value
            self._enter(Transaction("", "", [change], [change.row]))
            return change.row

    def revert(self, keep: Sequence[Transaction] = ()) -> list[Row]:
        """Undo the ledger but the transactions `keep`, newest first; every slot gets the very object that it held
        before.

        Raises:
            PatchConflictError: somebody replaced one of our replacements; nothing is undone.
        """
        with self.lock:
            changes = [c for c in self._changes(keep) if not c.slot.holds(c.before)]  # else somebody undid it already
            for change in changes:
                if not change.slot.holds(change.after):
                    raise PatchConflictError(
                        f"{change.row.target} now holds an object of {owner_of(change.slot.get())!r}, put there after "
                        f"{change.row.owner!r}; undo that first, then revert"
                    )
            for change in changes:
                change.slot.put(change.before)
            rows = [replace(c.row, state="reverted", reason="") for c in reversed(self._changes(keep))]
            self.ledger[:] = [t for t in self.ledger if t in keep]
            return rows

    def status(self) -> list[Row]:
        """The ledger's rows as things are now, the newest of each target; `stale` where somebody interfered since."""
        with self.lock:
            self._forget_gone()
            rows: dict[tuple[Any, ...], Row] = {}
            for transaction in self.ledger:
                lost = {
                    c.row.target: c for c in transaction.changes if not (c.slot.holds(c.after) and c.slot.is_found())
                }
                for row in transaction.rows:
                    if row.state == "applied" and row.target in lost:
                        row = replace(row, state="stale", reason=_why_lost(lost[row.target]))
                    by_itself = row.state == "stale" and row.reason != _MOVED
                    rows[row.target, row.model_type, row.op, row.reason if by_itself else ""] = row
            return list(rows.values())


def _why_lost(change: Change) -> str:
    """Why a replacement is not in force any more."""
    if not change.slot.is_found():
        return _MOVED
    if change.slot.holds(change.before):
        return "undone by somebody else"
    return f"overwritten by {owner_of(change.slot.get())}"


ENGINE = Engine()
