"""Actor updates of Qwen3-0.6B's geometry in verl's own FSDPEngine on one CUDA device, around each head:

    python tests/cuda/verl_engine_figures.py ROUNDS RESULTS.json

An update is old log-probs without gradients, then forward, PPO's loss with entropy, backward and the optimizer's step:
16 x 1024 random tokens, random weights, verl's defaults (float32 master weights, bfloat16 compute, checkpointing of
activations) but for attention (sdpa) and padding, of which there is none to remove. One process per head, all alive at
once; in each round each makes one update in turn, in a random order, while the others wait. verl is unmodified; its own
head runs without our plugin. Its Triton head is not among them: verl fails with it where padding is not removed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import verl_engine

SEQUENCES, LENGTH = 16, 1024
RESPONSES = {"nearly all": 1008, "half": 512}  # which rows carry gradients: tokens of the response
WARM_UPS = 2
RUN = {"dtype": "bf16", "attention": "sdpa", "checkpointing": True}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "verl chunked": ("stock", {"impl_backend": "torch"}),
    "Liger": ("plugin", {"impl_backend": "liger"}),
    "npu-backend triton, cache auto": ("plugin", {"impl_backend": "triton"}),
    "npu-backend triton, no cache": ("plugin", {"impl_backend": "triton"}),
    "npu-backend triton, cache auto, Liger's operators": ("plugin", {"impl_backend": "triton", "use_liger": True}),
}
VARIABLES = {"npu-backend triton, no cache": {"NPU_BACKEND_LOGITS_CACHE_GIB": "0"}}
if not importlib.util.find_spec("cutlass"):  # Liger's head would be its loop in torch
    del HEADS["Liger"]


def save_model(path: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from npu_backend.bench.actor_update import QWEN3_06B

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**QWEN3_06B, pad_token_id=0)).save_pretrained(path)
    verl_engine.save_tokenizer(path)


def batch(response: int) -> dict[str, Any]:
    """Sequences whose last `response` tokens are the policy's."""
    import torch

    torch.manual_seed(1)
    ids, mask = torch.randint(3, 151936, (SEQUENCES, LENGTH)), torch.ones(SEQUENCES, LENGTH, dtype=torch.int64)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": torch.arange(LENGTH).expand(SEQUENCES, -1).contiguous(),
        "prompts": ids[:, :-response],
        "responses": ids[:, -response:],
        "response_mask": mask[:, -response:],
        "advantages": torch.randn(SEQUENCES, response),
    }


def worker(channel: Connection, model: str, folder: Path, name: str) -> None:
    """An engine that makes an update whenever it is told which rows are to carry gradients."""
    verl_engine.BATCH, verl_engine.LENGTH, verl_engine.TOKENS = SEQUENCES, LENGTH, SEQUENCES * LENGTH
    how, settings = HEADS[name]
    run = {**verl_engine.DEFAULTS, **RUN, **settings}
    os.environ.update(VARIABLES.get(name, {}))
    verl_engine.set_up(how, [run])
    import torch

    verl_engine.start(folder)
    engine = verl_engine.make_engine(model, run)
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=SEQUENCES, entropy_coeff=0.001)
    loss = functools.partial(ppo_loss, config=actor)
    batches = {rows: batch(response) for rows, response in RESPONSES.items()}
    old = {rows: verl_engine.log_probs(engine, tensors, run) for rows, tensors in batches.items()}
    channel.send("ready")
    for rows in iter(channel.recv, None):
        tensors = batches[rows]
        given = {name: value for name, value in tensors.items() if name != "advantages"}
        scored = verl_engine.as_verl(given, run, compute_loss=False)
        trained = verl_engine.as_verl({**tensors, "old_log_probs": old[rows]}, run)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        with engine.eval_mode():
            engine.infer_batch(scored)
        with engine.train_mode():
            output = engine.train_batch(trained, loss_function=loss)
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        value = output["loss"]
        total = float(sum(value)) if isinstance(value, (list, tuple)) else float(value)
        channel.send({"ms": took * 1e3, "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "loss": total})


def summary(updates: list[dict[str, float]]) -> dict[str, float]:
    times = sorted(update["ms"] for update in updates)
    return {
        "median_ms": statistics.median(times),
        "fastest_ms": times[0],
        "slowest_ms": times[-1],
        "peak_gib": max(update["peak_gib"] for update in updates),
        "first_loss": updates[0]["loss"],
    }


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = []
    for rows, heads in results.items():
        lines += [f"Rows with gradients: {rows} ({RESPONSES[rows]} of {LENGTH} tokens)", ""]
        lines += ["| head | ms (fastest - slowest) | ms/token | peak GiB |", "|---|---|---|---|"]
        for name, at in heads.items():
            spread = f"{at['fastest_ms']:.1f} - {at['slowest_ms']:.1f}"
            per_token = at["median_ms"] / (SEQUENCES * LENGTH)
            lines.append(f"| {name} | {at['median_ms']:.1f} ({spread}) | {per_token:.5f} | {at['peak_gib']:.2f} |")
        lines.append("")
    return "\n".join(lines)


def main(rounds: int, output: Path) -> None:
    context = multiprocessing.get_context("spawn")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(verl_engine.__file__).parent), *sys.path])
    with tempfile.TemporaryDirectory() as top:
        save_model(Path(top, "model"))
        channels: dict[str, Connection] = {}
        for number, name in enumerate(HEADS):
            folder = Path(top, str(number))
            folder.mkdir()
            channels[name], theirs = context.Pipe()
            context.Process(target=worker, args=(theirs, str(Path(top, "model")), folder, name), daemon=True).start()
            theirs.close()
        for channel in channels.values():
            channel.recv()
        updates: dict[str, dict[str, list[dict[str, float]]]] = {
            rows: {name: [] for name in HEADS} for rows in RESPONSES
        }
        for _ in range(WARM_UPS + rounds):
            for rows in RESPONSES:
                for name in random.sample(list(HEADS), len(HEADS)):
                    channels[name].send(rows)
                    updates[rows][name].append(channels[name].recv())
        for channel in channels.values():
            channel.send(None)
    results = {
        rows: {name: summary(found[WARM_UPS:]) for name, found in heads.items()} for rows, heads in updates.items()
    }
    print(table(results))
    import torch

    from npu_backend.bench import contestants

    packages = ("verl", "transformers", "triton", "liger-kernel")
    about = {
        "command": "python tests/cuda/verl_engine_figures.py " + str(rounds),
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
        "Liger's head": contestants._liger(torch.device("cuda")).version if "Liger" in HEADS else "not here",
        "rounds": rounds,
        "results": results,
        "updates": updates,
    }
    output.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
