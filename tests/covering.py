"""A small set of combinations in which every pair of settings occurs: a covering array of strength 2, made greedily."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def product(levels: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Every combination of these settings that is allowed."""
    rows = (dict(zip(levels, values)) for values in itertools.product(*levels.values()))
    return [row for row in rows if allowed(row)]


def pairs(rows: Iterable[Row]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """The pairs of settings that occur in these rows."""
    return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}


def pairwise(rows: Sequence[Row], cost: Callable[[Row], float]) -> list[Row]:
    """Some of these rows, with every pair that occurs in all: each time the one with most new pairs for its cost."""
    missing, chosen = pairs(rows), []
    while missing:
        best = max(rows, key=lambda row: len(missing & pairs([row])) / cost(row))
        chosen.append(best)
        missing -= pairs([best])
    return chosen
