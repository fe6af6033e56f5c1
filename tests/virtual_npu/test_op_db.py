"""PyTorch's operator database on the virtual NPU (arithmetic by the CPU): what differs from the CPU is in op_db.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import scripts
import torch

pytest.importorskip(
    "torch.testing._internal.common_methods_invocations",
    reason="torch's operator database needs the expecttest package",
)
HERE = Path(__file__).parent
SHARE = 0.995  # of all samples, and of those of each dtype that torch_npu does not refuse by itself, equal the CPU's


@pytest.fixture(scope="module")
def op_db_sweep():
    return scripts.load(HERE / "op_db_sweep.py")


def known() -> set[str]:
    """The operators that the committed page lists."""
    rows = re.findall(r"^\| .+ \| \d+ \| (.+) \|$", (HERE / "op_db.md").read_text(), flags=re.MULTILINE)
    return {name for row in rows for name in row.split("; ")}


def check(counts, least: int) -> None:
    new = {name: entry for name, entry in counts.failures.items() if name not in known()}
    assert not new, f"not in op_db.md: {new}"
    assert counts.samples >= least


def test_the_committed_page_has_the_share_that_is_promised() -> None:
    heading = r"^## \w+: (\d+) of (\d+) samples .+\n\n.+; of the (\d+) others"
    found = [tuple(map(int, row)) for row in re.findall(heading, (HERE / "op_db.md").read_text(), flags=re.MULTILINE)]
    assert len(found) == 5
    assert sum(equal for equal, _, _ in found) >= SHARE * sum(total for _, total, _ in found)
    assert all(equal >= SHARE * accepted for equal, _, accepted in found)


@pytest.mark.filterwarnings("ignore")
def test_a_share_of_the_operators(op_db_sweep) -> None:
    counts = op_db_sweep.sweep(op_db_sweep.op_db[::9], torch.float32, 3)
    check(counts, 180)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool], ids=str)
def test_every_sample_of_every_operator(op_db_sweep, dtype: torch.dtype) -> None:
    counts = op_db_sweep.sweep(op_db_sweep.op_db, dtype, 0)
    check(counts, 2000)
    assert counts.failed - counts.refused <= (1 - SHARE) * (counts.samples - counts.refused)
