"""The adapter on two ranks: one line in the log, and the gradients of one process under DDP and FSDP2."""

from __future__ import annotations

import gloo_ranks
import pytest

pytestmark = gloo_ranks.newer_gloo


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Scenario -> number; `tests/adapter_scenarios.py` says what they are."""
    return gloo_ranks.run(2, "adapter_scenarios", tmp_path_factory.mktemp("ranks") / "store")


@pytest.mark.case("A21")
def test_one_rank_says_that_the_fused_head_is_off_and_why(found: dict[str, float]) -> None:
    assert (found["lines of rank 0"], found["lines of rank 1"]) == (1, 0)


@pytest.mark.case("D12")
@pytest.mark.parametrize("scenario", ["ddp", "fsdp2 untied", "fsdp2 tied", "fsdp2 softcap"])
def test_gradients_are_those_of_one_process_with_all_the_data(found: dict[str, float], scenario: str) -> None:
    """float32: relative to the largest entry, a few hundred roundings. A lost reduction would be of order 1."""
    assert found[scenario] < 1e-5
