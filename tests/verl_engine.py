"""PPO training runs of verl's own FSDPEngine, one after the other in one process, as a script.

    npu-backend run --virtual-npu=2 -- python verl_engine.py FOLDER HOW '[{"strategy": "fsdp2", ...}, ...]'

verl is unmodified; HOW is `plugin` (ours, by VERL_USE_EXTERNAL_MODULES), `entry-point` (ours, by that) or `stock`.
FOLDER holds tiny models (made when absent) and receives `results.json`, a list with what each run gave, or its error.
The data and the seeds are the same in every run, so results can be compared. The keys of a run are described at
`DEFAULTS`; a run with `scenario` calls that function of `verl_scenarios` instead.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEFAULTS: dict[str, Any] = {
    "family": "qwen3",
    "hidden_size": 64,  # of a qwen3
    "strategy": "fsdp",  # or fsdp2
    "tied": False,  # input embeddings and output head share a weight
    "remove_padding": False,  # sequences packed into one, for flash attention
    "lora": 0,  # its rank
    "sp": 1,  # ranks that share one sequence (Ulysses)
    "fused": True,  # use_fused_kernels
    "impl_backend": "torch",
    "attention": "eager",
    "checkpointing": False,  # of activations
    "dtype": "fp32",  # of the parameters in forward and backward, as verl spells it
    "use_liger": False,
    "steps": 2,
    "after": True,  # score the batch once more after the steps
}
BATCH, LENGTH = 8, 24
RESPONSE = LENGTH // 2
TOKENS = 256  # in a micro-batch, at most
LAYERS = 2

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def set_up(how: str, runs: list[dict[str, Any]]) -> None:
    """What must be settled before anything imports torch or verl."""
    os.environ.update(HF_HUB_OFFLINE="1", RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    if how == "stock":
        os.environ["NPU_BACKEND_DISABLE"] = "1"
    elif how == "plugin":
        os.environ["VERL_USE_EXTERNAL_MODULES"] = "npu_backend.verl_plugin"
    on_npu = "NPU_BACKEND_VIRTUAL_NPU" in os.environ
    if on_npu and any(run.get("use_liger") or run.get("impl_backend") in ("liger", "triton") for run in runs):
        from npu_backend import liger_interpreter

        liger_interpreter.activate()  # no triton-ascend here: Ascend sources run in Triton's interpreter


def tiny_model(folder: Path, run: dict[str, Any]) -> str:
    """A random two-layer model with a byte tokenizer, in a folder that from_pretrained takes."""
    path = folder / f"{run['family']}-{run['hidden_size']}-{'tied' if run['tied'] else 'untied'}"
    if (path / "config.json").exists():
        return str(path)
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    save_tokenizer(path)
    if run["family"] == "qwen3":
        config = Qwen3Config(
            vocab_size=128,
            hidden_size=run["hidden_size"],
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=256,
            tie_word_embeddings=run["tied"],
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        model = Qwen3ForCausalLM(config)
    else:
        from npu_backend import model_configs
        from npu_backend.verification import models as families

        model = families.tiny_model(model_configs.default_config(run["family"], tie_word_embeddings=run["tied"]))
    model.float().save_pretrained(path)
    return str(path)


def save_tokenizer(path: Path) -> None:
    """One word for each number below 128."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"t{i}": i for i in range(3, 128)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(path)


