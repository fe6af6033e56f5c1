"""Group relative policy optimisation in plain PyTorch: sample groups of answers, compare within a group, update.

Sampling asks the model for the logits of one position; log-probs and entropy come from the fused head that
`patch_forward_with_backends` put on it, so the logits of a whole batch never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Settings:
    """Sizes and constants of the demo's training. `groups` prompts with `group_size` answers each."""

    groups: int = 8
    group_size: int = 4
    new_tokens: int = 16
    minibatches: int = 2
    learning_rate: float = 5e-6
    clip: float = 0.2


@dataclass(frozen=True)
class Rollout:
    """Prompts with their sampled answers, [B, S] each: prompts padded on the left, answers on the right.

    `shift_labels` holds the next token where that is part of an answer, else -100.
    """

    input_ids: Tensor
    attention_mask: Tensor
    shift_labels: Tensor
    answers: list[list[int]]


@dataclass(frozen=True)
class Update:
    """What one GRPO update did: means over the answers' tokens, `ratio_range` over the tokens of every mini-batch."""

    loss: float
    entropy: float
    ratio_range: tuple[float, float]
    grad_norm: float


@torch.no_grad()
def sample(
    model: Any, prompts: Sequence[Sequence[int]], stop: int, settings: Settings, tick: Callable[[], None]
) -> Rollout:
    """Sample `group_size` answers to each prompt at temperature 1. The draws come from torch's CPU generator, so that
    the same seed gives the same answers on every device.

    Args:
        model: a causal language model, with or without the fused head.
        prompts: token ids.
        stop: the token that ends an answer, also used for padding.
        settings: how many answers, of how many tokens.
        tick: called once per token of the answers.
    """
    device = model.device
    longest = max(map(len, prompts))
    ids = torch.tensor([[stop] * (longest - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    out = model(input_ids=ids, attention_mask=mask, position_ids=_positions(mask), use_cache=True)
    cache, logits = out.past_key_values, out.logits[:, -1].repeat_interleave(settings.group_size, 0)
    cache.batch_repeat_interleave(settings.group_size)
    ids, mask = (t.repeat_interleave(settings.group_size, 0) for t in (ids, mask))
    going = torch.ones(len(ids), dtype=torch.bool)
    for step in range(settings.new_tokens):
        drawn = torch.multinomial(logits.float().cpu().softmax(-1), 1)[:, 0]
        drawn = torch.where(going, drawn, stop)
        ids = torch.cat([ids, drawn[:, None].to(device)], 1)
        mask = torch.cat([mask, going[:, None].to(device, mask.dtype)], 1)
        going &= drawn != stop
        tick()
        if step + 1 < settings.new_tokens and going.any():
            position = _positions(mask)[:, -1:]
            out = model(
                input_ids=ids[:, -1:], attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
            )
            logits = out.logits[:, -1]
    answered = mask.bool() & (torch.arange(mask.shape[1], device=device) >= longest)
    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = ids[:, 1:].masked_fill(~answered[:, 1:], IGNORED)
    answers = [row[kept].tolist() for row, kept in zip(ids.cpu(), answered.cpu())]
    return Rollout(ids, mask, labels, answers)


def advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Each answer's reward relative to its group, in the group's standard deviations; 0 in a group of equals. [B]."""
    groups = rewards.reshape(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    spread = centred.pow(2).mean(1, keepdim=True).sqrt()
    return torch.where(spread > 1e-6, centred / spread.clamp(min=1e-6), 0.0).reshape(-1)


def log_probs(model: Any, rollout: Rollout, rows: slice) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy) of the answers' tokens by the fused head, float32 [B, S], 0 elsewhere."""
    mask = rollout.attention_mask[rows]
    out = model(
        input_ids=rollout.input_ids[rows],
        attention_mask=mask,
        position_ids=_positions(mask),
        shift_labels=rollout.shift_labels[rows],
        temperature=1.0,
        use_cache=False,
    )
    return out.log_probs, out.entropy


def update(
    model: Any, optimizer: Any, rollout: Rollout, advantage: Tensor, settings: Settings, tick: Callable[[], None]
) -> Update:
    """One pass over the rollout in mini-batches with the clipped ratio; from the second on, old and new policy differ.

    Args:
        model: with the fused head on it.
        optimizer: of its parameters.
        rollout: of one `sample`.
        advantage: [B].
        settings: mini-batches and clipping.
        tick: called once per pass of a mini-batch through the model.
    """
    size = -(-len(advantage) // settings.minibatches)
    parts = [slice(start, start + size) for start in range(0, len(advantage), size)]
    old = []
    with torch.no_grad():
        for rows in parts:
            old.append(log_probs(model, rollout, rows)[0])
            tick()
    loss_sum = entropy_sum = tokens = 0.0
    lowest, highest, norm = 1.0, 1.0, 0.0
    for rows, before in zip(parts, old):
        kept = rollout.shift_labels[rows] != IGNORED
        count = kept.sum()
        now, entropy = log_probs(model, rollout, rows)
        ratio = (now - before).exp()
        gain = advantage[rows, None].to(ratio.device)
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        loss = -(torch.minimum(ratio * gain, clipped * gain) * kept).sum() / count
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = max(norm, float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)))
        optimizer.step()
        tick()
        loss_sum += float(loss.detach()) * int(count)
        entropy_sum += float(entropy.detach().sum())
        tokens += int(count)
        seen = ratio.detach()[kept]
        lowest, highest = min(lowest, float(seen.min())), max(highest, float(seen.max()))
    return Update(loss_sum / tokens, entropy_sum / tokens, (lowest, highest), norm)


def _positions(mask: Tensor) -> Tensor:
    """Position of each token in its text, padding on the left counted out."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
