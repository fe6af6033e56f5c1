"""Faults that the vendor's compiler accepts in silence: the emulator finds each, and passes the kernel without it."""

from __future__ import annotations

import re

import pytest
import torch
from hivm_emulator import FlagError, OutOfBoundsError, RaceError, launch
from hivm_emulator.head_kernels import RUNNERS, Shape
from hivm_emulator.modules import missing_toolchain, modules

from npu_backend.head.ascend_launches import KernelLaunch, kernel_launches
from npu_backend.soc import find_soc

SOC = "Ascend910B3"
BLOCK, ROWS = 64, 32


def described(name: str, kernel: str, pointers: str, sizes: str, **constants: int) -> KernelLaunch:
    signature = dict(pair.split(":") for pair in pointers.split()) | dict.fromkeys(sizes.split(), "i32")
    return KernelLaunch(name, kernel, signature, constants, (1,))


_PRODUCT = ("product", "a_ptr:*bf16 b_ptr:*bf16 c_ptr:*fp32", "M N K")
_EXP_SUMS = ("exp_sums", "a_ptr:*bf16 w_ptr:*bf16 out_ptr:*fp32 scale:fp32", "N H")
_PICKED = ("picked", "x_ptr:*fp32 labels_ptr:*i64 out_ptr:*fp32", "M V")
FAULTY = [
    described("atomic of a product", *_PRODUCT, ATOMIC=True, SCALED=False, BLOCK=BLOCK),
    described("atomic of a scaled product", *_PRODUCT, ATOMIC=True, SCALED=True, BLOCK=BLOCK),
    described("stored product", *_PRODUCT, ATOMIC=False, SCALED=True, BLOCK=BLOCK),
    described("masked weight", *_EXP_SUMS, SHIFTED=False, ROWS=ROWS, BLOCK=BLOCK),
    described("shifted weight", *_EXP_SUMS, SHIFTED=True, ROWS=ROWS, BLOCK=BLOCK),
    described("masked gather", *_PICKED, CLAMPED=False, ROWS=ROWS),
    described("clamped gather", *_PICKED, CLAMPED=True, ROWS=ROWS),
]


pytestmark = pytest.mark.skipif(bool(missing_toolchain()), reason=missing_toolchain())


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return dict(zip((one.name for one in FAULTY), modules(FAULTY, SOC, "emulator.faulty_kernels")))


def run_product(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    a, b, c = torch.randn(BLOCK, BLOCK).bfloat16(), torch.randn(BLOCK, BLOCK).bfloat16(), torch.zeros(BLOCK, BLOCK)
    launch(text, "product", [a, b, c, 1, BLOCK, BLOCK], 1)
    return c, a.double() @ b.double()


def test_atomic_addition_of_a_product_adds_memory_that_nobody_wrote(texts: dict[str, str]):
    found, _ = run_product(texts["atomic of a product"])
    assert found.isnan().any()


def test_atomic_addition_in_a_mixed_kernel_counts_twice(texts: dict[str, str]):
    found, exact = run_product(texts["atomic of a scaled product"])
    torch.testing.assert_close(found, 2 * exact.float())


def test_load_add_store_counts_once(texts: dict[str, str]):
    found, exact = run_product(texts["stored product"])
    torch.testing.assert_close(found, exact.float())


def run_exp_sums(text: str, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, w = torch.randn(ROWS, BLOCK).bfloat16(), torch.randn(columns, BLOCK).bfloat16()
    out = torch.full((ROWS,), float("nan"))
    launch(text, "exp_sums", [a, w, out, 0.05, columns, BLOCK], 1)
    return out, (0.05 * a.double() @ w.double().t()).exp().sum(1).float()


def test_masked_operand_leaves_the_accumulator_unwritten(texts: dict[str, str]):
    found, _ = run_exp_sums(texts["masked weight"], BLOCK - 24)
    assert found.isnan().all()
    found, exact = run_exp_sums(texts["masked weight"], 2 * BLOCK)  # nothing to mask
    torch.testing.assert_close(found, exact)


def test_shifted_tile_is_right(texts: dict[str, str]):
    found, exact = run_exp_sums(texts["shifted weight"], 2 * BLOCK - 24)
    torch.testing.assert_close(found, exact)


def run_picked(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = ROWS + 7, 50
    x, labels = torch.randn(rows, columns), torch.randint(columns, (rows,))
    out = torch.full((rows,), float("nan"))
    launch(text, "picked", [x, labels, out, rows, columns], 2)
    return out, x.gather(1, labels[:, None])[:, 0]


def test_masked_gather_reads_the_masked_address(texts: dict[str, str]):
    with pytest.raises(OutOfBoundsError, match="argument 0"):
        run_picked(texts["masked gather"])


def test_clamped_gather_is_right(texts: dict[str, str]):
    found, exact = run_picked(texts["clamped gather"])
    torch.testing.assert_close(found, exact)


ROWS_BACKWARD = next(one for one in kernel_launches(find_soc(SOC), 151936, 1024, "bf16") if one.name == "rows_backward")


@pytest.fixture(scope="module")
def right() -> str:
    return modules([ROWS_BACKWARD], SOC)[0]


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        (r"hivm\.hir\.pipe_barrier\[<PIPE_V>\]", RaceError),
        (r"hivm\.hir\.(set|wait)_flag\[<PIPE_MTE2>, <PIPE_V>, .*\]", RaceError),
        (r"hivm\.hir\.(set|wait)_flag\[<PIPE_V>, <PIPE_MTE3>, .*\]", RaceError),
        (r"hivm\.hir\.(set|wait)_flag\[<PIPE_S>, <PIPE_V>, .*\]", RaceError),
        (r"hivm\.hir\.set_flag\[<PIPE_MTE2>, <PIPE_V>, .*\]", FlagError),
        (r"hivm\.hir\.wait_flag\[<PIPE_MTE3>, <PIPE_V>, .*\]", FlagError),
    ],
)
def test_right_kernel_without_its_synchronisation(right: str, operation: str, error: type[Exception]):
    """As compiled it passes (`test_emulated_head_kernels`); each kind of synchronisation in it is needed."""
    changed, count = re.subn(rf"\n *{operation}", "", right)
    assert count
    with pytest.raises(error):
        RUNNERS["rows_backward"](changed, ROWS_BACKWARD, Shape(rows=5, vocab=20001))
