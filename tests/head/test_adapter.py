"""The adapter's calls: which labels, which errors, what comes back, and what is left of it after a revert."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

import npu_backend
from npu_backend.errors import ConfigError, HeadInputError, PatchConflictError

BACKEND = "_verl_fused_kernels_backend"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """These models are so small that a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def patched(family: str = "qwen2", **options: Any) -> Any:
    model = tiny_models.build(family, **options)
    assert npu_backend.patch_forward_with_backends(model, use_fused_kernels=True).applied == 1
    return model


def assert_untouched(model: Any) -> None:
    assert "forward" not in vars(model)
    assert BACKEND not in vars(model)


# -- which labels -------------------------------------------------------------------------------------------------------


def full_log_probs(model: Any, ids: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    logits = model(input_ids=ids, use_cache=True).logits / temperature
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0].detach()


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


# -- what comes back ----------------------------------------------------------------------------------------------------


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


# -- when there is nothing to patch -------------------------------------------------------------------------------------


@pytest.mark.case("A21", "D41")
def test_off_is_the_default_and_says_so_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_models.build("qwen2")
    with caplog.at_level(logging.INFO, logger="npu_backend"):
        report = npu_backend.patch_forward_with_backends(model)
    assert [row.state for row in report.rows] == ["disabled"]
    assert report.rows[0].reason == "fused head off: use_fused_kernels=False"
    assert [r.message.count("fused head off: use_fused_kernels=False") for r in caplog.records] == [1]
    assert_untouched(model)


@pytest.mark.parametrize("enabled", [True, False])
def test_an_unknown_backend_is_refused_before_anything_is_touched(enabled: bool) -> None:
    model = tiny_models.build("qwen2")
    with pytest.raises(ConfigError, match="cuda_graph.*torch, triton, liger, auto"):
        npu_backend.patch_forward_with_backends(model, enabled, "cuda_graph")
    with pytest.raises(ConfigError, match="use_fused_kernels"):
        npu_backend.patch_forward_with_backends(model, "maybe")  # type: ignore[arg-type]
    assert_untouched(model)
    assert not npu_backend.patch_status().rows


@pytest.mark.case("D39", "D17")
@pytest.mark.parametrize("model_class", ["Qwen2ForTokenClassification", "Qwen2ForSequenceClassification", "Qwen2Model"])
def test_a_model_without_an_output_head_is_left_alone(model_class: str) -> None:
    import transformers

    model = getattr(transformers, model_class)(tiny_models.build("qwen2").config)
    report = npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    assert [row.state for row in report.rows] == ["skipped"]
    assert "no output head on this module (no lm_head" in report.rows[0].reason
    assert_untouched(model)


def test_something_that_is_not_a_transformers_model_is_left_alone() -> None:
    report = npu_backend.patch_forward_with_backends(torch.nn.Linear(2, 2), use_fused_kernels=True)
    assert "no output head on this module" in report.rows[0].reason


@pytest.mark.case("D17")
def test_a_head_that_is_gone_is_missed_by_name() -> None:
    model = patched()
    model.lm_head = None
    with pytest.raises(HeadInputError, match="no output head on this module"):
        model(input_ids=tiny_models.tokens(1, 4))


def test_an_encoder_decoder_is_left_alone() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4))
    assert "encoder-decoder" in npu_backend.patch_forward_with_backends(model, True).rows[0].reason
    assert_untouched(model)


def test_a_compiled_model_is_reported() -> None:
    model = tiny_models.build("qwen2")
    for held in (torch.compile(model, backend="eager"), model):
        report = npu_backend.patch_forward_with_backends(held, use_fused_kernels=True)
        assert [row.state for row in report.rows] == ["skipped"]
        assert "before compiling it" in report.rows[0].reason
        assert_untouched(model)
        model.compile(backend="eager")  # in place: the second round


def test_compiling_a_patched_model_compiles_its_layers_and_changes_nothing() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model, ids = patched("gemma2", num_hidden_layers=1), tiny_models.tokens(2, 6)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter)
    output = compiled(input_ids=ids, use_cache=False)
    torch.testing.assert_close(output.log_probs, model(input_ids=ids, use_cache=False).log_probs)
    output.log_probs.sum().backward()
    assert counter.op_count > 30


# -- LoRA ---------------------------------------------------------------------------------------------------------------


def with_lora(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)  # zero at first: the adapter would do nothing
    return adapted.eval()


@pytest.mark.parametrize("adapter_first", [True, False])
def test_lora_on_the_attention_trains_through_the_fused_head(adapter_first: bool) -> None:
    model, ids = tiny_models.build("qwen2"), tiny_models.tokens(2, 6)
    if not adapter_first:
        npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    adapted = with_lora(model, target_modules=["q_proj"])
    if adapter_first:
        npu_backend.patch_forward_with_backends(adapted, use_fused_kernels=True)
    output = adapted(input_ids=ids, shift_labels=ids.roll(-1, -1), temperature=0.7)
    with torch.no_grad():
        torch.testing.assert_close(
            output.log_probs.detach(), full_log_probs(model, ids, ids.roll(-1, -1), temperature=0.7)
        )
    output.log_probs.sum().backward()
    trained = [p for name, p in adapted.named_parameters() if "lora_" in name]
    assert trained
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained)


