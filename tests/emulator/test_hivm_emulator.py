"""The emulator itself, on small pieces of IR written by hand: what it computes, and each fault that it must find."""

from __future__ import annotations

import pytest
import torch
from hivm_emulator import (
    DeadlockError,
    FlagError,
    OutOfBoundsError,
    RaceError,
    UninitialisedError,
    UnsupportedError,
    launch,
)
from hivm_emulator.parser import parse

UB = "#hivm.address_space<ub>"
GM = "#hivm.address_space<gm>"
DYNAMIC = "strided<[?], offset: ?>"
ON_UB, ON_GM = f"memref<?xf32, {DYNAMIC}, {UB}>", f"memref<?xf32, {DYNAMIC}, {GM}>"
WAIT = "hivm.hir.set_flag[<PIPE_{0}>, <PIPE_{1}>, <EVENT_ID0>]\nhivm.hir.wait_flag[<PIPE_{0}>, <PIPE_{1}>, <EVENT_ID0>]"


def constants(**values: int) -> str:
    return "\n".join(f"%{name} = arith.constant {value} : i64" for name, value in values.items())


def buffer(name: str, address: str, size: int = 8) -> str:
    kind = f"memref<{size}xf32, {UB}>"
    return (
        f"%{name}_raw = hivm.hir.pointer_cast(%{address}) : {kind}\n"
        f"%{name} = memref.cast %{name}_raw : {kind} to {ON_UB}"
    )


def tensor(name: str, argument: str, size: int = 8, offset: str = "%at") -> str:
    kind = f"memref<{size}xf32, strided<[1], offset: ?>, {GM}>"
    return (
        f"%{name}_raw = memref.reinterpret_cast {argument} to offset: [{offset}], sizes: [{size}], strides: [1] : "
        f"memref<?xf32, {GM}> to {kind}\n%{name} = memref.cast %{name}_raw : {kind} to {ON_GM}"
    )


def load(source: str, target: str) -> str:
    return f"call @load_gm_to_ubuf_1d_float(%{source}, %{target}, %no_pad, %zero, %start) : ({ON_GM}, {ON_UB}) -> ()"


def store(source: str, target: str) -> str:
    return f"call @store_ubuf_to_gm_1d_float(%{source}, %{target}, %no_pad) : ({ON_UB}, {ON_GM}, i32) -> ()"


def exp(source: str, target: str) -> str:
    return f"call @vexp_1d_float(%{source}, %{target}, %none) : ({ON_UB}, {ON_UB}, {ON_UB}) -> ()"


COMMON = "\n".join(
    [
        constants(a=0, b=64, c=128),
        "%no_pad = arith.constant 0 : i32",
        "%zero = arith.constant 0.000000e+00 : f32",
        "%start = arith.constant 0 : index",
        "%block = hivm.hir.get_block_idx -> i64",
        "%eight = arith.constant 8 : i64",
        "%at_wide = arith.muli %block, %eight : i64",
        "%at = arith.index_cast %at_wide : i64 to index",
        buffer("none", "a", 0),
    ]
)


def function(name: str, *lines: str) -> str:
    """A function of two tensors, in the compiler's own layout: what closes a region is indented like what opened it."""
    body = "\n".join((COMMON, *lines, "return")).split("\n")
    indented = "\n".join("    " + line for line in body)
    head = ", ".join(f"%arg{i}: memref<?xf32, {GM}>" for i in range(5))
    return f"  func.func @{name}({head}, %arg5: i32, %arg6: i32, %arg7: i32) attributes {{x}} {{\n{indented}\n  }}\n"


def run(*lines: str, grid: int = 1, source: torch.Tensor | None = None) -> torch.Tensor:
    """Run a vector kernel of a source and a result of 8 floats per program."""
    source = torch.randn(8 * grid) if source is None else source
    result = torch.full((8 * grid,), float("nan"))
    launch(function("kernel", *lines), "kernel", [source, result], grid)
    return result


EXP = (
    tensor("in", "%arg3"), tensor("out", "%arg4"), buffer("x", "b"), buffer("y", "c"),
    load("in", "x"), WAIT.format("MTE2", "V"), exp("x", "y"), WAIT.format("V", "MTE3"), store("y", "out"),
)  # fmt: skip


