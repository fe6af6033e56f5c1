"""torch.distributed on virtual NPUs (arithmetic by the CPU): torch_npu's own process group over software collectives.

The checks are the functions of rank_collectives.py, rank_training.py and rank_failures.py, named below; each world is
started once and runs all of its checks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COLLECTIVES = """
    all_reduce_of_every_dtype_and_operation half_types_are_summed_without_losing_digits long_tensors_go_in_pieces
    broadcast_reduce_gather_scatter all_gather_lists_and_tensors reduce_scatter_lists_and_tensors
    all_to_all_even_uneven_and_lists send_and_receive_alone_crossed_and_in_batches objects_barriers_and_work_handles
    groups_within_the_group coalesced_calls
""".split()
TRAINING = """
    ddp fsdp1 fsdp2 hsdp_on_a_two_dimensional_mesh tensor_parallel sequence_parallel_attention_by_all_to_all
""".split()
FAILURES = """
    ranks_in_different_calls_are_told_so ranks_that_disagree_about_lengths_are_told_so
    a_rank_that_does_not_come_is_a_timeout a_rank_that_is_killed_ends_the_others
""".split()
# Each world: how many ranks (more than the two devices share them), and its checks.
WORLDS = {
    "two ranks": (2, [*COLLECTIVES, "float64_is_refused_by_torch_npu_as_on_the_device", *TRAINING]),
    "four ranks": (4, [*COLLECTIVES, "hsdp_on_a_two_dimensional_mesh"]),
    "three ranks that fail": (3, FAILURES),
}
SCRIPT = Path(__file__).with_name("rank_checks.py")


def _run(size: int, checks: list[str], folder: Path) -> list[dict[str, str]]:
    """Start the ranks of a world and wait for them; what each has to say about each check, "" where it holds."""
    ranks = []
    for rank in range(size):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(size)}
        with (folder / f"{rank}.log").open("w") as log:
            command = [sys.executable, str(SCRIPT), ",".join(checks), str(folder)]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=250) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    logs = "\n".join((folder / f"{rank}.log").read_text()[-3000:] for rank in range(size))
    killed = 1 if checks == FAILURES else 0
    assert codes == [0] * (size - killed) + [-signal.SIGKILL] * killed, logs
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size - killed)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory):
    seen: dict[str, list[dict[str, str]]] = {}

    def of(world: str) -> list[dict[str, str]]:
        if world not in seen:
            seen[world] = _run(*WORLDS[world], tmp_path_factory.mktemp("world"))
        return seen[world]

    return of


@pytest.mark.parametrize(
    ("world", "check"), [(world, check) for world, (_, checks) in WORLDS.items() for check in checks]
)
def test_every_rank(world: str, check: str, results) -> None:
    for rank, found in enumerate(results(world)):
        assert not found[check], f"rank {rank}:\n{found[check]}"
