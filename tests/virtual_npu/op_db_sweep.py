"""PyTorch's operator database on a virtual NPU (arithmetic by the CPU) against the CPU: outputs and gradients.

    npu-backend run --virtual-npu -- python tests/virtual_npu/op_db_sweep.py --out tests/virtual_npu/op_db.md
    (options: --dtypes float32,int64; --samples N per operator, 0 for all; --every N takes each Nth operator; --name)

A sample counts if the CPU can run it. Left aside: results that are uninitialised memory, and sparse or quantised ones.
The committed table names every operator with a sample that differs, and why; test_op_db.py checks against it. What
torch_npu itself refuses, before it would call a kernel, is counted as different, and given apart.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import time_limit
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

UNINITIALISED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
SECONDS = 30  # for one sample
# Errors that torch_npu raises by itself: a program meets them on a real device too.
REFUSALS = ("Only contiguous_format or preserve_format is supported.", "is not differentiable with respect to argument")
# Differences whose cause lies above the device, by operator.
CAUSES = {
    "nn.functional.linear_cross_entropy": "torch accumulates half precision in float32 on cpu and cuda only "
    "(LinearCrossEntropyOptions.acc_dtype); with one acc_dtype for both all samples are equal",
}


@dataclass
class Counts:
    """What a sweep found; `failures` maps an operator to (samples that differ, samples, the first reason)."""

    samples: int = 0
    operators: int = 0
    failures: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return sum(entry[0] for entry in self.failures.values())

    @property
    def refused(self) -> int:
        return sum(n for n, _, reason in self.failures.values() if any(text in reason for text in REFUSALS))


def _to_npu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        whole = value.detach()
        if whole.layout == torch.strided and whole.untyped_storage().nbytes() != whole.numel() * whole.itemsize:
            # A view: as_strided reads what lies beside it, so all of its storage moves.
            storage = torch.empty(0, dtype=whole.dtype).set_(whole.untyped_storage())
            moved = storage.to("npu").as_strided(whole.size(), whole.stride(), whole.storage_offset())
            moved = moved.conj() if whole.is_conj() else moved
            return (torch._neg_view(moved) if whole.is_neg() else moved).requires_grad_(value.requires_grad)
        return whole.to("npu").requires_grad_(value.requires_grad)
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device("npu")
    return value


def _run(op: Any, sample: Any, convert: Callable[[Any], Any], with_grad: bool) -> list[Any]:
    """Outputs and gradients (None where there is none) of one sample, each call from the same seed."""
    rest = tree_map(convert if op.name != "tensor_split" else lambda value: value, (sample.args, sample.kwargs))
    arguments = (tree_map(convert, sample.input), *rest)  # tensor_split takes its indices from the CPU on any device
    torch.manual_seed(0)
    outputs = op(arguments[0], *arguments[1], **arguments[2])
    tensors = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    if not with_grad:
        return tensors
    leaves = [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor) and t.requires_grad]
    used = [t for t in tensors if t.requires_grad]
    if not used or not leaves:
        return tensors
    found = torch.autograd.grad(used, leaves, [torch.ones_like(t) for t in used], allow_unused=True)
    return [*tensors, *found]


def _difference(got: list[Any], expected: list[Any]) -> str | None:
    if len(got) != len(expected):
        return f"{len(got)} results, the CPU has {len(expected)}"
    for mine, theirs in zip(got, expected):
        if mine is None or theirs is None:
            if mine is theirs or not any(t.any() for t in (mine, theirs) if t is not None):
                continue
            return (
                "no gradient to an operand, which the CPU gives" if mine is None else "a gradient that the CPU has not"
            )
        try:
            torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), equal_nan=True)
        except AssertionError as error:
            return str(error).strip().splitlines()[0]
    return None


def _strided(tensors: list[Any]) -> bool:
    return all(t is None or (t.layout == torch.strided and not t.is_quantized) for t in tensors)


def sweep(ops: list[Any], dtype: torch.dtype, limit: int) -> Counts:
    """Run the samples of these operators, at most `limit` of each (0: all)."""
    counts = Counts()
    for op in ops:
        if dtype not in op.supported_dtypes("cpu") or op.name in UNINITIALISED:
            continue
        with_grad = op.supports_autograd and dtype == torch.float32
        try:
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=with_grad))
        except Exception:  # the database itself cannot make them here
            continue
        counts.operators += 1
        for sample in samples[: limit or None]:
            try:
                expected = _run(op, sample, lambda value: value, with_grad)
                operands = [
                    t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)
                ]
            except Exception:  # not for the CPU
                continue
            if not _strided(expected) or not _strided(operands):
                continue
            counts.samples += 1
            try:
                with time_limit.within(SECONDS):
                    reason = _difference(_run(op, sample, _to_npu, with_grad), expected)
            except TimeoutError as error:
                reason = str(error)
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:140]}"
            if reason:
                reason = CAUSES.get(op.name, reason)
                entry = counts.failures.setdefault(_name(op), [0, len(samples), reason])
                entry[0] += 1
    return counts


def _name(op: Any) -> str:
    return f"{op.name}, {op.variant_test_name}" if op.variant_test_name else str(op.name)


def page(found: dict[torch.dtype, Counts], limit: int) -> str:
    """The committed page: a table per dtype."""
    which = f"the first {limit} samples" if limit else "all samples"
    lines = [
        "# PyTorch's operator database on the virtual NPU (arithmetic by the CPU)",
        "",
        "Made by `npu-backend run --virtual-npu -- python tests/virtual_npu/op_db_sweep.py --out FILE`",
        f"with torch {torch.__version__}, {which} of every operator; outputs, for float32 gradients too.",
    ]
    for dtype, counts in found.items():
        total, equal = counts.samples, counts.samples - counts.failed
        accepted = max(total - counts.refused, 1)
        share = f"{equal} of {total} samples of {counts.operators} operators equal ({equal / max(total, 1):.2%})"
        lines += ["", f"## {str(dtype).removeprefix('torch.')}: {share}", ""]
        lines += [
            f"torch_npu itself refuses {counts.refused}; of the {accepted} others {equal / accepted:.2%} are equal.",
            "",
        ]
        lines += ["| what happens | samples | operators |", "|---|---|---|"]
        reasons: dict[str, list[str]] = {}
        for name, (_, _, reason) in sorted(counts.failures.items()):
            reasons.setdefault(reason.replace("|", "/"), []).append(name)
        for reason, names in reasons.items():
            failed = sum(counts.failures[name][0] for name in names)
            lines.append(f"| {reason} | {failed} | {'; '.join(names)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", default="float32,bfloat16,complex64,int64,bool")
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--name")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    dtypes = [getattr(torch, name) for name in args.dtypes.split(",")]
    ops = [op for op in op_db if op.name == args.name] if args.name else op_db[:: args.every]
    text = page({dtype: sweep(ops, dtype, args.samples) for dtype in dtypes}, args.samples)
    print(text)
    if args.out:
        args.out.write_text(text, encoding="ascii", errors="replace")
    return 0


if __name__ == "__main__":
    sys.exit(main())
