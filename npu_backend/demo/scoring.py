"""Real text through the plain model, the patched model and the fused head; and how often each operator ran."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npu_backend.demo.arithmetic import TEXTS
from npu_backend.head.adapter import patch_forward_with_backends
from npu_backend.manager import patch_status
from npu_backend.operators import counters
from npu_backend.patches.engine import ENGINE, Change
from npu_backend.report import table
from npu_backend.verification.models import expected_calls
from npu_backend.verification.replay import recording

LARGEST_DIFFERENCE = 1e-4  # of a log-prob, in float32


@dataclass(frozen=True)
class Scores:
    """Log-probs of the tokens of `TEXTS` but the first of each, float32 [texts, tokens - 1] on the CPU."""

    input_ids: Tensor
    log_probs: Tensor

    @classmethod
    def of(cls, model: Any, tokenizer: Any, longest: int) -> Scores:
        """Score the first tokens of each text, `longest` at most, with the logits of the model's own forward."""
        rows = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
        shortest = min(longest, *map(len, rows))
        ids = torch.tensor([row[:shortest] for row in rows], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        log_probs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return cls(ids, log_probs.cpu())


def compare(
    before: Scores, model: Any, tokenizer: Any, impl_backend: str | None
) -> tuple[list[str], dict[str, Any], list[str]]:
    """Score with the patched model and with its fused head, which is put on it here.

    Returns:
        Lines to print, facts for JSON, findings.
    """
    calls = OperatorCalls(model)
    expected = calls.expected_per_forward()
    with calls:
        patched = Scores.of(model, tokenizer, before.input_ids.shape[1])
    made, fallbacks = calls.made(), calls.fallbacks()
    head = patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend=impl_backend)
    with torch.no_grad():
        fused = model(input_ids=before.input_ids, labels=before.input_ids, use_cache=False).log_probs[:, :-1].cpu()
    differences = {
        "patched model": _largest(patched.log_probs, before.log_probs),
        f"fused head ({head.rows[0].reason})": _largest(fused, before.log_probs),
    }
    rows = [[name, f"{difference:.1e}", f"{LARGEST_DIFFERENCE:.0e}"] for name, difference in differences.items()]
    lines = [
        f"{before.log_probs.numel()} tokens, mean log-prob {before.log_probs.mean():.4f} with the plain model",
        *table(["largest difference to the plain model's log-probs", "found", "allowed"], rows),
    ]
    operators = [[op, str(made[op]), str(expected[op]), str(fallbacks[op])] for op in sorted({*expected, *made})]
    lines += table(["operator calls per forward", "made", "by the model's structure", "fallbacks"], operators)
    findings = [
        f"score: {name} differs from the plain model by {difference:.1e}"
        for name, difference in differences.items()
        if not difference < LARGEST_DIFFERENCE
    ]
    findings += [
        f"score: {op} ran {made[op]} times in a forward pass instead of {expected[op]}, with {fallbacks[op]} fallbacks"
        for op in sorted({*expected, *made})
        if made[op] != expected[op] or fallbacks[op]
    ]
    facts = {
        "tokens": before.log_probs.numel(),
        "largest_difference": differences,
        "calls_per_forward": dict(made),
        "expected_calls": dict(expected),
        "fallbacks": dict(fallbacks),
    }
    return lines, facts, findings


class OperatorCalls:
    """Counts the calls of patched operators while it is entered.

    `verl_npu` counts calls of torch_npu itself, queries and keys of a rotary embedding being two; Liger's replacements
    are counted where they stand.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.changes = [c for t in ENGINE.ledger if t.patch_set for c in t.changes if c.row.op]
        self.own = patch_status().patch_set == "verl_npu"

    def __enter__(self) -> OperatorCalls:
        counters.reset()
        self._recording = recording(self.model, self.changes)
        self._seen = self._recording.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._recording.__exit__(*exception)

    def made(self) -> Counter[str]:
        """Calls by operator."""
        if self.own:
            return Counter(counters.calls())
        found: Counter[str] = Counter()
        for change in self.changes:
            found[change.row.op] += self._seen.counts[change.row.target]
        return found

    def fallbacks(self) -> Counter[str]:
        """Inputs handed back to the original forward, by operator; Liger's kernels take whatever they are given."""
        return Counter({op: sum(reasons.values()) for op, reasons in counters.fallbacks().items()})

    def expected_per_forward(self) -> Counter[str]:
        """Calls of one forward pass, from the model's structure."""
        found: Counter[str] = Counter()
        for change in self.changes:
            found[change.row.op] += expected_calls(self.model, change) * self._calls_of(change)
        return found

    def _calls_of(self, change: Change) -> int:
        return 2 if self.own and change.row.op == "rotary" else 1


def _largest(found: Tensor, reference: Tensor) -> float:
    return float((found - reference).abs().nan_to_num(nan=torch.inf).max())
