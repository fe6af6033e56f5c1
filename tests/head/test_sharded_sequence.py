"""Sequence parallel (Ulysses): shards with the labels that the engine shifted are the whole sequence, cut."""

from __future__ import annotations

import pytest
import torch
from references import head_case
from torch import Tensor

import npu_backend


def _run(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: tuple[Tensor, Tensor]) -> list[Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy, _ = npu_backend.linear_log_prob(hidden, weight, labels, temperature=0.7)
    ((log_probs * upstream[0]).sum() + (entropy * upstream[1]).sum()).backward()
    return [log_probs.detach(), entropy.detach(), hidden.grad, weight.grad]


@pytest.mark.case("D03")
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_with_shifted_labels_are_the_whole_sequence(ranks: int) -> None:
    case = head_case(1, 16)
    tokens = case.labels
    shifted = tokens.roll(-1, dims=-1)
    whole = _run(case.hidden, case.weight, shifted, (case.grad_log_probs, case.grad_entropy))
    cut = [t.chunk(ranks, dim=1) for t in (case.hidden, shifted, case.grad_log_probs, case.grad_entropy)]
    shards = [_run(hidden, case.weight, labels, (g, h)) for hidden, labels, g, h in zip(*cut)]
    for index in range(3):
        joined = torch.cat([shard[index] for shard in shards], dim=1)
        torch.testing.assert_close(joined, whole[index], rtol=1e-5, atol=1e-6)
    of_weight = sum(shard[3] for shard in shards)
    torch.testing.assert_close(of_weight, whole[3], rtol=1e-5, atol=1e-5 * float(whole[3].abs().max()))
    # What each shard would do by itself is wrong at its last position, and only there.
    alone = torch.cat([shard.roll(-1, dims=-1) for shard in tokens.chunk(ranks, dim=1)], dim=1)
    assert (alone != shifted)[0, 16 // ranks - 1 :: 16 // ranks].any()
