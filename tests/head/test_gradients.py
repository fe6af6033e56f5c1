"""Which gradients exist, in which dtype, and what the upstream gradients and the inputs may look like."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from references import HeadCase, assert_close_to, assert_head_matches, full_logits_head, head_case, run_head
from torch import Tensor

import npu_backend
from npu_backend.errors import NPUBackendError


def head(case: HeadCase):
    return npu_backend.linear_log_prob(case.hidden, case.weight, case.labels, **case.options())[:2]


@pytest.mark.case("D04")
def test_3d_hidden_gets_its_gradient_when_the_weight_is_frozen() -> None:
    case = head_case(3, 200)
    hidden = case.hidden.clone().requires_grad_()
    log_probs, entropy = head(replace(case, hidden=hidden))
    torch.autograd.backward([log_probs, entropy], [case.grad_log_probs, case.grad_entropy])
    eager = run_head(case, full_logits_head)["grad_hidden"]
    assert_close_to(hidden.grad, run_head(case.to(torch.float64), full_logits_head)["grad_hidden"], eager)
    assert case.weight.grad is None


@pytest.mark.case("D29")
@pytest.mark.parametrize("hidden_wanted", [True, False])
@pytest.mark.parametrize("weight_wanted", [True, False])
@pytest.mark.parametrize("bias_wanted", [True, False])
def test_only_the_gradients_that_are_asked_for(
    hidden_wanted: bool, weight_wanted: bool, bias_wanted: bool, operators
) -> None:
    case = head_case(600, bias=torch.linspace(-1, 1, 101))
    expected = run_head(case, head)
    leaves = {
        "hidden": case.hidden.clone().requires_grad_(hidden_wanted),
        "weight": case.weight.clone().requires_grad_(weight_wanted),
        "bias": case.bias.clone().requires_grad_(bias_wanted),
    }
    log_probs, entropy = head(replace(case, **leaves))
    wanted = hidden_wanted or weight_wanted or bias_wanted
    assert log_probs.requires_grad == entropy.requires_grad == wanted
    if wanted:
        with operators() as seen:
            torch.autograd.backward([log_probs, entropy], [case.grad_log_probs, case.grad_entropy])
        assert seen["aten.mm.default"] == 2 * (1 + hidden_wanted + weight_wanted)  # two chunks; no GEMM for the frozen
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.grad is not None:
            assert torch.equal(leaf.grad, expected[f"grad_{name}"])


@pytest.mark.case("D29")
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_no_grad(guard, saved_elements) -> None:
    case = head_case(20)
    weight = case.weight.clone().requires_grad_()
    with guard(), saved_elements() as saved:
        log_probs, entropy = head(replace(case, weight=weight))
    assert not log_probs.requires_grad
    assert not saved
    expected = run_head(case, head)
    assert torch.equal(log_probs, expected["log_probs"])
    assert torch.equal(entropy, expected["entropy"])


@pytest.mark.case("D05")
def test_strided_and_expanded_upstream_gradients() -> None:
    case = head_case(700)
    every_other = torch.zeros(700)
    every_other[::2] = 1.0
    expected = run_head(replace(case, grad_log_probs=every_other, grad_entropy=torch.full((700,), 0.5)), head)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    log_probs, entropy = head(replace(case, hidden=hidden, weight=weight))
    (log_probs[::2].sum() + 0.5 * entropy.sum()).backward()  # the gradient of sum() has stride 0
    assert torch.equal(hidden.grad, expected["grad_hidden"])
    assert torch.equal(weight.grad, expected["grad_weight"])
    columns = torch.stack([case.grad_log_probs, case.grad_entropy], dim=1)  # stride 2
    assert not columns[:, 0].is_contiguous()
    strided = replace(case, grad_log_probs=columns[:, 0], grad_entropy=columns[:, 1])
    assert torch.equal(run_head(strided, head)["grad_weight"], run_head(case, head)["grad_weight"])


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_labels_and_temperatures_may_change_before_backward_and_be_inference_tensors(guard) -> None:
    case = head_case(8, temperature=torch.linspace(0.5, 2.0, 8))
    expected = run_head(case, head)
    with guard():
        labels, temperature = case.labels.clone(), case.temperature.clone()

    def changed_afterwards(case: HeadCase) -> tuple[Tensor, Tensor]:
        outputs = head(replace(case, labels=labels, temperature=temperature))
        with torch.inference_mode():
            labels.zero_()
            temperature.fill_(9.0)
        return outputs

    for name, value in run_head(case, changed_afterwards).items():
        assert torch.equal(value, expected[name]), name


def test_non_contiguous_inputs() -> None:
    case = head_case(8, 30)
    expected = run_head(case, head)
    views = replace(
        case,
        hidden=case.hidden.transpose(0, 1).contiguous().transpose(0, 1),
        weight=case.weight.t().contiguous().t(),
        labels=case.labels.t().contiguous().t(),
    )
    assert not views.hidden.is_contiguous()
    assert not views.weight.is_contiguous()
    for name, value in run_head(views, head).items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.case("D22", "D23")
@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
    ],
)
def test_mixed_dtypes_compute_in_the_wider_one(hidden_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    case = head_case(600)
    case = replace(case, hidden=case.hidden.to(hidden_dtype), weight=case.weight.to(weight_dtype))
    got = run_head(case, head)
    wider = torch.promote_types(hidden_dtype, weight_dtype)
    reference = run_head(case.to(torch.float64), full_logits_head)
    eager = run_head(case.to(wider), full_logits_head)
    assert got["log_probs"].dtype == got["entropy"].dtype == torch.float32
    assert got["grad_hidden"].dtype == hidden_dtype
    assert got["grad_weight"].dtype == weight_dtype
    for name, value in got.items():
        assert_close_to(value, reference[name], eager[name], what=name)


@pytest.mark.case("D22")
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast(hidden_dtype: torch.dtype, backward_inside: bool) -> None:
    """float32 master weights: GEMMs in bfloat16 both ways, gradients in the parameters' dtypes."""
    case = head_case(600)
    hidden = case.hidden.to(hidden_dtype).requires_grad_()
    weight = case.weight.clone().requires_grad_()
    upstream = [case.grad_log_probs, case.grad_entropy]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = head(replace(case, hidden=hidden, weight=weight))
        if backward_inside:
            torch.autograd.backward(outputs, upstream)
    if not backward_inside:
        torch.autograd.backward(outputs, upstream)
    assert outputs[0].dtype == outputs[1].dtype == torch.float32
    assert hidden.grad.dtype == hidden_dtype
    assert weight.grad.dtype == torch.float32
    narrow = run_head(replace(case, hidden=case.hidden.bfloat16(), weight=case.weight.bfloat16()), head)
    for value, name in ((outputs[0], "log_probs"), (outputs[1], "entropy")):
        assert torch.equal(value, narrow[name])
    assert torch.equal(hidden.grad.bfloat16(), narrow["grad_hidden"])
    assert torch.equal(weight.grad.bfloat16(), narrow["grad_weight"])


