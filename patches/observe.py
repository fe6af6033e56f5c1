"""Looking without touching: what somebody else's patcher changed, and what a patch does not reach. Standard library
only. Module and object dictionaries are read directly: `getattr` over `sys.modules` would wake lazy modules.
"""

from __future__ import annotations

import gc
import importlib
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from npu_backend.patches.targets import MISSING, Slot

if TYPE_CHECKING:
    from npu_backend.patches.engine import Change, Row

Snapshot = list[tuple[Any, dict[str, Any]]]


def snapshot(modules: Iterable[str]) -> Snapshot:
    """The attributes of these modules and of the classes they define."""
    taken: Snapshot = []
    for name in sorted(set(modules)):
        module = importlib.import_module(name)
        taken.append((module, dict(vars(module))))
        taken += [(c, dict(vars(c))) for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
    return taken


def differences(before: Snapshot) -> list[tuple[Slot, Any, Any]]:
    """Every attribute that differs from a snapshot, with the old and the new value."""
    pairs = (
        (Slot(owner, name), old.get(name, MISSING), vars(owner).get(name, MISSING))
        for owner, old in before
        for name in {**old, **vars(owner)}
    )
    return [pair for pair in pairs if pair[1] is not pair[2]]


def record(modules: Iterable[str], run: Callable[[], Any]) -> tuple[Any, list[tuple[Slot, Any, Any]]]:
    """Run somebody else's patcher; its result, and what it changed. When it fails, everything is put back."""
    before = snapshot(modules)
    try:
        result = run()
    except BaseException:
        for slot, old, _ in differences(before):
            slot.put(old)
        raise
    return result, differences(before)


def unreached(changes: Sequence[Change]) -> list[Row]:
    """What still runs an original: names bound by `from ... import` before the patch, instances of a class that was
    swapped, and live objects whose own attribute hides the class's.
    """
    return _stale_names(changes) + _stale_objects(changes)


def _stale_names(changes: Sequence[Change]) -> list[Row]:
    named = (c for c in changes if isinstance(c.slot.owner, types.ModuleType) and c.before is not MISSING)
    originals = {id(c.before): c for c in named}
    rows = []
    for module in list(sys.modules.values()) if originals else ():
        if not isinstance(module, types.ModuleType):
            continue
        for name, value in list(object.__getattribute__(module, "__dict__").items()):
            change = originals.get(id(value))
            if change is not None and module is not change.slot.owner:
                reason = "bound by `from ... import` before the patch; it still calls the original"
                rows.append(replace(change.row, target=f"{module.__name__}:{name}", state="stale", reason=reason))
    return rows


def _stale_objects(changes: Sequence[Change]) -> list[Row]:
    methods = {c.slot.owner: c for c in changes if isinstance(c.slot.owner, type)}
    swapped = {c.before: c for c in changes if isinstance(c.before, type)}
    if not methods and not swapped:
        return []  # looking for nothing, the collector would still go through every object of the process

    def stale() -> Counter[type]:
        things = gc.get_referrers(*methods, *swapped)  # an object refers to its class
        hiding = (t for t in things if type(t) in methods and methods[type(t)].slot.name in getattr(t, "__dict__", ()))
        return Counter(map(type, (*hiding, *(t for t in things if type(t) in swapped))))

    counts = stale()
    if counts:
        gc.collect()  # what only waits for its collection is not live
        counts = stale()
    rows = []
    for kind, count in counts.items():
        change = swapped.get(kind) or methods[kind]
        why = "of the original class" if kind in swapped else f"whose own {change.slot.name} hides the patch"
        reason = f"{count} live {kind.__name__} object(s) {why}; build the model after patching"
        rows.append(replace(change.row, state="stale", reason=reason))
    return rows
