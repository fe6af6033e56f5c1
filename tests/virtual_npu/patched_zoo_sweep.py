"""Every causal language model of transformers, tiny, with the patches and the fused head, on a virtual NPU (arithmetic
by the CPU).

    npu-backend run --virtual-npu -- python tests/virtual_npu/patched_zoo_sweep.py --out FILE
    (with tests/ on PYTHONPATH; --names llama,glm takes some of the types, and prints them only)

For each type the patch set that its configuration gets is applied to a model that was built before; logits and the
gradient of every parameter are compared with the unpatched model's, and the fused head's log-probs, entropy and
gradients with those of the full logits. Both must be as near to the float64 model as the unpatched one is:
`what_differs` of tests/references.py.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_zoo
import torch
import transformers
from references import exactly, nudged, what_differs
from torch import Tensor, nn

import npu_backend
from npu_backend.errors import NPUBackendError
from npu_backend.operators import counters

TEMPERATURE = 0.7
Results = dict[str, Tensor]


@dataclass
class Row:
    """What came of one type: calls of each operator in one forward pass, and the verdicts on operators and head."""

    name: str
    calls: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, list[str]] = field(default_factory=dict)
    patched: str = ""
    head: str = ""


def trained(model: nn.Module, loss: Callable[[Any], tuple[Tensor, ...]]) -> Results:
    """The loss's terms and the gradient of every parameter, on the CPU, from a fixed upstream gradient."""
    model.zero_grad()
    torch.manual_seed(0)
    terms = loss(model)
    noise = torch.Generator().manual_seed(1)
    upstream = [torch.randn(t.shape, generator=noise).to(t.device, t.dtype) for t in terms]
    torch.autograd.backward(terms, upstream)
    grads = {f"gradient of {n}": p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    return {f"output {i}": term.detach().cpu() for i, term in enumerate(terms)} | grads


def verdict(got: Results, unpatched: list[Results]) -> str:
    return what_differs(got, *unpatched) or "equal"


def full_logits(ids: Tensor) -> Callable[[Any], tuple[Tensor, ...]]:
    return lambda model: (model(input_ids=ids.to(model.device), use_cache=False).logits,)


def full_scores(ids: Tensor) -> Callable[[Any], tuple[Tensor, ...]]:
    """Log-probs and entropy of the next tokens from the full logits."""

    def scores(model: Any) -> tuple[Tensor, ...]:
        log_p = (full_logits(ids)(model)[0] / TEMPERATURE).log_softmax(-1)
        labels = ids.roll(-1, -1).to(log_p.device)
        return log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)

    return scores


def fused_scores(ids: Tensor) -> Callable[[Any], tuple[Tensor, ...]]:
    def scores(model: Any) -> tuple[Tensor, ...]:
        output = model(input_ids=ids.to(model.device), use_cache=False, temperature=TEMPERATURE)
        return output.log_probs, output.entropy

    return scores


def check(model_type: str) -> Row:
    """Patch one type's tiny model and compare."""
    row, ids = Row(model_type), tiny_zoo.tokens(2, 11)
    plain = tiny_zoo.build(model_type)
    exact, model = exactly(plain), copy.deepcopy(plain).to("npu:0")
    unpatched = (plain, exact, nudged(exact, torch.float32))
    logits, scores = ([trained(peer, loss(ids)) for peer in unpatched] for loss in (full_logits, full_scores))
    try:
        npu_backend.apply_npu_fsdp_patches({"hf_config": plain.config})
        counters.reset()
        got = trained(model, full_logits(ids))
        row.calls = counters.calls()
        row.fallbacks = {op: sorted(reasons) for op, reasons in counters.fallbacks().items()}
        row.patched = verdict(got, logits) if row.calls else "nothing of it is patched"
    finally:
        npu_backend.revert_patches()
    try:
        npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
        row.head = verdict(trained(model, fused_scores(ids)), scores)
    except NPUBackendError as error:
        row.head = f"refused: {' '.join(str(error).split())}"
    finally:
        npu_backend.revert_patches()
    return row


def sweep(types: list[str]) -> list[Row]:
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in types:
            try:
                rows.append(check(name))
            except Exception as error:
                rows.append(Row(name, patched=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"))
            print(rows[-1], flush=True)
    return rows


def page(rows: list[Row]) -> str:
    """The committed page: one line per type, and how many types each operator was reached in."""
    lines = [
        "# Tiny models of transformers with patches and fused head, on the virtual NPU (arithmetic by the CPU)",
        "",
        "Made by `npu-backend run --virtual-npu -- python tests/virtual_npu/patched_zoo_sweep.py --out FILE`",
        f"with torch {torch.__version__} and transformers {transformers.__version__}, float32.",
        "Logits and the gradient of every parameter, patched against unpatched; log-probs, entropy and gradients,",
        "fused head against full logits; equal: as near to float64 as the unpatched one. Calls of one forward.",
        "",
    ]
    operators = sorted({op for row in rows for op in row.calls})
    for op in operators:
        lines.append(
            f"* `{op}` ran in {sum(op in row.calls and row.patched == 'equal' for row in rows)} of {len(rows)} types"
        )
    lines += [
        "",
        "| model type | " + " | ".join(operators) + " | patched | fused head |",
        "|---" * (len(operators) + 3) + "|",
    ]
    for row in rows:
        calls = " | ".join(str(row.calls.get(op, "")) for op in operators)
        lines.append(f"| {row.name} | {calls} | {row.patched} | {row.head.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", help="comma-separated; all types if not given")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    text = page(sweep(args.names.split(",") if args.names else list(tiny_zoo.buildable_types())))
    print(text)
    if args.out:
        args.out.write_text(text, encoding="ascii", errors="replace")
    return 0


if __name__ == "__main__":
    sys.exit(main())
