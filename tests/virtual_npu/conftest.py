"""Tests on virtual NPUs (arithmetic by the CPU). Run them as

    npu-backend run --virtual-npu=2 -- python -m pytest tests/virtual_npu

Under a plain Python they are skipped, because torch decides about devices when it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from npu_backend import virtual_npu

# What a test takes for granted that an older torch_npu does not do: the first release that does, and what it is.
SINCE = {
    "test_out_of_memory_is_torch_npus_own_error": ("2.10", "torch.OutOfMemoryError; before, a RuntimeError"),
    "test_every_signature_is_the_vendors": ("2.10", "HcclCommConfig's time limit, in the header"),
    "test_every_rank[two ranks-float64_is_refused_by_torch_npu_as_on_the_device]": ("2.10", "the refusal"),
    "test_every_rank[two ranks-coalesced_calls]": ("2.10", "startCoalescing"),
    "test_every_rank[four ranks-coalesced_calls]": ("2.10", "startCoalescing"),
    "test_operator_equals_the_cpu_forward_and_gradient[nn.functional.kl_div]": (
        "2.10",
        "a gradient of kl_div's target",
    ),
    "test_torch_npu_says_that_a_norm_has_no_gradient": ("2.13", "the error; before, silently no gradient"),
    "test_sigmoid_gating_has_a_gradient": ("2.13", "npu_moe_gating_top_k's gradient"),
    "test_groups_of_an_adding_product_as_counts": ("2.10", "group_list_type of npu_grouped_matmul_add"),
}
TORCH_NPU = Version(torch.__version__)  # a torch_npu has the version of its torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in (item for item in items if "tests/virtual_npu/" in item.path.as_posix()):
        if not virtual_npu.is_active():
            reason = "needs a virtual NPU: npu-backend run --virtual-npu=2 -- python -m pytest tests/virtual_npu"
            item.add_marker(pytest.mark.skip(reason=reason))
        first, what = SINCE.get(item.name) or SINCE.get(item.name.partition("[")[0]) or ("0", "")
        if Version(first) > Version(TORCH_NPU.base_version):
            item.add_marker(pytest.mark.skip(reason=f"torch_npu {first} and later: {what}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """An operator that an older torch_npu does not have is no failure of ours."""
    try:
        return (yield)
    except AttributeError as error:
        if "'_OpNamespace' 'npu' object has no attribute" in str(error) and Version("2.13") > TORCH_NPU:
            pytest.skip(f"torch_npu {TORCH_NPU.base_version}: {error}")
        raise


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
def nothing_left() -> Iterator[None]:
    """The test leaves no shared memory of ours; that of the machine's other programs comes and goes meanwhile."""

    def ours() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if "npu" in name}

    before = ours()
    yield
    assert ours() == before


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
