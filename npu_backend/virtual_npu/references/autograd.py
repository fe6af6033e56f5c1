"""Gradients of references by autograd. References run below autograd, whose keys are let in again for the while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# What a thread has outside every kernel: autograd's keys are in force.
_INCLUDED, _EXCLUDED = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def gradients(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor], upstream: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Gradients of `function(*tensors)` to each tensor; zeros where one is not used."""
    with torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED), torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        outputs = function(*leaves)
        return torch.autograd.grad(outputs, leaves, upstream, allow_unused=True, materialize_grads=True)
