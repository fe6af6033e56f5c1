"""The vocabulary divided among ranks: what one process with all of it computes, without gathering it anywhere.

The scenarios also hold the number of collectives and of the elements they carry, and the errors, on every rank.
"""

from __future__ import annotations

import gloo_ranks
import interpreted
import pytest

_PARTS = [
    "4 uneven parts",
    "bfloat16",
    "bias, scale, softcap, temperature per row",
    "entropy only",
    "log-probs only",
    "cached logits",
    "no rows",
    "large logits",
    "a part of -inf",
    "some rows without upstream gradients",
    "no row with an upstream gradient",
    "rows left out",
    "rows left out, every option, cached logits",
    "every row left out",
    "batch invariant",
    "fsdp over the data, parts over the rest",
]
_TORCH_ONLY = {"large logits", "batch invariant", "fsdp over the data, parts over the rest"}
_LABELS = ["all labels in the first part", "all labels in the second part", "labels on the edges"]
_MEGATRON = [
    "Megatron's call",
    "Megatron's call after its gather, which sums",
    "Megatron's call after its gather, which does not sum",
    "Megatron's call after its copy, which sums",
]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Scenario -> error over what is allowed; `tests/vocab_parallel_scenarios.py` says what they do."""
    return gloo_ranks.run(4, "vocab_parallel_scenarios", tmp_path_factory.mktemp("ranks") / "store")


@pytest.mark.case("D25", "D35")
@interpreted.supported
def test_the_same_on_the_triton_backend(tmp_path) -> None:
    errors = gloo_ranks.run(4, "vocab_parallel_scenarios", tmp_path / "store", TRITON_INTERPRET="1")
    assert set(errors) >= {*_LABELS, *_PARTS} - _TORCH_ONLY
    assert max(errors.values()) < 1, errors


@pytest.mark.case("D35")
@pytest.mark.parametrize("scenario", _PARTS)
def test_parts_give_what_the_whole_vocabulary_gives(errors: dict[str, float], scenario: str) -> None:
    assert errors[scenario] < 1


@pytest.mark.case("D25")
@pytest.mark.parametrize("scenario", _LABELS)
def test_a_label_in_another_rank_s_part(errors: dict[str, float], scenario: str) -> None:
    assert errors[scenario] < 1


@pytest.mark.case("D35")
@pytest.mark.parametrize("scenario", _MEGATRON)
def test_the_hidden_gradient_is_summed_once_whoever_does_it(errors: dict[str, float], scenario: str) -> None:
    assert errors[scenario] < 1


def test_every_scenario_has_a_test(errors: dict[str, float]) -> None:
    assert set(errors) == {*_PARTS, *_LABELS, *_MEGATRON}
