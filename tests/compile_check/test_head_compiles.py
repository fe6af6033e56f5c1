"""Every kernel of the PPO head, on a chip of each kind, in every dtype, for every published model of the table."""

from __future__ import annotations

import pytest

from npu_backend.ascend import models
from npu_backend.ascend.check import DTYPES, check
from npu_backend.ascend.front_end import MOST_PROGRAMS
from npu_backend.ascend.models import Model
from npu_backend.soc import find_soc

pytestmark = pytest.mark.timeout(1800)  # whichever test comes first waits for the compilers
SOCS = ("Ascend910B1", "Ascend910B3", "Ascend910_9392", "Ascend950PR_9579")


@pytest.fixture(scope="module")
def report(compiler):
    return check(models.published(), SOCS, DTYPES, compiler)


def test_every_kernel_compiles_and_keeps_ping_pong(report):
    assert len(report.models) >= 20
    assert report.findings == []
    assert {(row["soc"], row["dtype"]) for row in report.rows} == {(soc, dtype) for soc in SOCS for dtype in DTYPES}
    lost = [(row["soc"], row["dtype"], row["kernel"]) for row in report.rows if row["verdict"]["ping_pong"] != "kept"]
    assert lost == []


def test_every_model_has_its_kernels_and_shares_them(report):
    for soc in SOCS:
        for dtype in DTYPES:
            mine = [row for row in report.rows if (row["soc"], row["dtype"]) == (soc, dtype)]
            for name in report.models:
                kernels = {row["kernel"] for row in mine if name in row["models"]}
                assert any(kernel.startswith("rows_forward") for kernel in kernels), name
                assert any(kernel.startswith("rows_backward") for kernel in kernels), name
            assert len(mine) < len(report.models), "a compile key per model would be a compilation per model"


def test_use_stays_within_the_chip_and_grids_within_the_launcher(report):
    for row in report.rows:
        verdict, soc = row["verdict"], find_soc(row["soc"])
        assert 0 < verdict["use"]["UB"] <= soc.ub_bytes * 8
        assert verdict["capacity"] == {"UB": soc.ub_bytes * 8, "L1": soc.l1_bytes * 8, "L0C": soc.l0c_bytes * 8}
        assert 0 < row["programs"] <= min(MOST_PROGRAMS, soc.vector_cores)


@pytest.mark.case("C02")
@pytest.mark.parametrize("vocab", [97, 1000, 32000, 128256, 151936, 248320])
def test_no_vocabulary_overflows(compiler, vocab):
    model = Model(f"vocabulary {vocab}", {"model_type": "any", "vocab_size": vocab, "hidden_size": 4096})
    found = check([model], ["Ascend910B1"], ["bfloat16"], compiler)
    assert found.rows
    assert found.findings == []
    assert all(row["verdict"]["use"]["UB"] <= 196608 * 8 for row in found.rows)
