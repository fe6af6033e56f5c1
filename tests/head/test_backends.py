"""Which backend runs: names, fallbacks, strictness, and Liger as it is, absent, old and broken."""

from __future__ import annotations

import json
import logging
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from references import HeadCase, assert_head_matches, head_case, run_head

import npu_backend
from npu_backend.errors import BackendUnavailableError, ConfigError, HeadInputError
from npu_backend.head import backends, liger

LIGER_FUNCTION = "liger_kernel.ops.fused_linear_scaled_cross_entropy"


def run(name: str | None, case: HeadCase | None = None):
    case = case or head_case(20)
    return npu_backend.linear_log_prob(case.hidden, case.weight, case.labels, **case.options(), impl_backend=name)


@pytest.fixture(autouse=True)
def _nothing_was_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_measured.py is about what `bench --store` keeps."""
    monkeypatch.setattr(backends.measured, "order", lambda *_: ((), ""))


def fake_liger(monkeypatch: pytest.MonkeyPatch, function: object) -> None:
    module = types.ModuleType(LIGER_FUNCTION)
    if function is not None:
        module.LigerFusedLinearScaledCrossEntropyFunction = function
    monkeypatch.setattr(liger, "why_unusable", lambda: None)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", types.ModuleType("liger_kernel.ops"))
    monkeypatch.setitem(sys.modules, LIGER_FUNCTION, module)


@pytest.mark.parametrize("name", ["nope", "", "Torch", "cuda", "none", 7])
def test_an_unknown_backend_is_a_value_error_that_lists_the_known_ones(name: object) -> None:
    message = rf"^Unsupported FusedLinearForPPO backend: {name}\. Known backends: torch, triton, liger, auto"
    with pytest.raises(ValueError, match=message) as caught:
        npu_backend.FusedLinearForPPO(impl_backend=name)
    assert isinstance(caught.value, ConfigError)
    with pytest.raises(ConfigError, match=message):
        run(name)


@pytest.mark.parametrize("name", [None, "torch", "auto"])
def test_torch_runs_on_the_cpu(name: str | None) -> None:
    assert run(name).backend == "torch"


def test_auto_says_why() -> None:
    assert "auto on npu" in backends.resolve("auto", torch.device("meta:0")).reason.replace("meta", "npu")
    assert backends.resolve("torch", torch.device("cpu")).reason == ""


@pytest.mark.case("C14")
def test_nobody_has_to_name_a_backend_on_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset is torch, without a warning; auto takes the Ascend kernels where they work; either says what runs."""
    npu = types.SimpleNamespace(type="npu")
    monkeypatch.setattr(backends, "warn_once", lambda *_: pytest.fail("nobody asked for anything that is missing"))
    monkeypatch.setattr(backends.triton_npu, "why_unusable", lambda *_: None)
    assert backends.resolve(None, npu) == backends.Choice("torch")
    chosen = backends.resolve("auto", npu)
    assert chosen.name == "triton"
    assert "auto on npu: the fewest bytes moved" in chosen.reason
    monkeypatch.setattr(backends.triton_npu, "why_unusable", lambda *_: "the compiler said so")
    assert backends.resolve("auto", npu) == backends.Choice("torch", "auto on npu: not 'triton': the compiler said so")


