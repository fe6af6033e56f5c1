"""Patches of the made-up library that tests/patches/conftest.py makes, and plans of them."""

from __future__ import annotations

from npu_backend.patches.engine import Engine, Patch, PatchSet, Row


def patch(target: str = "lib.modeling:Norm.forward", replacement: str = "ours:forward", **more: object) -> Patch:
    fields = {"op": "rms_norm", "family": "lib", "why": "w", "upstream": "u", "remove_when": "r", **more}
    return Patch(target, replacement, **fields)  # type: ignore[arg-type]


FORWARD = patch()
ROPE = patch("lib.modeling:rope", "ours:rope", op="rotary")


def plan(engine: Engine, *patches: Patch, name: str = "ours", **more: object):
    return engine.plan(PatchSet(name, patches), ["lib"], **more)  # type: ignore[arg-type]


def states(rows: list[Row]) -> list[str]:
    return [row.state for row in rows]