@pytest.mark.case("D22")
def test_backward_inside_an_autocast_that_forward_did_not_see() -> None:
    case = head_case(60)
    expected = run_head(case, head)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = case.hidden.clone().requires_grad_()
        with torch.autocast("cpu", enabled=False):
            log_probs, entropy = head(replace(case, hidden=hidden))
        torch.autograd.backward([log_probs, entropy], [case.grad_log_probs, case.grad_entropy])
    assert torch.equal(hidden.grad, expected["grad_hidden"])


@pytest.mark.case("D26", "D27")
@pytest.mark.parametrize("ignore_index", [-100, 0, -1])
def test_ignored_rows_are_zero_and_the_others_untouched(ignore_index: int) -> None:
    case = head_case(1, 700, ignore_index=ignore_index)
    labels = case.labels.clamp(min=1)
    labels[:, ::7] = ignore_index
    got = assert_head_matches(replace(case, labels=labels), head)
    ignored = labels == ignore_index
    for name in ("log_probs", "entropy", "grad_hidden"):
        assert (got[name][ignored] == 0).all()


@pytest.mark.case("D26")
@pytest.mark.parametrize("shape", [(20,), (2, 10)])
def test_all_rows_ignored_still_gives_every_parameter_its_gradient(shape: tuple[int, ...]) -> None:
    case = head_case(*shape, bias=torch.zeros(101))
    case = replace(case, labels=torch.full(shape, -100))
    got = run_head(case, head)
    assert set(got) == {"log_probs", "entropy", "grad_hidden", "grad_weight", "grad_bias"}
    assert all((value == 0).all() for value in got.values())


