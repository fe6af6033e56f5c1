"""The tiny model's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("models") / "tiny-llama")
