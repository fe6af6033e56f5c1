"""The adapter against the full logits of the model's own forward: log-probs, entropy and every parameter's gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny_models
import torch
from references import assert_close_to
from tiny_models import one_thread  # noqa: F401
from torch import Tensor, nn

import npu_backend

TEMPERATURE = 0.7


def scores_of(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy, from full logits."""
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    return log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def outputs_and_gradients(model: Any, scores: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """By name, for a loss in which each position's log-prob and entropy counts differently, with both signs."""
    log_probs, entropy = scores
    weights = torch.linspace(-1, 1, log_probs.numel(), dtype=log_probs.dtype).reshape(log_probs.shape)
    (weights * log_probs + weights.flip(-1) * entropy).mean().backward()
    found = {"log_probs": log_probs.detach(), "entropy": entropy.detach()}
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.case("A13", "D18")
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_equals_the_full_logits_of_the_models_own_forward(family: str) -> None:
    model = tiny_models.build(family)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped matmul does not take float64
    eager, reference = copy.deepcopy(model), copy.deepcopy(model).double()
    ids = tiny_models.tokens(3, 9)
    labels = ids.roll(-1, -1)
    assert npu_backend.patch_forward_with_backends(model, use_fused_kernels=True).applied == 1

    output = model(input_ids=ids, temperature=TEMPERATURE)
    got = outputs_and_gradients(model, (output.log_probs, output.entropy))
    wanted = outputs_and_gradients(reference, scores_of(reference(input_ids=ids).logits, labels))
    plain = outputs_and_gradients(eager, scores_of(eager(input_ids=ids).logits, labels))

    assert got.keys() == plain.keys() == wanted.keys()
    assert model.get_output_embeddings().weight.grad is not None
    for name, value in got.items():
        assert_close_to(value, wanted[name], plain[name], what=f"{family} {name}", times=5.0)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma2", {"final_logit_softcapping": None}),
        ("granite", {"logits_scaling": 1.0}),
        ("cohere", {"logit_scale": 1.0}),
    ],
)
def test_the_option_that_changes_the_logits_makes_the_difference(family: str, options: dict[str, Any]) -> None:
    """So the parity above is not that of a head without the option."""
    ids = tiny_models.tokens(2, 7)
    with_option, without = tiny_models.build(family), tiny_models.build(family, **options)
    log_probs = []
    for model in (with_option, without):
        npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
        log_probs.append(model(input_ids=ids).log_probs)
    assert (log_probs[0] - log_probs[1]).abs().max() > 0.1


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_gives_the_same_tokens_as_before(family: str, use_cache: bool) -> None:
    model, ids = tiny_models.build(family), tiny_models.tokens(2, 5)
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": use_cache, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    before = model.generate(input_ids=ids, **options)
    npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    assert torch.equal(model.generate(input_ids=ids, **options), before)
    assert model(input_ids=ids).log_probs.shape == ids.shape


def toy(change: Any) -> nn.Module:
    """A Qwen2 whose forward does `change(model, hidden, logits)` to the logits before it returns them."""
    from transformers import Qwen2ForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class Changed(Qwen2ForCausalLM):
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            hidden = self.model(input_ids=input_ids).last_hidden_state
            return CausalLMOutputWithPast(logits=change(self, hidden, self.lm_head(hidden)))

    model = tiny_models.build("qwen2")
    model.__class__ = Changed
    return model


FOLLOWED = {
    "as they are": lambda model, hidden, logits: logits,
    "cast": lambda model, hidden, logits: logits.contiguous().to(torch.float64).float(),
    "several factors": lambda model, hidden, logits: 2 * (logits * 3 / 4.5),
    "a multiplier that is an integer": lambda model, hidden, logits: torch.mul(logits, 2),
    "softcap": lambda model, hidden, logits: torch.tanh(logits / 3.0) * 3.0,
    "softcap by method": lambda model, hidden, logits: (logits / 3.0).tanh() * 3.0,
    "softcap by functional": lambda model, hidden, logits: nn.functional.tanh(logits / 3.0) * 3.0,
    "scale and softcap that are not each other's inverse": lambda model, hidden, logits: 5 * torch.tanh(logits * 0.4),
}
REFUSED = {
    "a token is ruled out": lambda model, hidden, logits: logits.__setitem__((..., 5), -1e9) or logits,
    "a tensor is added": lambda model, hidden, logits: logits + torch.ones(1),
    "a number is added": lambda model, hidden, logits: logits + 1,
    "a learnt scale": lambda model, hidden, logits: logits * torch.ones(()),
    "a number is divided by them": lambda model, hidden, logits: 1 / logits,
    "in place": lambda model, hidden, logits: logits.mul_(2),
    "rounded": lambda model, hidden, logits: logits.div(2, rounding_mode="floor"),
    "two saturations": lambda model, hidden, logits: logits.tanh().tanh(),
    "clamped": lambda model, hidden, logits: logits.clamp(-1, 1),
    "sliced": lambda model, hidden, logits: logits[:, 1:],
    "stored into another tensor": lambda model, hidden, logits: torch.empty(logits.shape).copy_(logits),
    "a second head": lambda model, hidden, logits: torch.stack([logits, logits]),
    "not through the head": lambda model, hidden, logits: hidden @ model.lm_head.weight.t(),
}


@pytest.mark.parametrize("change", FOLLOWED.values(), ids=FOLLOWED)
def test_what_a_forward_does_to_its_logits_is_followed(change: Any) -> None:
    model, ids = toy(change), tiny_models.tokens(2, 7)
    eager, reference = copy.deepcopy(model), copy.deepcopy(model).double()
    npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    output = model(input_ids=ids, temperature=TEMPERATURE)
    wanted, plain = (scores_of(m(input_ids=ids).logits, ids.roll(-1, -1)) for m in (reference, eager))
    for value, exact, same_dtype in zip((output.log_probs, output.entropy), wanted, plain):
        assert_close_to(value, exact, same_dtype)


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_followed_is_refused(change: Any) -> None:
    model, ids = toy(change), tiny_models.tokens(2, 7)
    npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    with pytest.raises(npu_backend.HeadInputError, match="use_fused_kernels=False"):
        model(input_ids=ids)
    assert "lm_head" not in vars(model)
    assert model(input_ids=ids, use_cache=True).logits is not None
