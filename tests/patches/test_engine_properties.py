"""Any sequence of apply, revert, foreign patch and failing target leaves everything or nothing applied."""

from __future__ import annotations

import sys
import types

from hypothesis import given, settings
from hypothesis import strategies as st

from npu_backend.errors import NPUBackendError
from npu_backend.patches.engine import Engine, Patch, PatchSet

NAMES = ("a", "b", "c", "d")


def build() -> types.ModuleType:
    """A fresh module `prop.lib` with four functions, and the factories `prop_ours`."""
    library = types.ModuleType("prop.lib")
    exec("\n".join(f"def {n}(x):\n    return x" for n in NAMES), library.__dict__)
    ours = types.ModuleType("prop_ours")
    exec("def make(original, context):\n    return lambda x: original(x) + 1", ours.__dict__)
    foreign = types.ModuleType("prop_foreign")
    exec("def f(x):\n    return -1", foreign.__dict__)
    modules = {"prop": types.ModuleType("prop"), "prop.lib": library, "prop_ours": ours, "prop_foreign": foreign}
    sys.modules.update(modules)
    return library


def patch(name: str) -> Patch:
    return Patch(f"prop.lib:{name}", "prop_ours:make", name, "lib", "w", "u", "r")


steps = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), st.sampled_from(["one", "two"]), st.sets(st.sampled_from(NAMES), min_size=1)),
        st.tuples(st.just("broken"), st.sampled_from(["one", "two"]), st.sets(st.sampled_from(NAMES))),
        st.tuples(st.just("revert")),
        st.tuples(st.just("foreign"), st.sampled_from(NAMES)),
        st.tuples(st.just("undo foreign")),
    ),
    max_size=12,
)


@settings(max_examples=200)
@given(steps)
def test_everything_or_nothing(sequence):
    library = build()
    originals = {n: vars(library)[n] for n in NAMES}
    engine, underneath = Engine(), {}
    for step in sequence:
        before = {n: vars(library)[n] for n in NAMES}
        ledger = len(engine.ledger)
        try:
            if step[0] in ("apply", "broken"):
                patches = [patch(n) for n in sorted(step[2])]
                if step[0] == "broken":
                    patches.append(Patch("prop.lib:absent", "prop_ours:make", "x", "lib", "w", "u", "r"))
                rows = engine.apply(engine.plan(PatchSet(step[1], tuple(patches)), ["lib"]))
                assert step[0] == "apply"
                assert {r.state for r in rows if r.state != "stale"} == {"applied"}
                assert all(vars(library)[n] is not originals[n] for n in step[2])
            elif step[0] == "revert":
                engine.revert()
                assert not engine.ledger
                assert all(vars(library)[n] is originals[n] for n in NAMES if n not in underneath)
            elif step[0] == "foreign":
                underneath.setdefault(step[1], vars(library)[step[1]])
                setattr(library, step[1], vars(sys.modules["prop_foreign"])["f"])
            else:
                for name, value in underneath.items():
                    setattr(library, name, value)
                underneath.clear()
        except NPUBackendError:
            assert {n: vars(library)[n] for n in NAMES} == before  # a refusal changes nothing
            assert len(engine.ledger) == ledger
    for name, value in underneath.items():
        setattr(library, name, value)
    engine.revert()
    assert {n: vars(library)[n] for n in NAMES} == originals
