"""Who takes part in the benchmark: our backends, and the heads of other packages that can be imported here."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from npu_backend.head import triton_cuda
from npu_backend.head.linear_log_prob import linear_log_prob

# (hidden [N, H], weight [V, H], labels [N], temperature) -> log-probs [N], entropy [N] or None.
Head = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Contestant:
    """A head that is measured.

    Attributes:
        name: as the tables show it.
        run: the head.
        version: of its package, and what it resolved to where it chooses.
        ours: it is npu-backend's.
        caches: it may keep logits, so that its floor is the shorter one.
        note: what it does not do that the others do; "" for nothing.
    """

    name: str
    run: Head
    version: str
    ours: bool = False
    caches: bool = False
    note: str = ""


def find(device: torch.device) -> tuple[list[Contestant], list[str]]:
    """Contestants that can run on `device`, and why each of the others is absent."""
    present, absent = _ours(device)
    for name, load in (
        ("verl chunked", _verl_chunked),
        ("verl triton", _verl_triton),
        ("Liger", _liger),
        ("cut-cross-entropy", _cut_cross_entropy),
    ):
        try:
            present.append(load(device))
        except Exception as error:  # whatever an optional package does at import
            absent.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return present, absent


def _ours(device: torch.device) -> tuple[list[Contestant], list[str]]:
    from npu_backend import __version__ as version

    def head(backend: str, cache: float | str | None) -> Head:
        def run(x: Tensor, w: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
            out = linear_log_prob(x, w, labels, temperature=temperature, impl_backend=backend, logits_cache_gib=cache)
            return out.log_probs, out.entropy

        return run

    torch_head = Contestant("npu-backend torch", head("torch", 0), version, ours=True)
    reason = triton_cuda.why_unusable(device, torch.bfloat16)
    if reason is not None:
        return [torch_head], [f"npu-backend triton: {reason}"]
    return [
        Contestant("npu-backend triton, cache auto", head("triton", "auto"), version, ours=True, caches=True),
        Contestant("npu-backend triton, no cache", head("triton", 0), version, ours=True),
        torch_head,
    ], []


def _verl_chunked(device: torch.device) -> Contestant:
    function = importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPOFunction

    def run(x: Tensor, w: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
        log_probs, entropy = function.apply(x, w, labels, temperature, 512)
        return log_probs, entropy

    return Contestant("verl chunked", run, _version("verl"))


def _verl_triton(device: torch.device) -> Contestant:
    _needs_cuda(device)
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def run(x: Tensor, w: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
        log_probs, entropy = function(x, w, labels, temperature, "none")
        return log_probs, entropy

    return Contestant("verl triton", run, _version("verl"))


def _liger(device: torch.device) -> Contestant:
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    function = module.LigerFusedLinearScaledCrossEntropyFunction
    resolved = module._resolve_implementation(device).__name__

    def run(x: Tensor, w: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
        negative, entropy = function.apply(x, w, labels, temperature, -100, 1, True)
        return -negative, entropy

    return Contestant("Liger", run, f"{_version('liger-kernel')}, {resolved}")


def _cut_cross_entropy(device: torch.device) -> Contestant:
    _needs_cuda(device)
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy

    def run(x: Tensor, w: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
        return -function(x, w, labels, reduction="none"), None

    version = _version("cut-cross-entropy")
    return Contestant("cut-cross-entropy", run, version, note="computes no entropy and knows no temperature")


def _needs_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise RuntimeError(f"it has no kernels for {device.type}")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "version unknown (not installed as a distribution)"