@pytest.mark.case("D26")
def test_garbage_in_ignored_rows_reaches_nothing() -> None:
    case = head_case(30)
    labels = case.labels.clone()
    labels[::3] = -100
    case = replace(case, labels=labels)
    expected = run_head(case, head)
    hidden, upstream = case.hidden.clone(), case.grad_log_probs.clone()
    hidden[::3] = torch.nan
    upstream[::3] = torch.nan
    got = run_head(replace(case, hidden=hidden, grad_log_probs=upstream), head)
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.case("D28")
@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_zero_tokens_give_empty_outputs_and_zero_gradients(shape: tuple[int, ...]) -> None:
    got = run_head(head_case(*shape, bias=torch.zeros(101), temperature=torch.ones(shape)), head)
    assert got["log_probs"].shape == got["entropy"].shape == shape
    assert got["grad_hidden"].shape == (*shape, 64)
    assert got["grad_weight"].shape == (101, 64)
    assert (got["grad_weight"] == 0).all()
    assert (got["grad_bias"] == 0).all()


def test_a_second_derivative_is_refused_by_name() -> None:
    case = head_case(10)
    hidden = case.hidden.clone().requires_grad_()
    log_probs, _ = head(replace(case, hidden=hidden))
    (first,) = torch.autograd.grad(log_probs.sum(), hidden, create_graph=True)
    assert torch.equal(
        first, run_head(replace(case, grad_log_probs=torch.ones(10), grad_entropy=None), head)["grad_hidden"]
    )
    with pytest.raises(NPUBackendError, match="linear_log_prob has no second derivative"):
        first.square().sum().backward()


def test_backward_twice_with_retain_graph() -> None:
    case = head_case(600)
    weight = case.weight.clone().requires_grad_()
    log_probs, _ = head(replace(case, weight=weight))
    first = torch.autograd.grad(log_probs.sum(), weight, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(log_probs.sum(), weight)[0], first)


def test_a_weight_changed_before_backward_is_noticed() -> None:
    case = head_case(10)
    weight = case.weight.clone().requires_grad_()
    log_probs, _ = head(replace(case, weight=weight))
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weight_gradient_over_many_chunks_is_rounded_once(dtype: torch.dtype) -> None:
    """Adding 128 chunks of one sign in bfloat16 stops growing long before the end; eager's GEMM is the yardstick."""
    module = npu_backend.FusedLinearForPPO(chunk_size=16)
    case = head_case(2048, hidden_size=16, vocab_size=32, dtype=dtype)
    case = replace(case, hidden=case.hidden.abs(), grad_log_probs=torch.ones(2048), grad_entropy=None)
    case = replace(case, labels=torch.zeros_like(case.labels))
    assert_head_matches(case, lambda given: module.forward(given.hidden, given.weight, given.labels))


@pytest.mark.parametrize("seed", range(3))
def test_a_sharp_policy_loses_nothing_in_backward(seed: int) -> None:
    """Scores of some hundreds: relative to log-sum-exp instead of the maximum, p would be off by their rounding."""
    case = head_case(20, spread=60.0, seed=seed)
    assert_head_matches(case, head)
