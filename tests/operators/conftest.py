"""Operators on a plain CPU, over a stand-in for torch_npu."""

from __future__ import annotations

from types import SimpleNamespace

import fake_torch_npu
import pytest


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> fake_torch_npu.FakeTorchNpu:
    return fake_torch_npu.install(monkeypatch)


@pytest.fixture
def context() -> SimpleNamespace:
    return SimpleNamespace(hf_config=None)
