"""Patches and fused head on tiny models of transformers, on the virtual NPU (arithmetic by the CPU): all of them are in
patched_zoo.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import scripts
import tiny_zoo
import transformers
from tiny_models import one_thread  # noqa: F401  # a fixture

pytestmark = [
    pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="the types are those of transformers 5"),
    pytest.mark.filterwarnings("ignore"),
]
HERE = Path(__file__).parent
# Different in structure: plain and offset norms, norms that round last, without weight, with a gate; SiLU and GELU;
# one and two projections; whole, partial, interleaved and single rotary; experts in three layouts; softcap and scale.
SAMPLE = (
    "apertus", "bamba", "cohere", "deepseek_v3", "diffllama", "ernie4_5_moe", "falcon_h1", "gemma", "gemma3_text",
    "gemma4_text", "glm4", "glm_moe_dsa", "gpt2", "gpt_oss", "granitemoeshared", "helium", "lfm2", "llama4_text",
    "mamba2", "nanochat", "olmo2", "phi3", "qwen3_moe", "qwen3_next", "starcoder2",
)  # fmt: skip
REFUSED = {"prophetnet": "__getitem__"}  # type -> what the head cannot follow in its forward


zoo = scripts.load(HERE / "patched_zoo_sweep.py")


def types() -> list:
    return [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in tiny_zoo.buildable_types()]


@pytest.mark.parametrize("name", types())
def test_patched_and_with_the_fused_head_as_without(name: str) -> None:
    row = zoo.check(name)
    assert row.patched in (("equal",) if row.calls else ("nothing of it is patched",))
    if name in REFUSED:
        assert row.head.startswith("refused: ")
        assert REFUSED[name] in row.head
    else:
        assert row.head == "equal"


def rows() -> dict[str, list[str]]:
    lines = re.findall(r"^\| (\S+) \| (.*) \|$", (HERE / "patched_zoo.md").read_text(), flags=re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in lines if name not in ("model", "---")}


def test_the_committed_page_has_every_type_and_no_failure() -> None:
    found = rows()
    assert list(found) == list(tiny_zoo.buildable_types())
    assert {cells[-2].strip() for cells in found.values()} == {"equal", "nothing of it is patched"}
    assert {name for name, cells in found.items() if cells[-1].strip() != "equal"} == set(REFUSED)
