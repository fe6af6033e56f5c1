"""A whole actor update with one head after the other: what the head is worth to a trainer.

One update is old log-probs without gradients, then forward, PPO's clipped loss, backward, clipping and fused AdamW. It
is written out here after verl's FSDP actor; verl's engine does not run, and with it neither its fp32 master weights nor
its batching. There is no padding to remove. FSDP2 shards the policy where there is more than one rank (torchrun).
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from npu_backend.bench.contestants import Contestant, Head
from npu_backend.bench.measure import elapsed_ms
from npu_backend.errors import BackendUnavailableError
from npu_backend.manager import apply_npu_fsdp_patches, revert_patches

TEMPERATURE, CLIP, ENTROPY_COEFFICIENT, MAX_NORM, LEARNING_RATE = 1.0, 0.2, 0.001, 1.0, 1e-5
UPDATES_PER_BATCH = 4  # of a loss curve, so that old and new policy differ
WARM_UPS = 1
OPERATORS = ("transformers", "Liger")  # whose RMSNorm, MLP and rotary embedding the policy runs on
ROWS = ("all", "silent")  # which rows carry gradients: all, or a random part of them
QWEN3_06B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
TINY = QWEN3_06B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Setting:
    """What is trained, and on how much.

    Attributes:
        geometry: of a Qwen3 with random weights.
        sequences: per rank in an update that is timed.
        curve_sequences: per rank in an update of a loss curve.
        length: of a sequence, in tokens.
        silent: share of the rows without gradients where `ROWS` says so.
        dtype: of weights, gradients and the optimizer's state.
    """

    geometry: dict[str, Any]
    sequences: int
    curve_sequences: int
    length: int
    silent: float
    dtype: torch.dtype

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it, with what else an update depends on."""
        constants = {
            "temperature": TEMPERATURE,
            "clip": CLIP,
            "entropy_coefficient": ENTROPY_COEFFICIENT,
            "max_norm": MAX_NORM,
            "learning_rate": LEARNING_RATE,
            "updates_per_batch": UPDATES_PER_BATCH,
        }
        return {**asdict(self), "dtype": str(self.dtype), "ranks": ranks(), **constants}


@dataclass(frozen=True)
class Batch:
    """This rank's part: ids, advantages and mask [B, S], labels [B * S], and the tokens with gradients per rank."""

    ids: Tensor
    labels: Tensor
    advantages: Tensor
    mask: Tensor
    tokens: Tensor


class Actor(nn.Module):
    """The policy. The head runs in the root's forward, where FSDP2 has gathered the output embedding, tied or not."""

    def __init__(self, setting: Setting, seed: int, device: torch.device) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        super().__init__()
        torch.manual_seed(seed)
        with device:
            self.causal_lm = Qwen3ForCausalLM(Qwen3Config(**setting.geometry))
        for parameter in self.parameters():  # not the buffers: the rotary frequencies stay float32
            parameter.data = parameter.data.to(setting.dtype)
        self.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.train()
        if ranks() > 1:
            self._shard(device)

    def _shard(self, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        try:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        except ImportError as error:
            raise BackendUnavailableError(
                f"bench --end-to-end on {ranks()} ranks shards the model by FSDP2, which torch {torch.__version__} has "
                "under no public name: torch 2.6 is needed, or one rank"
            ) from error

        mesh = init_device_mesh(device.type, (ranks(),))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for layer in self.causal_lm.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self, mesh=mesh, mp_policy=policy)

    def forward(self, batch: Batch, head: Head) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy, float32 [B, S]."""
        hidden = self.causal_lm.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        log_probs, entropy = head(hidden.flatten(0, 1), self.causal_lm.lm_head.weight, batch.labels, TEMPERATURE)
        assert entropy is not None
        return log_probs.float().view(batch.ids.shape), entropy.float().view(batch.ids.shape)


class Trainer:
    """A policy and its optimizer, both made from a seed, and the batches of that seed."""

    def __init__(self, setting: Setting, seed: int, device: torch.device) -> None:
        self.setting, self.seed, self.device = setting, seed, device
        self.actor = Actor(setting, seed, device)
        self.optimizer = torch.optim.AdamW(self.actor.parameters(), lr=LEARNING_RATE, fused=True)

    def batch(self, sequences: int, silent: float, number: int = 0) -> Batch:
        """This rank's part of the batch of that number, which depends only on how many sequences all ranks have."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        shape = (ranks() * sequences, self.setting.length)
        ids = torch.randint(self.setting.geometry["vocab_size"], shape, generator=generator)
        advantages = torch.randn(shape, generator=generator)
        mask = (torch.rand(shape, generator=generator) >= silent).float()
        mine = slice(rank() * sequences, (rank() + 1) * sequences)
        labels = ids.roll(-1, 1)[mine].flatten()
        parts = (ids[mine], labels, advantages[mine], mask[mine], mask.sum() / ranks())
        return Batch(*(part.to(self.device) for part in parts))

    def old_log_probs(self, head: Head, batch: Batch) -> Tensor:
        with torch.no_grad():
            log_probs: Tensor = self.actor(batch, head)[0]
        return log_probs

    def loss(self, head: Head, batch: Batch, old: Tensor) -> Tensor:
        """This rank's part: FSDP2 takes the mean over the ranks, which is then the mean over all tokens."""
        log_probs, entropy = self.actor(batch, head)
        ratio = (log_probs - old).exp()
        gain = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * batch.advantages)
        gain = gain + ENTROPY_COEFFICIENT * entropy
        return -torch.sum(gain * batch.mask) / batch.tokens

    def step(self, head: Head, batch: Batch, old: Tensor) -> Tensor:
        """One optimizer step; the loss before it."""
        loss = self.loss(head, batch, old)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.actor.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def update(self, head: Head, batch: Batch) -> None:
        """What is timed."""
        self.step(head, batch, self.old_log_probs(head, batch))


