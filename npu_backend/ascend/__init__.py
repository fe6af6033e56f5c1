"""Ascend kernels through the vendor's compiler on a machine without an Ascend: `npu-backend compile-check`.

`toolchain` finds or fetches triton-ascend and bishengir-compile; `check` starts the `worker`, a Python that has them,
and collects a `report`. In the worker, `front_end` takes a kernel through triton-ascend, `vendor` through
bishengir-compile up to its closed last stage, and `liger_launches` records what Liger's operators would launch.

What it shows: that every operation is supported, and that the memory planner finds room for every buffer on chip. No
machine code is made, nothing is executed, and no speed follows from it.
"""
