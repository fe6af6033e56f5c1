"""What the patch engine sees without touching it: what a patch does not reach, and what another patcher changes."""

from __future__ import annotations

import sys
import types

import pytest
from engine_plans import FORWARD, ROPE, patch, plan, states

from npu_backend.patches.engine import Engine, PatchSet


def test_names_bound_before_the_patch_are_reported_without_waking_lazy_modules(library, make_module):
    user = make_module("user.code", "from lib.modeling import rope")

    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"woke {name}")

    sys.modules["user.lazy"] = Lazy("user.lazy")
    try:
        engine = Engine()
        rows = engine.apply(plan(engine, ROPE))
    finally:
        del sys.modules["user.lazy"]
    assert [(r.state, r.target) for r in rows] == [("applied", "lib.modeling:rope"), ("stale", "user.code:rope")]
    assert user.rope(1, 2, 3, 4) == (1, 2)


def test_objects_that_hide_the_patch_are_reported(library):
    shadowed = library.Norm()
    shadowed.forward = lambda x: x
    engine = Engine()
    rows = engine.apply(plan(engine, FORWARD))
    assert states(rows) == ["applied", "stale"]
    assert "1 live Norm object" in rows[1].reason


def test_objects_that_only_wait_for_their_collection_are_not_reported(library):
    dead = library.Norm()
    dead.forward, dead.itself = (lambda x: x), dead
    del dead
    engine = Engine()
    assert states(engine.apply(plan(engine, FORWARD))) == ["applied"]


INSTALLER = """
import sys
def install(plan):
    class LibNorm:
        def forward(self, x):
            return 7
    modeling = sys.modules["lib.modeling"]
    modeling.Norm = LibNorm
    modeling.Child.extra = 1
    return []
def fail(plan):
    install(plan)
    raise RuntimeError("half way")
"""


def test_somebody_elses_patcher_is_recorded_and_reverted(library, make_module):
    make_module("theirs", INSTALLER)
    originals, engine = dict(vars(library)), Engine()
    norm, rope = patch("lib.modeling:Norm", ""), patch("lib.modeling:rope", "", op="rotary")
    rows = engine.apply(engine.plan(PatchSet("theirs", (norm, rope), install="theirs:install"), ["lib"]))
    assert [(r.target, r.state) for r in rows] == [
        ("lib.modeling:Norm", "applied"),
        ("lib.modeling:rope", "skipped"),
        ("lib.modeling:Child.extra", "applied"),
    ]
    assert library.Norm().forward(1) == 7
    engine.revert()
    assert dict(vars(library)) == originals


def test_a_patcher_that_fails_half_way_leaves_nothing(library, make_module):
    make_module("theirs", INSTALLER)
    originals, engine = dict(vars(library)), Engine()
    with pytest.raises(RuntimeError, match="half way"):
        engine.apply(engine.plan(PatchSet("theirs", (patch("lib.modeling:Norm", ""),), install="theirs:fail"), ["lib"]))
    assert dict(vars(library)) == originals
    assert engine.ledger == []
