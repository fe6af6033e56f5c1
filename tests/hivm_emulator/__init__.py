"""Runs a kernel from the IR that the vendor compiler hands to its closed last stage, without the hardware.

`bishengir-compile` ends in a program (`hivmc`) that nobody outside the vendor can read. What it is given is MLIR text
in which every on-chip buffer has its address and every synchronisation is an operation. This package executes that
text with numpy, one cube core and two vector cores per block in threads:

    launch.py   runs a grid of blocks on torch tensors
    core.py     one core: control flow, views, loads and stores
    scalar.py   integer, float and affine arithmetic
    library.py  the vendor's vector, cube and copy functions
    pipes.py    flags, barriers, and who may touch what when
    memory.py   poisoned on-chip memory, views of it, global memory
    parser.py   text to operations
    modules.py  gets that text for kernels of this repository
    head_kernels.py  runs each kernel of the PPO head on random data, against float64

It finds what no compiler message tells: buffers that the memory planner overlaid, reads of memory that nobody wrote (it
holds NaN), global memory out of bounds, integer overflow in addresses, accesses of two pipes that nothing orders, flags
set and never awaited, deadlock, two programs that write the same bytes. An operation it does not know is an
`UnsupportedError` that names it, never a guess.

Limits. A2 and A3 only (Ascend910B, 910_93): A5's IR has other operations. The library functions are modelled from their
names and operands, their sources are not public: rounding is numpy's, reductions are in numpy's order, exp and log are
exact to float32, and what `nd2nz`, `mma_tile` and `fixpipe` do at ragged edges is an assumption (stated where it is
made). The order of two pipes is checked on on-chip memory, not on global memory. Between the cores of a block, flags
must match; an access that no flag orders shows only if the threads happen to run so. Blocks run one after the other: a
race between two of them shows as overlapping writes only. Scalar accesses of global memory see everything at once: the
data cache is not modelled. Time is not modelled at all. The closed stage may still break what is right here.
"""

from hivm_emulator.launch import launch
from hivm_emulator.memory import (
    DeadlockError,
    EmulationError,
    FlagError,
    OutOfBoundsError,
    RaceError,
    UninitialisedError,
    UnsupportedError,
)

__all__ = [
    "DeadlockError",
    "EmulationError",
    "FlagError",
    "OutOfBoundsError",
    "RaceError",
    "UninitialisedError",
    "UnsupportedError",
    "launch",
]
