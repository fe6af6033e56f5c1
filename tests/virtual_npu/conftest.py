"""Tests on virtual NPUs (arithmetic by the CPU). Run them as

    npu-backend run --virtual-npu=2 -- python -m pytest tests/virtual_npu

Under a plain Python they are skipped, because torch decides about devices when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from npu_backend import virtual_npu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if virtual_npu.is_active():
        return
    reason = "needs a virtual NPU: npu-backend run --virtual-npu=2 -- python -m pytest tests/virtual_npu"
    for item in items:
        if "tests/virtual_npu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def calls() -> Iterator[Callable[[], dict[str, int]]]:
    """`calls()` gives how often each operator ran since the test began, or since its last call."""

    def read() -> dict[str, int]:
        seen = virtual_npu.calls()
        virtual_npu.reset_calls()
        return seen

    virtual_npu.reset_calls()
    yield read
    virtual_npu.reset_calls()


@pytest.fixture
def gradients() -> Callable[..., dict[str, Tensor]]:
    """`gradients(function, tensors, upstream)`: output and gradients by name; floating inputs are fresh leaves."""

    def run(function: Callable[..., Tensor], tensors: dict[str, Tensor], upstream: Tensor) -> dict[str, Tensor]:
        leaves = {
            name: value.detach().clone().requires_grad_() if value.is_floating_point() else value
            for name, value in tensors.items()
        }
        output = function(*leaves.values())
        wanted = {name: value for name, value in leaves.items() if value.requires_grad}
        found = torch.autograd.grad(output, list(wanted.values()), upstream.to(output.device, output.dtype))
        return {"output": output.detach(), **{f"grad_{name}": grad for name, grad in zip(wanted, found)}}

    return run
