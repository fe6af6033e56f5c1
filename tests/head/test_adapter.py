"""The adapter's calls: which labels it takes, which it refuses, and what comes back."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import sys
import types
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import full_log_probs, one_thread, patched  # noqa: F401
from torch import Tensor

import npu_backend
from npu_backend.errors import HeadInputError

# -- which labels -----------------------------------------------------------------------------------------------------


@pytest.mark.case("D10")
def test_input_ids_are_rolled_labels_are_rolled_and_shift_labels_are_taken_as_they_are() -> None:
    model, ids, other = patched(), tiny_models.tokens(2, 6), tiny_models.tokens(2, 6, seed=1)
    for given, labels in (
        ({}, ids.roll(-1, -1)),
        ({"labels": other}, other.roll(-1, -1)),
        ({"shift_labels": other}, other),
        ({"shift_labels": other, "labels": ids}, other),
    ):
        output = model(input_ids=ids, **given)
        assert output.log_probs.shape == output.entropy.shape == ids.shape
        torch.testing.assert_close(output.log_probs, full_log_probs(model, ids, labels))


def test_ignored_labels_give_zeros() -> None:
    model, ids = patched(), tiny_models.tokens(2, 6)
    labels = ids.clone()
    labels[:, 2] = -100
    output = model(input_ids=ids, labels=labels)
    assert (output.log_probs[:, 1] == 0).all()
    assert (output.entropy[:, 1] == 0).all()
    torch.testing.assert_close(output.log_probs[:, 2:], full_log_probs(model, ids, ids.roll(-1, -1))[:, 2:])


def test_temperature_may_differ_from_row_to_row() -> None:
    model, ids = patched(), tiny_models.tokens(2, 6)
    temperature = torch.tensor([[0.5], [2.0]]).expand(2, 6)
    log_probs = model(input_ids=ids, temperature=temperature).log_probs
    for row, value in enumerate((0.5, 2.0)):
        torch.testing.assert_close(log_probs[row], full_log_probs(model, ids, ids.roll(-1, -1), value)[row])
    torch.testing.assert_close(model(ids, temperature=None).log_probs, model(ids).log_probs)
    with pytest.raises(HeadInputError, match="temperature"):
        model(input_ids=ids, temperature=0.0)


@pytest.mark.case("D14")
def test_without_labels_the_error_says_which_argument_is_missing() -> None:
    model, ids = patched(), tiny_models.tokens(2, 6)
    embeddings = model.get_input_embeddings()(ids)
    for given in ({}, {"temperature": 0.7}, {"labels": None, "shift_labels": None, "return_dict": True}):
        with pytest.raises(HeadInputError, match="shift_labels.*labels.*input_ids"):
            model(inputs_embeds=embeddings, **given)
    labels = ids.roll(-1, -1)
    torch.testing.assert_close(
        model(inputs_embeds=embeddings, shift_labels=labels).log_probs, full_log_probs(model, ids, labels)
    )


def test_kept_positions_need_their_own_labels() -> None:
    model, ids = patched(), tiny_models.tokens(2, 6)
    labels = ids.roll(-1, -1)
    kept = model(input_ids=ids, shift_labels=labels[:, -2:], logits_to_keep=2).log_probs
    torch.testing.assert_close(kept, full_log_probs(model, ids, labels)[:, -2:])
    for given in ({"labels": ids}, {"temperature": 0.7}, {"shift_labels": labels}):
        with pytest.raises(HeadInputError, match=r"\[2, 6\] labels for logits of \[2, 2\] positions.*shift_labels"):
            model(input_ids=ids, logits_to_keep=2, **given)


@pytest.mark.case("D03")
def test_a_sequence_parallel_shard_needs_shift_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with 8 tokens each: the first one's last label is the second one's first token."""
    model, whole = patched(), tiny_models.tokens(1, 16)
    next_tokens = whole.roll(-1, -1)
    ulysses = types.ModuleType("verl.utils.ulysses")
    ulysses.get_ulysses_sequence_parallel_world_size = lambda: 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl.utils.ulysses", ulysses)
    shard, labels = whole[:, :8], next_tokens[:, :8]
    torch.testing.assert_close(
        model(input_ids=shard, shift_labels=labels).log_probs, full_log_probs(model, shard, labels)
    )
    for given in ({}, {"labels": shard}):
        with pytest.raises(HeadInputError, match=r"sequence parallel.*shift_labels"):
            model(input_ids=shard, **given)
    ulysses.get_ulysses_sequence_parallel_world_size = lambda: 1  # type: ignore[attr-defined]
    assert model(input_ids=whole).log_probs.shape == (1, 16)


# -- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.case("D40", "D09")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_is_the_models_own_with_log_probs_and_entropy_and_without_logits(dtype: torch.dtype) -> None:
    model, ids = tiny_models.build("qwen2").to(dtype), tiny_models.tokens(2, 6)
    own = type(model(input_ids=ids))
    npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    output = model(input_ids=ids, use_cache=True, output_hidden_states=True, labels=ids, return_dict=True)
    assert isinstance(output, own)
    assert output.logits is None
    assert output.loss is None
    assert "logits" not in output
    assert output["log_probs"] is output.log_probs
    assert output["entropy"] is output.entropy
    assert output.log_probs.dtype == output.entropy.dtype == torch.float32
    assert len(output.hidden_states) == 3
    assert output.past_key_values.get_seq_length() == 6
    assert output.to_tuple()[-1] is output.entropy
    leaves, structure = torch.utils._pytree.tree_flatten(
        output
    )  # FSDP and DDP take outputs apart and put them together
    assert torch.utils._pytree.tree_unflatten(leaves, structure).keys() == output.keys()
    with pytest.raises(HeadInputError, match="return_dict"):
        model(input_ids=ids, return_dict=False)


