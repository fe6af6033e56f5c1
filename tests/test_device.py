"""NPU first, then CUDA, then CPU; a device asked for by name is there or it is an error."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from npu_backend import device  # noqa: E402
from npu_backend.errors import BackendUnavailableError  # noqa: E402


@pytest.fixture
def torch_npu(monkeypatch):
    """Install a stand-in torch_npu with one Ascend910B1; returns it so that a test can spoil it."""
    module = types.ModuleType("torch_npu")
    module.__version__ = "2.13.0"
    npu = types.SimpleNamespace(is_available=lambda: True, get_device_name=lambda i: "Ascend910B1")
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    module.npu = npu
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: module if name == "torch_npu" else find(name, *a))
    return module


@pytest.mark.case("C08")
def test_a_shim_that_fakes_cuda_does_not_hide_the_npu(torch_npu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = device.detect()
    assert (found.type, found.name, found.virtual) == ("npu", "Ascend910B1", False)


def test_a_shim_without_cuda_is_no_cuda(monkeypatch):
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    monkeypatch.setenv("NPU_BACKEND_DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(BackendUnavailableError, match="shim"):
        device.detect()


@pytest.mark.case("C09")
@pytest.mark.parametrize("error", [OSError("libascend_hal.so: cannot open"), ImportError("x"), RuntimeError("y")])
def test_a_torch_npu_that_cannot_load_means_no_npu_with_the_reason(torch_npu, monkeypatch, error):
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(device.importlib, "import_module", fail)
    found = device.detect()
    assert found.type == "cpu"
    assert str(error) in found.reason


def test_a_driver_without_a_device_is_a_reason(torch_npu, monkeypatch):
    monkeypatch.setattr(torch_npu.npu, "is_available", lambda: False)
    assert "finds no device" in device.detect().reason


@pytest.mark.case("A34")
def test_an_npu_asked_for_by_name_must_be_there(monkeypatch):
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name, *a: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.detect().type == "cpu"
    assert "torch_npu is not installed" in device.detect().reason
    monkeypatch.setenv("NPU_BACKEND_DEVICE", "npu")
    with pytest.raises(BackendUnavailableError, match="torch_npu"):
        device.detect()


@pytest.mark.case("A25")
@pytest.mark.parametrize("version", ["2.2.0", "2.1.0.post3", "2.5.0"])
def test_an_old_torch_npu_is_refused_with_the_minimum(torch_npu, version):
    torch_npu.__version__ = version
    with pytest.raises(BackendUnavailableError, match=r">= 2\.5\.1"):
        device.detect()


@pytest.mark.case("A28")
@pytest.mark.parametrize("version", ["2.5.1", "2.7.1.post2", "2.14.0.dev0+g123", "2.9.0+cann8", "unknown"])
def test_edited_versions_are_read_by_their_release(torch_npu, version):
    torch_npu.__version__ = version
    assert device.detect().type == "npu"


def test_cpu_can_be_asked_for(torch_npu, monkeypatch):
    monkeypatch.setenv("NPU_BACKEND_DEVICE", "cpu")
    assert device.detect().type == "cpu"