@pytest.mark.case("C12")
def test_auto_on_cuda_takes_what_the_shipped_measurements_found_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures ship with device and versions. (On an NPU nothing was measured, and `auto` says so.)"""
    shipped = json.loads((Path(__file__).parents[2] / "docs/benchmarks/h200_head.json").read_text())
    assert "H200" in shipped["device"]
    assert all(facts["version"] for facts in shipped["contestants"].values())
    monkeypatch.setattr(backends.triton_cuda, "why_unusable", lambda *_: None)
    choice = backends.resolve("auto", types.SimpleNamespace(type="cuda"))
    backend_of = {"npu-backend triton, cache auto": "triton", "npu-backend torch": "torch", "Liger": "liger"}
    for result in shipped["results"]:
        full = {t["contestant"]: t["ms"] for t in result["timings"] if t["mode"] == "train"}
        fastest = min(backend_of, key=full.__getitem__)
        assert choice.name == backend_of[fastest]
        assert "docs/benchmarks" in choice.reason


@pytest.mark.case("D36")
def test_a_gpu_that_lacks_the_fast_path_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "an older GPU")
    monkeypatch.setattr(backends.triton_cuda.importlib.util, "find_spec", lambda name: object())
    choice = backends.resolve("triton", torch.device("cuda", 0), torch.bfloat16)
    assert choice.name == "torch"
    assert "the kernels need compute capability 8.0, an older GPU has 7.5" in choice.reason


def test_triton_on_a_plain_cpu_is_an_error() -> None:
    with pytest.raises(BackendUnavailableError, match="'triton' cannot run on the CPU"):
        run("triton")


@pytest.mark.parametrize("name", ["triton", "liger"])
def test_what_cannot_be_used_falls_back_once_with_the_reason(name: str, monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # as if not installed
    device = torch.device("cuda")  # nothing is allocated: only the choice is asked for
    with caplog.at_level(logging.WARNING, logger="npu_backend"):
        choices = [backends.resolve(name, device) for _ in range(3)]
    assert [choice.name for choice in choices] == ["torch"] * 3
    (record,) = caplog.records
    assert choices[0].reason in record.getMessage()
    assert repr(name) in record.getMessage()
    monkeypatch.setenv("NPU_BACKEND_STRICT", "1")
    with pytest.raises(BackendUnavailableError, match="NPU_BACKEND_STRICT=1 forbids"):
        backends.resolve(name, device)


def test_liger_absent_computes_with_torch(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    output = run("liger")
    assert output.backend == "torch"
    assert torch.equal(output.log_probs, run("torch").log_probs)


@pytest.mark.case("D15")
@pytest.mark.parametrize("name", [None, "torch", "auto"])
def test_torch_never_calls_an_importable_liger(name: str | None, monkeypatch) -> None:
    class Spy:
        @staticmethod
        def apply(*args: object, **kwargs: object) -> None:
            raise AssertionError("Liger was called")

    fake_liger(monkeypatch, Spy)
    case = head_case(20)
    got = run_head(case, lambda given: run(name, given)[:2])
    assert set(got) == {"log_probs", "entropy", "grad_hidden", "grad_weight"}
    assert run(name).backend == "torch"
    npu_backend.FusedLinearForPPO(impl_backend=name).forward(case.hidden, case.weight, case.labels)
    with pytest.raises(AssertionError, match="Liger was called"):
        run("liger")  # the spy would have noticed


def test_a_liger_that_is_too_old_raises(monkeypatch) -> None:
    fake_liger(monkeypatch, None)
    with pytest.raises(BackendUnavailableError, match=r"needs .*liger-kernel >= 0\.8\.2.*AttributeError"):
        run("liger")


def test_a_liger_that_fails_to_import_raises(monkeypatch) -> None:
    fake_liger(monkeypatch, None)

    def broken(name: str) -> None:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(liger.importlib, "import_module", broken)
    with pytest.raises(BackendUnavailableError, match="RuntimeError: 0 active drivers") as caught:
        run("liger")
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.fixture
def installed_liger() -> None:
    pytest.importorskip("liger_kernel")
    try:
        liger._function()
    except BackendUnavailableError as error:  # Liger needs a Triton driver to import on some hosts
        pytest.skip(str(error))


@pytest.mark.usefixtures("installed_liger")
@pytest.mark.case("D27", "D28", "D09")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(700,), (2, 9), (0,)])
def test_liger_gives_what_torch_gives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    case = head_case(*shape, dtype=dtype, temperature=0.7)
    labels = case.labels.clone()
    labels.view(-1)[::7] = -100
    # Liger rounds the entropy to the inputs' dtype and sums the weight's gradient in it, so its allowance is larger
    got = assert_head_matches(replace(case, labels=labels), lambda given: run("liger", given)[:2], times=8.0)
    assert got["log_probs"].dtype == got["entropy"].dtype == torch.float32
    assert (got["log_probs"][labels == -100] == 0).all()
    assert run("liger", case).backend == ("liger" if case.labels.numel() else "torch")


@pytest.mark.usefixtures("installed_liger")
def test_what_padding_holds_does_not_reach_ligers_gradients() -> None:
    case = head_case(20)
    case.labels[::4] = -100
    clean = run_head(case, lambda given: run("liger", given)[:2])
    case.hidden[::4] = torch.nan
    for name, value in run_head(case, lambda given: run("liger", given)[:2]).items():
        assert torch.equal(value, clean[name]), name


@pytest.mark.usefixtures("installed_liger")
@pytest.mark.parametrize("frozen", ["hidden", "weight", None])
def test_a_second_derivative_through_liger_is_an_error(frozen: str | None) -> None:
    case = head_case(20)
    leaves = {name: getattr(case, name).clone().requires_grad_(name != frozen) for name in ("hidden", "weight")}
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    grads = torch.autograd.grad(run("liger", replace(case, **leaves)).entropy.sum(), wanted, create_graph=True)
    for grad in grads:
        with pytest.raises(BackendUnavailableError, match="no second derivative"):
            torch.autograd.grad(grad.sum(), wanted, retain_graph=True, allow_unused=True)


@pytest.mark.usefixtures("installed_liger")
@pytest.mark.parametrize(
    "option",
    [{"bias": torch.zeros(101)}, {"softcap": 3.0}, {"logit_scale": 2.0}, {"temperature": torch.ones(20)}],
)
def test_what_liger_cannot_compute_is_refused(option: dict[str, object]) -> None:
    (name,) = ["a temperature per row" if key == "temperature" else key for key in option]
    with pytest.raises(HeadInputError, match=f"'liger' cannot apply {name}"):
        run("liger", head_case(20, **option))
