"""The patch engine: plan changes nothing, apply is all or nothing, revert restores the very objects."""

from __future__ import annotations

import dataclasses
import sys
import threading
import types

import pytest
from engine_plans import FORWARD, ROPE, patch, plan, states

from npu_backend.errors import PatchConflictError, PatchTargetError
from npu_backend.patches.engine import Engine, PatchSet, Row
from npu_backend.patches.targets import InstanceSlot, Slot, owner_of


def test_plan_changes_nothing(library):
    before = dict(vars(library)), dict(vars(library.Norm))
    assert states(plan(Engine(), FORWARD, ROPE).rows) == ["planned", "planned"]
    assert (dict(vars(library)), dict(vars(library.Norm))) == before


@pytest.mark.case("A15")
def test_revert_restores_the_very_objects_and_old_instances(library):
    engine, old = Engine(), library.Norm()
    originals = library.Norm, vars(library.Norm)["forward"], library.rope
    assert states(engine.apply(plan(engine, FORWARD, ROPE))) == ["applied", "applied"]
    assert library.Norm().forward(1) == 2
    assert old.forward(1) == 2
    assert library.rope(1, 2, 3, 4)[-1] == "patched"
    assert states(engine.revert()) == ["reverted", "reverted"]
    assert (library.Norm, vars(library.Norm)["forward"], library.rope) == originals
    assert isinstance(old, library.Norm)
    assert old.forward(1) == 1
    assert engine.status() == []


def test_an_inherited_method_is_set_on_the_class_and_taken_away_again(library):
    engine = Engine()
    engine.apply(plan(engine, patch("lib.modeling:Child.forward")))
    assert library.Child().forward(1) == 2
    assert library.Norm().forward(1) == 1
    engine.revert()
    assert "forward" not in vars(library.Child)


def test_a_registry_entry_is_a_target(library):
    engine, original = Engine(), library.REGISTRY["grouped"]
    engine.apply(plan(engine, patch("lib.modeling:REGISTRY[grouped]", "ours:rope")))
    assert library.REGISTRY["grouped"](1, 2, 3, 4)[-1] == "patched"
    engine.revert()
    assert library.REGISTRY["grouped"] is original
    with pytest.raises(PatchTargetError, match="REGISTRY"):
        plan(engine, patch("lib.modeling:REGISTRY[absent]", "ours:rope"))


def test_a_target_that_somebody_restored_is_patched_again_and_reverts(library):
    engine, original = Engine(), vars(library.Norm)["forward"]
    engine.apply(plan(engine, FORWARD, ROPE))
    library.Norm.forward = original  # a monkeypatch undone
    assert [(r.state, r.reason) for r in engine.status()] == [("stale", "undone by somebody else"), ("applied", "")]
    rows = engine.apply(plan(engine, FORWARD, ROPE))
    assert states(rows) == ["applied", "applied"]
    assert states(engine.status()) == ["applied", "applied"]
    engine.revert()
    assert vars(library.Norm)["forward"] is original
    assert len(library.rope(1, 2, 3, 4)) == 2


def test_a_module_that_was_loaded_anew_is_patched_again_and_reverts(library, load_anew):
    engine, old = Engine(), library.Norm
    before = vars(old)["forward"]
    engine.apply(plan(engine, FORWARD, ROPE))
    load_anew()
    rope, forward = library.rope, vars(library.Norm)["forward"]
    assert [(r.state, r.reason.partition(":")[0]) for r in engine.status()] == [
        ("stale", "its name leads elsewhere now"),
        ("stale", "overwritten by lib.modeling"),
    ]
    assert states(engine.apply(plan(engine, FORWARD, ROPE))) == ["applied", "applied"]
    assert states(engine.status()) == ["applied", "applied"]
    engine.revert()
    assert library.rope is rope
    assert vars(library.Norm)["forward"] is forward
    assert vars(old)["forward"] is before


def test_a_class_that_was_swapped_for_somebody_elses_is_stale(library):
    engine = Engine()
    engine.apply(plan(engine, FORWARD))
    library.Norm = type("LigerNorm", (), {})  # Liger, by hand, on top of ours
    assert states(engine.status()) == ["stale"]


