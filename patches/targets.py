"""Places that hold an object, how a target string finds one, and who owns what stands there. Standard library only."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sys
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from npu_backend.errors import PatchConflictError, PatchTargetError

if TYPE_CHECKING:
    from npu_backend.patches.engine import Change


class _Missing:
    def __repr__(self) -> str:
        return "<not set>"


MISSING: Any = _Missing()


class Slot:
    """An attribute of a module or a class, read without descriptors so that the very object can be put back."""

    def __init__(self, owner: Any, name: str, found_as: str = "") -> None:
        self.owner = owner
        self.name = name
        self.found_as = found_as  # the target string that led here

    def get(self) -> Any:
        return vars(self.owner).get(self.name, MISSING)

    def put(self, value: Any) -> None:
        if value is not MISSING:
            setattr(self.owner, self.name, value)
        elif self.get() is not MISSING:
            delattr(self.owner, self.name)

    def holds(self, value: Any) -> bool:
        """Whether the slot still holds this object."""
        return self.get() is value

    def same_place(self, other: Slot) -> bool:
        return self.owner is other.owner and self.name == other.name

    def is_found(self) -> bool:
        """Whether its name still leads here: not once the module was loaded anew, or the class swapped."""
        module, _, path = str(self).partition(":")
        found = _find(sys.modules[module], path) if module in sys.modules else self
        return found is not None and found.same_place(self)

    def __str__(self) -> str:
        if self.found_as:
            return self.found_as
        if isinstance(self.owner, type):
            return f"{self.owner.__module__}:{self.owner.__qualname__}.{self.name}"
        return f"{getattr(self.owner, '__name__', type(self.owner).__name__)}:{self.name}"


class ItemSlot(Slot):
    """An entry of a registry, `registry[key]`: the extension point that a library offers itself."""

    def get(self) -> Any:
        try:
            return self.owner[self.name]
        except KeyError:
            return MISSING

    def put(self, value: Any) -> None:
        if value is not MISSING:
            self.owner[self.name] = value
        elif self.get() is not MISSING:
            del self.owner[self.name]


class InstanceSlot(Slot):
    """An attribute of a live object, which the ledger must not keep alive: once the object is gone nothing is left to
    restore, and a bound method put there is remembered weakly too.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = weakref.ref(owner)
        self.name = name
        self.found_as = ""

    @property
    def owner(self) -> Any:
        return self._owner()

    def get(self) -> Any:
        return MISSING if self.owner is None else super().get()

    def put(self, value: Any) -> None:
        if self.owner is not None:
            super().put(value)

    def is_found(self) -> bool:
        return True

    def holds(self, value: Any) -> bool:
        if self.owner is None:
            return True
        return bool(self.get() == value()) if isinstance(value, weakref.WeakMethod) else self.get() is value


def put_all(changes: Iterable[Change]) -> None:
    """Make every change; when one fails, take back those before it."""
    done: list[Change] = []
    try:
        for change in changes:
            change.slot.put(change.after)
            done.append(change)
    except BaseException:
        for change in reversed(done):
            change.slot.put(change.before)
        raise


def load(path: str) -> Any:
    """The object that "module:attr.attr" names."""
    module, _, attrs = path.partition(":")
    return functools.reduce(getattr, attrs.split("."), importlib.import_module(module))


def resolve(target: str, aliases: Sequence[str] = ()) -> tuple[Slot, Any]:
    """The slot that "module:attr", "module:Class.attr" or "module:registry[key]" names (or one of its aliases, without
    the module), and the object in it.

    Raises:
        ImportError: this release has no such module.
        PatchTargetError: the module has no such attribute; the closest name is given.
    """
    module_name, _, path = target.partition(":")
    module = importlib.import_module(module_name)
    for candidate in (path, *aliases):
        slot = _find(module, candidate)
        if slot is not None:
            value = slot.get()
            if value is MISSING:  # inherited: the class itself holds nothing yet, and revert takes ours away again
                value = inspect.getattr_static(slot.owner, slot.name)
            return slot, value
    known = [name for name in vars(module) if "." not in path]
    known += [f"{n}.{a}" for n, v in vars(module).items() if isinstance(v, type) and "." in path for a in dir(v)]
    close = difflib.get_close_matches(path, known, n=1)
    hint = f"; did you mean {module_name}:{close[0]}?" if close else ""
    raise PatchTargetError(f"{target} does not exist in this release of {module_name.partition('.')[0]}{hint}")


def _find(module: Any, path: str) -> Slot | None:
    found_as = f"{module.__name__}:{path}"
    path, _, key = path.partition("[")
    *parents, name = path.split(".")
    owner = module
    for part in parents:
        owner = vars(owner).get(part, MISSING) if hasattr(owner, "__dict__") else MISSING
    if owner is MISSING or inspect.getattr_static(owner, name, MISSING) is MISSING:
        return None
    if not key:
        return Slot(owner, name, found_as)
    slot = ItemSlot(inspect.getattr_static(owner, name), key.rstrip("]"), found_as)
    return None if slot.get() is MISSING else slot


def foreign_owner(target: str, slot: Slot, value: Any) -> str:
    """Who has put an object of another package into a target, or swapped its class; nobody is an empty string."""
    package = target.partition(":")[0].partition(".")[0]
    things = (slot.owner, value) if isinstance(slot.owner, type) else (value,)
    return next((owner for owner in map(owner_of, things) if owner.partition(".")[0] != package), "")


def check_owner(target: str, owner: str) -> None:
    """Refuse a target that is not the library's own any more.

    Raises:
        PatchConflictError: it names the owner.
    """
    if owner:
        raise PatchConflictError(
            f"{target} has already been replaced by {owner!r}; undo that before npu-backend patches it, or leave "
            "this operator out with NPU_BACKEND_SKIP"
        )


def owner_of(value: Any) -> str:
    """The module that defined an object. A wrapper may copy `__module__` (functools.wraps), but not its globals."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__", "?"))
    return str(value.__module__ if isinstance(value, type) else type(value).__module__)


def check_signature(target: str, original: Any, replacement: Any) -> None:
    """A replacement must be callable exactly as the original: same names, order, kinds and defaults."""

    def shape(function: Any) -> list[tuple[Any, ...]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    if callable(original) and shape(original) != shape(replacement):
        raise PatchTargetError(
            f"{target}: the replacement {owner_of(replacement)}.{getattr(replacement, '__qualname__', '?')}"
            f"{inspect.signature(replacement)} does not have the original's signature {inspect.signature(original)}"
        )
