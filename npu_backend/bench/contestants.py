"""Who takes part in the benchmark: our backends, and the heads of other packages that can be imported here."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from npu_backend.errors import BackendUnavailableError
from npu_backend.head import triton_cuda, triton_npu
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
        impl_backend: what selects it, with everything else as it is by default; "" for a head that is not a backend.
    """

    name: str
    run: Head
    version: str
    ours: bool = False
    caches: bool = False
    note: str = ""
    impl_backend: str = ""


def find(device: torch.device) -> tuple[list[Contestant], list[str]]:
    """Contestants that can run on `device`, and why each of the others is absent."""
    present, absent = _ours(device)
    for name, load in (
        ("verl chunked", verl_chunked),
        ("verl triton", _verl_triton),
        ("Liger", _liger),
        ("cut-cross-entropy", _cut_cross_entropy),
    ):
        try:
            present.append(load(device))
        except BackendUnavailableError as error:  # our own reason
            absent.append(f"{name}: {error}")
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

    torch_head = Contestant("npu-backend torch", head("torch", 0), version, ours=True, impl_backend="torch")
    on_npu = device.type == "npu"
    reason = (triton_npu if on_npu else triton_cuda).why_unusable(device, torch.bfloat16)
    if reason is not None:
        return [torch_head], [f"npu-backend triton: {reason}"]
    if on_npu:
        no_cache = head("triton", 0)

        def fused(x: Tensor, w: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
            with triton_npu.fused_forward():
                return no_cache(x, w, labels, temperature)

        return [
            Contestant("npu-backend triton, no cache", no_cache, version, ours=True, impl_backend="triton"),
            Contestant("npu-backend triton, fused where no gradient is wanted", fused, version, ours=True),
            torch_head,
        ], []
    return [
        Contestant(
            "npu-backend triton, cache auto",
            head("triton", "auto"),
            version,
            ours=True,
            caches=True,
            impl_backend="triton",
        ),
        Contestant("npu-backend triton, no cache", head("triton", 0), version, ours=True),
        torch_head,
    ], []


def verl_chunked(device: torch.device) -> Contestant:
    function = importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPOFunction

    def run(x: Tensor, w: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
        log_probs, entropy = function.apply(x, w, labels, temperature, 512)
        return log_probs, entropy

    return Contestant("verl chunked", run, version_of("verl"))


def _verl_triton(device: torch.device) -> Contestant:
    _needs_cuda(device)
    module = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    function = inspect.unwrap(module.linear_cross_entropy)  # verl's own, also where our plugin stands in for it

    def run(x: Tensor, w: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
        log_probs, entropy = function(x, w, labels, temperature, "none")
        return log_probs, entropy

    return Contestant("verl triton", run, version_of("verl"))


def _liger(device: torch.device) -> Contestant:
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    function = module.LigerFusedLinearScaledCrossEntropyFunction
    resolved = module._resolve_implementation(device).__name__

    def run(x: Tensor, w: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
        negative, entropy = function.apply(x, w, labels, temperature, -100, 1, True)
        return -negative, entropy

    return Contestant("Liger", run, f"{version_of('liger-kernel')}, {resolved}", impl_backend="liger")


def _cut_cross_entropy(device: torch.device) -> Contestant:
    _needs_cuda(device)
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy

    def run(x: Tensor, w: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
        return -function(x, w, labels, reduction="none"), None

    version = version_of("cut-cross-entropy")
    return Contestant("cut-cross-entropy", run, version, note="computes no entropy and knows no temperature")


def _needs_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise BackendUnavailableError(f"it has no kernels for {device.type}")


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "version unknown (not installed as a distribution)"
