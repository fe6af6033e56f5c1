"""The demo's task: additions, and a reward that a program can check and that tells any two answers apart.

The reward is graded on purpose. With a right-or-wrong reward the four answers of a group are often all wrong, their
advantages all zero, and a step trains on nothing.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

ANSWER_WEIGHT = 0.7  # how near the first number is to the sum; the rest is for saying nothing else
SPARE_CHARACTERS = 10  # so many characters besides the number halve the second part

_SYSTEM = "Answer with one number."
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Addition:
    """One problem."""

    a: int
    b: int

    def prompt(self, tokenizer: Any, *, bare: bool = False) -> str:
        """The text to be completed; the answer has been begun, so that its first number is what counts.

        Args:
            tokenizer: its chat template is used, if it has one; otherwise two examples go before.
            bare: neither, for the fewest tokens.
        """
        begun = f"{self.a} + {self.b} ="
        if bare:
            return begun
        if not getattr(tokenizer, "chat_template", None):
            return f"4 + 3 = 7\n20 + 15 = 35\n{begun}"
        turns = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": f"What is {self.a} + {self.b}?"}]
        return str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)) + begun

    def reward(self, completion: str) -> float:
        """Between 0 and 1: 0.7 / (1 + distance of the first number to the sum) + 0.3 for saying nothing else."""
        found = _NUMBER.search(completion)
        near = 0.0
        if found is not None:
            # a model may write hundreds of digits, which int() refuses; nine are far enough off
            near = 1 / (1 + abs(int(found.group()[:9]) - self.a - self.b))
        spare = len(completion.strip()) - (len(found.group()) if found else 0)
        return ANSWER_WEIGHT * near + (1 - ANSWER_WEIGHT) / (1 + spare / SPARE_CHARACTERS)


def additions(count: int, seed: int) -> list[Addition]:
    """`count` problems with two-digit sums, the same ones for the same seed."""
    dice = random.Random(seed)
    return [Addition(dice.randint(2, 49), dice.randint(2, 49)) for _ in range(count)]


# What the demo scores with the plain and the patched model: ordinary English, no task.
TEXTS = (
    "Water boils at a lower temperature on a mountain because the pressure of the air is lower there; that is why an "
    "egg takes longer to cook.",
    "When the last train had left, the old man locked the station, counted the day's money twice, and walked home "
    "along the river in the rain.",
)
