"""Checks that references share: what an operator's documentation allows, said as an error when it is not kept."""

from __future__ import annotations

import torch

from npu_backend.virtual_npu.registry import OperatorError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def need(condition: bool, operator: str, message: str) -> None:
    """Raise the operator's error unless the condition holds."""
    if not condition:
        raise OperatorError(f"npu::{operator}: {message}")


def need_dtype(operator: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """`tensor` must have one of the dtypes."""
    allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    need(tensor.dtype in dtypes, operator, f"{name} is {tensor.dtype}, allowed are {allowed}")