@pytest.mark.case("D19")
@pytest.mark.parametrize("adapter_first", [True, False])
@pytest.mark.parametrize(
    "options", [{"target_modules": ["lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}]
)
def test_an_adapter_on_the_head_is_refused_by_name(options: dict[str, Any], adapter_first: bool) -> None:
    model, ids = tiny_models.build("qwen2"), tiny_models.tokens(2, 6)
    if not adapter_first:
        npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    adapted = with_lora(model, **options)
    with pytest.raises(HeadInputError, match=r"peft\..* with adapter default.*use_fused_kernels=False"):
        if adapter_first:
            npu_backend.patch_forward_with_backends(adapted, use_fused_kernels=True)
        adapted(input_ids=ids)
    if adapter_first:
        assert_untouched(model)


# -- the patch itself ---------------------------------------------------------------------------------------------------


def test_the_patch_is_in_the_ledger_and_reverts() -> None:
    model = patched()
    assert [row.state for row in npu_backend.patch_status().rows] == ["applied", "applied"]
    assert {row.op for row in npu_backend.patch_status().rows} == {"ppo_head"}
    assert getattr(model, BACKEND) == "torch"
    assert npu_backend.patch_status().patch_set is None
    npu_backend.revert_patches()
    assert_untouched(model)
    assert model(input_ids=tiny_models.tokens(1, 4)).logits is not None


def test_the_same_backend_again_is_a_no_op_and_another_is_a_conflict() -> None:
    model = patched()
    forward = vars(model)["forward"]
    report = npu_backend.patch_forward_with_backends(model, True, "torch")
    assert (report.status, report.applied) == ("already applied", 1)
    with pytest.raises(PatchConflictError, match=r"'torch'.*'liger'"):
        npu_backend.patch_forward_with_backends(model, True, "liger")
    assert vars(model)["forward"] is forward
    assert getattr(model, BACKEND) == "torch"
    npu_backend.revert_patches()
    assert npu_backend.patch_forward_with_backends(model, True, "liger").status == "applied"


def test_somebody_elses_forward_on_the_object_is_a_conflict() -> None:
    model = tiny_models.build("qwen2")
    model.forward = lambda **kwargs: None
    with pytest.raises(PatchConflictError, match=__name__.rpartition(".")[2]):
        npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    assert BACKEND not in vars(model)


def test_the_chosen_backend_is_the_one_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_backend.head import adapter

    asked = []
    original = adapter.linear_log_prob

    def spy(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.pop("impl_backend"))
        return original(*args, **kwargs)

    monkeypatch.setattr(adapter, "linear_log_prob", spy)
    for backend in (None, "auto", "liger"):
        model = tiny_models.build("qwen2")
        npu_backend.patch_forward_with_backends(model, True, backend)
        model(input_ids=tiny_models.tokens(1, 4))
    assert asked == ["torch", "auto", "liger"]


@pytest.mark.case("A29")
def test_a_deep_copy_runs_its_own_forward_with_its_own_weights() -> None:
    model, ids = patched(), tiny_models.tokens(2, 6)
    before, text = model(input_ids=ids).log_probs, repr(model)
    duplicate = copy.deepcopy(model)
    assert duplicate.forward.__self__ is duplicate
    assert repr(duplicate) == text
    with torch.no_grad():
        duplicate.lm_head.weight.mul_(2)
    assert (duplicate(input_ids=ids).log_probs - before).abs().max() > 0.1
    torch.testing.assert_close(model(input_ids=ids).log_probs, before)
    assert npu_backend.patch_forward_with_backends(duplicate, use_fused_kernels=True).status == "already applied"
    pickle.loads(pickle.dumps(model.config))


def test_a_pickled_model_comes_back_unpatched_and_can_be_patched() -> None:
    model, ids = patched(), tiny_models.tokens(2, 6)
    back = pickle.load(io.BytesIO(pickle.dumps(model)))
    assert back(input_ids=ids).logits is not None
    assert npu_backend.patch_forward_with_backends(back, use_fused_kernels=True).status == "applied"
    torch.testing.assert_close(back(input_ids=ids).log_probs, model(input_ids=ids).log_probs)


def test_a_model_that_is_gone_does_not_stop_a_revert() -> None:
    model, kept = patched(), patched()
    del model
    npu_backend.revert_patches()
    assert_untouched(kept)


def test_an_error_in_the_forward_leaves_the_head_in_its_place() -> None:
    model, ids = patched(), tiny_models.tokens(2, 6)
    with pytest.raises(HeadInputError):
        model(input_ids=ids, shift_labels=ids + 10**6)
    assert "lm_head" not in vars(model)
    assert "forward" not in vars(model.lm_head)
    assert model(input_ids=ids).log_probs.shape == ids.shape
