"""Weights that FSDP has sharded, on 1, 2, 4 and 2 x 2 ranks: gradients are those of one process with all the data."""

from __future__ import annotations

from itertools import product

import gloo_ranks
import pytest

_MESHES = ("1 rank", "2 ranks", "4 ranks", "2 x 2 ranks")
_DIRECT = [f"direct, {mesh}, torch.{dtype}" for mesh, dtype in product(_MESHES, ("float32", "bfloat16"))]
_DIRECT += ["direct, wider weight under autocast", "direct, rows left out", "direct, frozen weight"]
_FSDP2 = [f"fsdp2 untied, {mesh}" for mesh in _MESHES]
_FSDP2 += ["fsdp2 tied, 2 ranks", "fsdp2 tied, 2 x 2 ranks", "fsdp2 with bias", "fsdp2 bfloat16"]
_TENSOR_PARALLEL = "direct, fsdp and tensor parallel"
_FSDP1 = [f"fsdp1 {model} use_orig_params={given}" for model in ("qwen2", "qwen2_tied") for given in (True, False)]
_FSDP1 += ["fsdp1 head its own unit"]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Scenario -> error over what is allowed; `tests/sharded_scenarios.py` says what they do."""
    return gloo_ranks.run(4, "sharded_scenarios", tmp_path_factory.mktemp("ranks") / "store")


@pytest.mark.parametrize("scenario", _DIRECT)
def test_a_dtensor_weight_outside_any_forward(errors: dict[str, float], scenario: str) -> None:
    assert errors[scenario] < 1


@gloo_ranks.newer_gloo
def test_a_weight_of_fsdp2_over_tensor_parallelism(errors: dict[str, float]) -> None:
    assert errors[_TENSOR_PARALLEL] < 1


@gloo_ranks.newer_gloo
@pytest.mark.case("D20", "A30")
def test_fsdp2_with_a_trained_copy_of_the_head(errors: dict[str, float]) -> None:
    pytest.importorskip("peft")
    assert errors["fsdp2 modules_to_save"] < 1


@gloo_ranks.newer_gloo
@pytest.mark.case("D12")
@pytest.mark.parametrize("scenario", _FSDP2)
def test_fsdp2_with_accumulated_gradients(errors: dict[str, float], scenario: str) -> None:
    assert errors[scenario] < 1


@pytest.mark.case("D20")
@pytest.mark.parametrize("scenario", _FSDP1)
def test_fsdp1_with_accumulated_gradients(errors: dict[str, float], scenario: str) -> None:
    assert errors[scenario] < 1


@gloo_ranks.newer_gloo
def test_every_scenario_has_a_test(errors: dict[str, float]) -> None:
    assert set(errors) - {"fsdp2 modules_to_save"} == {*_DIRECT, *_FSDP2, _TENSOR_PARALLEL, *_FSDP1}
