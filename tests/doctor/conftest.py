"""A healthy Ascend host for each test to break."""

from __future__ import annotations

from pathlib import Path

import fake_host
import pytest


@pytest.fixture
def fake(tmp_path: Path) -> fake_host.FakeHost:
    return fake_host.healthy(tmp_path / "healthy")


@pytest.fixture
def bare(tmp_path: Path) -> fake_host.FakeHost:
    """A host with nothing of Ascend."""
    return fake_host.FakeHost(tmp_path / "bare")
