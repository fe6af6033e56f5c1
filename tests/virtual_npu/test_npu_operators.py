"""References of npu:: operators on the virtual NPU (arithmetic by the CPU): forward and gradients against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from references import assert_close_to
from torch import Tensor

npu = torch.ops.npu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Case:
    """An operator as its users call it, the formula it stands for, its inputs, and the calls in both directions."""

    call: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    tensors: dict[str, Tensor]
    counted: dict[str, int]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gamma


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(a) * b


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def moe_block(tokens: Tensor, weight: Tensor, probs: Tensor, experts: Tensor) -> Tensor:
    """Every token through its experts, one at a time."""
    rows = []
    for token, choice, share in zip(tokens, experts, probs):
        rows.append(sum(share[k] * (token @ weight[int(e)]) for k, e in enumerate(choice)))
    return torch.stack(rows) if rows else tokens @ weight[0]


class GroupedMatmul(torch.autograd.Function):
    """Grouped matmul with the gradients that trainers write for it: it has no autograd formula of its own."""

    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x, weight, counts)
        return npu.npu_grouped_matmul([x], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1)[
            0
        ]

    @staticmethod
    def backward(ctx, grad):
        x, weight, counts = ctx.saved_tensors
        types = {"group_list": counts, "group_list_type": 1}
        dx = npu.npu_grouped_matmul([grad], [weight.transpose(1, 2)], split_item=2, group_type=0, **types)[0]
        dw = npu.npu_grouped_matmul([x.t()], [grad], split_item=3, group_type=2, **types)[0]
        return dx, dw, None


def moe_on_npu(tokens: Tensor, weight: Tensor, probs: Tensor, experts: Tensor) -> Tensor:
    permuted, rows = npu.npu_moe_token_permute(tokens, experts.to(torch.int32))
    counts = torch.histc(experts, bins=weight.shape[0], min=0, max=weight.shape[0])
    return npu.npu_moe_token_unpermute(GroupedMatmul.apply(permuted, weight, counts), rows, probs=probs)


def log_prob(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return rows.masked_fill(labels == -100, 0.0)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    blocked = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(blocked, -torch.inf).softmax(-1) @ v


def both(name: str, backward: str = "_backward") -> dict[str, int]:
    return {f"npu::{name}": 1, f"npu::{name}{backward}": 1}


CASES = {
    "rms_norm": Case(
        lambda x, gamma: npu.npu_rms_norm(x, gamma, 1e-5)[0],
        rms_norm,
        {"x": normal(3, 5, 24), "gamma": normal(24, seed=1)},
        both("npu_rms_norm"),
    ),
    "rms_norm without rows": Case(
        lambda x, gamma: npu.npu_rms_norm(x, gamma, 1e-5)[0],
        rms_norm,
        {"x": normal(0, 24), "gamma": normal(24, seed=1)},
        both("npu_rms_norm"),
    ),
    "swiglu": Case(npu.npu_swiglu, swiglu, {"x": normal(7, 26)}, both("npu_swiglu")),
    "swiglu in the middle": Case(
        lambda x: npu.npu_swiglu(x, 1), lambda x: swiglu(x, 1), {"x": normal(3, 4, 5)}, both("npu_swiglu")
    ),
    "rotary": Case(
        npu.npu_rotary_mul,
        lambda input, r1, r2: input * r1 + rotate_half(input) * r2,
        {"input": normal(2, 3, 5, 16), "r1": normal(2, 1, 5, 16, seed=1), "r2": normal(2, 1, 5, 16, seed=2)},
        both("npu_rotary_mul"),
    ),
    "rotary interleaved": Case(
        lambda input, r1, r2: npu.npu_rotary_mul(input, r1, r2, "interleave"),
        lambda input, r1, r2: input * r1 + rotate_pairs(input) * r2,
        {"input": normal(2, 5, 3, 16), "r1": normal(1, 5, 1, 16, seed=1), "r2": normal(1, 5, 1, 16, seed=2)},
        both("npu_rotary_mul"),
    ),
    "moe, one expert without tokens": Case(
        moe_on_npu,
        moe_block,
        {
            "tokens": normal(5, 8),
            "weight": normal(4, 8, 6, seed=1) / 3,
            "probs": normal(5, 2, seed=2).softmax(-1),
            "experts": torch.tensor([[0, 3], [1, 0], [3, 1], [0, 1], [3, 0]]),
        },
        {
            "npu::npu_grouped_matmul": 3,
            **both("npu_moe_token_permute", "_grad"),
            **both("npu_moe_token_unpermute", "_grad"),
        },
    ),
    "cross entropy per token": Case(
        lambda input, target: -npu.npu_cross_entropy_loss(input, target, reduction="none")[0],
        log_prob,
        {"input": normal(6, 11), "target": torch.tensor([0, 10, 3, -100, 5, 5])},
        both("npu_cross_entropy_loss"),
    ),
    "cross entropy, mean": Case(
        lambda input, target: -npu.npu_cross_entropy_loss(input, target)[0],
        lambda input, target: (log_prob(input, target).sum() / (target != -100).sum()).view(1),
        {"input": normal(6, 11), "target": torch.tensor([0, 10, 3, -100, 5, 5])},
        both("npu_cross_entropy_loss"),
    ),
    "attention, causal, grouped": Case(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        attention,
        {"q": normal(2, 4, 7, 8), "k": normal(2, 2, 7, 8, seed=1), "v": normal(2, 2, 7, 8, seed=2)},
        {"aten::scaled_dot_product_attention": 1, "aten::scaled_dot_product_attention_backward": 1},
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_and_gradients_match_float64(case: Case, dtype: torch.dtype, gradients, calls) -> None:
    def cast(to: torch.dtype, device: str) -> dict[str, Tensor]:
        # The dtype's own values, so that the reference sees the same inputs.
        narrow = {k: v.to(dtype) if v.is_floating_point() else v for k, v in case.tensors.items()}
        return {k: (v.to(to) if v.is_floating_point() else v).to(device) for k, v in narrow.items()}

    reference_inputs = cast(torch.float64, "cpu")
    upstream = normal(*case.formula(*reference_inputs.values()).shape, seed=9).to(dtype)
    reference = gradients(case.formula, reference_inputs, upstream)
    eager = gradients(case.formula, cast(dtype, "cpu"), upstream)
    inputs = cast(dtype, "npu:0")
    calls()
    got = gradients(case.call, inputs, upstream)
    counted = {name: n for name, n in calls().items() if name in case.counted}
    assert counted == case.counted
    for name, value in got.items():
        assert value.device == torch.device("npu:0")
        assert value.dtype == (torch.float32 if value.is_floating_point() and value.dtype == torch.float32 else dtype)
        assert_close_to(value.cpu(), reference[name], eager[name], out_dtype=dtype, what=name)


def test_permute_says_where_each_token_went() -> None:
    tokens = normal(4, 3).npu()
    experts = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]], dtype=torch.int32, device="npu")
    permuted, rows = npu.npu_moe_token_permute(tokens, experts)
    assert rows.dtype == torch.int32
    order = experts.flatten().cpu()[rows.argsort().cpu()]
    assert order.tolist() == sorted(order.tolist())
    for place in range(8):
        assert torch.equal(permuted[rows[place]], tokens[place // 2])


@pytest.mark.parametrize("kept", [5, -2])
def test_permute_drops_what_is_over(kept: int) -> None:
    tokens = normal(4, 3).npu().requires_grad_()
    experts = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]], dtype=torch.int32, device="npu")
    everything, rows = npu.npu_moe_token_permute(tokens.detach(), experts)
    permuted, _ = npu.npu_moe_token_permute(tokens, experts, kept)
    assert torch.equal(permuted, everything[:kept])
    permuted.sum().backward()
    assert tokens.grad[:, 0].tolist() == [sum(int(rows[2 * i + k] < len(permuted)) for k in (0, 1)) for i in range(4)]


@pytest.mark.case("B08")
def test_grouped_matmul_takes_counts_or_running_sums() -> None:
    x, weight = normal(5, 4).npu(), normal(3, 4, 2, seed=1).npu()
    counts, sums = torch.tensor([3, 0, 2], device="npu"), torch.tensor([3, 3, 5], device="npu")
    rows = {"split_item": 2, "group_type": 0}
    by_count = npu.npu_grouped_matmul([x], [weight], group_list=counts, group_list_type=1, **rows)[0]
    by_sum = npu.npu_grouped_matmul([x], [weight], group_list=sums, group_list_type=0, **rows)[0]
    assert torch.equal(by_count, by_sum)
    assert torch.equal(by_count, torch.cat([x[:3] @ weight[0], x[3:] @ weight[2]]))


def test_grouped_matmul_without_groups_pairs_up() -> None:
    x, weight = [normal(2, 3).npu(), normal(4, 5).npu()], [normal(3, 6).npu(), normal(5, 7).npu()]
    products = npu.npu_grouped_matmul(x, weight)
    assert all(torch.equal(p, a @ b) for p, a, b in zip(products, x, weight))


def test_references_work_in_inference_mode_and_under_a_device_context() -> None:
    with torch.inference_mode(), torch.device("npu:1"):
        assert npu.npu_swiglu(torch.ones(2, 4)).device == torch.device("npu:1")
        q = torch.ones(1, 2, 3, 4)
        assert torch.nn.functional.scaled_dot_product_attention(q, q, q).device == torch.device("npu:1")
