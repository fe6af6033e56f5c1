"""What the head saves for backward: read once, as checkpoint and offloading need it, and out of the caller's reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from references import HeadCase, head_case, run_head
from tiny_models import one_thread, patched  # noqa: F401
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import npu_backend


def head(backend: str, **options: Any) -> Callable[[HeadCase], tuple[Tensor, Tensor | None]]:
    if backend == "liger":
        pytest.importorskip("liger_kernel")

    def call(case: HeadCase) -> tuple[Tensor, Tensor | None]:
        return npu_backend.linear_log_prob(
            case.hidden, case.weight, case.labels, **case.options(), impl_backend=backend, **options
        )[:2]

    return call


@pytest.mark.parametrize(("backend", "options"), [("torch", {}), ("torch", {"logits_cache_gib": 1}), ("liger", {})])
def test_checkpoint_changes_no_bit(backend: str, options: dict[str, Any]) -> None:
    """torch.utils.checkpoint unpacks a saved tensor once and refuses the second time."""
    plain = head(backend, **options)
    case = head_case(600, hidden_size=16, vocab_size=50)
    expected = run_head(case, plain)
    for name, value in run_head(case, lambda given: checkpoint(plain, given, use_reentrant=False)).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("backend", ["torch", "liger"])
def test_every_saved_tensor_is_unpacked_once(backend: str) -> None:
    """Offloading hooks copy a tensor back from the host each time that it is unpacked."""
    unpacked: Counter[int] = Counter()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    def unpack(index: int) -> Tensor:
        unpacked[index] += 1
        return packed[index]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        run_head(head_case(20, hidden_size=16, vocab_size=50), head(backend))
    assert len(unpacked) > 3
    assert set(unpacked.values()) == {1}


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_a_patched_model_inside_checkpoint(family: str) -> None:
    ids, gradients = tiny_models.tokens(2, 6), []
    for checkpointed in (False, True):
        model = patched(family)

        def loss(model: Any = model) -> Tensor:
            output = model(input_ids=ids, use_cache=False, temperature=0.7)
            return output.log_probs.sum() - output.entropy.sum()

        (checkpoint(loss, use_reentrant=False) if checkpointed else loss()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("shape", [(20,), (2, 10)])
@pytest.mark.parametrize("backend", ["torch", "liger", "module", "linear_cross_entropy"])
def test_outputs_may_be_changed_in_place(backend: str, shape: tuple[int, ...]) -> None:
    """`log_probs.mul_(mask)` and `entropy.clamp_()` are the caller's; backward needs what was computed."""
    calls: dict[str, Callable[[HeadCase], tuple[Tensor, Tensor | None]]] = {
        "module": lambda case: npu_backend.FusedLinearForPPO().forward(case.hidden, case.weight, case.labels),
        "linear_cross_entropy": lambda case: npu_backend.linear_cross_entropy(case.hidden, case.weight, case.labels),
    }
    call = calls.get(backend) or head(backend)
    mask = torch.arange(20).reshape(shape) % 3 == 0

    def in_place(case: HeadCase) -> tuple[Tensor, Tensor | None]:
        log_probs, entropy = call(case)
        assert not log_probs._is_view()  # or FSDP2 would lose the hook that it puts on it
        assert not entropy._is_view()
        return log_probs.mul_(mask), entropy.mul_(2.0).clamp_(max=1e9)

    def out_of_place(case: HeadCase) -> tuple[Tensor, Tensor | None]:
        log_probs, entropy = call(case)
        return log_probs * mask, entropy * 2.0

    case = head_case(*shape, hidden_size=16, vocab_size=50)
    expected = run_head(case, out_of_place)
    for name, value in run_head(case, in_place).items():
        assert torch.equal(value, expected[name]), name
