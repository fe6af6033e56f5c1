"""The cost model's table: what each PPO head does to device memory per token, counted by `cost`, for `bench --cost`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_backend import triton_interpreter
from npu_backend.bench import contestants, measure
from npu_backend.bench.contestants import Head
from npu_backend.bench.cost import CostCounter, Traffic, triton_launches
from npu_backend.errors import ConfigError
from npu_backend.head import inputs
from npu_backend.head.linear_log_prob import DEFAULT_CHUNK_ROWS, linear_log_prob

OURS = "npu-backend triton on npu"
# Rows, hidden size, vocabulary: Qwen3-0.6B, Qwen3-8B, Llama 3 8B.
SHAPES = [(4096, 1024, 151936), (4096, 4096, 151936), (4096, 4096, 128256)]
# Of an Ascend910B2, in public documents (docs/cost_model.md): bytes and bfloat16 FLOPs per second at best.
HBM_RATE, CUBE_RATE = 1.6e12, 353e12
_MODES = {"no_grad": "forward, no gradients", "train": "forward and backward"}


def heads() -> tuple[dict[str, Head], list[str]]:
    """Heads that can be counted here, ours last, and why each of the others cannot."""
    absent = []
    no_interpreter = triton_interpreter.why_unusable()
    if no_interpreter is None:
        triton_interpreter.activate()  # before anything else imports triton
    found: dict[str, Head] = {"full logits in torch": measure.eager}
    try:
        found["verl chunked"] = contestants.verl_chunked(torch.device("cpu")).run
    except Exception as error:  # whatever an optional package does at import
        absent.append(f"verl chunked: {type(error).__name__}: {error}")
    found["npu-backend torch"] = _torch
    if no_interpreter is None:
        found[OURS] = _triton_on_npu
    else:
        absent.append(f"{OURS}: its kernels are counted in Triton's interpreter, and {no_interpreter}")
    return found, absent


def count(shapes: list[tuple[int, int, int]], dtype: torch.dtype, only: str | None = None) -> dict[str, Any]:
    """The document of `bench --cost`: every head at every shape, with and without gradients.

    Raises:
        ConfigError: `only` is part of no head's name.
    """
    found, absent = heads()
    found = {name: head for name, head in found.items() if only is None or only in name}
    if not found:
        raise ConfigError(f"--only {only!r} matches no head that can be counted here")
    results = [
        {"head": name, "mode": mode, **_per_token(_count(head, shape, dtype, train=mode == "train"), shape, dtype)}
        for shape in shapes
        for name, head in found.items()
        for mode in _MODES
    ]
    return {
        "what": "counted, not measured: no device was used",
        "torch": torch.__version__,
        "verl": contestants.version_of("verl") if "verl chunked" in found else None,
        "chunk_rows": DEFAULT_CHUNK_ROWS,
        "absent": absent,
        "results": results,
    }


def _count(head: Head, shape: tuple[int, int, int], dtype: torch.dtype, *, train: bool) -> CostCounter:
    rows, hidden, vocab = shape
    counter = CostCounter()
    with FakeTensorMode(), torch.set_grad_enabled(train):
        x = torch.empty(rows, hidden, dtype=dtype, requires_grad=train)
        w = torch.empty(vocab, hidden, dtype=dtype, requires_grad=train)
        labels = torch.empty(rows, dtype=torch.int64)
        upstream = [torch.empty(rows), torch.empty(rows)]
        with triton_launches(counter) if head is _triton_on_npu else nullcontext(), counter:
            outputs = head(x, w, labels, measure.TEMPERATURE)
            if train:
                measure.backward(outputs, upstream)
    return counter


def _per_token(counter: CostCounter, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    rows, hidden, vocab = shape
    gemms, others = counter.totals()
    return {
        "rows": rows,
        "hidden": hidden,
        "vocab": vocab,
        "dtype": str(dtype).removeprefix("torch."),
        "launches": gemms.launches + others.launches,
        "gemm_flops_per_token": gemms.flops / rows,
        "gemm_read_per_token": gemms.read / rows,
        "gemm_written_per_token": gemms.written / rows,
        "read_per_token": others.read / rows,
        "written_per_token": others.written / rows,
        "operators": _by_operator(counter),
    }


def _by_operator(counter: CostCounter) -> dict[str, dict[str, int]]:
    """What moves at least a hundredth of all bytes, largest first, and the rest as one."""
    least = sum(traffic.moved for traffic in counter.by_name.values()) / 100
    found = {name: t for name, t in counter.by_name.items() if t.moved >= least}
    rest = Traffic()
    for name, traffic in counter.by_name.items():
        if name not in found:
            rest.add(traffic)
    ordered = sorted(found.items(), key=lambda item: -item[1].moved)
    return {name: asdict(traffic) for name, traffic in [*ordered, ("all others", rest)]}


def to_text(document: dict[str, Any]) -> str:
    """The document as tables in Markdown, one for each shape and mode."""
    lines = [f"{document['what']}; torch {document['torch']}, verl {document['verl']}"]
    lines += [f"* not here: {reason}" for reason in document["absent"]]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in document["results"]:
        key = tuple(result[name] for name in ("rows", "hidden", "vocab", "dtype", "mode"))
        groups.setdefault(key, []).append(result)
    for (rows, hidden, vocab, dtype, mode), results in groups.items():
        lines += ["", f"## N={rows} H={hidden} V={vocab} {dtype}, {_MODES[mode]}", ""]
        lines += [
            "| head | outside the GEMMs: bytes per logit | read | written | us per token at least "
            "| GEMMs: bytes per logit | MFLOP per token | us per token at least | launches |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [f"| {' | '.join(_cells(result))} |" for result in results]
    return "\n".join(lines)


def _cells(result: dict[str, Any]) -> list[str]:
    vocab = result["vocab"]
    read, written = result["read_per_token"], result["written_per_token"]
    gemm_bytes, flops = result["gemm_read_per_token"] + result["gemm_written_per_token"], result["gemm_flops_per_token"]
    others_us = (read + written) / HBM_RATE * 1e6
    gemms_us = max(gemm_bytes / HBM_RATE, flops / CUBE_RATE) * 1e6
    return [
        result["head"],
        *(f"{figure / vocab:.1f}" for figure in (read + written, read, written)),
        f"{others_us:.2f}",
        f"{gemm_bytes / vocab:.1f}",
        f"{flops / 1e6:.0f}",
        f"{gemms_us:.2f}",
        str(result["launches"]),
    ]


def _torch(x: Tensor, w: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
    with inputs.trusted_values():  # fake tensors have none to check
        found = linear_log_prob(x, w, labels, temperature=temperature, impl_backend="torch")
    return found.log_probs, found.entropy


def _triton_on_npu(x: Tensor, w: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
    from npu_backend.head import rows_ascend
    from npu_backend.head.chunked import Plan
    from npu_backend.head.vocab_tiles import VocabTiledHead

    plan = Plan(
        kernels=rows_ascend,
        chunk_rows=DEFAULT_CHUNK_ROWS,
        compute_dtype=x.dtype,
        logit_scale=1.0,
        softcap=None,
        temperature=temperature,
        calculate_entropy=True,
        cache_bytes=0,
    )
    outputs: tuple[Tensor, Tensor | None] = VocabTiledHead.apply(x, w, None, labels, None, plan)  # type: ignore[no-untyped-call]
    return outputs
