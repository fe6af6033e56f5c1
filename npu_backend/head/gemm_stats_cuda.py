"""Hopper's fused GEMM of the PPO head: logits are consumed in registers, in forward and in backward.

One persistent, warp-specialised kernel in Triton's Gluon: a producer warp keeps tiles of x and W flowing into shared
memory (TMA), two consumer warpgroups multiply the two halves of each tile (wgmma). They share the tiles but no
barrier, so that one falls behind the other and each one's epilogue hides behind the other's multiplications. The
epilogue is either

* `statistics`: softmax statistics of the tile's columns, and, where asked for, the scores themselves in half precision;
* `gradient`: the gradient of the logits, rounded once to the operands' dtype.

So a pass without gradients writes no logits, and a backward pass that recomputes them never reads any.

What the numbers mean is said in `rows_cuda`, whose kernels do the same to logits from a library's GEMM.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Their names since triton 3.8 or so, and before.
_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# A tile of the product is 128 rows (64 for each consumer) by 256 columns; 64 of H are in one stage of the pipeline.
ROWS = gl.constexpr(128)
HALF = gl.constexpr(64)
COLUMNS = gl.constexpr(256)
DEPTH = gl.constexpr(64)
STORE_COLUMNS = gl.constexpr(64)
GROUP_BYTES = 16 * 2**20  # of x: the row tiles that sweep the columns together, and stay in L2 while they do
STAGES = gl.constexpr(4)
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))  # of a consumer's half tile


@gluon.jit
def _position(tile, row_tiles, column_tiles, group):
    """Row and column of a tile: `group` row tiles at a time sweep the columns, so that both operands stay in L2."""
    first = tile // (group * column_tiles) * group
    height = gl.minimum(row_tiles - first, group)
    within = tile - first * column_tiles
    return (first + within % height) * ROWS, (within // height) * COLUMNS


@gluon.jit
def _produce(x, w, ring, schedule):
    steps, row_tiles, column_tiles, group = schedule
    x_tiles, w_tiles, filled, drained = ring
    count = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _position(tile, row_tiles, column_tiles, group)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(drained.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(filled.index(stage), x.block_type.nbytes + w.block_type.nbytes)
            _load_tile(x, [row, step * DEPTH], filled.index(stage), x_tiles.index(stage))
            _load_tile(w, [column, step * DEPTH], filled.index(stage), w_tiles.index(stage))
            count += 1


@gluon.jit
def _multiply(ring, count, steps, MINE: gl.constexpr):
    """This consumer's half tile of x W^T [64, 256], and the advanced count of pipeline stages."""
    x_tiles, w_tiles, filled, drained = ring
    product = gl.zeros([HALF, COLUMNS], gl.float32, PRODUCT)
    for step in range(steps):
        stage = count % STAGES
        mbarrier.wait(filled.index(stage), (count // STAGES) & 1)
        mine = x_tiles.index(stage).slice(MINE * HALF, HALF, dim=0)
        product = hopper.warpgroup_mma(
            mine, w_tiles.index(stage).permute((1, 0)), product, use_acc=step > 0, is_async=True
        )
        product = hopper.warpgroup_mma_wait(1, deps=(product,))
        # All but the newest product are done, so the stage before this one is free.
        mbarrier.arrive(drained.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
        count += 1
    product = hopper.warpgroup_mma_wait(0, deps=(product,))
    mbarrier.arrive(drained.index((count + STAGES - 1) % STAGES), count=1)
    return product, count


@gluon.jit
def _quarters(product):
    """Columns 0-63, 64-127, 128-191 and 192-255; only names for registers change."""
    left, right = product.reshape([HALF, 2, COLUMNS // 2]).permute((0, 2, 1)).split()
    first, second = left.reshape([HALF, 2, STORE_COLUMNS]).permute((0, 2, 1)).split()
    third, fourth = right.reshape([HALF, 2, STORE_COLUMNS]).permute((0, 2, 1)).split()
    return first, second, third, fourth


@gluon.jit
def _column(per_row, like):
    """[64] as [64, 1], in the layout of `like`."""
    return gl.expand_dims(gl.convert_layout(per_row, gl.SliceLayout(1, like.type.layout)), 1)


@gluon.jit
def _store(values, target, buffer, row, column):
    """Write [64, 64] through shared memory, clipped to the target by the copy engine."""
    tma.store_wait(1)  # all stores but the last one have left their buffers, and this is not that one's
    buffer.store(values.to(target.dtype))
    hopper.fence_async_shared()
    _store_tile(target, [row, column], buffer)


@gluon.jit
def _consume_statistics(work, KEEP: gl.constexpr, MINE: gl.constexpr):
    ring, staging, kept, rows_ptr, partials_ptr, plane, M, logit_scale, schedule = work
    steps, row_tiles, column_tiles, group = schedule
    count = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _position(tile, row_tiles, column_tiles, group)
        row += MINE * HALF
        rows = row + gl.arange(0, HALF, gl.SliceLayout(1, PRODUCT))
        factor = gl.load(rows_ptr + rows, mask=rows < M, other=1.0) * logit_scale
        base = gl.load(rows_ptr + M + rows, mask=rows < M, other=0.0)
        product, count = _multiply(ring, count, steps, MINE)
        largest = gl.max(product, 1)
        # A quarter at a time, so that its arithmetic hides the way of the quarter before it into memory.
        quarters = _quarters(product)
        for quarter in gl.static_range(4):
            part = quarters[quarter]
            if KEEP:
                scores = gl.fma(part, _column(factor, part), _column(-base, part))
                _store(scores, kept, staging.index(2 * MINE + quarter % 2), row, column + quarter * STORE_COLUMNS)
            shifted = gl.fma(part, _column(factor, part), _column(-largest * factor, part))
            weight = gl.exp2(shifted)
            if quarter == 0:
                weights, weighted = weight, weight * shifted
            else:
                weights, weighted = weights + weight, gl.fma(weight, shifted, weighted)
        total = gl.convert_layout(gl.sum(weights, 1), gl.SliceLayout(1, PRODUCT))
        first_moment = gl.convert_layout(gl.sum(weighted, 1), gl.SliceLayout(1, PRODUCT))
        target = partials_ptr + (column // COLUMNS).to(gl.int64) * M + rows
        gl.store(target, largest * factor - base, mask=rows < M)
        gl.store(target + plane, total, mask=rows < M)
        gl.store(target + plane + plane, first_moment, mask=rows < M)
    if KEEP:
        tma.store_wait(0)


@gluon.jit
def _consume_gradient(work, MINE: gl.constexpr):
    ring, staging, target, rows_ptr, _, _, M, logit_scale, schedule = work
    steps, row_tiles, column_tiles, group = schedule
    count = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _position(tile, row_tiles, column_tiles, group)
        row += MINE * HALF
        rows = row + gl.arange(0, HALF, gl.SliceLayout(1, PRODUCT))
        factor = gl.load(rows_ptr + rows, mask=rows < M, other=0.0) * logit_scale
        base = gl.load(rows_ptr + M + rows, mask=rows < M, other=0.0)
        shift = gl.load(rows_ptr + 2 * M + rows, mask=rows < M, other=0.0) - base
        constant = gl.load(rows_ptr + 3 * M + rows, mask=rows < M, other=0.0)
        slope = gl.load(rows_ptr + 4 * M + rows, mask=rows < M, other=0.0)
        product, count = _multiply(ring, count, steps, MINE)
        quarters = _quarters(product)
        for quarter in gl.static_range(4):
            part = quarters[quarter]
            log_p = gl.fma(part, _column(factor, part), _column(shift, part))
            gradient = gl.exp2(log_p) * gl.fma(log_p, _column(slope, part), _column(constant, part))
            _store(gradient, target, staging.index(2 * MINE + quarter % 2), row, column + quarter * STORE_COLUMNS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["plane", "M", "steps", "row_tiles", "column_tiles", "group"])
def _kernel(
    x, w, target, rows_ptr, partials_ptr, plane, M, logit_scale, steps, row_tiles, column_tiles, group,
    GRADIENT: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, DEPTH], x.layout)
    w_tiles = gl.allocate_shared_memory(w.dtype, [STAGES, COLUMNS, DEPTH], w.layout)
    staging = gl.allocate_shared_memory(target.dtype, [4, HALF, STORE_COLUMNS], target.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(drained.index(stage), count=2)
    hopper.fence_async_shared()
    ring = (x_tiles, w_tiles, filled, drained)
    schedule = (steps, row_tiles, column_tiles, group)
    work = (ring, staging, target, rows_ptr, partials_ptr, plane, M, logit_scale, schedule)
    if GRADIENT:
        gl.warp_specialize(
            [(_consume_gradient, (work, 0)), (_consume_gradient, (work, 1)), (_produce, (x, w, ring, schedule))],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume_statistics, (work, KEEP, 0)),
                (_consume_statistics, (work, KEEP, 1)),
                (_produce, (x, w, ring, schedule)),
            ],
            [4, 1],
            [240, 24],
        )


@triton.jit(do_not_specialize=["M", "C", "first"])
def _label_gradient(target_ptr, labels_ptr, rows_ptr, target_stride, first, M, C, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.load(labels_ptr + rows, mask=rows < M, other=-1) - first
    gradient = tl.load(rows_ptr + 5 * M + rows, mask=rows < M, other=0.0)
    at = target_ptr + rows.to(tl.int64) * target_stride + column
    tl.store(at, gradient.to(target_ptr.dtype.element_ty), mask=(column >= 0) & (column < C) & (rows < M))


def unusable_reason(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype, logit_scale: float, softcap: float | None
) -> str | None:
    """Why the kernels cannot take these inputs on a Hopper device, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"they multiply bfloat16 or float16, not {dtype}"
    if bias is not None or softcap is not None or logit_scale <= 0.0:
        return "they know no bias, softcap or negative logit scale"
    width = weight.shape[1]
    if width % 8 != 0 or weight.stride() != (width, 1) or weight.data_ptr() % 16 != 0:
        return "rows of the weight must be contiguous and begin at multiples of 16 bytes"
    return None


def whole_tiles(columns: int) -> int:
    """How many of the first columns `statistics` takes: it has no mask for a tile that is not full.

    A mask in every tile made it 2 to 4 % slower; one behind a branch took LLVM 1.5 s to compile.
    """
    return columns // int(COLUMNS.value) * int(COLUMNS.value)


def parts(columns: int) -> int:
    """How many parts of statistics `statistics` leaves for that many columns, in whole tiles."""
    return columns // int(COLUMNS.value)


def statistics(
    x: Tensor, w: Tensor, kept: Tensor | None, planes: Tensor, partials: Tensor, *, logit_scale: float
) -> None:
    """What `rows_cuda.statistics` does, from x [M, H] and w [C, H]: into partials [3, parts(C), M] and kept [M, C]."""
    _launch(x, w, kept, planes, partials, logit_scale, gradient=False)


def gradient(
    x: Tensor, w: Tensor, target: Tensor, labels: Tensor, first: int, planes: Tensor, *, logit_scale: float
) -> None:
    """What `rows_cuda.gradient` does, from x [M, H] and w [C, H], into target [M, C]."""
    _launch(x, w, target, planes, planes, logit_scale, gradient=True)
    rows, columns = target.shape
    _label_gradient[(triton.cdiv(rows, 256),)](
        target, labels, planes, target.stride(0), first, rows, columns, ROWS=256, num_warps=4
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch(
    x: Tensor, w: Tensor, target: Tensor | None, planes: Tensor, partials: Tensor, logit_scale: float, *, gradient: bool
) -> None:
    rows, columns = x.shape[0], w.shape[0]
    tile = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    depth, height, width = DEPTH.value, ROWS.value, COLUMNS.value
    destination = x if target is None else target  # a descriptor is needed even where nothing is stored
    _kernel[(_multiprocessors(x.device),)](
        TensorDescriptor.from_tensor(x, [height, depth], tile),
        TensorDescriptor.from_tensor(w, [width, depth], tile),
        TensorDescriptor.from_tensor(destination, [HALF.value, STORE_COLUMNS.value], tile),
        planes,
        partials,
        partials.stride(0),
        rows,
        logit_scale,
        -(-x.shape[1] // depth),
        -(-rows // height),
        -(-columns // width),
        max(1, GROUP_BYTES // (height * x.shape[1] * x.element_size())),
        GRADIENT=gradient,
        KEEP=target is not None,
        num_warps=4,
    )