def test_a_value_put_on_top_of_our_own_reverts_to_the_first(library):
    engine, model = Engine(), library.Norm()
    for backend in ("torch", "liger"):
        engine.put(InstanceSlot(model, "backend"), backend, Row("Norm:backend", "ppo_head", "lib", "ppo_head", ""))
    assert states(engine.status()) == ["applied"]
    engine.revert()
    assert "backend" not in vars(model)


def test_what_is_kept_is_known_by_itself_not_by_its_place(library):
    """The ledger shrinks when a patched model is gone; verify then took back nothing of its own."""
    engine, model, other = Engine(), library.Norm(), library.Norm()
    for each in (model, other):
        engine.put(InstanceSlot(each, "backend"), "torch", Row("Norm:backend", "ppo_head", "lib", "ppo_head", ""))
    kept = tuple(engine.ledger)
    del model, each
    engine.apply(plan(engine, ROPE))
    assert states(engine.revert(keep=kept)) == ["reverted"]
    assert len(library.rope(1, 2, 3, 4)) == 2
    assert other.backend == "torch"


def test_what_somebody_undid_needs_no_revert(library):
    engine, model = Engine(), library.Norm()
    bound = types.MethodType(lambda self, x: "fused", model)
    engine.put(InstanceSlot(model, "forward"), bound, Row("Norm.forward", "ppo_head", "lib", "ppo_head", ""))
    del model.forward
    assert states(engine.revert()) == ["reverted"]
    assert "forward" not in vars(model)


def test_repeated_applications_do_not_grow_the_ledger_or_the_status(library):
    engine = Engine()
    for _ in range(3):
        engine.apply(plan(engine, patch(requires="ours:reason")))
    assert states(engine.status()) == ["skipped"]
    assert len(engine.ledger) == 1
    engine.revert()
    off = {"disabled": lambda p: "by the user" if p.op == "rotary" else None}
    engine.apply(plan(engine, FORWARD, ROPE, **off))
    engine.apply(plan(engine, FORWARD, ROPE))
    assert sorted(states(engine.status())) == ["applied", "applied"]
    assert states(plan(engine, FORWARD, ROPE, **off).rows) == ["applied", "applied"]  # it is in force, so that is said


def test_two_families_may_share_one_place(library):
    engine, original = Engine(), library.REGISTRY["grouped"]
    entry = patch("lib.modeling:REGISTRY[grouped]", "ours:rope")
    shared = PatchSet("ours", (entry, dataclasses.replace(entry, family="other")))
    assert states(engine.apply(engine.plan(shared, ["lib", "other"]))) == ["applied", "applied"]
    assert states(engine.status()) == ["applied", "applied"]
    assert states(engine.apply(engine.plan(shared, ["other"]))) == ["applied"]
    engine.revert()
    assert library.REGISTRY["grouped"] is original


@pytest.mark.case("A27")
def test_the_same_set_again_is_a_no_op(library):
    engine = Engine()
    engine.apply(plan(engine, FORWARD))
    replacement = vars(library.Norm)["forward"]
    again = plan(engine, FORWARD)
    assert [(r.state, r.reason) for r in again.rows] == [("applied", "already applied")]
    engine.apply(again)
    assert vars(library.Norm)["forward"] is replacement
    assert len(engine.ledger) == 1


def test_a_second_family_joins_the_set(library, make_module):
    make_module("lib.other", "class Norm:\n    def forward(self, x):\n        return x\n")
    engine = Engine()
    both = PatchSet("ours", (FORWARD, patch("lib.other:Norm.forward", family="other")))
    engine.apply(engine.plan(both, ["lib"]))
    rows = engine.apply(engine.plan(both, ["lib", "other"]))
    assert [(r.model_type, r.state) for r in rows] == [("lib", "applied"), ("other", "applied")]
    assert states(engine.revert()) == ["reverted", "reverted"]


