"""npu:: operators that route tokens to experts, on the virtual NPU (arithmetic by the CPU): results and limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from npu_operator_checks import DTYPES, compare, normal, zeros
from torch import Tensor

npu = torch.ops.npu


def chosen(tokens: int, experts: int, top_k: int) -> Tensor:
    """A routing map: every token's top_k of the experts."""
    return torch.zeros(tokens, experts).scatter(1, normal(tokens, experts, seed=9).topk(top_k, 1).indices, 1).bool()


# ---- a map of tokens and experts ----


def permute(x: Tensor, probs: Tensor, routing: Tensor) -> tuple[Tensor, Tensor]:
    experts, tokens = routing.t().nonzero(as_tuple=True)
    return x[tokens], probs.t()[experts, tokens]


def padded(routing: Tensor, capacity: int) -> Tensor:
    return routing.t().int().sort(dim=-1, descending=True, stable=True).indices[:, :capacity]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_permute_by_a_map(dtype: torch.dtype) -> None:
    routing = chosen(6, 4, 2)

    def call(x: Tensor, probs: Tensor) -> Tensor:
        rows, weights, places = npu.npu_moe_token_permute_with_routing_map(
            x, routing.npu(), probs=probs, num_out_tokens=12
        )
        assert torch.equal(rows[places.long()].cpu(), x.repeat_interleave(2, 0).cpu())
        return rows * weights.unsqueeze(1)

    def formula(x: Tensor, probs: Tensor) -> Tensor:
        rows, weights = permute(x, probs, routing)
        return rows * weights.unsqueeze(1)

    compare(call, formula, {"x": normal(6, 5), "probs": normal(6, 4, seed=1)}, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_permute_by_a_map_with_the_same_number_for_each_expert(dtype: torch.dtype) -> None:
    routing = chosen(6, 4, 2)
    sources = padded(routing, 3)

    def call(x: Tensor, probs: Tensor) -> Tensor:
        rows, weights, places = npu.npu_moe_token_permute_with_routing_map(
            x, routing.to("npu", torch.int8), probs=probs, num_out_tokens=12, drop_and_pad=True
        )
        assert torch.equal(places.cpu(), sources.flatten().int())
        return rows * weights.unsqueeze(1)

    def formula(x: Tensor, probs: Tensor) -> Tensor:
        return x[sources.flatten()] * probs.t().gather(1, sources).flatten().unsqueeze(1)

    compare(call, formula, {"x": normal(6, 5), "probs": normal(6, 4, seed=1)}, dtype)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpermute_by_a_map(dtype: torch.dtype, pad: bool) -> None:
    routing = chosen(6, 4, 2)
    tokens = padded(routing, 3).flatten() if pad else routing.t().nonzero()[:, 1]
    experts = torch.arange(4).repeat_interleave(3) if pad else routing.t().nonzero()[:, 0]
    places = (
        tokens.int()
        if pad
        else npu.npu_moe_token_permute_with_routing_map(normal(6, 1).npu(), routing.npu(), num_out_tokens=12)[2].cpu()
    )

    def call(rows: Tensor, probs: Tensor) -> Tensor:
        return npu.npu_moe_token_unpermute_with_routing_map(
            rows, places.npu(), [6, 5], probs=probs, routing_map=routing.npu(), drop_and_pad=pad
        )

    def formula(rows: Tensor, probs: Tensor) -> Tensor:
        return rows.new_zeros(6, 5).index_add(0, tokens, rows * probs[tokens, experts].unsqueeze(1))

    compare(call, formula, {"rows": normal(12, 5), "probs": normal(6, 4, seed=1)}, dtype)


def test_unpermute_without_weights_undoes_permute_and_takes_missing_slots() -> None:
    routing = chosen(6, 4, 2)
    x = normal(6, 5)
    rows, weights, places = npu.npu_moe_token_permute_with_routing_map(x.npu(), routing.npu(), num_out_tokens=12)
    assert weights.numel() == 0
    rows = rows.requires_grad_()
    back = npu.npu_moe_token_unpermute_with_routing_map(rows, places, [6, 5])
    torch.testing.assert_close(back.cpu(), 2 * x)
    back.sum().backward()
    assert torch.equal(rows.grad.cpu(), torch.ones(12, 5))
    missing = places.clone()
    missing[3] = -1  # token 1's second expert
    found = npu.npu_moe_token_unpermute_with_routing_map(rows, missing, [6, 5]).cpu()
    torch.testing.assert_close(found[1], x[1])
    torch.testing.assert_close(found[2:], 2 * x[2:])


# ---- gating ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sigmoid_gating_has_a_gradient(dtype: torch.dtype) -> None:
    x = normal(5, 12)
    experts = torch.sigmoid(x.to(dtype).float()).topk(4, -1).indices

    def call(logits: Tensor) -> Tensor:
        weights, found, _ = npu.npu_moe_gating_top_k(logits, 4, norm_type=1, routed_scaling_factor=2.5, out_flag=True)
        assert torch.equal(found.cpu(), experts.int())
        return weights

    def formula(logits: Tensor) -> Tensor:
        taken = torch.sigmoid(logits).gather(1, experts)
        return taken / taken.sum(-1, keepdim=True) * 2.5

    compare(call, formula, {"logits": x}, dtype)


@pytest.mark.parametrize("mode", [0, 1])
def test_gating_by_groups_lets_the_bias_choose_only(mode: int) -> None:
    x, bias = normal(7, 24), normal(24, seed=3)
    scores = torch.softmax(x, -1)
    groups = (scores + bias).view(7, 4, 6)
    best = groups.amax(-1) if mode == 0 else groups.topk(2).values.sum(-1)
    allowed = torch.zeros(7, 4).scatter(1, best.topk(2).indices, 1).bool().repeat_interleave(6, 1)
    experts = (scores + bias).masked_fill(~allowed, -torch.inf).topk(5).indices
    weights, found, whole = npu.npu_moe_gating_top_k(
        x.npu(), 5, bias=bias.npu(), k_group=2, group_count=4, group_select_mode=mode, out_flag=True
    )
    assert torch.equal(found.cpu(), experts.int())
    torch.testing.assert_close(weights.cpu(), scores.gather(1, experts))
    torch.testing.assert_close(whole.cpu(), scores)


def test_gating_that_normalises_the_chosen_ones() -> None:
    x, finished = normal(4, 6), torch.tensor([False, True, False, False])
    values, experts, whole = npu.npu_moe_gating_top_k_softmax_v2(x.npu(), k=2, finished=finished.npu(), renorm=1)
    logits, wanted = x.topk(2)
    torch.testing.assert_close(values.cpu(), torch.softmax(logits, -1))
    assert torch.equal(experts.cpu(), wanted.masked_fill(finished.unsqueeze(1), 6).int())
    assert whole.numel() == 0
    values, _, whole = npu.npu_moe_gating_top_k_softmax_v2(x.npu(), k=2, output_softmax=True)
    torch.testing.assert_close(whole.cpu(), torch.softmax(x, -1))
    torch.testing.assert_close(values.cpu(), torch.softmax(x, -1).topk(2).values)


# ---- sorted indices ----


def test_a_round_trip_through_sorted_rows() -> None:
    """gating, init_routing, an expert that doubles, finalize_routing: the weighted sum of doubled rows."""
    x = normal(5, 3)
    weights, experts, sources = npu.npu_moe_gating_top_k_softmax(normal(5, 4, seed=1).npu(), None, 2)
    rows, places, sorted_experts = npu.npu_moe_init_routing(x.npu(), sources, experts, 5)
    assert torch.equal(sorted_experts.cpu(), experts.cpu().flatten().sort().values)
    ends = npu.npu_moe_compute_expert_tokens(sorted_experts, 4)
    assert ends.cpu().tolist() == [int((experts.cpu() <= e).sum()) for e in range(4)]
    skip, bias = normal(5, 3, seed=2), normal(4, 3, seed=3)
    out = npu.npu_moe_finalize_routing(rows * 2, skip.npu(), None, bias.npu(), weights, places, experts)
    chosen_bias = bias[experts.cpu().long()]
    wanted = skip + ((2 * x.unsqueeze(1) + chosen_bias) * weights.cpu().unsqueeze(-1)).sum(1)
    torch.testing.assert_close(out.cpu(), wanted)


@pytest.mark.parametrize("index_type", [0, 1])
def test_rows_of_a_range_of_experts(index_type: int) -> None:
    x, experts = normal(4, 3), torch.tensor([[0, 3], [2, 1], [3, 2], [2, 0]], dtype=torch.int32)
    rows, places, counts, scales = npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), scale=torch.arange(4.0).npu(), expert_num=4, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, active_expert_range=[1, 3], row_idx_type=index_type,
    )  # fmt: skip
    order = [3, 2, 5, 6]  # flat places of expert 1, then of expert 2
    torch.testing.assert_close(rows[:4].cpu(), x[[i // 2 for i in order]])
    assert counts.cpu().tolist() == [1, 3]
    assert scales[:4].cpu().tolist() == [i // 2 for i in order]
    found = places.cpu().tolist()
    assert found[:4] == order if index_type else found == [-1, -1, 1, 0, -1, 2, 3, -1]
    pairs = npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), expert_num=4, expert_tokens_num_type=2, expert_tokens_num_flag=True,
        active_expert_range=[1, 4],
    )[2]  # fmt: skip
    assert pairs.cpu().tolist() == [[1, 1], [2, 3], [3, 2], [0, 0]]
    rows, places, _, _ = npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), expert_num=4, expert_tokens_num_type=1, expert_tokens_num_flag=True,
        active_expert_range=[0, 4],
    )  # fmt: skip
    ones = torch.ones(4, 2, device="npu")
    back = npu.npu_moe_finalize_routing(rows, None, None, None, ones, places, None, 2)
    torch.testing.assert_close(back.cpu(), 2 * x)


