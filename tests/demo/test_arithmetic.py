"""The demo's task and its reward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_backend.demo.arithmetic import Addition, additions

PROBLEM = Addition(12, 7)


def test_the_right_number_and_nothing_else_is_the_whole_reward() -> None:
    assert PROBLEM.reward(" 19") == pytest.approx(1.0)
    assert PROBLEM.reward("19\n") == pytest.approx(1.0)


def test_the_reward_falls_with_the_distance_and_with_idle_talk() -> None:
    ordered = [" 19", " 19.", " 20", " 20, I think", " 35", " 99999999999999999999", " I do not know"]
    rewards = [PROBLEM.reward(text) for text in ordered]
    assert rewards == sorted(rewards, reverse=True)
    assert len(set(rewards)) == len(rewards)


@given(st.text())
def test_every_text_has_a_reward_between_zero_and_one(text: str) -> None:
    assert 0.0 <= PROBLEM.reward(text) <= 1.0


@given(st.integers(0, 10**5000))
def test_a_number_of_any_length_has_a_reward(number: int) -> None:
    assert 0.0 <= PROBLEM.reward("9" * (number.bit_length() // 3)) <= 1.0


def test_problems_are_the_same_for_the_same_seed() -> None:
    assert additions(8, 0) == additions(8, 0) != additions(8, 1)


def test_the_prompt_follows_the_tokenizer() -> None:
    def template(turns: list[dict[str, str]], **options: object) -> str:
        return "".join(f"<{t['role']}>{t['content']}" for t in turns) + "<assistant>"

    chat = SimpleNamespace(chat_template="...", apply_chat_template=template)
    assert PROBLEM.prompt(chat).endswith("<user>What is 12 + 7?<assistant>12 + 7 =")
    plain = SimpleNamespace(chat_template=None)
    assert PROBLEM.prompt(plain).endswith("= 35\n12 + 7 =")
    assert PROBLEM.prompt(chat, bare=True) == "12 + 7 ="
