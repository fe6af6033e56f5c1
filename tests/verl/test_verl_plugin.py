"""Loading the plugin: cheap, silent where all is well, and never an error of verl's import, whatever verl there is.

The verl here is a stand-in on disk with the parts that the plugin hooks; the real one is in tests/virtual_npu.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERL = {  # file -> source; __init__ loads the plugin as verl does with VERL_USE_EXTERNAL_MODULES
    "__init__.py": "import npu_backend.verl_plugin\n",
    "workers/engine/fsdp/utils.py": "def apply_npu_fsdp_patches(model_config=None): return 'verl'\n",
    "workers/engine/fsdp/transformer_impl.py": (
        "class FSDPEngineWithLMHead:\n"
        "    def prepare_model_outputs(self, output, output_args, micro_batch): return {}\n"
    ),
    "workers/engine/base.py": (
        "class BaseEngine:\n    def train_batch(self, data): return {'metrics': {'loss': data}}\n"
    ),
    "utils/experimental/torch_functional.py": "class FusedLinearForPPO: pass\n",
    "models/transformers/monkey_patch.py": "def patch_forward_with_backends(model, use_fused_kernels=False): pass\n",
    "utils/kernel/linear_cross_entropy.py": "def linear_cross_entropy(): pass\n",
}
ENGINE = "from verl.workers.engine.fsdp.utils import apply_npu_fsdp_patches\n"


@pytest.fixture
def verl(tmp_path):
    """`verl(code, changes, **environment)` runs code beside the stand-in. `changes`: other sources, None: no file."""

    def run(code: str, changes: dict[str, str | None] | None = None, **environment: str) -> tuple[str, str]:
        for name, source in {**VERL, **(changes or {})}.items():
            if source is None:
                continue
            path = tmp_path / "verl" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
            for folder in path.relative_to(tmp_path).parents:
                if folder != Path("."):
                    (tmp_path / folder / "__init__.py").touch()
        path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("NPU_BACKEND_", "VERL_"))}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**outer, "PYTHONPATH": path, "NPU_BACKEND_DEVICE": "cpu", **environment},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run


def test_loading_imports_nothing_heavy_and_takes_no_time(verl):
    code = (
        "import dataclasses, importlib.abc, inspect, logging, pathlib, typing\n"  # verl and torch need these anyway
        "import sys, time; start = time.process_time(); import verl; spent = time.process_time() - start\n"
        "heavy = {'torch', 'torch_npu', 'transformers', 'triton', 'liger_kernel'}\n"
        "print(spent, *heavy.intersection(sys.modules))"
    )
    spent, *heavy = min((verl(code)[0].split() for _ in range(3)), key=lambda words: float(words[0]))
    assert heavy == []
    assert float(spent) < 0.05


def test_that_it_is_loaded_is_said_at_import(verl):
    said = "the plugin is loaded into verl"
    assert [said in line for line in verl("import verl", NPU_BACKEND_LOG="INFO")[1].splitlines()] == [True]
    assert verl("import verl")[1] == ""
    assert said not in verl("import verl", NPU_BACKEND_LOG="INFO", NPU_BACKEND_DISABLE="1")[1]


def test_the_line_about_what_was_hooked(verl):
    out, err = verl(ENGINE + "import verl.workers.engine.base; apply_npu_fsdp_patches()", NPU_BACKEND_LOG="INFO")
    assert out == ""
    [line] = [line for line in err.splitlines() if "npu-backend in verl" in line]
    hooked, waiting = line.split("; on import ")
    assert "fsdp.utils.apply_npu_fsdp_patches" in hooked
    assert "BaseEngine.train_batch" in hooked
    assert "torch_functional.FusedLinearForPPO" in waiting
    assert "absent" not in line


def test_a_newer_verl_whose_targets_moved(verl):
    """A module gone, a function gone, a class's method gone: said, and all else works."""
    changes = {
        "models/transformers/monkey_patch.py": None,
        "utils/kernel/linear_cross_entropy.py": "def renamed(): pass\n",
        "workers/engine/base.py": "class BaseEngine:\n    def update(self, data): return {}\n",
    }
    code = (
        ENGINE + "import verl.utils.kernel.linear_cross_entropy, verl.workers.engine.base\n"
        "from verl.utils.experimental.torch_functional import FusedLinearForPPO\n"
        "apply_npu_fsdp_patches(); print(FusedLinearForPPO.__module__)"
    )
    out, err = verl(code, changes, NPU_BACKEND_LOG="INFO")
    assert out.strip() == "npu_backend.head.modules"
    for moved in (
        "models.transformers.monkey_patch",
        "linear_cross_entropy.linear_cross_entropy",
        "base.BaseEngine.train_batch",
    ):
        assert f"this verl has no verl.{moved}; it stays as it is" in err.replace("workers.engine.", "").replace(
            "utils.kernel.", ""
        )
    [line] = [line for line in err.splitlines() if "npu-backend in verl" in line]
    assert "monkey_patch" in line.partition("absent from this verl")[2]
    assert "monkey_patch" not in line.partition("absent from this verl")[0]


