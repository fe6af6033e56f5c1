"""Each kernel of `npu_backend.head.ascend_kernels` on random data in the emulator, against float64.

A runner takes the compiled text, the `KernelLaunch` and a shape, and returns the errors that matter: of log-probs,
entropy and scores absolute, of gradients relative (norm of the difference over the norm).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hivm_emulator.launch import launch
from npu_backend.head.ascend_launches import KernelLaunch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_LOGIT_SCALE, _SOFTCAP = 0.9, 6.0


class Shape(NamedTuple):
    """Rows, vocabulary and hidden size; programs to run, and into how many parts the vocabulary is divided."""

    rows: int
    vocab: int
    hidden: int = 64
    programs: int = 4
    parts: int = 2


class _Problem:
    """Logits with what else the row kernels take, and float64 results."""

    def __init__(self, shape: Shape, kernel: KernelLaunch) -> None:
        rows, vocab = shape.rows, shape.vocab
        flags = kernel.constants
        self.dtype = DTYPES[kernel.signature["logits_ptr"][1:]]
        self.stride = vocab + 3  # rows that do not begin at aligned addresses
        self.storage = torch.full((rows, self.stride), float("nan"), dtype=self.dtype)
        self.logits = self.storage[:, :vocab]
        self.logits.copy_(torch.randn(rows, vocab) * 2)
        # MASK without a softcap is for scales that are not positive; a padded vocabulary entry needs a positive one.
        self.scale = -_LOGIT_SCALE if flags.get("MASK") and not flags["SOFTCAP"] else _LOGIT_SCALE
        if self.scale > 0:
            self.logits[:, 5] = -torch.inf
        self.labels = _labels(rows, vocab)
        self.bias = torch.randn(vocab)
        self.temperatures = torch.rand(rows) + 0.5
        self.softcap = _SOFTCAP
        leaf = self.logits.double().requires_grad_()
        u = leaf + self.bias.double() if flags["BIAS"] else leaf
        u = self.scale * u
        if flags["SOFTCAP"]:
            u = _SOFTCAP * torch.tanh(u / _SOFTCAP)
        z = u / self.temperatures.double()[:, None]
        self.here = (self.labels >= 0) & (self.labels < vocab)
        column = self.labels.clamp(0, vocab - 1)[:, None]
        self.of_label = z.gather(1, column)[:, 0].masked_fill(~self.here, 0.0)
        self.peak = z.amax(1)
        self.log_total = z.logsumexp(1) - self.peak
        log_p = z.log_softmax(1)
        log_p = log_p.masked_fill(log_p == -torch.inf, 0.0)  # and p is 0
        self.log_probs = log_p.gather(1, column)[:, 0].masked_fill(~self.here, 0.0)
        self.entropy = -(z.softmax(1) * log_p).sum(1)
        self.g, self.h = torch.randn(rows).masked_fill(~self.here, 0.0), torch.randn(rows)
        total = (self.g.double() * self.log_probs).sum()
        if flags["ENTROPY"]:
            total = total + (self.h.double() * self.entropy).sum()
        (self.gradient,) = torch.autograd.grad(total, leaf)


def _labels(rows: int, vocab: int) -> Tensor:
    """Random labels, the first and the last column among them, and ignored ones."""
    labels = torch.randint(vocab, (rows,))
    labels[::5] = -100
    labels[1 % rows], labels[-1] = 0, vocab - 1
    return labels


def _nan(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"))


def _worst(found: Tensor, exact: Tensor) -> float:
    error = (found.double() - exact.detach()).abs().max()
    return float(error) if not error.isnan() else float("inf")


def _relative(found: Tensor, exact: Tensor) -> float:
    error = (found.double() - exact).norm() / exact.norm()
    return float(error) if not error.isnan() else float("inf")


def run_rows_forward(ir: str, kernel: KernelLaunch, shape: Shape) -> dict[str, float]:
    problem = _Problem(shape, kernel)
    of_label, peak, total, weighted = (_nan(shape.rows) for _ in range(4))
    launch(
        ir, "rows_forward",
        [problem.logits, problem.labels, problem.bias, problem.temperatures, of_label, peak, total, weighted,
         problem.stride, shape.rows, shape.vocab, problem.scale, _SOFTCAP],
        shape.programs,
    )  # fmt: skip
    log_total = total.double().log()
    found = {
        "of_label": _worst(of_label, problem.of_label),
        "log_probs": _worst(
            ((of_label.double() - peak.double()) - log_total).masked_fill(~problem.here, 0.0), problem.log_probs
        ),
    }
    if kernel.constants["ENTROPY"]:
        found["entropy"] = _worst(log_total - weighted.double() / total.double(), problem.entropy)
    return found


def run_rows_backward(ir: str, kernel: KernelLaunch, shape: Shape) -> dict[str, float]:
    problem = _Problem(shape, kernel)
    vectors = [problem.log_probs, problem.entropy, problem.peak, problem.log_total.exp()]
    launch(
        ir, "rows_backward",
        [problem.logits, problem.logits, problem.labels, problem.bias, problem.temperatures,
         *(vector.detach().float() for vector in vectors), problem.g, problem.h,
         problem.stride, shape.rows, shape.vocab, problem.scale, _SOFTCAP],
        shape.programs,
    )  # fmt: skip
    assert problem.storage[:, shape.vocab :].isnan().all(), "wrote beyond the row"
    return {"gradient": _relative(problem.logits, problem.gradient)}


class _Product:
    """Hidden states and weights, and float64 statistics of their product."""

    def __init__(self, shape: Shape, kernel: KernelLaunch) -> None:
        self.dtype = DTYPES[kernel.signature["hidden_ptr"][1:]]
        self.hidden = torch.randn(shape.rows, shape.hidden).to(self.dtype)
        self.weight = (torch.randn(shape.vocab, shape.hidden) * 2 * shape.hidden**-0.5).to(self.dtype)
        self.temperatures = torch.rand(shape.rows) + 0.5
        self.z = self.hidden.double() @ self.weight.double().t() * (_LOGIT_SCALE / self.temperatures.double()[:, None])


def run_fused_forward(ir: str, kernel: KernelLaunch, shape: Shape) -> dict[str, float]:
    problem = _Product(shape, kernel)
    tile = int(kernel.constants["COLUMNS"])
    part_columns = -(-shape.vocab // (shape.parts * tile)) * tile
    peak, total, weighted = (_nan(shape.parts, shape.rows) for _ in range(3))
    launch(
        ir, "fused_forward",
        [problem.hidden, problem.weight, problem.temperatures, peak, total, weighted, shape.hidden, shape.hidden,
         shape.rows, shape.vocab, shape.hidden, _LOGIT_SCALE, shape.parts, part_columns],
        shape.programs,
    )  # fmt: skip
    peak, total, weighted = peak.double(), total.double(), weighted.double()
    m = peak.amax(0)
    shrink = (peak - m).exp()
    s = (total * shrink).sum(0)
    t = ((weighted + total * (peak - m)) * shrink).sum(0)
    log_p = problem.z.log_softmax(1)
    return {
        "log_sum": _worst(m + s.log(), problem.z.logsumexp(1)),
        "entropy": _worst(s.log() - t / s, -(log_p.exp() * log_p).sum(1)),
    }


def run_label_scores(ir: str, kernel: KernelLaunch, shape: Shape) -> dict[str, float]:
    problem = _Product(shape, kernel)
    labels = _labels(shape.rows, shape.vocab)
    of_label = _nan(shape.rows)
    launch(
        ir, "label_scores",
        [problem.hidden, problem.weight, labels, problem.temperatures, of_label, shape.hidden, shape.hidden,
         shape.rows, shape.vocab, shape.hidden, _LOGIT_SCALE],
        shape.programs,
    )  # fmt: skip
    exact = problem.z.gather(1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(labels < 0, 0.0)
    return {"of_label": _worst(of_label, exact)}


RUNNERS = {
    "rows_forward": run_rows_forward,
    "rows_backward": run_rows_backward,
    "fused_forward": run_fused_forward,
    "label_scores": run_label_scores,
}
