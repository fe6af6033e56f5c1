"""What we compare on the host must have arrived there: no check reads a copy that is still under way (verl#3222)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import npu_backend


class DelayedCopies(TorchDispatchMode):
    """A device whose non-blocking copies to the host have not arrived yet: they read as NaN."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        asked = kwargs.get("non_blocking") or (func is torch.ops.aten.copy_.default and len(args) > 2 and args[2])
        if asked and isinstance(result, torch.Tensor) and result.device.type == "cpu" and result.is_floating_point():
            result.fill_(float("nan"))
        return result


@pytest.mark.case("B18")
def test_verify_reads_no_copy_that_is_still_under_way():
    pytest.importorskip("transformers")
    with DelayedCopies():
        assert torch.ones(2, device="npu").to("cpu", non_blocking=True).isnan().all()  # the stand-in does delay
        report = npu_backend.verify({"hf_config": {"model_type": "qwen3"}}, dtype=torch.float32)
    assert report.ok, str(report)
    assert all(row.error == row.error for row in report.rows)  # no NaN
