"""One PPO training run of verl's own FSDPEngine on virtual NPUs (arithmetic by the CPU), as a script.

    npu-backend run --virtual-npu=1 -- python verl_engine.py FOLDER '{"strategy": "fsdp2", "fused": true, ...}'

FOLDER holds a tiny model (made when absent) and receives `result.json`. verl is unmodified; our plugin is loaded by
VERL_USE_EXTERNAL_MODULES, or left out. The data and the seeds are the same in every run, so results can be compared.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
os.environ.update(HF_HUB_OFFLINE="1", RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
if settings.get("plugin", True):
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "npu_backend.verl_plugin"
else:
    os.environ["NPU_BACKEND_DISABLE"] = "1"  # the entry point may be installed

if settings.get("use_liger"):
    from npu_backend import liger_interpreter

    liger_interpreter.activate()  # no triton-ascend here: Liger's Ascend sources run in Triton's interpreter

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

BATCH, LENGTH = 8, 24
RESPONSE = LENGTH // 2


def tiny_model(path: Path, tied: bool) -> str:
    """A random two-layer Qwen3 with a byte tokenizer, in a folder that from_pretrained takes."""
    if (path / "config.json").exists():
        return str(path)
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"t{i}": i for i in range(3, 128)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(path)
    return str(path)


def make_engine(path: str) -> Any:
    """verl's engine for a language model, with this run's settings."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    fused = settings.get("fused", True)
    model_config = HFModelConfig(
        path=path,
        lora_rank=settings.get("lora", 0),
        use_remove_padding=settings.get("remove_padding", False),
        use_liger=settings.get("use_liger", False),
        enable_gradient_checkpointing=False,
        use_fused_kernels=fused,
        fused_kernel_options={"impl_backend": settings.get("impl_backend", "torch")},
        override_config={"attn_implementation": "eager"},
    )
    engine_config = FSDPEngineConfig(
        strategy=settings.get("strategy", "fsdp2"),
        fsdp_size=-1,
        use_torch_compile=False,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=256,
        infer_max_token_len_per_gpu=256,
        use_remove_padding=settings.get("remove_padding", False),
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        model_dtype="fp32",
        use_fused_kernels=fused,
    )
    engine = EngineRegistry.new(
        "language_model",
        settings.get("strategy", "fsdp2"),
        model_config=model_config,
        engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def global_batch() -> dict[str, torch.Tensor]:
    """Eight sequences of differing lengths, padded on both sides; the same on every rank."""
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


def as_verl(tensors: dict[str, torch.Tensor], **meta: Any) -> Any:
    """This rank's part of a batch, in the form that verl's engine takes."""
    from verl import DataProto
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import left_right_2_no_padding

    part = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    proto = DataProto.from_single_dict({k: v[part] for k, v in tensors.items()}, meta_info={"temperature": 0.8, **meta})
    data = left_right_2_no_padding(proto.to_tensordict())
    if "loss_mask" not in data.keys():  # noqa: SIM118
        data["loss_mask"] = data["response_mask"]
    tensordict_utils.assign_non_tensor(
        data,
        use_remove_padding=settings.get("remove_padding", False),
        use_fused_kernels=settings.get("fused", True),
        use_dynamic_bsz=True,
        max_token_len_per_gpu=256,
        calculate_entropy=True,
        pad_token_id=0,
        global_batch_size=BATCH,
    )
    return data


def log_probs(engine: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Log-probs of the responses of the whole batch, gathered from all ranks."""
    from verl.workers.utils.padding import no_padding_2_padding

    given = {k: v for k, v in tensors.items() if k != "advantages"}
    data = as_verl(given, compute_loss=False)
    with engine.eval_mode():
        output = engine.infer_batch(data)
    mine = no_padding_2_padding(output["model_output"]["log_probs"], data).detach().float().cpu().contiguous()
    parts = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def main() -> None:
    from verl.utils.device import get_device_name, is_npu_available
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    assert (get_device_name(), is_npu_available) == ("npu", True)
    torch.npu.set_device(rank % torch.npu.device_count())
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    dist.init_process_group("cpu:gloo,npu:hccl", store=store, rank=rank, world_size=world)
    tied = settings.get("tied", False)
    engine = make_engine(tiny_model(folder / f"model-{'tied' if tied else 'untied'}", tied))
    tensors = global_batch()
    before = log_probs(engine, tensors)
    actor = ActorConfig(
        strategy=settings.get("strategy", "fsdp2"),
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        ppo_mini_batch_size=BATCH,
        entropy_coeff=0.01,
        use_kl_loss=True,
    )
    loss_function = functools.partial(ppo_loss, config=actor)
    steps = []
    for _ in range(settings.get("steps", 2)):
        data = as_verl({**tensors, "old_log_probs": before, "ref_log_prob": before})
        with engine.train_mode():
            output = engine.train_batch(data, loss_function=loss_function)
        loss = output["loss"]
        mean = torch.tensor([float(sum(loss)) if isinstance(loss, (list, tuple)) else float(loss)])
        dist.all_reduce(mean)
        steps.append([mean.item() / world, float(output["metrics"]["grad_norm"])])
    after = log_probs(engine, tensors)
    result: dict[str, Any] = {"steps": steps, "before": before.tolist(), "after": after.tolist()}
    if settings.get("plugin", True):
        import npu_backend
        from npu_backend.operators import counters

        result["status"] = npu_backend.patch_status().to_dict()
        result["calls"], result["fallbacks"] = counters.calls(), counters.fallbacks()
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
