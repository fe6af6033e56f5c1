"""Every causal language model type of transformers, tiny, trained on a virtual NPU (arithmetic by the CPU) and the CPU.

    npu-backend run --virtual-npu -- python tests/virtual_npu/model_zoo_sweep.py --out tests/virtual_npu/model_zoo.md
    (with tests/ on PYTHONPATH; --names mamba2,llama takes some of the types)

Compared are the logits, the gradient of every parameter, and every parameter after three steps of AdamW. What is not
the same to the bit must be as near to the float64 model as the CPU's own result is: `what_differs` of
tests/references.py. A result's kind is logits, gradient or trained parameter.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import time_limit
import tiny_zoo
import torch
import transformers
from references import exactly, largest_by_kind, max_error, nudged, what_differs
from torch import Tensor, nn

from npu_backend import model_configs, virtual_npu
from npu_backend.verification import models

STEPS = 3  # of AdamW
SECONDS = 120  # for one model on the device
VISION_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")  # the supported ones with images
Results = dict[str, Tensor]


@dataclass
class Row:
    """What came of one model: how many of its parameters have a gradient, the largest difference, why it fails.

    `difference` is relative to the largest value of its kind in the model: logits, gradients or trained parameters.
    """

    name: str
    parameters: int = 0
    gradients: int = 0
    difference: float = 0.0
    failure: str = ""


@dataclass
class Sweep:
    """Rows of the language models and of the families with an image; what ran, and what torch_npu left to the CPU."""

    text: list[Row] = field(default_factory=list)
    vision: list[Row] = field(default_factory=list)
    operators: Counter[str] = field(default_factory=Counter)
    left_to_cpu: list[str] = field(default_factory=list)

    @property
    def failures(self) -> dict[str, str]:
        return {row.name: row.failure for row in (*self.text, *self.vision) if row.failure}


def train(model: nn.Module, inputs: Results, device: str) -> Results:
    """Logits, gradients of the first step and trained parameters by name, on the CPU; the model is not changed.

    AdamW's epsilon is above the rounding noise of gradients that are zero in exact arithmetic (that of a key's bias
    under softmax): with the default one it would turn the noise into steps of full length.
    """
    model, dtype = copy.deepcopy(model).to(device), next(model.parameters()).dtype
    inputs = {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in inputs.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    results: Results = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.manual_seed(step)
        logits = model(**inputs, use_cache=False).logits
        labels = inputs["input_ids"][:, 1:].flatten()
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels).backward()
        if step == 0:
            found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            results["logits"] = logits.detach().cpu()
            results |= {f"gradient of {name}": grad.to("cpu", copy=True) for name, grad in found.items()}
        optimizer.step()
    return results | {f"trained {name}": p.detach().cpu() for name, p in model.named_parameters()}


def compare(row: Row, model: nn.Module, inputs: Results) -> None:
    """Fill in the row of a model."""
    eager = train(model, inputs, "cpu")
    with time_limit.within(SECONDS):
        got = train(model, inputs, "npu:0")
    row.parameters = len(list(model.parameters()))
    row.gradients = sum(name.startswith("gradient") for name in eager)
    unequal = [name for name in got.keys() & eager.keys() if not torch.equal(got[name], eager[name])]
    largest = largest_by_kind(eager)
    row.difference = max((max_error(got[n], eager[n]) / largest[n.split()[0]] for n in unequal), default=0.0)
    if not all(value.isfinite().all() for value in eager.values()):
        row.failure = "the CPU's results are not finite"
    elif unequal or got.keys() != eager.keys():
        exact = exactly(model)
        moved = nudged(exact, torch.float32)
        row.failure = what_differs(got, eager, train(exact, inputs, "cpu"), train(moved, inputs, "cpu"))


def sweep(types: Iterable[str] = (), families: Iterable[str] = ()) -> Sweep:
    """Compare the language models of these types, and the models of these families with an image."""
    found = Sweep()
    virtual_npu.reset_calls()
    with warnings.catch_warnings(record=True) as caught, _standard_error() as printed:
        warnings.simplefilter("always")
        found.text += [_row(name, _of_text) for name in types]
        found.vision += [_row(name, _with_image) for name in families]
    found.operators.update(virtual_npu.calls())
    said = "\n".join([*printed, *(str(warning.message) for warning in caught)])
    found.left_to_cpu = sorted(set(re.findall(r"operator '?([\w:.]+)[^\n]* fall ?back to run on the CPU", said)))
    return found


@contextmanager
def _standard_error() -> Iterator[list[str]]:
    """What C++ code prints there while this is open: torch_npu says once per process what it leaves to the CPU."""
    lines: list[str] = []
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.readlines()


def _of_text(model_type: str) -> tuple[nn.Module, Results]:
    return tiny_zoo.build(model_type), {"input_ids": tiny_zoo.tokens(2, 11)}


def _with_image(family: str) -> tuple[nn.Module, Results]:
    model = models.tiny_model(model_configs.default_config(family))
    return model, models.inputs(model)


def _row(name: str, make: Callable[[str], tuple[nn.Module, Results]]) -> Row:
    row = Row(name)
    try:
        compare(row, *make(name))
    except Exception as error:
        row.failure = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    return row


def page(found: Sweep) -> str:
    """The committed page: a table of the language models, one of those with an image, and the types that have none."""
    left = ", ".join(found.left_to_cpu) or "none"
    lines = [
        "# Tiny models of transformers on the virtual NPU (arithmetic by the CPU)",
        "",
        "Made by `npu-backend run --virtual-npu -- python tests/virtual_npu/model_zoo_sweep.py --out FILE`",
        f"with torch {torch.__version__} and transformers {transformers.__version__}, float32.",
        "Compared with the CPU: logits, the gradient of every parameter that has one, every parameter after three",
        "steps of AdamW. 0: the same bits. The largest difference is relative to the largest value of its kind in the",
        "model; equal: as near to the float64 model as the CPU's own result is, by the rule of `tests/references.py`,",
        "or one float32 rounding of that largest value further.",
        "",
        f"{len(found.operators)} operators ran. Those that torch_npu itself leaves to the CPU: {left}.",
    ]
    total = len(found.text) + len(tiny_zoo.UNBUILDABLE)
    tables = {f"of {total} causal language model types": found.text, "families with an image": found.vision}
    for what, rows in tables.items():
        equal = sum(not row.failure for row in rows)
        lines += ["", f"## {len(rows)} {what}, {equal} equal", ""]
        lines += ["| model type | result | gradients, of parameters | largest difference |", "|---|---|---|---|"]
        for row in rows:
            difference = f"{row.difference:.0e}" if row.difference else "0"
            result = row.failure.replace("|", "/") or "equal"
            lines.append(f"| {row.name} | {result} | {row.gradients} of {row.parameters} | {difference} |")
    lines += ["", "## Types without a tiny model", "", "| model type | why |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in tiny_zoo.UNBUILDABLE.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", help="comma-separated; all types and families if not given")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = sweep(args.names.split(",")) if args.names else sweep(tiny_zoo.buildable_types(), VISION_FAMILIES)
    text = page(found)
    print(text)
    if args.out:
        args.out.write_text(text, encoding="ascii", errors="replace")
    return 0


if __name__ == "__main__":
    sys.exit(main())
