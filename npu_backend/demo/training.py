"""The demo's training: a few GRPO steps, a table of them, and what must be true of them."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from npu_backend.demo import arithmetic, grpo
from npu_backend.demo.host import Host, PeakMemory
from npu_backend.demo.scoring import OperatorCalls
from npu_backend.report import table

if TYPE_CHECKING:
    from npu_backend.demo.job import Screen

SEED = 0
# Triton's interpreter takes about a tenth of a second for one token in one layer, so its run is as short as can be.
INTERPRETED = grpo.Settings(groups=2, group_size=3, new_tokens=4)
SMALLEST_SHARE = 0.5  # of the groups must have an advantage to learn from


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
        steps: how many, of `grpo.Settings.minibatches` updates each.
        screen: where to print.

    Returns:
        Facts for JSON, findings.
    """
    from tqdm import tqdm

    trainer = _Trainer(model, tokenizer, stop, host)
    settings = trainer.settings
    problems = arithmetic.additions(steps * settings.groups, SEED)
    torch.manual_seed(SEED)
    rows: list[dict[str, Any]] = []
    calls = OperatorCalls(model)
    with (
        calls,
        tqdm(total=steps * trainer.ticks, desc=f"GRPO, {host.label}", disable=screen.quiet, file=sys.stderr) as bar,
    ):
        for step in range(steps):
            asked = problems[step * settings.groups :][: settings.groups]
            rows.append({"step": step + 1, **trainer.step(asked, bar.update)})
            bar.update((step + 1) * trainer.ticks - bar.n)  # sampling ends early when every answer has ended
            bar.set_postfix_str(f"reward {rows[-1]['reward']:.3f}")
    facts = {
        "steps": rows,
        "memory": trainer.memory.what,
        "answers_per_step": settings.groups * settings.group_size,
        "tokens_per_answer": settings.new_tokens,
        "weight_change": _weight_change(model, plain),
        "operator_calls": dict(calls.made()),
        "fallbacks": dict(calls.fallbacks()),
    }
    _print(facts, screen)
    return facts, _findings(facts, bool(calls.changes))


class _Trainer:
    """What every step needs: the model in evaluation mode (no dropout, so that old and new log-probs compare), its
    optimizer and the sizes.
    """

    def __init__(self, model: Any, tokenizer: Any, stop: int, host: Host) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.stop = stop
        self.bare = host.interpreter
        self.settings = INTERPRETED if host.interpreter else grpo.Settings()
        self.ticks = self.settings.new_tokens + 2 * self.settings.minibatches
        self.memory = PeakMemory(host.device)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.settings.learning_rate, weight_decay=0.0, foreach=False
        )

    def step(self, asked: Sequence[arithmetic.Addition], tick: Callable[[], Any]) -> dict[str, Any]:
        """Sample, reward, update; returns the row of the table."""
        self.memory.reset()
        start = time.perf_counter()
        size = self.settings.group_size
        texts = [problem.prompt(self.tokenizer, bare=self.bare) for problem in asked]
        prompts = [self.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        rollout = grpo.sample(self.model, prompts, self.stop, self.settings, tick)
        answers = [_decoded(self.tokenizer, answer) for answer in rollout.answers]
        rewards = [asked[i // size].reward(answer) for i, answer in enumerate(answers)]
        advantage = grpo.advantages(torch.tensor(rewards), size)
        update = grpo.update(self.model, self.optimizer, rollout, advantage, self.settings, tick)
        best = max(range(len(answers)), key=rewards.__getitem__)
        return {
            "reward": sum(rewards) / len(rewards),
            "loss": update.loss,
            "entropy": update.entropy,
            "groups": float((advantage.reshape(-1, size) != 0).any(1).float().mean()),
            "seconds": time.perf_counter() - start,
            "peak_mib": self.memory.mib(),
            "ratio_range": update.ratio_range,
            "grad_norm": update.grad_norm,
            "best_answer": f"{asked[best // size].a} + {asked[best // size].b} ={answers[best]}",
        }


def _decoded(tokenizer: Any, answer: list[int]) -> str:
    return str(tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _weight_change(model: Any, plain: Any) -> float:
    """Length of the change of all weights, relative to the weights."""
    changed = total = 0.0
    for now, before in zip(model.parameters(), plain.parameters()):
        changed += float((now.detach() - before.detach()).float().square().sum())
        total += float(before.detach().float().square().sum())
    return math.sqrt(changed / total)


def _print(facts: dict[str, Any], screen: Screen) -> None:
    cells = [
        [
            str(row["step"]),
            f"{row['reward']:.4f}",
            f"{row['loss']:+.4f}",
            f"{row['entropy']:.3f}",
            f"{row['groups']:.0%}",
            "{:.2f} to {:.2f}".format(*row["ratio_range"]),
            f"{row['seconds']:.1f}",
            f"{row['peak_mib']:.0f}",
        ]
        for row in facts["steps"]
    ]
    head = [
        "step",
        "reward",
        "loss",
        "entropy",
        "groups with an advantage",
        "new/old ratio",
        "seconds",
        facts["memory"],
    ]
    for line in table(head, cells):
        screen.say(line)
    counts = (
        ", ".join(f"{op} {n}" for op, n in sorted(facts[name].items())) for name in ("operator_calls", "fallbacks")
    )
    made, fallbacks = (text or "none" for text in counts)
    screen.say(f"{facts['answers_per_step']} answers of up to {facts['tokens_per_answer']} tokens a step")
    screen.say(f"the best one of the last step: {facts['steps'][-1]['best_answer']!r}")
    screen.say(f"weights changed by {facts['weight_change']:.1e} of their length")
    screen.say(f"operator calls while training: {made}; fallbacks: {fallbacks}")


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
