"""A PPO update through Ray: a driver and two of verl's TrainingWorkers, as a script: `verl_ray.py FOLDER`.

The same model, batch and settings as `verl_engine.py`, FSDP2. `results.json` in FOLDER holds its result, and what each
worker says of our plugin.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import verl_engine

WORLD = 2
RUN = {**verl_engine.DEFAULTS, "strategy": "fsdp2"}


def worker_class() -> Any:
    """verl's worker, which tells about our plugin when asked."""
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.workers.engine_workers import TrainingWorker

    class Worker(TrainingWorker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def plugin(self) -> Any:
            import npu_backend
            from npu_backend import verl_plugin
            from npu_backend.operators import counters

            return {
                "hooked": list(verl_plugin._hooked),
                "status": npu_backend.patch_status().to_dict(),
                "calls": counters.calls(),
                "fallbacks": counters.fallbacks(),
            }

    return Worker


def main(folder: Path) -> None:
    device = os.environ.get("VERL_PLATFORM", "npu")
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "npu_backend.verl_plugin"
    if device == "cpu":
        os.environ["VERL_USE_EXTERNAL_MODULES"] = "verl_cpu_platform,npu_backend.verl_plugin"
    os.environ.update(HF_HUB_OFFLINE="1", RAY_USAGE_STATS_ENABLED="0")
    import ray
    import verl  # noqa: F401
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig, TrainingWorkerConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import no_padding_2_padding

    model, engine, optimizer = verl_engine.configs(verl_engine.tiny_model(folder, RUN), RUN)
    resources = {} if device == "cpu" else {device.upper(): WORLD}
    ray.init(
        num_cpus=12 * WORLD,  # verl reserves ten for each worker
        resources=resources,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=200 * 2**20,
    )
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=model,
        engine_config=engine,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    workers = RayWorkerGroup(
        resource_pool=RayResourcePool(process_on_nodes=[WORLD], use_gpu=device != "cpu"),
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(worker_class()), config=config),
        device_name=device,
    )
    workers.reset()
    tensors = verl_engine.global_batch()
    lengths = {"global_token_num": tensors["attention_mask"].sum(-1).tolist()}
    given = {k: v for k, v in tensors.items() if k != "advantages"}
    data = verl_engine.as_verl(given, RUN, compute_loss=False, **lengths)
    before = no_padding_2_padding(tensordict_utils.get(workers.infer_batch(data).get(), "log_probs").cpu(), data)
    actor = ActorConfig(
        strategy=RUN["strategy"],
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        ppo_mini_batch_size=verl_engine.BATCH,
        entropy_coeff=0.01,
        use_kl_loss=True,
    )
    workers.set_loss_fn(functools.partial(ppo_loss, config=actor))
    steps, metrics = [], {}
    for _ in range(RUN["steps"]):
        data = verl_engine.as_verl({**tensors, "old_log_probs": before, "ref_log_prob": before}, RUN, **lengths)
        metrics = tensordict_utils.get(workers.train_batch(data).get(), "metrics")
        steps.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    ours = {name: value for name, value in metrics.items() if name.startswith("npu_backend/")}
    result = {"steps": steps, "before": before.float().tolist(), "metrics": ours, "workers": workers.plugin()}
    (folder / "results.json").write_text(json.dumps(result))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
