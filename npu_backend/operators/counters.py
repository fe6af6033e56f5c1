"""How often each operator ran, and how often it handed its input back to the original forward, with the reason.

`verify` and the demo show these numbers; a patch that never runs is the fault nobody sees otherwise.
"""

from __future__ import annotations

from collections import Counter

from npu_backend import log

_calls: Counter[str] = Counter()
_fallbacks: Counter[tuple[str, str]] = Counter()


def ran(op: str) -> None:
    """Note one call of an operator's torch_npu path."""
    _calls[op] += 1


def fell_back(op: str, reason: str) -> None:
    """Note one input that went to the original forward; the first of its kind is a DEBUG line."""
    if (op, reason) not in _fallbacks:
        log.logger.debug("%s runs the original forward: %s", op, reason)
    _fallbacks[op, reason] += 1


def calls() -> dict[str, int]:
    """Calls by operator since the last reset. q and k of one rotary embedding count as two."""
    return dict(_calls)


def fallbacks() -> dict[str, dict[str, int]]:
    """Inputs handed back, by operator and reason, since the last reset."""
    found: dict[str, dict[str, int]] = {}
    for (op, reason), count in _fallbacks.items():
        found.setdefault(op, {})[reason] = count
    return found


def reset() -> None:
    """Start counting from zero."""
    _calls.clear()
    _fallbacks.clear()
