"""Facts about counting Triton launches, printed as JSON. A process of its own: Triton's interpreter cannot be left."""

from __future__ import annotations

import json
from dataclasses import asdict

from npu_backend import triton_interpreter

triton_interpreter.activate()  # before anything imports triton

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from npu_backend.bench import cost, cost_table  # noqa: E402


@triton.jit
def add(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size)
    y = tl.load(y_ptr + at, mask=at < size)
    tl.store(y_ptr + at, x + y, mask=at < size)


def masked_lanes() -> dict[str, int]:
    """100 of 128 lanes: float16 and float32 in, float32 out, launched twice, and the tensors keep their values."""
    counter = cost.CostCounter()
    x, y = torch.zeros(100, dtype=torch.float16), torch.zeros(100)
    with cost.triton_launches(counter), counter:
        for _ in range(2):
            add[(2,)](x, y, 100, BLOCK=64)
    return {**asdict(counter.by_name["add"]), "changed": int(y.any())}


def whole_and_from_two_rows() -> list[list[dict[str, int]]]:
    """The head's kernels on 5 rows and a ragged vocabulary: all rows interpreted, and two of them."""
    shape = (5, 32, 5000)
    found = []
    for whole in (True, False):
        if whole:
            original, cost._replaced = cost._replaced, lambda args, position, value: args
        counter = cost_table._count(cost_table._triton_on_npu, shape, torch.bfloat16, train=True)
        if whole:
            cost._replaced = original
        found.append([asdict(counter.by_name[name]) for name in ("rows_forward", "rows_backward")])
    return found


if __name__ == "__main__":
    print(json.dumps({"masked_lanes": masked_lanes(), "rows": whole_and_from_two_rows()}))
