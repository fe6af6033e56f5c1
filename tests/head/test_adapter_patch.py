"""What the adapter patches and what it leaves alone: reasons, LoRA, the ledger, copies, and a revert."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import full_log_probs, one_thread, patched  # noqa: F401

import npu_backend
from npu_backend import device
from npu_backend.errors import BackendUnavailableError, ConfigError, HeadInputError, PatchConflictError

BACKEND = "_verl_fused_kernels_backend"


def assert_untouched(model: Any) -> None:
    assert "forward" not in vars(model)
    assert BACKEND not in vars(model)


# -- when there is nothing to patch -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("NPU_BACKEND_FOO", "1", ConfigError),
        ("NPU_BACKEND_SKIP", "lamma", ConfigError),
        ("NPU_BACKEND_DISABLE", "perhaps", ConfigError),
        ("NPU_BACKEND_DEVICE", "npu", BackendUnavailableError),
    ],
)
def test_an_environment_that_means_nothing_here_changes_nothing(
    variable: str, value: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    if value == "npu" and device.detect().type == "npu":
        pytest.skip("there is an NPU")
    model = tiny_models.build("qwen2")
    with monkeypatch.context() as environment:
        environment.setenv(variable, value)
        with pytest.raises(error, match=variable):
            npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    assert_untouched(model)
    assert not npu_backend.patch_status().rows


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NPU_BACKEND_DISABLE", "1"),
        ("NPU_BACKEND_SKIP", "ppo_head"),
        ("NPU_BACKEND_SKIP", "llama"),
        ("NPU_BACKEND_SKIP", "llama.ppo_head"),
    ],
)
def test_the_environment_can_turn_the_head_off(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("llama")
    monkeypatch.setenv(variable, value)
    if variable == "NPU_BACKEND_DISABLE":
        monkeypatch.setenv("NPU_BACKEND_DEVICE", "cuda")  # not here, which does not matter then
    report = npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    assert [(row.state, row.reason) for row in report.rows] == [("disabled", f"{variable}={value}")]
    assert (report.status, report.applied) == ("nothing applied", 0)
    assert_untouched(model)
    assert not npu_backend.patch_status().rows
    monkeypatch.setenv("NPU_BACKEND_SKIP", "qwen3,llama.rms_norm")  # neither this family's head nor all heads
    monkeypatch.delenv("NPU_BACKEND_DISABLE", raising=False)
    monkeypatch.delenv("NPU_BACKEND_DEVICE", raising=False)
    assert npu_backend.patch_forward_with_backends(model, use_fused_kernels=True).applied == 1


@pytest.mark.parametrize("what", [None, "x", torch.zeros(2), {}])
@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_not_a_model_is_refused(what: Any, enabled: bool) -> None:
    with pytest.raises(HeadInputError, match=r"model must be a Hugging Face model .*got"):
        npu_backend.patch_forward_with_backends(what, enabled)


def test_a_module_with_a_head_but_no_config_is_refused() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = torch.nn.Linear(4, 8)

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.lm_head

    model = Own()
    with pytest.raises(HeadInputError, match=r"Own has an output head but no `config`.*use_fused_kernels=False"):
        npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    assert_untouched(model)


def test_a_head_that_is_not_registered_is_refused_before_and_after_the_patch() -> None:
    model, late = tiny_models.build("qwen2"), patched()
    head = torch.nn.Linear(32, tiny_models.VOCAB)
    model.get_output_embeddings = late.get_output_embeddings = lambda: head
    with pytest.raises(HeadInputError, match=r"Linear that is not a submodule.*use_fused_kernels=False"):
        npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    assert_untouched(model)
    with pytest.raises(HeadInputError, match="not a submodule"):
        late(input_ids=tiny_models.tokens(1, 4))


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


# -- LoRA -------------------------------------------------------------------------------------------------------------


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
def test_an_adapter_on_the_head_is_refused_by_name(adapter_first: bool) -> None:
    model, ids = tiny_models.build("qwen2"), tiny_models.tokens(2, 6)
    if not adapter_first:
        npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    adapted = with_lora(model, target_modules=["lm_head"])
    with pytest.raises(HeadInputError, match=r"peft\..* with adapter default.*use_fused_kernels=False"):
        npu_backend.patch_forward_with_backends(adapted, True) if adapter_first else adapted(input_ids=ids)
    if adapter_first:
        assert_untouched(model)


# -- the patch itself -------------------------------------------------------------------------------------------------


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
