"""Small Triton kernels with a known verdict each. Run as a program in the toolchain's Python: prints them as JSON.

python sample_kernels.py CHIP
"""

from __future__ import annotations

import json
import os
import sys

import triton
import triton.language as tl

from npu_backend.ascend import front_end, vendor
from npu_backend.ascend.front_end import Launch
from npu_backend.soc import find_soc


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)


@triton.jit
def blocks(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Sums of a loop's blocks: loads can overlap with the work."""
    total = 0.0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        total += tl.sum(tl.exp(x) * x, 0)
    tl.store(out_ptr, total)


@triton.jit
def powers(x_ptr, n, BLOCK: tl.constexpr):
    """In place, block by block: a buffer for what comes in and one for what goes out, twice each to overlap."""
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=0.0)
        tl.store(x_ptr + at, tl.exp(x) * x, mask=at < n)


@triton.jit
def add_of_dot(a_ptr, b_ptr, out_ptr, SCALE: tl.constexpr, SIZE: tl.constexpr):
    """SCALE 0: an atomic straight on what tl.dot gives; else with vector work between them."""
    square = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(a_ptr + square), tl.load(b_ptr + square))
    tl.atomic_add(out_ptr + square, product * SCALE if SCALE else product)


@triton.jit
def largest_of_rows(a_ptr, b_ptr, out_ptr, columns, MASK: tl.constexpr, SELECT: tl.constexpr, SIZE: tl.constexpr):
    """MASK: the right operand is masked along the columns of the product; SELECT: and so is the product."""
    at = tl.arange(0, SIZE)
    a = tl.load(a_ptr + at[:, None] * SIZE + at[None, :])
    inside = at < columns
    if MASK:
        b = tl.load(b_ptr + at[:, None] * SIZE + at[None, :], mask=inside[:, None], other=0.0)
    else:
        b = tl.load(b_ptr + at[:, None] * SIZE + at[None, :])
    product = tl.dot(a, tl.trans(b))
    if SELECT:
        product = tl.where(inside[None, :], product, -1e30)
    tl.store(out_ptr + at, tl.max(product, 1))


@triton.jit
def print_it(x_ptr):
    tl.store(x_ptr, undefined_name)  # noqa: F821


def launches() -> dict[str, Launch]:
    floats = {"x_ptr": "*fp32", "n": "i32"}
    matrices = {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32"}
    rows = {**matrices, "columns": "i32"}
    sums = {"x_ptr": "*bf16", "out_ptr": "*fp32", "n": "i32"}
    return {
        "small": Launch("double", double, floats, {"BLOCK": 1024}, (1,)),
        "too large": Launch("double", double, floats, {"BLOCK": 65536}, (1,)),
        "overlapping": Launch("blocks", blocks, sums, {"BLOCK": 4096}, (1,)),
        "tight": Launch("powers", powers, floats, {"BLOCK": 16384}, (1,)),
        "atomic on dot": Launch("add_of_dot", add_of_dot, matrices, {"SCALE": 0, "SIZE": 64}, (1,)),
        "atomic after dot": Launch("add_of_dot", add_of_dot, matrices, {"SCALE": 2, "SIZE": 64}, (1,)),
        "masked dot": Launch("rows", largest_of_rows, rows, {"MASK": True, "SELECT": False, "SIZE": 64}, (1,)),
        "masked dot, select": Launch("rows", largest_of_rows, rows, {"MASK": True, "SELECT": True, "SIZE": 64}, (1,)),
        "whole dot": Launch("rows", largest_of_rows, rows, {"MASK": False, "SELECT": False, "SIZE": 64}, (1,)),
        "no kernel": Launch("print_it", print_it, {"x_ptr": "*fp32"}, {}, (1,)),
    }


def main(chip: str) -> None:
    soc = find_soc(chip)
    environment = {**os.environ, "PATH": f"{vendor.stand_in_folder()}{os.pathsep}{os.environ['PATH']}"}
    verdicts = {}
    for name, launch in launches().items():
        try:
            command, linalg = front_end.lower(launch, soc)
        except front_end.Refused as error:
            verdicts[name] = {"status": "unsupported", "message": str(error)}
        else:
            verdicts[name] = vendor.compile_repeatedly(command, linalg, environment).to_dict()
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main(sys.argv[1])
