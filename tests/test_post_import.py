"""Callbacks run after somebody else's import, once, and leave the module as it would have been."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest

from npu_backend.post_import import _FINDER, when_imported


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package on disk, `pi_demo` with `pi_demo.part`."""
    folder = tmp_path / "pi_demo"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("VALUE = 1\ndef f():\n    return VALUE\n")
    (folder / "broken.py").write_text("raise ValueError('half imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_FINDER, "callbacks", {})
    yield
    for name in [n for n in sys.modules if n.startswith("pi_demo")]:
        del sys.modules[name]


def test_a_callback_waits_for_the_import_and_runs_once(package):
    seen = []
    when_imported("pi_demo.part", lambda module: seen.append(module.VALUE))
    assert "pi_demo.part" not in sys.modules
    part = importlib.import_module("pi_demo.part")
    assert seen == [1]
    importlib.reload(part)
    assert seen == [1]
    assert inspect.getsource(part.f).startswith("def f")
    assert type(part.__spec__.loader).__name__ == "SourceFileLoader"


def test_an_imported_module_is_served_at_once(package):
    importlib.import_module("pi_demo.part")
    seen = []
    when_imported("pi_demo.part", seen.append)
    assert len(seen) == 1


def test_several_callbacks_in_order_and_an_absent_module_does_no_harm(package):
    seen = []
    for number in (1, 2):
        when_imported("pi_demo.part", lambda module, number=number: seen.append(number))
    when_imported("pi_demo.absent", lambda module: seen.append("never"))
    importlib.import_module("pi_demo.part")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("pi_demo.absent")
    assert seen == [1, 2]


def test_a_module_that_fails_to_import_keeps_its_callback_for_the_next_try(package):
    seen = []
    when_imported("pi_demo.broken", seen.append)
    with pytest.raises(ValueError, match="half imported"):
        importlib.import_module("pi_demo.broken")
    assert seen == []
    assert "pi_demo.broken" in _FINDER.callbacks
