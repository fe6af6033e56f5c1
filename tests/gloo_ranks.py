"""Runs a module's scenarios on several ranks (gloo, CPU): `python gloo_ranks.py WORLD MODULE STORE`.

The module is imported once and then forked, which costs one start for all ranks. Its `scenarios()` is called on each
rank and yields (name, number), the same names in the same order; the last line printed is JSON: name -> the largest
number of any rank.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch.distributed.fsdp

TESTS = Path(__file__).parent
newer_gloo = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "fully_shard"),
    reason="gloo of torch 2.5 has no mean, which FSDP2 takes, and can wait for itself when it is destroyed",
)
SECONDS = 240


def run(world: int, module: str, store: Path, **environment: str) -> dict[str, float]:
    """The numbers that `module`'s scenarios gave; fails with what the ranks printed."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, str(world), module, str(store)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _rank(rank: int, world: int, name: str, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    found = dict(sys.modules[name].scenarios())
    numbers = torch.tensor(list(found.values()), dtype=torch.float64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    dist.barrier()
    if rank == 0:
        print(json.dumps(dict(zip(found, numbers.tolist()))), flush=True)


def _main(world: int, name: str, store: str) -> int:
    importlib.import_module(name)
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _rank(rank, world, name, store)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:  # the others would wait for it
            for other in children:
                os.kill(other, 9)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