@pytest.mark.case("A10")
@pytest.mark.parametrize(
    ("target", "close"),
    [
        ("lib.modeling:rop", "lib.modeling:rope"),
        ("lib.modeling:Norm.forwrad", "lib.modeling:Norm.forward"),
        ("lib.modeling:Nrom.forward", "Norm"),
    ],
)
def test_a_missing_target_is_an_error_with_the_closest_name(library, target, close):
    before = dict(vars(library)), dict(vars(library.Norm))
    with pytest.raises(PatchTargetError, match=close):
        plan(Engine(), FORWARD, patch(target))
    assert (dict(vars(library)), dict(vars(library.Norm))) == before


def test_an_alias_finds_the_name_of_another_release(library):
    engine = Engine()
    rows = engine.apply(plan(engine, patch("lib.modeling:OldNorm.forward", aliases=("Norm.forward",))))
    assert [(r.state, r.target) for r in rows] == [("applied", "lib.modeling:Norm.forward")]
    assert library.Norm().forward(1) == 2


@pytest.mark.case("A01", "A39")
@pytest.mark.parametrize("absent", ["lib.never", "lib.hidden"])
def test_a_module_that_this_release_lacks_is_unavailable_and_harms_nothing(library, monkeypatch, absent):
    monkeypatch.setitem(sys.modules, "lib.hidden", None)
    engine = Engine()
    rows = engine.apply(plan(engine, patch(f"{absent}:Norm.forward"), FORWARD))
    assert states(rows) == ["unavailable", "applied"]
    assert absent in rows[0].reason or "No module" in rows[0].reason


@pytest.mark.case("A06")
def test_a_replacement_with_another_signature_is_refused(library):
    with pytest.raises(PatchTargetError, match="position_ids"):
        plan(Engine(), patch("lib.modeling:rope", "ours:old_rope"))


@pytest.mark.case("A11")
def test_two_owners_of_one_target_are_both_named(library):
    engine = Engine()
    engine.put(Slot(library.Norm, "forward"), lambda self, x: x, Row("lib.modeling:Norm.forward", "", "", "first", ""))
    with pytest.raises(PatchConflictError, match="lib.modeling:Norm.forward.*'first'.*'second'"):
        plan(engine, FORWARD, name="second")


def test_another_set_is_refused_with_both_configurations_and_the_way_out(library):
    engine = Engine()
    engine.apply(plan(engine, FORWARD, asked_by="use_liger=False"))
    with pytest.raises(PatchConflictError, match=r"use_liger=True.*use_liger=False.*revert_patches"):
        plan(engine, ROPE, name="theirs", asked_by="use_liger=True")
    engine.revert()
    assert states(plan(engine, ROPE, name="theirs").rows) == ["planned"]


FOREIGN = """
import functools
def swap(library):
    @functools.wraps(library.Norm.forward)      # hides __module__, not the globals
    def forward(self, x):
        return -1
    library.Norm.forward = forward
def swap_class(library):
    class Norm:
        def forward(self, x):
            return -1
    library.Norm = Norm
"""


@pytest.mark.parametrize("how", ["swap", "swap_class"])
def test_a_foreign_patch_is_a_conflict_that_names_its_owner(library, make_module, how):
    getattr(make_module("someone.patches", FOREIGN), how)(library)
    with pytest.raises(PatchConflictError, match=r"someone\.patches"):
        plan(Engine(), FORWARD)


@pytest.mark.case("A16")
def test_a_patch_on_top_of_ours_blocks_revert_until_it_is_undone(library, make_module):
    engine, original = Engine(), vars(library.Norm)["forward"]
    engine.apply(plan(engine, FORWARD, ROPE))
    ours = vars(library.Norm)["forward"]
    make_module("someone.patches", FOREIGN).swap(library)
    assert states(engine.status()) == ["stale", "applied"]
    assert "someone.patches" in engine.status()[0].reason
    with pytest.raises(PatchConflictError, match=r"someone\.patches.*undo that first"):
        engine.revert()
    assert library.rope(1, 2, 3, 4)[-1] == "patched"  # nothing was reverted
    with pytest.raises(PatchConflictError, match=r"someone\.patches"):
        plan(engine, FORWARD)
    library.Norm.forward = ours
    engine.revert()
    assert vars(library.Norm)["forward"] is original