# ---- products that add ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_grouped_products_add_to_what_is_there(dtype: torch.dtype) -> None:
    x, weight, total = normal(9, 4).to(dtype), normal(9, 3, seed=1).to(dtype), normal(3, 4, 3, seed=2)
    parts = [(0, 4), (4, 4), (4, 9)]
    wanted = total.double() + torch.stack([x[a:b].double().t() @ weight[a:b].double() for a, b in parts])
    sums = torch.tensor([4, 4, 9]).npu()
    found = npu.npu_grouped_matmul_add(total.npu(), x.npu(), weight.npu(), sums)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-5, atol=1e-5)
    place = total.npu()
    assert npu.npu_grouped_matmul_add_(place, x.npu(), weight.npu(), sums) is place
    torch.testing.assert_close(place.cpu(), found.cpu())


def test_groups_of_an_adding_product_as_counts() -> None:
    x, weight, total = normal(9, 4).half().npu(), normal(9, 3, seed=1).half().npu(), zeros(3, 4, 3)
    by_sums = npu.npu_grouped_matmul_add(total, x, weight, torch.tensor([4, 4, 9]).npu())
    counts = torch.tensor([4, 0, 5]).npu()
    assert torch.equal(npu.npu_grouped_matmul_add(total, x, weight, counts, group_list_type=1), by_sums)


