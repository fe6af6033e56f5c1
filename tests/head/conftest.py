"""Fixtures of the PPO head's tests: a clean NPU_BACKEND_* environment, and counters of what torch executed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npu_backend import log, soc
from npu_backend.head import backends, rows_ascend, triton_cuda


@pytest.fixture(autouse=True)
def _default_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of Triton's interpreter (`test_rows_triton`) tests that name no backend are about `triton`."""
    if triton_cuda.interpreted():
        monkeypatch.setattr(backends, "DEFAULT_BACKEND", "triton")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("NPU_BACKEND_")]:
        monkeypatch.delenv(name)
    log.forget_warnings()
    yield
    log.forget_warnings()


@pytest.fixture
def small_chip(monkeypatch: pytest.MonkeyPatch) -> soc.Soc:
    """What the Ascend kernels are launched for: a chip of few cores, for programs without work take time too."""
    chip = replace(soc.find_soc("Ascend910B1"), cube_cores=6, vector_cores=6)
    monkeypatch.setattr(rows_ascend, "chip", lambda device: chip)
    return chip


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def operators() -> Callable[[], AbstractContextManager[Counter[str]]]:
    """`with operators() as seen:` counts every ATen operator, in forward and backward."""

    @contextmanager
    def record() -> Iterator[Counter[str]]:
        with _Operators() as mode:
            yield mode.seen

    return record


@pytest.fixture
def saved_elements() -> Callable[[], AbstractContextManager[list[torch.Tensor]]]:
    """`with saved_elements() as saved:` lists every tensor that autograd saves for backward."""

    @contextmanager
    def record() -> Iterator[list[torch.Tensor]]:
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield saved

    return record
