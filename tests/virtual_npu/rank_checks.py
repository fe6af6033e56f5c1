"""What a rank of test_distributed.py runs on virtual NPUs (arithmetic by the CPU): `rank_checks.py NAMES FOLDER`.

The checks are the functions of `rank_collectives`, `rank_training` and `rank_failures`; what one raises is written to
FOLDER/<rank>.json for the test to show.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import pytest
import rank_collectives
import rank_failures
import rank_training
import torch
import torch.distributed as dist
from this_rank import DEVICE, RANK, WORLD

CHECKS = {**vars(rank_collectives), **vars(rank_training), **vars(rank_failures)}


def main(names: list[str], folder: Path) -> None:
    torch.npu.set_device(DEVICE)
    dist.init_process_group("hccl", init_method=f"file://{folder}/store", rank=RANK, world_size=WORLD)
    results = {}
    for name in names:
        try:
            CHECKS[name]()
            results[name] = ""
        except (Exception, pytest.fail.Exception):  # the latter is what pytest.raises raises; it is no Exception
            results[name] = traceback.format_exc()
    (folder / f"{RANK}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]))
