"""Operators on DTensor activations of two gloo ranks: tests/sharded_operator_scenarios.py says what is compared."""

from __future__ import annotations

from pathlib import Path

import gloo_ranks
import pytest


@pytest.mark.case("B15")
@gloo_ranks.newer_gloo
def test_dtensor_activations_keep_values_gradients_and_placements(tmp_path: Path) -> None:
    compared = gloo_ranks.run(2, "sharded_operator_scenarios", tmp_path / "store")
    assert compared == {"rms_norm": 9, "gated_mlp": 4, "rms_norm's fallbacks": 2}
