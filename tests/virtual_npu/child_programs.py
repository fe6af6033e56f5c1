"""Programs that start processes of their own, for test_child_processes.py: `python child_programs.py NAME [ARGUMENT]`.

Each prints what the processes it started computed on a virtual NPU (arithmetic by the CPU).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch


def on_device(number: int) -> float:
    """number + 1 + 1, computed on one of the devices."""
    assert torch.npu.device_count() == 2
    return float((torch.full((3,), number, device=f"npu:{number % 2}") + 1).add_(1)[0])


def ranks() -> None:
    """Started by torchrun: the sum over ranks of rank + 1, by torch_npu's process group."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.npu.set_device(rank)
    torch.distributed.init_process_group("hccl")
    value = torch.full((4,), rank + 1.0, device="npu")
    torch.distributed.all_reduce(value)
    print(f"rank {rank} of {torch.distributed.get_world_size()}: {value[0].item()} {value.device}", flush=True)
    torch.distributed.destroy_process_group()


class Numbers(torch.utils.data.Dataset):
    """0 to 9; `compute`: each by way of a device, in the worker."""

    def __init__(self, compute: bool) -> None:
        self.compute = compute

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(on_device(index) if self.compute else index + 2.0)


def loader(method: str) -> None:
    """Two workers; pinned batches go to the device. Spawned workers use a device themselves."""
    torch.ones(1, device="npu:1")  # the parent is at work before the workers start
    numbers = Numbers(compute=method == "spawn")
    batches = torch.utils.data.DataLoader(
        numbers, batch_size=4, num_workers=2, pin_memory=True, multiprocessing_context=method
    )
    for batch in batches:
        pinned, moved = batch.is_pinned(), batch.to("npu:1", non_blocking=True)
        print(pinned, moved.device, moved.sum().item())


def _spawned(index: int, queue: Any) -> None:
    queue.put((index, on_device(index)))


def spawn() -> None:
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_spawned, (queue,), nprocs=2)
    print(sorted([queue.get(), queue.get()]))


def ray() -> None:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    folder = os.path.dirname(os.path.abspath(__file__))

    @ray.remote
    def task(number: int) -> float:
        sys.path.append(folder)
        from child_programs import on_device

        return on_device(number)

    print(ray.get([task.remote(number) for number in range(2)]))
    ray.shutdown()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