def test_router_logits_and_their_loss_come_through() -> None:
    model, ids = tiny_models.build("qwen3_moe"), tiny_models.tokens(2, 6)
    own = model(input_ids=ids, output_router_logits=True)
    npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    output = model(input_ids=ids, output_router_logits=True)
    torch.testing.assert_close(output.aux_loss, own.aux_loss)
    assert len(output.router_logits) == len(own.router_logits) > 0


@pytest.mark.case("A31")
def test_other_arguments_reach_the_base_model() -> None:
    model, ids = patched("qwen2_5_vl"), tiny_models.tokens(2, 6)
    seen: dict[str, Any] = {}
    model.model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    mask = torch.ones_like(ids)
    output = model(ids, mask, some_new_argument=5, temperature=0.7)
    assert seen["some_new_argument"] == 5
    assert seen["attention_mask"] is mask
    assert not {"temperature", "shift_labels", "labels"} & seen.keys()
    assert output.log_probs.shape == ids.shape
    with pytest.raises(TypeError):
        model(ids, *[None] * 40)


def test_a_call_for_logits_gets_them() -> None:
    model, ids = patched(), tiny_models.tokens(2, 6)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    assert model(input_ids=ids[:, :1], past_key_values=cache).logits.shape == (2, 1, tiny_models.VOCAB)
    assert model(input_ids=ids, logits_to_keep=2).logits.shape == (2, 2, tiny_models.VOCAB)
    # not these: verl's engine says use_cache=False, and a label or a temperature asks for log-probs
    for given in ({"use_cache": False}, {"logits_to_keep": 0}, {"use_cache": True, "temperature": 0.7}):
        assert model(input_ids=ids, **given).logits is None


def test_gradient_checkpointing_changes_no_gradient() -> None:
    ids, gradients = tiny_models.tokens(2, 6), []
    for checkpointing in (False, True):
        model = patched().train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(input_ids=ids, use_cache=False).log_probs.sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.case("D18")
def test_a_tied_embedding_gets_the_gradient_of_both_uses() -> None:
    tied, untied = patched("qwen2_tied"), tiny_models.build("qwen2")
    untied.load_state_dict(tied.state_dict())
    npu_backend.patch_forward_with_backends(untied, use_fused_kernels=True)
    ids = tiny_models.tokens(2, 6)
    for model in (tied, untied):
        model(input_ids=ids).log_probs.sum().backward()
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    both = untied.lm_head.weight.grad + untied.model.embed_tokens.weight.grad
    torch.testing.assert_close(tied.model.embed_tokens.weight.grad, both)


def test_a_class_patched_later_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl puts its own forward on VLM classes, Liger its own on others; both may come after us."""
    model, ids = patched(), tiny_models.tokens(2, 6)
    expected = model(input_ids=ids, temperature=1 / 3).log_probs
    own = type(model).forward

    def tripled(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        output = own(self, input_ids, **kwargs)
        output.logits = output.logits * 3
        return output

    monkeypatch.setattr(type(model), "forward", tripled)
    torch.testing.assert_close(model(input_ids=ids).log_probs, expected)


@pytest.mark.case("A13")
@pytest.mark.parametrize(
    ("family", "liger_model"), [("qwen2_5_vl", "qwen2_5_vl"), ("gemma2", "gemma2"), ("qwen3", "qwen3")]
)
def test_ligers_fused_cross_entropy_does_not_fight_the_head(
    family: str, liger_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We apply Liger without it, but somebody's own call may put Liger's forward on the class."""
    pytest.importorskip("liger_kernel")
    module = importlib.import_module(f"liger_kernel.transformers.model.{liger_model}")
    model, ids = patched(family).train(), tiny_models.tokens(2, 6)
    before = model(input_ids=ids, labels=ids, use_cache=False).log_probs
    monkeypatch.setattr(type(model), "forward", module.lce_forward)
    output = model(input_ids=ids, labels=ids, use_cache=False)
    assert type(output).__name__.startswith("Liger")
    torch.testing.assert_close(output.log_probs, before)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy", "copy"])
def test_outputs_travel_like_the_model_s_own(family: str, how: str) -> None:
    """Between processes (a dataloader's, Ray's) and into files; their class is made at run time."""

    def saved(output: Any) -> Any:
        torch.save(output, buffer := io.BytesIO())
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    ways: dict[str, Any] = {
        "pickle": lambda output: pickle.loads(pickle.dumps(output)),
        "torch.save": saved,
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
    }
    model = patched(family)
    with torch.no_grad():
        output = model(input_ids=tiny_models.tokens(2, 6), use_cache=False, output_hidden_states=True)
    back = ways[how](output)
    assert type(back) is type(output)
    assert list(back) == list(output)
    assert back.logits is None
    assert len(back.hidden_states) == len(output.hidden_states)
    for name in ("log_probs", "entropy"):
        assert torch.equal(back[name], output[name])
        assert back[name] is getattr(back, name)
