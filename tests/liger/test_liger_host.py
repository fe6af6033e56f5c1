"""use_liger on hosts where Liger is absent, broken, too old, too new, or not bound to its Ascend kernels."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import interpreted
import pytest

import npu_backend
from npu_backend import device
from npu_backend.errors import BackendUnavailableError
from npu_backend.patches import liger

NPU = device.Device("npu", "a fake device of this test", name="Ascend910B1")
QWEN3 = SimpleNamespace(model_type="qwen3")
MODEL = {"use_liger": True, "hf_config": QWEN3}
NOT_PATCHED = ("unavailable",)


@pytest.fixture(autouse=True)
def npu_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The manager believes in an NPU; nothing is remembered of Liger before and after."""
    monkeypatch.setattr(device, "detect", lambda: NPU)
    liger._import_liger.cache_clear()
    yield
    npu_backend.revert_patches()
    liger._import_liger.cache_clear()


@pytest.fixture
def liger_made_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[dict[str, str]], None]:
    """Put a made-up liger_kernel package in the place of the installed one."""

    def make(files: dict[str, str]) -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] == "liger_kernel"]:
            monkeypatch.delitem(sys.modules, name)
        for name, text in {
            "liger_kernel/__init__.py": "",
            "liger_kernel/transformers/__init__.py": "",
            **files,
        }.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield make
    for name in [n for n in sys.modules if n.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]  # not by monkeypatch, which would bring the made-up ones back when it undoes its work


def qwen3_objects() -> dict[str, Any]:
    from transformers.models.qwen3 import modeling_qwen3

    return dict(vars(modeling_qwen3))


def test_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else find_spec(name))
    before = qwen3_objects()
    with pytest.raises(BackendUnavailableError, match=r"pip install --no-deps liger-kernel"):
        npu_backend.apply_npu_fsdp_patches(MODEL)
    assert qwen3_objects() == before


REFUSES = "raise ImportError('liger-kernel requires transformers >= 5.0.0, got 4.57.6.')"
OLD = "def apply_liger_kernel_to_llama(): ...\ndef _apply_liger_kernel_to_instance(model): ..."
TOO_NEW = "def apply_liger_kernel_to_qwen3(): ...\ndef _apply_liger_kernel_to_instance(model): ..."
RENAMED = "from transformers.models.qwen3.modeling_qwen3 import Qwen3OutputOfAnotherRelease"


@pytest.mark.case("A39")
@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"monkey_patch.py": REFUSES}, "requires transformers >= 5.0.0"),
        ({"monkey_patch.py": OLD}, "has no patches for qwen3"),
        (
            {"monkey_patch.py": TOO_NEW, "model/__init__.py": "", "model/qwen3.py": RENAMED},
            "Qwen3OutputOfAnotherRelease",
        ),
    ],
    ids=["transformers too old", "Liger too old", "transformers too new"],
)
def test_a_liger_that_does_not_go_with_this_transformers_is_a_row_with_the_reason(
    liger_made_of: Callable[[dict[str, str]], None], files: dict[str, str], reason: str
) -> None:
    liger_made_of({f"liger_kernel/transformers/{name}": text for name, text in files.items()})
    before = qwen3_objects()
    for report in (npu_backend.plan_patches(MODEL), npu_backend.apply_npu_fsdp_patches(MODEL)):
        assert len(report.rows) == 3
        assert all(row.state in NOT_PATCHED and reason in row.reason for row in report.rows), str(report)
    assert qwen3_objects() == before