def test_disabled(verl):
    out, err = verl(ENGINE + "print(apply_npu_fsdp_patches())", NPU_BACKEND_DISABLE="1")
    assert out.strip() == "verl"
    assert err.count("NPU_BACKEND_DISABLE=1, verl stays as it is") == 1


def test_a_bad_variable_is_said_at_import_and_raised_at_first_use(verl):
    code = (
        ENGINE + "from npu_backend.errors import ConfigError\n"
        "try:\n    apply_npu_fsdp_patches()\nexcept ConfigError as error:\n    print(error)\n"
    )
    out, err = verl(code, NPU_BACKEND_STRICT="perhaps")
    assert "NPU_BACKEND_STRICT" in out
    assert "NPU_BACKEND_STRICT" in err


def test_torch_npu_without_a_device(verl, tmp_path):
    """Its module can be imported on a host without an NPU: the patches are skipped, and the reason is said."""
    source = (
        "import torch, types\ntorch.npu = types.SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)\n"
    )
    (tmp_path / "torch_npu.py").write_text(source)
    code = ENGINE + (
        "import torch, torch_npu, npu_backend; apply_npu_fsdp_patches({'use_liger': False})\n"
        "report = npu_backend.plan_patches(); print(report.applied, {row.state for row in report.rows}, report.device)"
    )
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "NPU_BACKEND_DEVICE": ""}
    out, _ = verl(code, **{k: v for k, v in environment.items() if v}, CUDA_VISIBLE_DEVICES="")
    assert out.startswith("0 {'skipped'} cpu")


def test_what_the_fused_head_cannot_give_is_refused(verl):
    code = (
        "from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead as Engine\n"
        "from npu_backend.errors import HeadInputError\n"
        "print(Engine().prepare_model_outputs(None, {}, {'distillation_use_topk': True}))\n"
        "asked = {'use_fused_kernels': True, 'distillation_use_topk': True}\n"
        "try:\n    Engine().prepare_model_outputs(None, {}, asked)\n"
        "except HeadInputError as error:\n    print(error)\n"
    )
    out, _ = verl(code)
    assert out.startswith("{}\ndistillation over the top k logits")


def test_the_metrics_of_an_update(verl):
    """The same names with and without fallbacks, because verl gathers them over the ranks."""
    code = (
        "from verl.workers.engine.base import BaseEngine\nfrom npu_backend.operators import counters\n"
        "counters.note_fallback('rotary', 'before'); print(BaseEngine().train_batch(1)['metrics'])\n"
    )
    out, _ = verl(code)
    zeros = {f"npu_backend/fallbacks/{op}": 0 for op in ("rms_norm", "gated_mlp", "rotary", "sparse_moe", "ppo_head")}
    assert out.strip() == str({"loss": 1, **zeros})
