"""Tiny models of transformers train on the virtual NPU (arithmetic by the CPU) as on the CPU: all in model_zoo.md."""

from __future__ import annotations

import importlib.util
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
# different in structure: dense, experts, latent and linear attention, state spaces, recurrence, convolutions, ...
SAMPLE = (
    "llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "qwen3_next", "mamba2", "rwkv", "recurrent_gemma", "lfm2",
    "gpt2", "bloom", "prophetnet", "xlnet", "llama4_text",
)  # fmt: skip
SAMPLE_WITH_IMAGE = ("qwen2_5_vl", "qwen3_vl_moe")
LEFT_TO_CPU = {"aten::_assert_async.msg"}  # torch_npu has no kernel of it: its own fallback runs, as on a device


zoo = scripts.load(HERE / "model_zoo_sweep.py")


def check(types: tuple[str, ...], families: tuple[str, ...] = ()) -> None:
    found = zoo.sweep(types, families)
    assert found.failures == {}
    assert set(found.left_to_cpu) <= LEFT_TO_CPU
    assert all(row.gradients for row in (*found.text, *found.vision))
    assert len(found.operators) > 20  # so it was the device that trained


def rest(names: tuple[str, ...], sample: tuple[str, ...]) -> list:
    return [pytest.param(name, marks=() if name in sample else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", rest(tiny_zoo.buildable_types(), SAMPLE))
def test_language_model(name: str) -> None:
    check((name,))


@pytest.mark.parametrize("name", rest(zoo.VISION_FAMILIES, SAMPLE_WITH_IMAGE))
def test_with_an_image(name: str) -> None:
    check((), (name,))


def test_the_committed_page_has_every_type_and_no_failure() -> None:
    text = (HERE / "model_zoo.md").read_text()
    rows = re.findall(r"^\| (\S+) \| equal \| [1-9]\d* of \d+ \| \S+ \|$", text, flags=re.MULTILINE)
    assert rows == [*tiny_zoo.buildable_types(), *zoo.VISION_FAMILIES]
    for name, reason in tiny_zoo.UNBUILDABLE.items():
        assert f"| {name} | {reason} |" in text
    assert f"Those that torch_npu itself leaves to the CPU: {', '.join(sorted(LEFT_TO_CPU))}." in text


@pytest.mark.parametrize("name", list(tiny_zoo.UNBUILDABLE))
def test_what_is_said_to_have_no_tiny_model_has_none(name: str) -> None:
    if name == "gemma3n" and importlib.util.find_spec("timm"):
        pytest.skip("timm is installed")
    with pytest.raises(Exception, match="timm|vocab_size|text_encoder"):
        tiny_zoo.build(name)