def configs(path: str, run: dict[str, Any]) -> tuple[Any, Any, Any]:
    """verl's configurations of model, engine and optimizer with this run's settings."""
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    model = HFModelConfig(
        path=path,
        lora_rank=run["lora"],
        use_remove_padding=run["remove_padding"],
        use_liger=run["use_liger"],
        enable_gradient_checkpointing=run["checkpointing"],
        use_fused_kernels=run["fused"],
        fused_kernel_options={"impl_backend": run["impl_backend"]},
        override_config={"attn_implementation": attention_of(run)},
    )
    engine = FSDPEngineConfig(
        strategy=run["strategy"],
        fsdp_size=-1,
        ulysses_sequence_parallel_size=run["sp"],
        use_torch_compile=False,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=TOKENS,
        infer_max_token_len_per_gpu=TOKENS,
        use_remove_padding=run["remove_padding"],
        mixed_precision={"param_dtype": run["dtype"], "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        model_dtype="fp32",
        use_fused_kernels=run["fused"],
    )
    return model, engine, FSDPOptimizerConfig(lr=1e-3, total_training_steps=10)


def make_engine(path: str, run: dict[str, Any]) -> Any:
    """verl's engine for a language model."""
    import torch
    from verl.trainer.config import CheckpointConfig
    from verl.workers.engine import EngineRegistry

    torch.manual_seed(2)  # the adapters of LoRA
    model, engine, optimizer = configs(path, run)
    built = EngineRegistry.new(
        "language_model",
        run["strategy"],
        model_config=model,
        engine_config=engine,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    built.initialize()
    return built


def attention_of(run: dict[str, Any]) -> str:
    """Ulysses is in verl's flash attention; on an NPU that is npu_fusion_attention."""
    return "flash_attention_2" if run["sp"] > 1 else run["attention"]


def global_batch() -> dict[str, Any]:
    """Eight sequences of differing lengths, padded on both sides; the same on every rank."""
    import torch
    from verl.utils.model import compute_position_id_with_mask

    torch.manual_seed(1)
    ids, mask = torch.randint(3, 128, (BATCH, LENGTH)), torch.ones(BATCH, LENGTH, dtype=torch.int64)
    for row in range(BATCH):
        mask[row, : row % 4] = 0
        mask[row, LENGTH - row % 3 :] = 0
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "position_ids": compute_position_id_with_mask(mask),
        "prompts": (ids * mask)[:, :RESPONSE],
        "responses": (ids * mask)[:, RESPONSE:],
        "response_mask": mask[:, RESPONSE:],
        "advantages": torch.randn(BATCH, RESPONSE),
    }


def as_verl(tensors: dict[str, Any], run: dict[str, Any], **meta: Any) -> Any:
    """This rank's part of a batch, in the form that verl's engine takes. Ranks that share sequences share the part."""
    from verl import DataProto
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import left_right_2_no_padding

    replica, replicas = rank // run["sp"], world // run["sp"]
    part = slice(replica * BATCH // replicas, (replica + 1) * BATCH // replicas)
    proto = DataProto.from_single_dict({k: v[part] for k, v in tensors.items()}, meta_info={"temperature": 0.8, **meta})
    data = left_right_2_no_padding(proto.to_tensordict())
    if "loss_mask" not in data.keys():  # noqa: SIM118
        data["loss_mask"] = data["response_mask"]
    tensordict_utils.assign_non_tensor(
        data,
        use_remove_padding=run["remove_padding"],
        use_fused_kernels=run["fused"],
        use_dynamic_bsz=True,
        max_token_len_per_gpu=TOKENS,
        calculate_entropy=True,
        pad_token_id=0,
        global_batch_size=BATCH,
    )
    return data


def log_probs(engine: Any, tensors: dict[str, Any], run: dict[str, Any], **meta: Any) -> Any:
    """Log-probs of the responses of the whole batch, [BATCH, RESPONSE], gathered from all ranks."""
    import torch
    import torch.distributed as dist
    from verl.workers.utils.padding import no_padding_2_padding

    given = {k: v for k, v in tensors.items() if k != "advantages"}
    data = as_verl(given, run, compute_loss=False, **meta)
    with engine.eval_mode():
        output = engine.infer_batch(data)
    mine = no_padding_2_padding(output["model_output"]["log_probs"], data).detach().float().cpu().contiguous()
    parts = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    return torch.cat(parts[:: run["sp"]])


def train(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradient norm of each step, the log-probs before and after, and what ran how often."""
    import torch
    import torch.distributed as dist
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    with counted() as counts:
        engine = make_engine(tiny_model(folder, run), run)
        counts.watch(engine)
        tensors = global_batch()
        before = log_probs(engine, tensors, run)
        actor = ActorConfig(
            strategy=run["strategy"],
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=2,
            ppo_mini_batch_size=BATCH,
            entropy_coeff=0.01,
            use_kl_loss=True,
        )
        steps, metrics = [], {}
        for _ in range(run["steps"]):
            data = as_verl({**tensors, "old_log_probs": before, "ref_log_prob": before}, run)
            with engine.train_mode():
                output = engine.train_batch(data, loss_function=functools.partial(ppo_loss, config=actor))
            metrics, loss = output["metrics"], output["loss"]
            mean = torch.tensor([float(sum(loss)) if isinstance(loss, (list, tuple)) else float(loss)])
            dist.all_reduce(mean)
            grad_norm = metrics.get("grad_norm", "nan")  # the first rank of a sequence has it
            steps.append([mean.item() / world, float(grad_norm)])
        after = {"after": log_probs(engine, tensors, run).tolist()} if run["after"] else {}
    ours = {name: value for name, value in metrics.items() if name.startswith("npu_backend/")}
    return {"steps": steps, "before": before.tolist(), **after, "metrics": ours, **counts.found()}


class Counts:
    """What ran during a run: forwards of the model, our operators, the head by backend, Liger's modules."""

    def __init__(self, plugin: bool) -> None:
        self.plugin = plugin
        self.forwards = 0
        self.head: Counter[str] = Counter()
        self.liger: Counter[str] = Counter()

    def watch(self, engine: Any) -> None:
        forward_step = engine.forward_step

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.forwards += 1
            return forward_step(*args, **kwargs)

        engine.forward_step = counting

    def module_ran(self, module: Any, args: Any, output: Any) -> None:
        forward = getattr(module.forward, "__func__", module.forward)
        if getattr(forward, "__module__", "").startswith("liger_kernel"):
            self.liger[forward.__qualname__] += 1

    def found(self) -> dict[str, Any]:
        found: dict[str, Any] = {"forwards": self.forwards, "liger": self.liger}
        if self.plugin:
            import npu_backend
            from npu_backend.operators import counters

            found |= {"status": npu_backend.patch_status().to_dict(), "head": self.head}
            found |= {"calls": counters.calls(), "fallbacks": counters.fallbacks()}
        return found


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count from here on."""
    import torch

    plugin = "npu_backend.verl_plugin" in sys.modules and "NPU_BACKEND_DISABLE" not in os.environ
    counts = Counts(plugin)
    hook = torch.nn.modules.module.register_module_forward_hook(counts.module_ran)
    try:
        if not plugin:
            yield counts
            return
        from npu_backend.head import adapter
        from npu_backend.operators import counters

        original = adapter.linear_log_prob

        def counting(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            counts.head[output.backend] += 1
            return output

        counters.reset()
        adapter.linear_log_prob = counting
        try:
            yield counts
        finally:
            adapter.linear_log_prob = original
    finally:
        hook.remove()


def start(folder: Path) -> None:
    """Check that verl sees the device that it is meant to, and join the other processes."""
    import torch
    import torch.distributed as dist
    from verl.utils.device import get_device_name, is_npu_available

    backend = "gloo"
    if os.environ.get("NPU_BACKEND_VIRTUAL_NPU"):
        assert (get_device_name(), is_npu_available) == ("npu", True)
        torch.npu.set_device(rank % torch.npu.device_count())
        backend = "cpu:gloo,npu:hccl"
    elif get_device_name() == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def main(folder: Path, how: str, runs: list[dict[str, Any]]) -> None:
    set_up(how, runs)
    if os.environ.get("VERL_PLATFORM") == "cpu":
        import verl_cpu_platform  # noqa: F401
    import torch.distributed as dist

    start(folder)
    results = []
    for run in runs:
        scenario = getattr(importlib.import_module("verl_scenarios"), run["scenario"]) if "scenario" in run else train
        try:
            results.append(scenario(folder, {**DEFAULTS, **run}))
        except Exception as error:
            traceback.print_exc()
            if world > 1:
                raise  # the other ranks wait for this one
            results.append({"error": f"{type(error).__name__}: {error}"})
        if how != "stock":
            import npu_backend

            npu_backend.revert_patches()
        gc.collect()
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.modules["verl_engine"] = sys.modules["__main__"]  # for verl_scenarios
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
