"""How the PPO head's Ascend kernels are compiled and launched: signatures, constants, block sizes and grids, as data.

The one source of it: `rows_ascend` launches by these descriptions and `npu-backend compile-check` compiles them, so
what is checked is what runs. Standard library only. No kernel argument is specialised by its value, so a kernel's
compilation depends on its signature and constants alone: on the chip's on-chip memory, the dtype and the options below,
and neither on the number of rows nor on the vocabulary or hidden size.

Block sizes: the largest power of two whose buffers fit into a vector core's unified buffer (UB) twice, once for the
block at work and once for the next one on its way ("ping-pong"). What a kernel needs per element of a block is what
the vendor's memory planner says (bishengir 1.2.0), rounded up; see docs/ascend.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from npu_backend.soc import Soc

DTYPES = ("bf16", "fp16", "fp32")  # Triton's names
_RESERVED_BITS = 16 * 1024  # of the UB, for what a kernel holds besides its blocks


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel as it is compiled and launched.

    Attributes:
        name: of this variant, for reports.
        kernel: the function's name in `npu_backend.head.ascend_kernels`.
        signature: argument name to Triton type ("*bf16", "i32", "fp32"), in order, constants left out.
        constants: every constexpr argument.
        grid: number of programs: one per core, whatever the number of rows.
    """

    name: str
    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, int]
    grid: tuple[int]


def kernel_launches(
    soc: Soc,
    vocab_size: int,
    hidden_size: int,
    dtype: str,
    *,
    bias: bool = False,
    softcap: bool = False,
    slices: bool = True,
) -> tuple[KernelLaunch, ...]:
    """Every launch that the head can make for one output layer with a positive logit scale, as every known model has.

    Args:
        soc: the chip.
        vocab_size: V; decides only whether the fused forward can take it.
        hidden_size: H; no launch depends on it.
        dtype: of the GEMMs and the logits, one of `DTYPES`.
        bias: the output layer has one.
        softcap: the model caps its logits.
        slices: Ascend's form of the kernels; False is the portable one, for Triton's interpreter.
    """
    launches = []
    for entropy in (True, False):
        launches.append(rows_forward(soc, dtype, bias=bias, softcap=softcap, mask=softcap, entropy=entropy))
        launches.append(rows_backward(soc, dtype, bias=bias, softcap=softcap, entropy=entropy, slices=slices))
    if fused_forward_fits(soc, vocab_size) and not bias and not softcap:
        launches += [fused_forward(soc, dtype), label_scores(soc, dtype)]
    return tuple(launches)


def rows_forward(soc: Soc, dtype: str, *, bias: bool, softcap: bool, mask: bool, entropy: bool) -> KernelLaunch:
    """The statistics of rows of logits. `mask` as the kernel says: always with a softcap."""
    bits = 128 + 64 * bias + 160 * mask
    return KernelLaunch(
        name=_name("rows_forward", bias=bias, softcap=softcap, mask=mask and not softcap, no_entropy=not entropy),
        kernel="rows_forward",
        signature={"logits_ptr": f"*{dtype}", "labels_ptr": "*i64"}
        | _floats("bias", "temperatures", "of_label", "peak", "total", "weighted")
        | {"stride": "i32", "M": "i32", "V": "i32", "logit_scale": "fp32", "softcap": "fp32"},
        constants={
            "BIAS": bias,
            "SOFTCAP": softcap,
            "ENTROPY": entropy,
            "MASK": mask,
            "BLOCK": _block(soc, bits),
        },
        grid=(soc.vector_cores,),
    )


def rows_backward(soc: Soc, dtype: str, *, bias: bool, softcap: bool, entropy: bool, slices: bool) -> KernelLaunch:
    """The gradient of rows of logits."""
    bits = 128 + 32 * bias + 64 * softcap + 128 * (not slices)
    return KernelLaunch(
        name=_name("rows_backward", bias=bias, softcap=softcap, no_entropy=not entropy, portable=not slices),
        kernel="rows_backward",
        signature={"logits_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "labels_ptr": "*i64"}
        | _floats("bias", "temperatures", "log_probs", "entropy", "peak", "total", "g", "h")
        | {"stride": "i32", "M": "i32", "V": "i32", "logit_scale": "fp32", "softcap": "fp32"},
        constants={
            "BIAS": bias,
            "SOFTCAP": softcap,
            "ENTROPY": entropy,
            "SLICE": slices,
            "BLOCK": _block(soc, bits),
        },
        grid=(soc.vector_cores,),
    )


def fused_forward_fits(soc: Soc, vocab_size: int) -> bool:
    """Whether the fused forward can take that vocabulary: its tiles are never masked along it."""
    return vocab_size >= _fused_columns(soc)


def _fused_columns(soc: Soc) -> int:
    # A float32 tile of 128 x 256 fills L0C on A2 and A3. On A5 it reaches the UB whole, where only half of that fits.
    return 128 if soc.generation == "A5" else 256


def fused_forward(soc: Soc, dtype: str) -> KernelLaunch:
    """GEMM and statistics in one kernel of cube and vector cores."""
    columns = _fused_columns(soc)
    return KernelLaunch(
        name="fused_forward",
        kernel="fused_forward",
        signature={"hidden_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}"}
        | _floats("temperatures", "peak", "total", "weighted")
        | dict.fromkeys(("hidden_stride", "weight_stride", "M", "V", "H"), "i32")
        | {"logit_scale": "fp32", "parts": "i32", "part_columns": "i32"},
        # Two tiles of each operand in L1: 2 * (128 + 256) * DEPTH elements.
        constants={"ROWS": 128, "COLUMNS": columns, "DEPTH": 128 if dtype == "fp32" else 256},
        grid=(soc.cube_cores,),
    )


def fused_parts(launch: KernelLaunch, rows: int, vocab_size: int) -> tuple[int, int]:
    """Into how many parts the fused forward divides the columns, and the columns of one: enough for every core."""
    columns = launch.constants["COLUMNS"]
    tiles = -(-vocab_size // columns)
    wanted = max(1, launch.grid[0] // max(1, -(-rows // launch.constants["ROWS"])))
    part_tiles = -(-tiles // min(wanted, tiles))
    return -(-tiles // part_tiles), part_tiles * columns


def label_scores(soc: Soc, dtype: str) -> KernelLaunch:
    """What the fused forward leaves out: the label's score."""
    return KernelLaunch(
        name="label_scores",
        kernel="label_scores",
        signature={"hidden_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}", "labels_ptr": "*i64"}
        | _floats("temperatures", "of_label")
        | dict.fromkeys(("hidden_stride", "weight_stride", "M", "V", "H"), "i32")
        | {"logit_scale": "fp32"},
        constants={"BLOCK": 2048},
        grid=(soc.vector_cores,),
    )


def _block(soc: Soc, bits_per_element: int) -> int:
    """The largest power of two of elements that fits into the UB."""
    fits = (soc.ub_bytes * 8 - _RESERVED_BITS) // bits_per_element
    return 1 << (fits.bit_length() - 1)


def _floats(*names: str) -> dict[str, str]:
    return {f"{name}_ptr": "*fp32" for name in names}


def _name(kernel: str, **options: bool) -> str:
    return "+".join([kernel, *(option for option, on in options.items() if on)])
