"""How the PPO head's Ascend kernels are launched: what fits on chip, grids, arguments. No kernel runs here."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

from npu_backend import soc as socs
from npu_backend.head import ascend_launches

FORMS = [{"bias": bias, "softcap": softcap} for bias, softcap in itertools.product((False, True), repeat=2)]


def all_launches() -> list[tuple[socs.Soc, ascend_launches.KernelLaunch]]:
    return [
        (chip, launch)
        for chip, dtype, form in itertools.product(socs.SOCS.values(), ascend_launches.DTYPES, FORMS)
        for vocab_size in (32000, 128256, 151936, 248320)
        for launch in ascend_launches.kernel_launches(chip, vocab_size, 4096, dtype, **form)
    ]


@pytest.mark.case("C02")
def test_blocks_fit_into_the_unified_buffer() -> None:
    """What is held at once, by count: a row kernel has the logits twice (ping-pong) and two blocks in float32."""
    for chip, launch in all_launches():
        if "BLOCK" in launch.constants:
            narrow = launch.signature.get("logits_ptr") in ("*bf16", "*fp16")
            held = launch.constants["BLOCK"] * (2 * (2 if narrow else 4) + 2 * 4)
            assert held <= chip.ub_bytes == (196608 if chip.generation != "A5" else 253952)
        else:
            tile = launch.constants["ROWS"] * launch.constants["COLUMNS"]
            assert 4 * tile <= chip.l0c_bytes
            operands = 2 * (launch.constants["ROWS"] + launch.constants["COLUMNS"]) * launch.constants["DEPTH"]
            assert operands * (4 if launch.signature["hidden_ptr"] == "*fp32" else 2) <= chip.l1_bytes


@pytest.mark.case("C03")
def test_grids_are_core_counts_and_far_below_the_limit() -> None:
    for chip, launch in all_launches():
        cores = chip.cube_cores if launch.kernel == "fused_forward" else chip.vector_cores
        assert launch.grid == (cores,)
        assert cores <= 65535


def test_a_vocabulary_smaller_than_a_tile_has_no_fused_forward() -> None:
    chip = socs.find_soc("Ascend910B3")
    names = {launch.kernel for launch in ascend_launches.kernel_launches(chip, 255, 64, "bf16")}
    assert names == {"rows_forward", "rows_backward"}


@pytest.mark.case("C04")
def test_launches_pass_what_the_kernels_take_and_no_options_of_other_devices() -> None:
    """Read from the kernels' source: importing it takes triton, and leaves it without its interpreter."""
    source = Path(ascend_launches.__file__).with_name("ascend_kernels.py").read_text(encoding="utf-8")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    taken = {function.name: [argument.arg for argument in function.args.args] for function in functions}
    for _, launch in all_launches():
        assert taken[launch.kernel] == [*launch.signature, *launch.constants]
        assert not {"num_warps", "num_stages"} & {*launch.signature, *launch.constants}


@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 256), (1, 300), (128, 151936), (4096, 151936), (2, 248320)])
def test_parts_of_the_fused_forward_cover_the_vocabulary_and_occupy_the_cores(rows: int, vocab_size: int) -> None:
    launch = ascend_launches.fused_forward(socs.find_soc("Ascend910B3"), "bf16")
    parts, part_columns = ascend_launches.fused_parts(launch, rows, vocab_size)
    assert (parts - 1) * part_columns < vocab_size <= parts * part_columns
    assert part_columns % launch.constants["COLUMNS"] == 0
    tasks = parts * -(-rows // launch.constants["ROWS"])
    assert tasks <= launch.grid[0] or parts == 1


def test_an_unknown_chip_gets_the_smallest_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    chip = socs.find_or_smallest("Ascend910X9")
    assert (chip.ub_bytes, chip.vector_cores) == (192 * 1024, 40)
    assert "unknown Ascend chip 'Ascend910X9'" in caplog.text
    assert socs.find_or_smallest("Ascend910_9392").name == "Ascend910_9392"