def contestants(heads: list[Contestant]) -> list[Contestant]:
    """Those of the heads that an update can be made with, and of ours those that such a device is meant for."""
    ours = [head.name for head in heads if head.ours]
    slow = "npu-backend torch" if len(ours) > 1 else None
    return [head for head in heads if head.name != slow and not head.note]


def loss_curve(setting: Setting, head: Head, seed: int, updates: int, device: torch.device) -> list[float]:
    """The loss of each of `updates` updates from fresh weights, as a mean over the ranks.

    A new batch and its old log-probs every `UPDATES_PER_BATCH` updates; all rows carry gradients.
    """
    trainer = Trainer(setting, seed, device)
    losses: list[Tensor] = []
    for number in range(updates):
        if number % UPDATES_PER_BATCH == 0:
            batch = trainer.batch(setting.curve_sequences, 0.0, number)
            old = trainer.old_log_probs(head, batch)
        losses.append(trainer.step(head, batch, old))
    found = torch.stack(losses)
    if ranks() > 1:
        dist.all_reduce(found)
        found /= ranks()
    return [float(loss) for loss in found]


def without_head(x: Tensor, w: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """What stands for a head where everything else is timed."""
    mean = x.float().mean(-1)
    return mean, mean


NO_HEAD = Contestant("everything but the head", without_head, "")


def measure(
    setting: Setting, heads: list[Contestant], seed: int, rounds: int, operators: str, device: torch.device
) -> dict[str, Any]:
    """Time and peak memory of each head's updates, interleaved: each round runs all of them in a new random order.

    Returns:
        `timings`, of each head and kind of rows a `contestant`, its `mode`, `ms` per round (the slowest rank's) and
        `peak_gib`, the memory allocated at most, weights and optimizer included; `failures`, a reason per head.
    """
    trainer = Trainer(setting, seed, device)
    batches = {mode: trainer.batch(setting.sequences, setting.silent * (mode == "silent")) for mode in ROWS}
    turns = [(head, mode) for head in (NO_HEAD, *heads) for mode in ROWS if head is not NO_HEAD or mode == "all"]
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
    failures: dict[str, str] = {}
    order = random.Random(seed)
    for round_ in range(WARM_UPS + rounds):
        for head, mode in order.sample(turns, len(turns)):
            if head.name in failures:
                continue
            try:
                found = _timed(trainer, head, batches[mode])
            except Exception as error:
                failures[head.name] = f"{type(error).__name__}: {error}"[:300]
                trainer.optimizer.zero_grad(set_to_none=True)
                continue
            if round_ >= WARM_UPS:
                samples.setdefault((head.name, mode), []).append(found)
    timings = [
        {
            "contestant": head.name,
            "mode": mode,
            "ms": [ms for ms, _ in samples[head.name, mode]],
            "peak_gib": max(peak for _, peak in samples[head.name, mode]),
        }
        for head, mode in turns
        if head.name not in failures
    ]
    return {"seed": seed, "operators": operators, "timings": timings, "failures": failures}


def _timed(trainer: Trainer, head: Contestant, batch: Batch) -> tuple[float, float]:
    """Time in ms and peak memory in GiB of one update, the largest of all ranks."""
    on_cuda = trainer.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    if ranks() > 1:
        dist.barrier()
    (ms,) = elapsed_ms(trainer.device, lambda: trainer.update(head.run, batch))
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_cuda else float("nan")
    found = torch.tensor([ms, peak], device=trainer.device)
    if ranks() > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found[0]), float(found[1])


@contextmanager
def operators_of(name: str, setting: Setting) -> Iterator[str | None]:
    """The policy's operators by this name while it is built and runs; a reason where they cannot be had."""
    if name == "transformers":
        yield None
        return
    from transformers import Qwen3Config

    try:
        report = apply_npu_fsdp_patches({"use_liger": True, "hf_config": Qwen3Config(**setting.geometry)})
        reason = None if report.applied else "; ".join(sorted({row.reason for row in report.rows}))
    except Exception as error:  # whatever Liger does here at import
        reason = f"{type(error).__name__}: {error}"
    try:
        yield reason
    finally:
        revert_patches()


def run(
    setting: Setting,
    heads: list[Contestant],
    seeds: int,
    rounds: int,
    updates: int,
    device: torch.device,
    about: dict[str, Any],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Loss curves, then times seed by seed; `save` gets what there is after each part, `about` included."""
    found: dict[str, Any] = {**about, "setting": setting.to_dict(), "curves": {}, "results": [], "operators_absent": {}}
    again = [Contestant(f"{head.name}, again", head.run, head.version) for head in heads if head.name == "verl chunked"]
    for head in (*heads, *again) if updates else ():
        found["curves"][head.name] = loss_curve(setting, head.run, 0, updates, device)
        _clean(device)
        save(found)
    for seed in range(seeds):
        for operators in OPERATORS:
            with operators_of(operators, setting) as absent:
                if absent:
                    found["operators_absent"][operators] = absent
                    continue
                found["results"].append(measure(setting, heads, seed, rounds, operators, device))
            _clean(device)
            save(found)
    return found


def _clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- ranks -----------------------------------------------------------------------------------------------------------


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def on_ranks(device_type: str) -> Iterator[torch.device]:
    """This process's device, in a process group if torchrun started it."""
    if not dist.is_torchelastic_launched():
        yield torch.device(device_type)
        return
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, int(os.environ["LOCAL_RANK"]))
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        yield device
    finally:
        dist.destroy_process_group()
