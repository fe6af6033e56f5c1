"""The demo's training: a few GRPO updates, a table of them, and what must be true of them."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from npu_backend.demo import arithmetic, grpo
from npu_backend.demo.host import Host, PeakMemory
from npu_backend.demo.scoring import OperatorCalls
from npu_backend.report import table

if TYPE_CHECKING:
    from npu_backend.demo.job import Screen

SEED = 0
SMALLEST_SHARE = 0.5  # of the groups must have an advantage to learn from
_COLUMNS = ("step", "reward", "loss", "entropy", "groups", "seconds")


def train(
    model: Any, plain: Any, tokenizer: Any, stop: int, host: Host, steps: int, screen: Screen
) -> tuple[dict[str, Any], list[str]]:
    """Train the patched model and print what happens.

    Args:
        model: patched, with the fused head on it.
        plain: the same model before any update.
        tokenizer: of the model.
        stop: the token that ends an answer.
        host: where it runs.
        steps: how many updates.
        screen: where to print.

    Returns:
        Facts for JSON, findings.
    """
    from tqdm import tqdm

    settings = grpo.Settings(groups=4, new_tokens=12) if host.interpreter else grpo.Settings()
    problems = arithmetic.additions(steps * settings.groups, SEED)
    torch.manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, foreach=False)
    memory = PeakMemory(host.device)
    rows: list[dict[str, Any]] = []
    ticks = steps * (settings.new_tokens + 2 * settings.minibatches)
    calls = OperatorCalls(model)
    example = ""
    with calls, tqdm(total=ticks, desc=f"GRPO, {host.label}", disable=screen.quiet, file=sys.stderr) as bar:
        for step in range(steps):
            memory.reset()
            start = time.perf_counter()
            asked = problems[step * settings.groups :][: settings.groups]
            prompts = [tokenizer(p.prompt(tokenizer), add_special_tokens=False).input_ids for p in asked]
            model.eval()
            rollout = grpo.sample(model, prompts, stop, settings, bar.update)
            bar.update((step + 1) * settings.new_tokens + step * 2 * settings.minibatches - bar.n)  # all stopped early
            texts = [_decoded(tokenizer, answer) for answer in rollout.answers]
            rewards = [asked[i // settings.group_size].reward(text) for i, text in enumerate(texts)]
            advantage = grpo.advantages(torch.tensor(rewards, dtype=torch.float64).float(), settings.group_size)
            model.train()
            update = grpo.update(model, optimizer, rollout, advantage, settings, bar.update)
            useful = advantage.reshape(-1, settings.group_size).abs().amax(1) > 0
            best = max(range(len(texts)), key=rewards.__getitem__)
            example = (
                f"{asked[best // settings.group_size].a} + {asked[best // settings.group_size].b} ={texts[best]!r}"
            )
            rows.append(
                {
                    "step": step + 1,
                    "reward": sum(rewards) / len(rewards),
                    "loss": update.loss,
                    "entropy": update.entropy,
                    "groups": float(useful.float().mean()),
                    "seconds": time.perf_counter() - start,
                    "peak_mib": memory.mib(),
                    "ratio_range": update.ratio_range,
                    "grad_norm": update.grad_norm,
                }
            )
            bar.set_postfix_str(f"reward {rows[-1]['reward']:.3f}")
    change = _weight_change(model, plain)
    facts = {
        "steps": rows,
        "memory": memory.what,
        "answers_per_step": settings.groups * settings.group_size,
        "weight_change": change,
        "operator_calls": dict(calls.made()),
        "fallbacks": dict(calls.fallbacks()),
        "best_last_answer": example,
    }
    _print(facts, settings, screen)
    return facts, _findings(facts, bool(calls.changes))


def _decoded(tokenizer: Any, answer: list[int]) -> str:
    return str(tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _weight_change(model: Any, plain: Any) -> float:
    """Length of the change of all weights, relative to the weights."""
    changed = total = 0.0
    for now, before in zip(model.parameters(), plain.parameters()):
        changed += float((now.detach() - before.detach()).float().square().sum())
        total += float(before.detach().float().square().sum())
    return math.sqrt(changed / total)


def _print(facts: dict[str, Any], settings: grpo.Settings, screen: Screen) -> None:
    cells = [
        [
            str(row["step"]),
            f"{row['reward']:.4f}",
            f"{row['loss']:+.4f}",
            f"{row['entropy']:.3f}",
            f"{row['groups']:.0%}",
            f"{row['seconds']:.1f}",
            f"{row['peak_mib']:.0f}",
            f"{row['ratio_range'][0]:.3f} to {row['ratio_range'][1]:.3f}",
        ]
        for row in facts["steps"]
    ]
    head = [
        "step",
        "reward",
        "loss",
        "entropy",
        "groups with an advantage",
        "seconds",
        facts["memory"],
        "ratio new/old",
    ]
    for line in table(head, cells):
        screen.say(line)
    calls = ", ".join(f"{op} {count}" for op, count in sorted(facts["operator_calls"].items())) or "none"
    fallbacks = ", ".join(f"{op} {count}" for op, count in sorted(facts["fallbacks"].items())) or "none"
    screen.say(
        f"{facts['answers_per_step']} answers of up to {settings.new_tokens} tokens a step; best of the last step: "
        f"{facts['best_last_answer']}"
    )
    screen.say(f"weights changed by {facts['weight_change']:.1e} of their length")
    screen.say(f"operator calls while training: {calls}; fallbacks: {fallbacks}")


def _findings(facts: dict[str, Any], patched: bool) -> list[str]:
    found = [
        f"train: step {row['step']}: only {row['groups']:.0%} of the groups have an advantage to learn from"
        for row in facts["steps"]
        if row["groups"] < SMALLEST_SHARE
    ]
    found += [
        f"train: step {row['step']}: {name} is {row[name]}"
        for row in facts["steps"]
        for name in ("loss", "entropy")
        if not math.isfinite(row[name])
    ]
    if not 0 < facts["weight_change"] < math.inf:
        found.append(f"train: the weights changed by {facts['weight_change']}")
    if patched and not any(facts["operator_calls"].values()):
        found.append("train: no patched operator ran")
    return found
