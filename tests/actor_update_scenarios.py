"""What tests/bench/test_actor_update.py runs on two ranks: the sharded policy against that of a single process."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed.fsdp  # once, before the ranks are forked
import transformers.models.qwen3.modeling_qwen3  # noqa: F401  likewise
from torch.distributed.tensor import DTensor

from npu_backend.bench import actor_update
from npu_backend.bench.contestants import Contestant
from npu_backend.bench.measure import eager

SEQUENCES = 2  # per rank
CPU = torch.device("cpu")


def setting(geometry: dict[str, object]) -> actor_update.Setting:
    return actor_update.Setting(geometry, SEQUENCES, SEQUENCES, 16, 0.5, torch.float32)


def scenarios() -> Iterator[tuple[str, float]]:
    for name, tied in (("tied", True), ("untied", False)):
        trained = setting(actor_update.TINY | {"tie_word_embeddings": tied})
        yield f"gradients, {name}", _gradients(trained)
    trained = setting(actor_update.TINY)
    for number, loss in enumerate(actor_update.loss_curve(trained, eager, 0, 6, CPU)):
        yield f"loss {number}", loss
    found = actor_update.measure(trained, [Contestant("eager", eager, "")], 0, 2, "transformers", CPU)
    assert not found["failures"]
    times = torch.tensor([timing["ms"] for timing in found["timings"]])
    yield "times", float(times.shape == (3, 2) and times.min() > 0)
    yield "time of the first update", float(times[0, 0])  # the same on both ranks: the slower one's
    yield "minus that", -float(times[0, 0])


def _gradients(trained: actor_update.Setting) -> float:
    """Largest error of any parameter's gradient, over the largest entry of what one process with all the data gets."""
    sharded = actor_update.Trainer(trained, 0, CPU)
    batch = sharded.batch(SEQUENCES, trained.silent)
    sharded.loss(eager, batch, torch.zeros_like(batch.mask) - 6.0).backward()
    with mock.patch.multiple(actor_update, ranks=mock.Mock(return_value=1), rank=mock.Mock(return_value=0)):
        alone = actor_update.Trainer(trained, 0, CPU)
        everything = alone.batch(2 * SEQUENCES, trained.silent)
    alone.loss(eager, everything, torch.zeros_like(everything.mask) - 6.0).backward()
    errors = []
    for part, whole in zip(sharded.actor.parameters(), alone.actor.parameters()):
        assert isinstance(part.grad, DTensor)
        errors.append(float((part.grad.full_tensor() - whole.grad).abs().max() / whole.grad.abs().max()))
    return max(errors)
