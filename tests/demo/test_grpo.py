"""GRPO: sampling, advantages, the loss and its labels, on a tiny random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import npu_backend
from npu_backend.demo import checkpoint, grpo

SETTINGS = grpo.Settings(groups=2, group_size=3, new_tokens=5, learning_rate=1e-3)
PROMPTS = [[10, 11, 12, 13, 14], [20, 21]]


@pytest.fixture
def model(tiny_folder: Path) -> Any:
    return checkpoint.load(checkpoint.find(str(tiny_folder)))[0].eval()


def sample(model: Any, stop: int = 2) -> grpo.Rollout:
    torch.manual_seed(3)
    return grpo.sample(model, PROMPTS, stop, SETTINGS, lambda: None)


def test_advantages_compare_within_a_group_only() -> None:
    found = grpo.advantages(torch.tensor([1.0, 3.0, 5.0, 5.0, 5.0, 5.0]), 3)
    assert found[:3].tolist() == pytest.approx([-1.2247449, 0.0, 1.2247449])
    assert found[3:].tolist() == [0.0, 0.0, 0.0]


def test_sampling_with_a_cache_and_padding_follows_the_models_own_distribution(model: Any) -> None:
    """The log-probs that a pass without cache or padding gives to the answers are those they were drawn with."""
    rollout = sample(model)
    assert rollout.input_ids.shape == (6, 10)
    greedy = _greedy(model, rollout)
    for row, answer in enumerate(rollout.answers):
        prompt = PROMPTS[row // 3]
        ids = torch.tensor([[*prompt, *answer]])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(logits, greedy[row][: len(answer)], atol=2e-5, rtol=1e-4)


def _greedy(model: Any, rollout: grpo.Rollout) -> list[Tensor]:
    """Logits at the answers' tokens from the padded batch."""
    mask = rollout.attention_mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=rollout.input_ids, attention_mask=mask, position_ids=positions).logits
    return [logits[row][rollout.shift_labels[row] != grpo.IGNORED] for row in range(len(logits))]


def test_labels_are_the_answers_tokens_with_the_stop_token_and_nothing_else(model: Any) -> None:
    with torch.no_grad():  # a model that often stops
        model.lm_head.weight[2] += 0.3 * model.lm_head.weight.std()
        model.model.norm.weight.fill_(0.0)  # every token equally likely, whatever came before
    torch.manual_seed(0)
    settings = grpo.Settings(groups=2, group_size=40, new_tokens=60)
    rollout = grpo.sample(model, PROMPTS, 2, settings, lambda: None)
    stopped = [answer for answer in rollout.answers if answer[-1] == 2]
    assert stopped
    assert all(2 not in answer[:-1] for answer in rollout.answers)
    for row, answer in enumerate(rollout.answers):
        labels = rollout.shift_labels[row]
        assert labels[labels != grpo.IGNORED].tolist() == answer


def test_the_same_seed_gives_the_same_answers(model: Any) -> None:
    assert sample(model).answers == sample(model).answers


def test_the_first_minibatch_of_an_update_has_ratio_one_and_the_loss_falls_along_the_advantage(model: Any) -> None:
    npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    rollout = sample(model)
    advantage = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 0.0])
    whole = slice(0, 6)
    before = grpo.log_probs(model, rollout, whole)[0].detach()
    settings = grpo.Settings(groups=2, group_size=3, new_tokens=5, minibatches=1, learning_rate=1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    made = grpo.update(model, optimizer, rollout, advantage, settings, lambda: None)
    assert made.ratio_range == (1.0, 1.0)
    after = grpo.log_probs(model, rollout, whole)[0].detach()
    gain = ((after - before).sum(1) * advantage).sum()
    assert gain > 0
    assert made.entropy > 0


def test_the_loss_is_the_clipped_objective(model: Any) -> None:
    """Against a plain computation with full logits, on the second of two mini-batches, where the ratio is not one."""
    npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    rollout = sample(model)
    advantage = torch.tensor([1.0, -1.0, 0.5, 2.0, -2.0, 0.25])
    seen: list[float] = []
    optimizer = _Peeking(model, rollout, advantage, seen)
    made = grpo.update(model, optimizer, rollout, advantage, SETTINGS, lambda: None)
    counts = [int((rollout.shift_labels[rows] != grpo.IGNORED).sum()) for rows in (slice(0, 3), slice(3, 6))]
    expected = sum(loss * count for loss, count in zip(seen, counts)) / sum(counts)
    assert made.loss == pytest.approx(expected, abs=1e-6)
    assert made.ratio_range[0] < 1.0 < made.ratio_range[1]


class _Peeking(torch.optim.SGD):
    """Before each step, the loss of that mini-batch as full logits give it."""

    def __init__(self, model: Any, rollout: grpo.Rollout, advantage: Tensor, seen: list[float]) -> None:
        super().__init__(model.parameters(), lr=0.5)
        self.model, self.rollout, self.advantage, self.seen = model, rollout, advantage, seen
        self.old = self._full_logits()

    def _full_logits(self) -> Tensor:
        with torch.no_grad():
            mask = self.rollout.attention_mask
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = self.model(
                input_ids=self.rollout.input_ids, attention_mask=mask, position_ids=positions, use_cache=True
            ).logits
        labels = self.rollout.shift_labels.clamp(min=0)
        return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    def step(self, closure: Any = None) -> None:
        rows = slice(0, 3) if not self.seen else slice(3, 6)
        kept = self.rollout.shift_labels[rows] != grpo.IGNORED
        ratio = (self._full_logits()[rows] - self.old[rows]).exp()
        gain = self.advantage[rows, None]
        objective = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        self.seen.append(float(-objective[kept].mean()))
        super().step(closure)
