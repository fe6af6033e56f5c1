"""The names that others rely on, and what importing the package costs."""

from __future__ import annotations

import inspect
import subprocess
import sys

import processor_time
import pytest
from torch_free import needs_torch

import npu_backend

SIGNATURES = {
    "apply_npu_fsdp_patches": "(model_config=None)",
    "plan_patches": "(model_config=None)",
    "patch_status": "()",
    "revert_patches": "()",
    "verify": "(model_config=None, *, model=None, dtype=None)",
    "FusedLinearForPPO": "(chunk_size=512, impl_backend=None)",
    "linear_log_prob": "(hidden_states, vocab_weights, labels, *, temperature=1.0, bias=None, logit_scale=None, "
    "softcap=None, ignore_index=-100, calculate_entropy=True, impl_backend=None, process_group=None, "
    "logits_cache_gib=None)",
    "linear_cross_entropy": "(hidden, weight, labels, temperature=1.0, reduction='none', dist_process_group=None)",
    "patch_forward_with_backends": "(model, use_fused_kernels=False, fused_kernels_backend=None)",
}
OTHERS = {"PatchReport", "VerifyReport", "LinearLogProbOutput", "virtual_npu"}
ERRORS = {
    "NPUBackendError": (Exception,),
    "ConfigError": (npu_backend.NPUBackendError, ValueError),
    "PatchConflictError": (npu_backend.NPUBackendError,),
    "PatchTargetError": (npu_backend.NPUBackendError,),
    "BackendUnavailableError": (npu_backend.NPUBackendError,),
    "HeadInputError": (npu_backend.NPUBackendError, ValueError),
}
OPTIONAL = ("torch", "torch_npu", "transformers", "triton", "liger_kernel", "numpy", "verl")


def without_annotations(function) -> str:
    """A signature as the contract writes it."""
    signature = inspect.signature(function)
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_all_is_exactly_the_contract() -> None:
    assert set(npu_backend.__all__) == {"__version__", *SIGNATURES, *OTHERS, *ERRORS}
    assert set(npu_backend.__all__) <= set(dir(npu_backend))


@needs_torch
@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name) -> None:
    assert without_annotations(getattr(npu_backend, name)) == SIGNATURES[name]


@needs_torch
def test_signature_of_fused_linear_forward() -> None:
    forward = npu_backend.FusedLinearForPPO(chunk_size=4).forward
    assert without_annotations(forward) == "(hidden_states, vocab_weights, input_ids, temperature=1.0)"


def test_signature_of_activate() -> None:
    assert without_annotations(npu_backend.virtual_npu.activate).startswith("(devices=1, soc='Ascend910B1'")


@needs_torch
def test_fields_of_results() -> None:
    assert npu_backend.LinearLogProbOutput._fields == ("log_probs", "entropy", "backend")
    report = npu_backend.PatchReport()
    assert (report.rows, report.patch_set, report.applied) == ((), None, 0)
    assert {"rows", "patch_set", "device", "applied"} <= report.to_dict().keys()


@pytest.mark.parametrize("name", ERRORS)
def test_error_classes(name) -> None:
    assert issubclass(getattr(npu_backend, name), ERRORS[name])


def test_unknown_name_lists_the_public_ones() -> None:
    with pytest.raises(AttributeError, match="apply_npu_fsdp_patches"):
        npu_backend.apply_patches  # noqa: B018


def test_import_loads_no_optional_package() -> None:
    code = f"import sys, npu_backend; dir(npu_backend); print([m for m in {OPTIONAL} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_import_takes_under_100_ms() -> None:
    cost, of_starting = (processor_time.of_python("-c", code, runs=7) for code in ("import npu_backend", "pass"))
    assert cost - of_starting < 0.1