def without(lines: tuple[str, ...], index: int) -> tuple[str, ...]:
    return lines[:index] + lines[index + 1 :]


def test_exp_of_two_programs():
    source = torch.randn(16)
    torch.testing.assert_close(run(*EXP, grid=2, source=source), source.exp())


@pytest.mark.parametrize("index", [5, 7], ids=["load before exp", "exp before store"])
def test_missing_flag_is_a_race(index: int):
    with pytest.raises(RaceError, match="no flag or barrier orders them"):
        run(*without(EXP, index))


def test_vector_instructions_need_a_barrier_between_them():
    again = (*EXP[:7], exp("y", "x"), WAIT.format("V", "MTE3"), store("x", "out"))
    with pytest.raises(RaceError, match="pipe V reads ub bytes 128 to 160"):
        run(*again)
    source = torch.randn(8)
    barrier = (*again[:7], "hivm.hir.pipe_barrier[<PIPE_V>]", *again[7:])
    torch.testing.assert_close(run(*barrier, source=source), source.exp().exp())


def test_overwriting_what_is_still_read_is_a_race():
    with pytest.raises(RaceError, match="pipe MTE2 overwrites .* V may still be reading"):
        run(*EXP[:7], "hivm.hir.pipe_barrier[<PIPE_MTE2>]", load("in", "x"), *EXP[7:])


def test_overlaid_buffers_show():
    """The planner may give two live values one address; every flag is right, and the result is wrong."""
    overlaid = (*EXP[:2], buffer("x", "b"), buffer("y", "c"), buffer("z", "c"), *EXP[4:7])
    lines = (*overlaid, "hivm.hir.pipe_barrier[<PIPE_V>]", exp("x", "z"), "hivm.hir.pipe_barrier[<PIPE_V>]")
    add = f"call @vadd_1d_float(%x, %y, %z, %none) : ({ON_UB}, {ON_UB}, {ON_UB}, {ON_UB}) -> ()"
    source = torch.randn(8)
    found = run(*lines, exp("z", "y"), "hivm.hir.pipe_barrier[<PIPE_V>]", add, *EXP[7:], source=source)
    assert not torch.allclose(found, source + source.exp())


def test_memory_that_nobody_wrote_is_nan():
    assert run(*without(EXP, 4), source=torch.randn(8)).isnan().all()


def test_scalar_that_nobody_wrote_is_an_error():
    with pytest.raises(UninitialisedError, match="never written"):
        run(*EXP[:4], f"%v = memref.load %x_raw[%start] : memref<8xf32, {UB}>")


def test_out_of_bounds_of_a_tensor():
    with pytest.raises(OutOfBoundsError, match="argument 0"):
        run("%after = arith.index_cast %eight : i64 to index", tensor("in", "%arg3", 8, "%after"), *EXP[1:])


def test_tail_of_a_copy_is_not_zero():
    """A copy of 5 floats into UB writes a granule of 8; the other three hold anything, unless they are padded."""
    short = (tensor("in", "%arg3", 5), tensor("out", "%arg4"), buffer("whole", "b"), buffer("x", "b", 5))
    lines = (*short, load("in", "x"), WAIT.format("MTE2", "MTE3"), store("whole", "out"))
    found = run(*lines)
    assert not found[:5].isnan().any()
    assert found[5:].isnan().all()
    padded = run(*lines[:4], "%value = arith.constant 2 : i32", lines[4].replace("%no_pad", "%value"), *lines[5:])
    assert padded[5:].eq(0).all()


def test_two_programs_that_write_the_same_bytes():
    with pytest.raises(RaceError, match="programs 0 and 1 both write"):
        run(*(line.replace("%at]", "%start]") for line in EXP), grid=2)


def test_flag_that_nobody_awaits():
    with pytest.raises(FlagError, match="ended with flags that nobody awaited: 3 from V to S"):
        run(*EXP, "hivm.hir.set_flag[<PIPE_V>, <PIPE_S>, <EVENT_ID3>]")


