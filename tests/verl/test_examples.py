"""The examples: verl's own loader composes and checks each GRPO configuration; the accelerate example trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = {"grpo_qwen3_0_6b": "Qwen/Qwen3-0.6B", "grpo_qwen3_8b": "Qwen/Qwen3-8B"}
KERNELS = {
    "npu_operators": ("npu", False, "auto"),
    "npu_liger": ("npu", True, "auto"),
    "cuda": ("cuda", True, "triton"),
}
COMPOSE = """
import sys
from hydra import compose, initialize_config_dir
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
import npu_backend
with initialize_config_dir(sys.argv[1], version_base=None):
    for name in ("grpo_qwen3_0_6b", "grpo_qwen3_8b"):
        for kernels in ("npu_operators", "npu_liger", "cuda"):
            config = compose(name, [f"kernels={kernels}"])
            validate_config(config, need_reference_policy(config), need_critic(config))
            model, actor = config.actor_rollout_ref.model, omega_conf_to_dataclass(config.actor_rollout_ref.actor)
            npu_backend.plan_patches({**model, "hf_config": None}) if not model.use_liger else None
            print("FOUND", name, kernels, model.path, config.trainer.device, model.use_liger, model.use_fused_kernels,
                  model.fused_kernel_options.impl_backend, actor.strategy, config.algorithm.adv_estimator)
"""


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{EXAMPLES.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_verl_composes_and_validates_every_configuration():
    pytest.importorskip("verl", reason="verl is in the main environment only")
    found = [line.split()[1:] for line in run("-c", COMPOSE, str(EXAMPLES / "config")).splitlines() if "FOUND" in line]
    assert found == [
        [name, kernels, path, device, str(liger), "True", backend, "fsdp2", "grpo"]
        for name, path in MODELS.items()
        for kernels, (device, liger, backend) in KERNELS.items()
    ]


def test_the_command_of_the_readme():
    """As written there, but for printing the configuration instead of training."""
    pytest.importorskip("verl", reason="verl is in the main environment only")
    [command] = re.findall(r"python -m (verl.trainer.main_ppo --config-path .*)", (EXAMPLES / "README.md").read_text())
    arguments = command.replace('"$PWD/examples/config"', str(EXAMPLES / "config")).split()
    printed = run("-m", *arguments, "--cfg", "job")
    assert "use_liger: true" in printed
    assert "path: Qwen/Qwen3-0.6B" in printed


def test_accelerate():
    pytest.importorskip("accelerate")
    printed = run(str(EXAMPLES / "hf_accelerate.py"), "--steps", "4")
    losses = [float(loss) for loss in re.findall(r"loss (-?\d+\.\d+)", printed)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
