"""How often each operator ran, and how often it handed its input back to the original forward, with the reason.

`verify` and the demo show these numbers; a patch that never runs is the fault nobody sees otherwise.
"""

from __future__ import annotations

from collections import Counter

from npu_backend import log
from npu_backend.config import read_environment
from npu_backend.errors import BackendUnavailableError

_ORDINARY = ("a tensor is on ", "empty input")  # nothing that an operator for the NPU could have been wanted for
_calls: Counter[str] = Counter()
_fallbacks: Counter[tuple[str, str]] = Counter()
_choices: dict[str, None] = {}


def ran(op: str) -> None:
    """Note one call of an operator's torch_npu path."""
    _calls[op] += 1


def fell_back(op: str, reason: str) -> None:
    """Note one input that goes to the original forward; the first of its kind is said on rank 0.

    Raises:
        BackendUnavailableError: NPU_BACKEND_STRICT=1, and the input is one that the NPU was wanted for.
    """
    note_fallback(op, reason)
    if reason.startswith(_ORDINARY):
        return
    message = f"npu-backend: {op} runs the original forward: {reason}"
    if read_environment().strict:
        raise BackendUnavailableError(
            f"{message}. Leave it out with NPU_BACKEND_SKIP={op}, or NPU_BACKEND_STRICT unset"
        )
    log.warn_once(f"operators.{op}.{reason}", message)


def note_fallback(op: str, reason: str) -> None:
    """Only count a fallback, where somebody else has said it and obeyed NPU_BACKEND_STRICT."""
    _fallbacks[op, reason] += 1


def note_choice(text: str) -> None:
    """Keep for reports what was chosen where the choice was ours, and why; the first of its kind is said on rank 0."""
    if text not in _choices:
        _choices[text] = None
        log.info_rank0(f"npu-backend: {text}")


def choices() -> tuple[str, ...]:
    """What `note_choice` was told in this process."""
    return tuple(_choices)


def calls() -> dict[str, int]:
    """Calls by operator since the last reset. q and k of one rotary embedding count as two."""
    return dict(_calls)


def fallbacks() -> dict[str, dict[str, int]]:
    """Inputs handed back, by operator and reason, since the last reset."""
    found: dict[str, dict[str, int]] = {}
    for (op, reason), count in _fallbacks.items():
        found.setdefault(op, {})[reason] = count
    return found


def totals() -> Counter[str]:
    """Inputs handed back, by operator; 0 for every other name."""
    found: Counter[str] = Counter()
    for (op, _), count in _fallbacks.items():
        found[op] += count
    return found


def reset() -> None:
    """Start counting from zero."""
    _calls.clear()
    _fallbacks.clear()