def test_strict_turns_unavailable_into_an_error(
    liger_made_of: Callable[[dict[str, str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    liger_made_of({"liger_kernel/transformers/monkey_patch.py": REFUSES})
    monkeypatch.setenv("NPU_BACKEND_STRICT", "1")
    with pytest.raises(BackendUnavailableError, match="requires transformers"):
        npu_backend.apply_npu_fsdp_patches(MODEL)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('0 active drivers')", r"broken here.*0 active drivers"),
        ("import triton.of_no_release", r"no triton that.*triton-ascend==3\.2\.2 --extra-index-url https://"),
        ("from triton.language.math import of_another", r"no triton that it can use \(.*cannot import.*triton-ascend"),
    ],
    ids=["raises at import", "no triton", "another triton"],
)
def test_a_broken_liger_is_an_error_with_the_repair(
    liger_made_of: Callable[[dict[str, str]], None], text: str, message: str
) -> None:
    liger_made_of({"liger_kernel/transformers/monkey_patch.py": text})
    before = qwen3_objects()
    with pytest.raises(BackendUnavailableError, match=message):
        npu_backend.apply_npu_fsdp_patches(MODEL)
    assert qwen3_objects() == before


@pytest.mark.parametrize("installed", ["none", "3.9.0"])
def test_upstream_triton_is_to_be_removed_only_where_there_is_one(
    liger_made_of: Callable[[dict[str, str]], None], monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    liger_made_of({"liger_kernel/transformers/monkey_patch.py": "import triton.of_no_release"})
    monkeypatch.setattr(liger, "_version", lambda distribution: installed)
    with pytest.raises(BackendUnavailableError) as raised:
        npu_backend.apply_npu_fsdp_patches(MODEL)
    assert ("pip uninstall -y triton" in str(raised.value)) == (installed != "none")


@pytest.mark.case("A18")
@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_liger_does_not_know(monkeypatch: pytest.MonkeyPatch, strict: bool) -> None:
    config = {"use_liger": True, "hf_config": SimpleNamespace(model_type="gpt2")}
    if strict:
        monkeypatch.setenv("NPU_BACKEND_STRICT", "1")
        with pytest.raises(BackendUnavailableError, match=r"gpt2.*it covers.*qwen3_moe"):
            npu_backend.apply_npu_fsdp_patches(config)
        return
    report = npu_backend.apply_npu_fsdp_patches(config)
    assert [row.state for row in report.rows] == ["unavailable"]
    assert "gpt2" in report.rows[0].reason


NOT_BOUND = """
import importlib, sys
from types import SimpleNamespace
import triton
triton.runtime.driver.set_active(SimpleNamespace(get_benchmarker=lambda: None))  # so that Liger's generic half imports
triton.language.math.tanh = triton.language.math.rsqrt  # triton-ascend has it
import liger_kernel.utils
liger_kernel.utils.is_npu_available = lambda: True
import npu_backend
from npu_backend import device
from npu_backend.errors import BackendUnavailableError
device.detect = lambda: device.Device("npu", "a fake device of this test", name="Ascend910B1")
modeling = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
before = dict(vars(modeling))
try:
    npu_backend.apply_npu_fsdp_patches({"use_liger": True, "hf_config": SimpleNamespace(model_type="qwen3")})
except BackendUnavailableError as error:
    print("REFUSED", error)
from liger_kernel.transformers import monkey_patch
print("UNCHANGED", all(vars(modeling)[n] is v for n, v in before.items()), npu_backend.patch_status().rows,
      type(monkey_patch._apply_liger_kernel_to_instance).__name__)
from npu_backend.liger_interpreter import activate
try:
    activate()
except BackendUnavailableError as error:
    print("LATE", error)
"""


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
@interpreted.supported
def test_liger_that_silently_kept_its_cuda_kernels_is_an_error_with_the_repair_and_changes_nothing() -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", NOT_BOUND],
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = {line.partition(" ")[0]: line for line in done.stdout.splitlines()}
    assert "LigerRMSNormFunction" in lines["REFUSED"]
    assert "triton.language.extra.cann" in lines["REFUSED"]
    assert "triton-ascend==3.2.2" in lines["REFUSED"]
    assert lines["UNCHANGED"] == "UNCHANGED True () function"
    assert "Start another process" in lines["LATE"]


def test_every_record_says_what_it_is_for_and_when_it_can_go() -> None:
    for patch in liger.PATCH_SET.patches:
        assert patch.why
        assert patch.upstream
        assert patch.remove_when
    targets = [patch.target for patch in liger.PATCH_SET.patches]
    assert len(targets) == len(set(targets))