def test_a_target_replaced_between_plan_and_apply_stops_everything(library, make_module):
    engine = Engine()
    ready = plan(engine, ROPE, FORWARD)
    make_module("someone.patches", FOREIGN).swap(library)
    with pytest.raises(PatchConflictError, match=r"someone\.patches"):
        engine.apply(ready)
    assert len(library.rope(1, 2, 3, 4)) == 2


def test_a_failing_assignment_takes_back_those_before_it(library, monkeypatch):
    engine, original = Engine(), library.rope
    ready = plan(engine, ROPE, FORWARD)

    def fail(value: object) -> None:
        raise AttributeError("read-only")

    monkeypatch.setattr(ready.changes[1].slot, "put", fail)
    with pytest.raises(AttributeError, match="read-only"):
        engine.apply(ready)
    assert library.rope is original
    assert engine.ledger == []


def test_an_interrupted_search_for_what_is_not_reached_leaves_the_changes_in_the_ledger(library, monkeypatch):
    def interrupted(changes: object) -> None:
        raise KeyboardInterrupt

    engine, original = Engine(), library.rope
    monkeypatch.setattr("npu_backend.patches.engine.unreached", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.apply(plan(engine, ROPE))
    assert states(engine.status()) == ["applied"]
    engine.revert()
    assert library.rope is original


def test_a_factory_that_fails_fails_in_the_plan(library):
    with pytest.raises(RuntimeError, match="broken"):
        plan(Engine(), FORWARD, patch(replacement="ours:broken", target="lib.modeling:rope"))


@pytest.mark.case("A35")
def test_disabled_and_skipped_rows_carry_their_reason(library):
    rows = plan(
        Engine(), patch(requires="ours:reason"), ROPE, disabled=lambda p: "by the user" if p.op == "rotary" else None
    ).rows
    assert [(r.state, r.reason) for r in rows] == [("skipped", "not for this original"), ("disabled", "by the user")]


def test_a_predicate_that_cannot_import_makes_its_target_unavailable(library):
    rows = plan(Engine(), patch(requires="ours:too_old")).rows
    assert [(r.state, r.reason) for r in rows] == [("unavailable", "ImportError: this release is too old")]


def test_what_is_left_alone_may_belong_to_anyone(library, make_module):
    make_module("someone.patches", FOREIGN).swap(library)
    (row,) = plan(Engine(), patch(requires="ours:reason")).rows
    assert (row.state, row.reason) == (
        "skipped",
        "not for this original; what stands there is of 'someone.patches'",
    )


def test_a_predicate_sees_nothing_of_somebody_else_s_object(library, make_module, monkeypatch):
    """A wrapper with parameters of its own is as foreign as one with the original's."""
    make_module("someone.patches", FOREIGN).swap(library)
    monkeypatch.setattr(sys.modules["ours"], "reason", lambda original, context: original and "unknown parameters")
    with pytest.raises(PatchConflictError, match=r"already been replaced by 'someone\.patches'"):
        plan(Engine(), patch(requires="ours:reason"))


def test_an_instance_patch_reverts_and_does_not_keep_its_object(library):
    import gc
    import weakref

    engine, model = Engine(), library.Norm()
    bound = types.MethodType(lambda self, x: "fused", model)
    engine.put(InstanceSlot(model, "forward"), bound, Row("Norm.forward", "ppo_head", "lib", "ppo_head", ""))
    assert model.forward(1) == "fused"
    assert states(engine.status()) == ["applied"]
    engine.revert()
    assert "forward" not in vars(model)
    engine.put(InstanceSlot(model, "forward"), bound, Row("Norm.forward", "ppo_head", "lib", "ppo_head", ""))
    alive = weakref.ref(model)
    del model, bound
    gc.collect()
    assert alive() is None
    assert engine.status() == []
    assert engine.ledger == []


def test_owner_is_the_module_of_the_globals(library):
    assert owner_of(library.rope) == "lib.modeling"
    assert owner_of(test_owner_is_the_module_of_the_globals).endswith("test_engine")
    assert owner_of(Engine) == "npu_backend.patches.engine"


def test_threads_apply_once(library):
    engine, errors = Engine(), []

    def work() -> None:
        try:
            with engine.lock:
                engine.apply(plan(engine, FORWARD, ROPE))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(engine.ledger) == 1
    assert library.Norm().forward(1) == 2
