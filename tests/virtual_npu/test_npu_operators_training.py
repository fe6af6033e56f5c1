"""npu:: operators that training code uses, on the virtual NPU (arithmetic by the CPU): float64, and their limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from references import assert_close_to, max_error
from torch import Tensor

npu = torch.ops.npu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """An operator as its users call it (its first result), the formula it stands for, and its inputs."""

    call: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    tensors: dict[str, Tensor] = field(default_factory=lambda: {"x": normal(3, 8)})


def attend(q: Tensor, k: Tensor, v: Tensor, masked: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Attention of [batch, heads, sequence, width], scale 0.25, written out."""
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2)
    scores = (scores if bias is None else scores + bias) * 0.25
    scores = scores if masked is None else scores.masked_fill(masked, -torch.inf)
    return torch.softmax(scores, -1) @ v.repeat_interleave(groups, 1)


def flat(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def heads(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def fused(q: Tensor, k: Tensor, v: Tensor, layout: str = "BNSD", **options: object) -> Tensor:
    options = {name: value.to(q.device) if isinstance(value, Tensor) else value for name, value in options.items()}
    return npu.npu_fusion_attention(q, k, v, 4, layout, scale=0.25, **options)[0]


TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
QKV = {"q": normal(2, 4, 5, 8), "k": normal(2, 2, 7, 8, seed=1), "v": normal(2, 2, 7, 8, seed=2)}
FLAT = {name: flat(x) for name, x in QKV.items()}
ROWS = {"q": normal(9, 4, 8), "k": normal(9, 2, 8, seed=1), "v": normal(9, 2, 8, seed=2)}


def per_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sequences of 4, 0 and 5 rows, each causal."""
    parts = []
    for rows in (slice(0, 4), slice(4, 9)):
        a, b, c = (t[rows].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        parts.append(attend(a, b, c, torch.ones(a.shape[2], a.shape[2]).triu(1).bool())[0].transpose(0, 1))
    return torch.cat(parts)


CASES = {
    "gelu": Case(npu.npu_gelu, torch.nn.functional.gelu),
    "gelu by tanh": Case(
        lambda x: npu.npu_gelu(x, approximate="tanh"), lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    ),
    "fast gelu": Case(npu.npu_fast_gelu, lambda x: x / (1 + torch.exp(-1.702 * x))),
    "silu": Case(npu.npu_silu, lambda x: x / (1 + torch.exp(-x))),
    "geglu": Case(
        lambda x: npu.npu_geglu(x, -1, 1)[0],
        lambda x: x[:, :4] * torch.nn.functional.gelu(x[:, 4:], approximate="tanh"),
    ),
    "geglu, left half, exact, other dimension": Case(
        lambda x: npu.npu_geglu(x, 0, 0, True)[0],
        lambda x: x[2:] * torch.nn.functional.gelu(x[:2]),
        {"x": normal(4, 3)},
    ),
    "layer norm of a sum": Case(
        lambda x1, x2, gamma, beta: npu.npu_add_layer_norm(x1, x2, gamma, beta, 1e-5)[0],
        lambda x1, x2, gamma, beta: torch.nn.functional.layer_norm(x1 + x2, gamma.shape, gamma, beta),
        {"x1": normal(3, 8), "x2": normal(3, 8, seed=1), "gamma": normal(8, seed=2), "beta": normal(8, seed=3)},
    ),
    "masked softmax": Case(
        lambda x: npu.npu_scaled_masked_softmax(x, torch.ones(1, 1, 32, 64, device="npu").triu(9).bool(), 0.5),
        lambda x: torch.softmax((x * 0.5).masked_fill(torch.ones(32, 64).triu(9).bool(), -torch.inf), -1),
        {"x": normal(1, 2, 32, 64)},
    ),
    "masked softmax, triangle": Case(
        lambda x: npu.npu_scaled_masked_softmax(x, torch.zeros(1, 1, 1, 1, device="npu").bool(), 2.0, True),
        lambda x: torch.softmax((x * 2).masked_fill(torch.ones(32, 32).triu(1).bool(), -torch.inf), -1),
        {"x": normal(1, 2, 32, 32)},
    ),
    "attention BNSD, grouped": Case(fused, attend, QKV),
    "attention BSND": Case(
        lambda q, k, v: fused(*(t.transpose(1, 2) for t in (q, k, v)), "BSND").transpose(1, 2), attend, QKV
    ),
    "attention BSH": Case(
        lambda q, k, v: fused(q, k, v, "BSH"),
        lambda q, k, v: flat(attend(heads(q, 4), heads(k, 2), heads(v, 2))),
        FLAT,
    ),
    "attention SBH": Case(
        lambda q, k, v: fused(*(t.transpose(0, 1) for t in (q, k, v)), "SBH").transpose(0, 1),
        lambda q, k, v: flat(attend(heads(q, 4), heads(k, 2), heads(v, 2))),
        FLAT,
    ),
    "attention, own mask and bias": Case(
        lambda q, k, v, bias: fused(q, k, v, pse=bias, atten_mask=torch.ones(2, 1, 5, 7).triu(2).bool()),
        lambda q, k, v, bias: attend(q, k, v, torch.ones(5, 7).triu(2).bool(), bias),
        {**QKV, "bias": normal(2, 4, 5, 7, seed=3)},
    ),
    "attention, causal from the upper left": Case(
        lambda q, k, v: fused(q, k, v, atten_mask=TRIANGLE, sparse_mode=2),
        lambda q, k, v: attend(q, k, v, torch.ones(5, 7).triu(1).bool()),
        QKV,
    ),
    "attention, causal from the lower right": Case(
        lambda q, k, v: fused(q, k, v, atten_mask=TRIANGLE, sparse_mode=3),
        lambda q, k, v: attend(q, k, v, torch.ones(5, 7).triu(3).bool()),
        QKV,
    ),
    "attention, a band": Case(
        lambda q, k, v: fused(q, k, v, atten_mask=TRIANGLE, sparse_mode=4, pre_tockens=2, next_tockens=0),
        lambda q, k, v: attend(q, k, v, torch.ones(5, 7).triu(3).bool() | torch.ones(5, 7).tril(-1).bool()),
        QKV,
    ),
    "attention TND, packed and causal": Case(
        lambda q, k, v: fused(
            q, k, v, "TND", atten_mask=TRIANGLE, sparse_mode=3, actual_seq_qlen=[4, 4, 9], actual_seq_kvlen=[4, 4, 9]
        ),
        per_sequence,
        ROWS,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_and_gradients_match_float64(case: Case, dtype: torch.dtype, gradients) -> None:
    def cast(to: torch.dtype, device: str) -> dict[str, Tensor]:
        return {name: value.to(dtype).to(to).to(device) for name, value in case.tensors.items()}

    reference_inputs = cast(torch.float64, "cpu")
    upstream = normal(*case.formula(*reference_inputs.values()).shape, seed=9).to(dtype)
    reference = gradients(case.formula, reference_inputs, upstream)
    eager = gradients(case.formula, cast(dtype, "cpu"), upstream)
    got = gradients(case.call, cast(dtype, "npu:0"), upstream)
    for name, value in got.items():
        assert value.device == torch.device("npu:0")
        assert_close_to(value.cpu(), reference[name], eager[name], out_dtype=dtype, what=name, times=4.0)


def test_attention_gives_softmax_statistics_and_replays_dropout() -> None:
    q, k, v = (normal(1, 4, 6, 8, seed=i).npu().requires_grad_() for i in range(3))
    out, largest, total, _, _, _, _ = npu.npu_fusion_attention(q, k, v, 4, "BNSD", scale=0.25)
    scores = (q @ k.transpose(-1, -2)).detach() * 0.25
    assert largest.shape == total.shape == (1, 4, 6, 8)
    torch.testing.assert_close(largest[..., 0], scores.amax(-1))
    torch.testing.assert_close(total[..., 7], (scores - scores.amax(-1, keepdim=True)).exp().sum(-1))
    ones = torch.ones(1, 4, 6, 6, device="npu").requires_grad_()
    dropped = npu.npu_fusion_attention(q, k, ones, 4, "BNSD", scale=0.25, keep_prob=0.5)[0]
    assert not torch.equal(dropped, npu.npu_fusion_attention(q, k, ones, 4, "BNSD", scale=0.25, keep_prob=0.5)[0])
    # With values of one, the output is linear in them: its gradient shows the very weights that forward used.
    (weights,) = torch.autograd.grad(dropped[..., 0].sum(), ones)
    torch.testing.assert_close(weights.sum(-2)[..., 0].sum(), dropped[..., 0].sum())
    assert out.shape == q.shape


def test_rows_that_see_nothing_are_zero() -> None:
    q, k, v = (normal(1, 4, n, 8, seed=n).npu().requires_grad_() for n in (5, 3, 3))
    out = npu.npu_fusion_attention(q, k, v, 4, "BNSD", atten_mask=TRIANGLE.npu(), sparse_mode=3)[0]
    assert torch.equal(out[:, :, :2], torch.zeros(1, 4, 2, 8, device="npu"))
    out.sum().backward()
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_without_a_gradient(dtype: torch.dtype) -> None:
    a, b, gamma = (normal(*shape, seed=i).to(dtype) for i, shape in enumerate([(3, 8), (3, 8), (8,)]))
    y, rstd, total = npu.npu_add_rms_norm(a.npu(), b.npu(), gamma.npu(), 1e-5)
    assert torch.equal(total.cpu(), a + b)
    exact = torch.rsqrt((a + b).double().square().mean(-1, keepdim=True) + 1e-5)
    assert max_error(rstd.cpu(), exact) < 1e-5
    assert_close_to(y.cpu(), (a + b).double() * exact * gamma.double(), (a + b) * exact.to(dtype) * gamma)
    y, _ = npu.npu_gemma_rms_norm(a.npu(), gamma.npu(), 1e-5)
    exact = torch.rsqrt(a.double().square().mean(-1, keepdim=True) + 1e-5)
    assert_close_to(y.cpu(), a.double() * exact * (1 + gamma.double()), a * exact.to(dtype) * (1 + gamma))
    normed = npu.npu_layer_norm_eval(a.npu(), [8], gamma.npu())
    torch.testing.assert_close(normed.cpu(), torch.nn.functional.layer_norm(a, [8], gamma))


def test_torch_npu_says_that_a_norm_has_no_gradient() -> None:
    x, gamma = normal(3, 8).npu(), normal(8).npu()
    with pytest.raises(RuntimeError, match="derivative for npu::npu_add_rms_norm is not implemented"):
        npu.npu_add_rms_norm(x.requires_grad_(), x.detach(), gamma)[0].sum().backward()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_apply_adam_w_equals_torch(amsgrad: bool) -> None:
    import torch_npu

    weight = torch.nn.Parameter(normal(4, 3))
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": amsgrad}
    optimizer = torch.optim.AdamW([weight], **options)
    var, m, v = weight.detach().clone().npu(), torch.zeros(4, 3).npu(), torch.zeros(4, 3).npu()
    largest = torch.zeros(4, 3).npu() if amsgrad else None
    for step in range(3):
        weight.grad = normal(4, 3, seed=step + 1) * (3 - step)
        results = torch_npu.npu_apply_adam_w(
            0.9**step,
            0.99**step,
            0.1,
            0.01,
            0.9,
            0.99,
            1e-8,
            weight.grad.npu(),
            largest,
            amsgrad,
            False,
            out=(var, m, v),
        )
        assert [r.data_ptr() for r in results] == [var.data_ptr(), m.data_ptr(), v.data_ptr()]
        optimizer.step()
    torch.testing.assert_close(var.cpu(), weight.detach())


def test_in_place_operators_return_their_operand() -> None:
    x = normal(5).npu()
    expected = torch.nn.functional.silu(x.cpu())
    assert npu.npu_silu_(x).data_ptr() == x.data_ptr()
    torch.testing.assert_close(x.cpu(), expected)


def test_gating_takes_the_largest_and_marks_finished_rows() -> None:
    x, finished = normal(5, 7), torch.tensor([False, True, False, False, True])
    values, experts, rows = npu.npu_moe_gating_top_k_softmax(x.npu(), finished.npu(), 3)
    expected, chosen = torch.softmax(x, -1).topk(3, -1)
    torch.testing.assert_close(values.cpu(), expected)
    assert experts.dtype == rows.dtype == torch.int32
    assert torch.equal(experts.cpu(), chosen.masked_fill(finished.unsqueeze(1), 7).int())
    assert rows.cpu().tolist() == [[i, 5 + i, 10 + i] for i in range(5)]


@pytest.mark.parametrize("keep_logits", [True, False])
def test_linear_cross_entropy_over_a_divided_vocabulary(keep_logits: bool) -> None:
    """Two ranks' halves of the vocabulary, put together by hand, give the loss and gradients of the whole."""
    x, weight = normal(11, 8).half(), normal(12, 8, seed=1).half()
    target = torch.randint(0, 12, (11,), generator=torch.Generator().manual_seed(2))
    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(exact_x @ exact_weight.t(), target, reduction="none")
    upstream = normal(11, seed=3)
    exact.backward(upstream.double())
    parts = [
        npu.npu_fused_linear_online_max_sum(x.npu(), half.npu(), target.npu(), 6 * i, 6 * i + 5, keep_logits)
        for i, half in enumerate(weight.split(6))
    ]
    largest = torch.maximum(parts[0][0], parts[1][0])
    total = sum(part[1] * (part[0] - largest).exp() for part in parts)
    predicted = parts[0][2] + parts[1][2]
    grads_x, grads_weight = 0, []
    for i, part in enumerate(parts):
        logits = part[5] if keep_logits else None
        loss, softmax = npu.npu_fused_cross_entropy_loss_with_max_sum(
            largest, total, predicted, vocab_parallel_logits=logits
        )
        torch.testing.assert_close(loss.cpu().double(), exact.detach(), rtol=2e-3, atol=2e-3)
        known = {"softmax": softmax} if keep_logits else {"logits_max": largest, "sum_exp_logits": total}
        dx, dw = npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
            upstream.npu(), x.npu(), weight[6 * i : 6 * i + 6].npu(), part[3], part[4], **known
        )
        grads_x = grads_x + dx.float()
        grads_weight.append(dw.float())
    torch.testing.assert_close(grads_x.cpu().double(), exact_x.grad, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(torch.cat(grads_weight).cpu().double(), exact_weight.grad, rtol=5e-3, atol=5e-3)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device="npu")


RULED_OUT = {
    "gelu of float64": (lambda: npu.npu_gelu(zeros(2).double()), "float64"),
    "gelu approximation": (lambda: npu.npu_gelu(zeros(2), approximate="fast"), "approximate='fast'"),
    "geglu of an odd size": (lambda: npu.npu_geglu(zeros(2, 5)), "size 5 of dimension -1 is odd"),
    "add norm of two shapes": (lambda: npu.npu_add_rms_norm(zeros(2, 4), zeros(4), zeros(4)), "must be alike"),
    "layer norm's gamma": (
        lambda: npu.npu_add_layer_norm(*[zeros(2, 4)] * 2, *[zeros(3)] * 2),
        "must be the last sizes",
    ),
    "softmax of a size that 32 does not divide": (
        lambda: npu.npu_scaled_masked_softmax(zeros(1, 1, 32, 40), zeros(32, 40).bool()),
        "multiples of 32",
    ),
    "softmax's mask": (
        lambda: npu.npu_scaled_masked_softmax(zeros(1, 1, 32, 32), zeros(1, 1, 32, 16).bool()),
        "does not broadcast",
    ),
    "attention's layout": (lambda: fused(*[zeros(1, 4, 2, 8)] * 3, "BNDS"), "input_layout='BNDS'"),
    "attention's heads": (lambda: fused(*[zeros(1, 3, 2, 8)] * 3), "head_num=4"),
    "attention's groups": (lambda: fused(zeros(1, 4, 2, 8), *[zeros(1, 3, 2, 8)] * 2), "no multiple of 3 key heads"),
    "attention in two dtypes": (
        lambda: fused(zeros(1, 4, 2, 8), *[zeros(1, 4, 2, 8, dtype=torch.bfloat16)] * 2),
        "key is torch.bfloat16",
    ),
    "attention, packed without lengths": (lambda: fused(*[zeros(3, 4, 8)] * 3, "TND"), "needs actual_seq_qlen"),
    "attention, a small mask for a sparse mode": (
        lambda: fused(*[zeros(1, 4, 2, 8)] * 3, atten_mask=zeros(2, 2).bool(), sparse_mode=2),
        "2048 x 2048",
    ),
    "attention, sparse mode": (
        lambda: fused(*[zeros(1, 4, 2, 8)] * 3, sparse_mode=7),
        "sparse_mode=7 is not one of 0, 1, 2, 3, 4, 5, 6",
    ),
    "attention, mask and tokens that differ": (
        lambda: fused(*[zeros(1, 4, 2, 8)] * 3, atten_mask=zeros(2, 2).bool(), next_tockens=0),
        "outside of pre_tockens and next_tockens",
    ),
    "attention, nothing kept": (lambda: fused(*[zeros(1, 4, 2, 8)] * 3, keep_prob=0.0), "keep_prob=0.0"),
    "gating of too many": (lambda: npu.npu_moe_gating_top_k_softmax(zeros(2, 4), None, 5), "k=5 must be from 1 to 4"),
    "linear loss in float32": (
        lambda: npu.npu_fused_linear_online_max_sum(zeros(2, 4), zeros(3, 4), zeros(2).long(), 0, 2),
        "float32",
    ),
}


@pytest.mark.parametrize(("call", "message"), RULED_OUT.values(), ids=RULED_OUT)
def test_what_the_documentation_rules_out_is_an_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()
