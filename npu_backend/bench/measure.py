"""Measures one shape: every contestant in turn, round after round, so that a slow moment of the machine hits all.

The rate of the three GEMMs that no head can avoid (z = x W^T, dx = dz W, dW = dz^T x) is measured in the same rounds,
one right after the other as in a head. A head's floor is the time of the GEMMs it has to run at those rates; `share` is
that floor over its own time.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from npu_backend.bench.contestants import Contestant

TEMPERATURE = 0.9
WARM_UPS = 2


@dataclass(frozen=True)
class Case:
    """What is computed: N rows, hidden size H, vocabulary V, and the share of rows with zero upstream gradients."""

    rows: int
    hidden: int
    vocab: int
    silent: float
    dtype: torch.dtype

    @property
    def flops(self) -> int:
        """Of one GEMM."""
        return 2 * self.rows * self.hidden * self.vocab


@dataclass
class Timing:
    """One contestant in one mode: median, fastest and slowest time in ms, useful TFLOPS, share of its floor."""

    contestant: str
    mode: str
    ms: float
    fastest_ms: float
    slowest_ms: float
    tflops: float
    share: float
    peak_gib: float


@dataclass
class Result:
    """One shape. `errors`: relative error to float64 of log-probs, entropy, dx and dW on the first `error_rows` rows,
    for each contestant and for eager torch in the same dtype.
    """

    case: dict[str, Any]
    gemm_ms: dict[str, float]
    timings: list[Timing] = field(default_factory=list)
    errors: dict[str, dict[str, float | None]] = field(default_factory=dict)
    error_rows: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Bench:
    """Inputs of one case on a device, and what is measured with them."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0, free_gib: float | None = None) -> None:
        """`free_gib`: only so much device memory is free while times are taken, None for all there is."""
        self.case, self.device, self.free_gib = case, device, free_gib
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator)

        self.x = normal(case.rows, case.hidden).to(case.dtype).requires_grad_()
        self.w = (normal(case.vocab, case.hidden) * (2 * case.hidden**-0.5)).to(case.dtype).requires_grad_()
        self.labels = torch.randint(case.vocab, (case.rows,), device=device, generator=generator)
        self.upstream = [normal(case.rows), normal(case.rows) * 0.01]
        silent = torch.rand(case.rows, device=device, generator=generator) < case.silent
        self.half_silent = [grad.masked_fill(silent, 0.0) for grad in self.upstream]
        self.silent_rows = int(silent.sum())

    def modes(self, head: Contestant) -> dict[str, Callable[[], None]]:
        """What is timed of a head: no_grad, train, and train_silent, where part of the rows have zero gradients."""

        def no_grad() -> None:
            with torch.no_grad():
                head.run(self.x, self.w, self.labels, TEMPERATURE)

        def train(upstream: list[Tensor]) -> Callable[[], None]:
            def step() -> None:
                self.x.grad = self.w.grad = None
                backward(head.run(self.x, self.w, self.labels, TEMPERATURE), upstream)

            return step

        return {"no_grad": no_grad, "train": train(self.upstream), "train_silent": train(self.half_silent)}

    def run(self, heads: list[Contestant], rounds: int, error_rows: int) -> Result:
        """Measure all heads in all modes; one that fails is left out with its reason."""
        result = Result({**asdict(self.case), "dtype": str(self.case.dtype), "silent_rows": self.silent_rows}, {})
        self._errors(heads, error_rows, result)
        usable = [head for head in heads if head.name not in result.failures]
        if self.free_gib is not None:  # then the memory that the GEMMs' rate takes belongs to the heads
            self._time("train", [], rounds, {}, result)
        with only_free(self.device, self.free_gib):
            self._peaks_and_times(usable, rounds, result)
        return result

    def _peaks_and_times(self, usable: list[Contestant], rounds: int, result: Result) -> None:
        peaks: dict[tuple[str, str], float] = {}
        for head in list(usable):
            try:
                for mode, step in self.modes(head).items():
                    step()
                    peaks[head.name, mode] = self._peak_gib(step)
            except Exception as error:
                result.failures[head.name] = f"{type(error).__name__}: {error}"[:300]
                usable.remove(head)
                self._clean()
        for mode in ("no_grad", "train", "train_silent"):
            self._time(mode, usable, rounds, peaks, result)

    def _time(
        self, mode: str, heads: list[Contestant], rounds: int, peaks: dict[tuple[str, str], float], result: Result
    ) -> None:
        steps = {head.name: self.modes(head)[mode] for head in heads}
        measures_gemms = mode != "train_silent" and (self.free_gib is None or not heads)
        gemms = self._gemms(backward=mode == "train") if measures_gemms else {}
        samples: dict[str, list[float]] = {name: [] for name in (*gemms, *steps)}
        order = random.Random(0)
        for round_ in range(WARM_UPS + rounds):
            # A new order each round: what runs after a hot neighbour runs at a lower clock.
            turns = [*steps, "gemms"] if gemms else [*steps]
            for name in order.sample(turns, len(turns)):
                elapsed = elapsed_ms(self.device, *(gemms.values() if name == "gemms" else (steps[name],)))
                if round_ >= WARM_UPS:
                    for key, ms in zip(gemms if name == "gemms" else (name,), elapsed):
                        samples[key].append(ms)
        self.x.grad = self.w.grad = None
        for name in gemms:
            result.gemm_ms[name] = statistics.median(samples[name])
        del gemms
        self._clean()
        for head in heads:
            times = samples[head.name]
            middle = statistics.median(times)
            flops = self.case.flops * {"no_grad": 1.0, "train": 3.0, "train_silent": 3.0 - 2.0 * self.case.silent}[mode]
            result.timings.append(
                Timing(
                    contestant=head.name,
                    mode=mode,
                    ms=middle,
                    fastest_ms=min(times),
                    slowest_ms=max(times),
                    tflops=flops / middle / 1e9,
                    share=self._floor_ms(mode, head, result.gemm_ms) / middle,
                    peak_gib=peaks[head.name, mode],
                )
            )

    def _floor_ms(self, mode: str, head: Contestant, gemm_ms: dict[str, float]) -> float:
        if mode == "no_grad":
            return gemm_ms["z"]
        part = 1.0 - self.silent_rows / self.case.rows if mode == "train_silent" else 1.0
        again = 0.0 if head.caches else gemm_ms["z"]
        return gemm_ms["z"] + part * (again + gemm_ms["dx"] + gemm_ms["dw"])

    def _gemms(self, *, backward: bool) -> dict[str, Callable[[], None]]:
        x, w = self.x.detach(), self.w.detach()
        logits = torch.randn(x.shape[0], w.shape[0], device=self.device, dtype=x.dtype)

        def z() -> None:
            torch.mm(x, w.t(), out=logits)

        def dx() -> None:
            torch.mm(logits, w)

        def dw() -> None:
            torch.mm(logits.t(), x)

        return {"z": z, "dx": dx, "dw": dw} if backward else {"z": z}

    def _errors(self, heads: list[Contestant], rows: int, result: Result) -> None:
        """Relative errors (norm of the difference over norm) on the first rows, one head at a time."""
        rows = result.error_rows = min(rows, self.case.rows)
        x, w, labels = self.x.detach()[:rows], self.w.detach(), self.labels[:rows]
        upstream = [grad[:rows] for grad in self.upstream]
        exact = reference(x, w, labels, upstream)

        def measure(name: str, run: Any) -> None:
            leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
            outputs = run(leaf_x, leaf_w, labels, TEMPERATURE)
            backward(outputs, upstream)
            found = [*outputs, leaf_x.grad, leaf_w.grad]
            names = ("log_probs", "entropy", "dx", "dw")
            result.errors[name] = {n: relative_error(f, e) for n, f, e in zip(names, found, exact)}

        for name, run in [("eager, same dtype", eager), *((head.name, head.run) for head in heads)]:
            try:
                measure(name, run)
            except Exception as error:
                result.failures[name] = f"{type(error).__name__}: {error}"[:300]
            self._clean()

    def _peak_gib(self, step: Callable[[], None]) -> float:
        """Peak memory of a step above what lay there before it: inputs and upstream gradients."""
        if self.device.type != "cuda":
            return float("nan")
        self.x.grad = self.w.grad = None
        self._clean()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before) / 2**30

    def _clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def elapsed_ms(device: torch.device, *steps: Callable[[], object]) -> list[float]:
    """How long each of some steps takes, one right after the other."""
    if device.type != "cuda":
        times = [_now(device)]
        for step in steps:
            step()
            times.append(_now(device))
        return [(end - start) * 1e3 for start, end in itertools.pairwise(times)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for step, event in zip(steps, events[1:]):
        step()
        event.record()
    torch.cuda.synchronize()
    return [float(start.elapsed_time(end)) for start, end in itertools.pairwise(events)]


def _now(device: torch.device) -> float:
    if device.type == "npu":
        torch.accelerator.synchronize()
    return time.perf_counter()


@contextmanager
def only_free(device: torch.device, gib: float | None) -> Iterator[None]:
    """Occupy device memory so that `gib` GiB are left; None leaves it as it is."""
    ballast = None
    if gib is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        ballast = torch.empty(max(0, free - int(gib * 2**30)), dtype=torch.uint8, device=device)
    yield
    del ballast


def backward(outputs: tuple[Tensor, Tensor | None], upstream: list[Tensor]) -> None:
    """Backward from log-probs and, where there is one, entropy."""
    pairs = [(out, grad.to(out.dtype)) for out, grad in zip(outputs, upstream) if out is not None]
    torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])


def eager(x: Tensor, w: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The textbook head: logits in the inputs' dtype, the rest in float32 (float64 stays)."""
    logits = x @ w.t()
    scores = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    log_p = scores.log_softmax(-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def reference(x: Tensor, w: Tensor, labels: Tensor, upstream: list[Tensor]) -> list[Tensor]:
    """Log-probs, entropy, dx and dW in float64, 512 rows at a time."""
    leaf_w = w.double().requires_grad_()
    found: list[list[Tensor]] = [[], [], []]
    for start in range(0, x.shape[0], 512):
        rows = slice(start, start + 512)
        leaf_x = x[rows].double().requires_grad_()
        outputs = eager(leaf_x, leaf_w, labels[rows], TEMPERATURE)
        backward(outputs, [grad[rows] for grad in upstream])
        assert leaf_x.grad is not None
        for part, value in zip(found, (*outputs, leaf_x.grad)):
            part.append(value.detach())
    assert leaf_w.grad is not None
    return [*(torch.cat(part) for part in found), leaf_w.grad]


def relative_error(found: Tensor | None, exact: Tensor) -> float | None:
    """Norm of the difference over the norm of the exact value."""
    if found is None:
        return None
    return float(((found.detach().double() - exact).norm() / exact.norm()).item())
