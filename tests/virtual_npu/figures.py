"""What the virtual NPU (arithmetic by the CPU) costs, measured here and now, in CPU seconds and on the clock:

    npu-backend run --virtual-npu=2 -- python tests/virtual_npu/figures.py [import] [operator] [model] [all_reduce]

CPU seconds are user and system time of the measured process, of use on a machine that others load too; each figure is
the least of several tries. That 200 starts and kills leave nothing behind is tested by test_hccl_leftovers.py.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

TRIES = 5
MEBIBYTE = 1 << 20


def _least(function: Callable[[], object], tries: int = TRIES) -> tuple[float, float]:
    """CPU and clock seconds of the cheapest try."""
    found = []
    for _ in range(tries):
        cpu, clock = time.process_time(), time.perf_counter()
        function()
        found.append((time.process_time() - cpu, time.perf_counter() - clock))
    return min(cpu for cpu, _ in found), min(clock for _, clock in found)


def _child(code: str, **environment: str) -> float:
    """CPU seconds of a new Python that runs this code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **environment}, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def import_() -> None:
    """`import torch_npu` and activation: a Python with torch and the virtual NPU, less one with torch alone."""
    alone = min(_child("import torch", NPU_BACKEND_VIRTUAL_NPU="", TORCH_DEVICE_BACKEND_AUTOLOAD="0") for _ in range(3))
    whole = min(_child("import torch") for _ in range(3))
    print(f"import torch_npu and activation: {whole - alone:.2f} s CPU (torch alone {alone:.2f}, all {whole:.2f})")


def operator() -> None:
    """One addition of two small tensors, less the same on the CPU."""
    import torch

    calls = 5000
    spent = {}
    for device in ("cpu", "npu"):
        x = torch.ones(8, device=device)

        def add(x: torch.Tensor = x) -> None:
            for _ in range(calls):
                x + x

        spent[device] = _least(add)
    cpu, clock = ((spent["npu"][i] - spent["cpu"][i]) / calls * 1e6 for i in (0, 1))
    print(f"overhead per operator: {cpu:.0f} us CPU, {clock:.0f} us on the clock")


def model() -> None:
    """Forward and backward of SmolLM2-135M's geometry, random weights, 4 x 48 tokens, eager attention."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    twin = LlamaForCausalLM(config)
    tokens = torch.randint(0, config.vocab_size, (4, 48))
    spent = {}
    for device in ("cpu", "npu"):
        twin, here = twin.to(device), tokens.to(device)
        spent[device] = _least(lambda m=twin, t=here: m(input_ids=t, labels=t).loss.backward(), 3)
    ratio = [spent["npu"][i] / spent["cpu"][i] for i in (0, 1)]
    times = f"{spent['npu'][0]:.2f} s against {spent['cpu'][0]:.2f} s"
    print(f"SmolLM2-135M forward and backward: {ratio[0]:.2f} x the CPU ({times} CPU), {ratio[1]:.2f} x on the clock")


RANK = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("hccl", init_method="tcp://127.0.0.1:29917", rank=int(os.environ["RANK"]), world_size=2)
x = torch.ones(16 << 20, device="npu")
for _ in range(6):
    dist.barrier()
    cpu, clock = time.process_time(), time.perf_counter()
    dist.all_reduce(x)
    torch.npu.synchronize()
    print(time.process_time() - cpu, time.perf_counter() - clock, flush=True)
dist.destroy_process_group()
"""


def all_reduce() -> None:
    """64 MiB between two ranks, each a process."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True, env={**os.environ, "RANK": rank}
        )
        for rank in "01"
    ]
    lines = ranks[0].communicate()[0].splitlines()
    ranks[1].communicate()
    cpu, clock = zip(*(map(float, line.split()) for line in lines[1:]))  # the first one touches new memory
    middle = statistics.median(clock)
    best = f"{min(clock):.3f} s on the clock (median {middle:.3f}), {min(cpu):.3f} s CPU per rank"
    print(f"all_reduce of 64 MiB, two ranks: {best}")


FIGURES = {"import": import_, "operator": operator, "model": model, "all_reduce": all_reduce}

if __name__ == "__main__":
    print(f"virtual NPU (arithmetic by the CPU), {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name in sys.argv[1:] or FIGURES:
        FIGURES[name]()