def test_wait_for_a_flag_that_nobody_sets():
    with pytest.raises(FlagError, match="V waits for flag 0 from MTE2"):
        run(*EXP[:4], "hivm.hir.wait_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]")


def test_branches_between_blocks():
    """sum of 1..10 by a loop of blocks, as the compiler prints `while`."""
    source, result = torch.zeros(8), torch.zeros(8)
    lines = [
        "%one = arith.constant 1 : i64", "%ten = arith.constant 10 : i64", "%nil = arith.constant 0 : i64",
        "cf.br ^bb1(%one, %nil : i64, i64)",
        "^bb1(%i: i64, %sum: i64):  // 2 preds: ^bb0, ^bb2",
        "%more = arith.cmpi sle, %i, %ten : i64",
        "cf.cond_br %more, ^bb2, ^bb3",
        "^bb2:  // pred: ^bb1",
        "%added = arith.addi %sum, %i : i64", "%next = arith.addi %i, %one : i64",
        "cf.br ^bb1(%next, %added : i64, i64)",
        "^bb3:  // pred: ^bb1",
        "%float = arith.sitofp %sum : i64 to f32",
        f"memref.store %float, %arg4[%start] : memref<?xf32, {GM}>",
    ]  # fmt: skip
    launch(function("kernel", *lines), "kernel", [source, result], 1)
    assert result[0] == 55


def test_affine_maps():
    ceiling = parse("#map = affine_map<(d0)[s0] -> (-d0 + s0 * 2 ceildiv 4, d0 mod 3)>\n").maps["#map"]
    assert ceiling(1, 5) == (-1 + 3, 1)
    floor = parse("#map1 = affine_map<()[s0, s1] -> ((s0 - s1) floordiv 4)>\n").maps["#map1"]
    assert floor(-1, 0) == (-1,)


def test_int32_wraps_around():
    result = torch.zeros(8)
    lines = [
        "%large = arith.constant 65536 : i32", "%square = arith.muli %large, %large : i32",
        "%float = arith.sitofp %square : i32 to f32", f"memref.store %float, %arg4[%start] : memref<?xf32, {GM}>",
    ]  # fmt: skip
    launch(function("kernel", *lines), "kernel", [torch.zeros(8), result], 1)
    assert result[0] == 0


@pytest.mark.parametrize(
    "line",
    [
        "call @vrsqrt_1d_float(%x) : () -> ()",
        "%v = math.tan %zero : f32",
        "hivm.hir.brand_new %x",
        "%v = arith.cmpf ult, %zero, %zero : f32",
        '%v = "hivm_regbaseintrins.intr.hivm.pge.b32"(%zero, %zero) : (i32, i32) -> vector<256xi1>',  # A5
    ],
)
def test_unknown_operations_are_named(line: str):
    with pytest.raises(UnsupportedError, match=r"vrsqrt_1d_float|math\.tan|brand_new|arith\.cmpf ult|regbase"):
        run(*EXP[:4], line)


def mixed(cube: list[str], vector: list[str]) -> str:
    return function("kernel_mix_aic", *cube) + function("kernel_mix_aiv", *vector)


def sync(what: str, core: str, flag: int) -> str:
    return f"hivm.hir.sync_block_{what}[<{core}>, <PIPE_FIX>, <PIPE_S>] flag = {flag}"


def launch_mixed(ir: str) -> None:
    launch(ir, "kernel", [torch.zeros(8), torch.zeros(8)], 1)


def test_cores_wait_for_each_other():
    launch_mixed(
        mixed(
            [sync("wait", "CUBE", 1), sync("set", "CUBE", 0)],
            [sync("set", "VECTOR", 1), sync("wait", "VECTOR", 0)],
        )
    )


def test_deadlock_between_cores():
    with pytest.raises(DeadlockError, match="waits for flag"):
        launch_mixed(
            mixed(
                [sync("wait", "CUBE", 1), sync("set", "CUBE", 0)],
                [sync("wait", "VECTOR", 0), sync("set", "VECTOR", 1)],
            )
        )


def test_flag_between_cores_that_nobody_awaits():
    with pytest.raises(FlagError, match="flag 4 of the cube core"):
        launch_mixed(mixed([sync("set", "CUBE", 4)], []))