def test_groups_as_a_list_of_integers() -> None:
    x, weight = normal(5, 4), normal(3, 4, 2, seed=1)
    found = npu.npu_grouped_matmul.List([x.npu()], [weight.npu()], group_list=[3, 3, 5], split_item=2, group_type=0)
    torch.testing.assert_close(found[0].cpu(), torch.cat([x[:3] @ weight[0], x[3:] @ weight[2]]))


# ---- limits ----


def experts_of(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.int32)


def init_v2(**options: object) -> object:
    known = {
        "expert_num": 4,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, 4],
    }
    return npu.npu_moe_init_routing_v2(zeros(2, 3), experts_of(2, 2), **{**known, **options})


MAP = "npu_moe_token_permute_with_routing_map"
RULED_OUT = {
    "a map of floats": (lambda: getattr(npu, MAP)(zeros(2, 3), zeros(2, 4)), "routing_map is torch.float32"),
    "a map of other tokens": (lambda: getattr(npu, MAP)(zeros(2, 3), zeros(3, 4).bool()), "must be .2, experts."),
    "rows with fewer experts": (lambda: getattr(npu, MAP)(zeros(2, 3), zeros(2, 4).bool()), "must choose"),
    "weights without a map": (
        lambda: npu.npu_moe_token_unpermute_with_routing_map(zeros(2, 3), experts_of(2), [2, 3], probs=zeros(2, 4)),
        "probs need routing_map",
    ),
    "gating by 2 per group": (lambda: npu.npu_moe_gating_top_k(zeros(2, 8), 2, group_count=4), "more than 2"),
    "gating's k": (lambda: npu.npu_moe_gating_top_k(zeros(2, 8), 5, group_count=2), "k=5 must be from 1 to 4"),
    "gating's bias": (lambda: npu.npu_moe_gating_top_k(zeros(2, 8), 2, bias=zeros(7)), "must be .8,."),
    "gating's norm": (lambda: npu.npu_moe_gating_top_k(zeros(2, 8), 2, norm_type=2), "norm_type=2"),
    "routing by int64": (
        lambda: npu.npu_moe_init_routing(zeros(2, 3), experts_of(2, 2).long(), experts_of(2, 2), 2),
        "row_idx is torch.int64",
    ),
    "quantised routing": (lambda: init_v2(quant_mode=1), "quant_mode=1 has no reference"),
    "routing that pads": (lambda: init_v2(drop_pad_mode=1), "only 0 is supported"),
    "routing to experts outside": (lambda: init_v2(active_expert_range=[2, 5]), "within 0 and 4"),
    "experts that fall": (
        lambda: npu.npu_moe_compute_expert_tokens(torch.tensor([1, 0], dtype=torch.int32).npu(), 2),
        "must not fall",
    ),
    "adding to bfloat16": (
        lambda: npu.npu_grouped_matmul_add(
            zeros(1, 2, 2).bfloat16(), zeros(3, 2).bfloat16(), zeros(3, 2).bfloat16(), torch.tensor([3]).npu()
        ),
        "self is torch.bfloat16",
    ),
}


@pytest.mark.parametrize(("call", "message"), RULED_OUT.values(), ids=RULED_OUT)
def test_what_the_documentation_of_experts_rules_out_is_an_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()
