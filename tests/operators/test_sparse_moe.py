"""Sparse MoE blocks of both transformers generations, patched against unpatched, and what sends them back."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import fake_torch_npu
import pytest
import torch
import transformers
from fake_torch_npu import FakeTorchNpu
from operator_references import DTYPES, normal
from references import assert_close_to
from torch import Tensor, nn

from npu_backend.operators import counters, sparse_moe
from npu_backend.patches.targets import load
from npu_backend.patches.verl_npu import PATCH_SET

HAS_REGISTRY = importlib.util.find_spec("transformers.integrations.moe") is not None  # transformers 5
SIZES = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "shared_expert_intermediate_size": 24,
}
BLOCKS = {
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextSparseMoeBlock"),
    "qwen3_vl_moe": ("Qwen3VLMoeTextConfig", "Qwen3VLMoeTextSparseMoeBlock"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeSparseMoeBlock"),
}
FAMILIES = [family for family in BLOCKS if importlib.util.find_spec(f"transformers.models.{family}")]


def block(family: str, **fields: Any) -> nn.Module:
    """One sparse block with random weights, experts that some tokens do not reach, float32."""
    config_name, block_name = BLOCKS[family]
    config_class = getattr(importlib.import_module(f"transformers.models.{family}.configuration_{family}"), config_name)
    config = config_class(**(SIZES | fields))
    config._experts_implementation = "grouped_mm"
    module = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), block_name)(config)
    for i, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(i))
    return module  # type: ignore[no-any-return]


@contextmanager
def patched(family: str) -> Iterator[None]:
    """The family's sparse_moe records of the table, applied as the engine does; the engine is tested elsewhere."""
    from npu_backend.patches.engine import Engine, PatchSet

    own = PatchSet("verl_npu", tuple(p for p in PATCH_SET.of((family,)) if p.op == "sparse_moe"))
    engine = Engine()
    rows = engine.apply(engine.plan(own, [family], context=SimpleNamespace(hf_config=None)))
    assert [row.state for row in rows].count("applied") == 1, rows
    try:
        yield
    finally:
        engine.revert()


def run(module: nn.Module, x: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """The block's result, and its first output with all gradients by name."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    result = module(x)
    out = result[0] if isinstance(result, tuple) else result
    (out * normal(*out.shape, seed=5).to(out.dtype)).sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return result, {"output": out.detach(), "x": x.grad, **grads}  # type: ignore[dict-item]


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], fwd: float, grad: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=fwd if name == "output" else grad, msg=name)


@pytest.mark.case("A03")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_block_equals_the_unpatched_one(family: str, norm_topk_prob: bool, npu: FakeTorchNpu) -> None:
    module = block(family, norm_topk_prob=norm_topk_prob)
    x = normal(2, 9, 64)
    expected_result, expected = run(module, x)
    with patched(family):
        got_result, got = run(module, x)
    assert type(got_result) is type(expected_result)
    if isinstance(expected_result, tuple):
        assert torch.equal(got_result[1], expected_result[1])
    assert_same(got, expected, 1e-5, 1e-4)
    assert counters.calls() == {"sparse_moe": 1}
    assert counters.fallbacks() == {}
    assert npu.count("npu_grouped_matmul", group_type=0) == 4  # two forward, two for their inputs
    assert npu.count("npu_grouped_matmul", group_type=2) == 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_is_as_near_to_float64_as_the_unpatched_one(family: str, dtype: torch.dtype, npu: FakeTorchNpu) -> None:
    module, x = block(family), normal(2, 9, 64)
    narrow = copy.deepcopy(module).to(dtype)
    # the router decides in the narrow dtype: give the exact block the same weights and input, as they were rounded
    wide = copy.deepcopy(narrow).double()
    if HAS_REGISTRY:
        wide.experts.config._experts_implementation = "eager"  # type: ignore[union-attr]  # the others have no float64
    exact = run(wide, x.to(dtype).double())[1]
    eager = run(narrow, x.to(dtype))[1]
    with patched(family):
        got = run(narrow, x.to(dtype))[1]
    for name, value in got.items():
        assert value.dtype == eager[name].dtype
        assert_close_to(value, exact[name], eager[name], what=name)


@pytest.mark.case("A04")
@pytest.mark.parametrize("family", FAMILIES)
def test_train_equals_eval(family: str, npu: FakeTorchNpu) -> None:
    """Dense routing weights reached an operator that wants one per choice: training used the wrong ones, silently."""
    module, x = block(family), normal(2, 9, 64)
    results = []
    for training in (True, False):
        module.train(training)
        expected = run(module, x)[1]["output"]
        with patched(family):
            results += [expected, run(module, x)[1]["output"]]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-5)
    probs = [kwargs["probs"] for name, _, kwargs in npu.seen if name == "npu_moe_token_unpermute"]
    assert [tuple(p.shape) for p in probs] == [(18, 2)] * 2


@pytest.mark.case("B11")
@pytest.mark.parametrize("family", FAMILIES)
def test_routing_is_bit_for_bit_the_original_with_near_ties(
    family: str, npu: FakeTorchNpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = block(family).to(torch.bfloat16)
    rows = normal(1, 64, seed=3).expand(4, -1) + 1e-3 * normal(4, 64, seed=4)
    module.gate.weight.data.copy_(rows.to(torch.bfloat16))  # four nearly equal experts
    x = normal(3, 8, 64, dtype=torch.bfloat16)
    chosen: list[tuple[Tensor, Tensor]] = []
    topk = torch.topk

    def recording(*args: Any, **kwargs: Any) -> Any:
        found = topk(*args, **kwargs)
        chosen.append((args[0].detach().clone(), found[1]))
        return found

    monkeypatch.setattr(torch, "topk", recording)
    expected = run(module, x)[1]["output"]
    with patched(family):
        got = run(module, x)[1]["output"]
    (before, index_before), (after, index_after) = chosen
    assert after.dtype == torch.float32
    assert torch.equal(before, after)
    assert torch.equal(index_before, index_after)
    assert_close_to(got, expected.double(), expected, times=1, out_dtype=torch.bfloat16)


@pytest.mark.case("B16", "B17")
@pytest.mark.parametrize("family", FAMILIES)
def test_unused_experts_get_zero_and_frozen_ones_nothing(family: str, npu: FakeTorchNpu) -> None:
    module, x = block(family), normal(1, 1, 64)  # one token: two of four experts
    with patched(family):
        grads = run(module, x)[1]
        expert_grads = {name: g for name, g in grads.items() if ".experts." in f".{name}"}
        assert expert_grads
        assert any((g == 0).flatten(1).all(1).any() if g.dim() == 3 else (g == 0).all() for g in expert_grads.values())
        assert all(torch.isfinite(g).all() for g in expert_grads.values())
        for parameter in module.experts.parameters():  # type: ignore[union-attr]
            parameter.requires_grad_(False)
        npu.seen.clear()
        grads = run(module, x)[1]
    assert not [name for name in grads if ".experts." in f".{name}"]
    assert npu.count("npu_grouped_matmul", group_type=2) == 0
    assert npu.count("npu_grouped_matmul", group_type=0) == 4


@pytest.mark.case("B07")
def test_an_old_grouped_matmul_leaves_the_eager_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def npu_grouped_matmul(
        x: Any, weight: Any, *, bias: Any = None, group_list: Any = None, split_item: int = 0
    ) -> Any:
        raise AssertionError("must not be called")

    fake_torch_npu.install(monkeypatch, fake_torch_npu.OPERATORS | {"npu_grouped_matmul": npu_grouped_matmul})
    context = SimpleNamespace(hf_config=None)
    for patch in (p for p in PATCH_SET.patches if p.op == "sparse_moe"):
        original = lambda self, hidden_states: None
        assert load(patch.requires)(original, context) == "torch_npu too old for grouped matmul"


def registered_experts(**fields: Any) -> SimpleNamespace:
    """Fused experts as transformers' decorator leaves them, with one thing changed."""
    found = {
        "gate_up_proj": normal(4, 64, 64),
        "down_proj": normal(4, 64, 32),
        "act_fn": nn.SiLU(),
        "num_experts": 4,
        "config": SimpleNamespace(num_experts=4),
        "has_gate": True,
        "has_bias": False,
        "is_transposed": False,
        "is_concatenated": True,
    }
    return SimpleNamespace(**(found | fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"act_fn": nn.GELU()}, "activation GELU"),
        ({"has_gate": False}, "experts that are not gate and up side by side"),
        ({"is_concatenated": False}, "experts that are not gate and up side by side"),
        ({"has_bias": True}, "experts with biases"),
        ({"config": SimpleNamespace(num_experts=8)}, "a part of the experts on this rank"),
        ({"config": SimpleNamespace(n_routed_experts=8)}, "a part of the experts on this rank"),
        ({"gate_up_proj": normal(4, 64, 64).double()}, "dtype float64"),
        ({"num_experts": 1}, "1 experts"),
    ],
)
def test_experts_that_do_not_fit_go_to_the_original(
    fields: dict[str, Any], reason: str, npu: FakeTorchNpu, context: Any
) -> None:
    sentinel = torch.zeros(3, 64)
    forward = sparse_moe.registered(lambda self, hidden_states, top_k_index, top_k_weights: sentinel, context)
    index = torch.tensor([[0, 1], [1, 2], [3, 0]])
    assert forward(registered_experts(**fields), normal(3, 64), index, torch.rand(3, 2)) is sentinel
    assert counters.fallbacks() == {"sparse_moe": {reason: 1}}
    assert npu.seen == []


def test_experts_without_an_activation_module_go_to_the_original(npu: FakeTorchNpu, context: Any) -> None:
    """GPT-OSS's, which compute their gate themselves and have no `act_fn`."""
    experts, sentinel = registered_experts(), torch.zeros(3, 64)
    del experts.act_fn
    forward = sparse_moe.registered(lambda *args: sentinel, context)  # type: ignore[arg-type,return-value]
    assert forward(experts, normal(3, 64), torch.tensor([[0], [1], [2]]), torch.rand(3, 1)) is sentinel


def test_transposed_experts_are_computed_as_they_are_stored(npu: FakeTorchNpu, context: Any) -> None:
    forward = sparse_moe.registered(lambda *args: None, context)  # type: ignore[arg-type,return-value]
    plain = registered_experts()
    turned = registered_experts(
        gate_up_proj=plain.gate_up_proj.transpose(1, 2).contiguous(),
        down_proj=plain.down_proj.transpose(1, 2).contiguous(),
        is_transposed=True,
    )
    given = (normal(3, 64), torch.tensor([[0, 1], [1, 2], [3, 0]]), torch.rand(3, 2))
    torch.testing.assert_close(forward(turned, *given), forward(plain, *given))


def test_an_empty_batch_goes_to_the_original(npu: FakeTorchNpu) -> None:
    module = block("qwen3_moe")
    with patched("qwen3_moe"):
        result = module(torch.zeros(0, 3, 64))
    assert (result[0] if isinstance(result, tuple) else result).shape == (0, 3, 64)
    assert counters.fallbacks() == {"sparse_moe": {"empty input": 1}}


@pytest.mark.skipif(HAS_REGISTRY, reason="transformers 5 has no lists of experts in these families")
@pytest.mark.parametrize("change", ["adapter", "hook", "bias", "gelu"])
def test_a_list_of_experts_with_something_added_goes_to_the_original(change: str, npu: FakeTorchNpu) -> None:
    module, x = block("qwen3_moe"), normal(2, 5, 64)
    expert = module.experts[1]  # type: ignore[index]
    if change == "adapter":
        expert.up_proj = nn.Sequential(expert.up_proj)
    elif change == "hook":
        expert.register_forward_hook(lambda _module, _args, out: 2 * out)
    elif change == "bias":
        expert.down_proj = nn.Linear(32, 64)
    else:
        expert.act_fn = nn.GELU()
    expected = module(x)[0]
    with patched("qwen3_moe"):
        got = module(x)[0]
    assert torch.equal(got, expected)
    assert list(counters.fallbacks()) == ["sparse_moe"]


@pytest.mark.skipif(not HAS_REGISTRY, reason="transformers 4 has no registry")
@pytest.mark.parametrize("chosen", ["eager", "batched_mm"])
def test_an_implementation_that_the_user_chose_is_left_alone(chosen: str, npu: FakeTorchNpu) -> None:
    module, x = block("qwen3_moe"), normal(2, 5, 64)
    module.experts.config._experts_implementation = chosen  # type: ignore[union-attr]
    expected = module(x)
    with patched("qwen3_moe"):
        assert torch.equal(module(x), expected)
    assert npu.seen == []


@pytest.mark.skipif(not HAS_REGISTRY, reason="transformers 4 has no registry")
def test_a_torch_without_grouped_mm_gets_the_class_patched(npu: FakeTorchNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers falls back to `eager` there, past the registry."""
    for owner, name in ((torch.nn.functional, "grouped_mm"), (torch, "_grouped_mm")):
        monkeypatch.delattr(owner, name, raising=False)
    kind = load("transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts")
    context = SimpleNamespace(hf_config=None)
    assert sparse_moe.requires_eager_default(kind.forward, context) is None
    module, x = block("qwen3_moe"), normal(2, 5, 64)
    module.experts.config._experts_implementation = "eager"  # type: ignore[union-attr]
    expected = run(module, x)[1]
    forward: Callable[..., Any] = sparse_moe.experts(kind.forward, context)
    monkeypatch.setattr(kind, "forward", forward)
    assert_same(run(module, x)[1], expected, 1e-5, 1e-4)
    assert counters.calls() == {"sparse_moe": 1}


def test_the_release_under_test_is_named() -> None:
    """Structure decides everywhere above; this only says which structure the run covered."""
    assert (int(transformers.__version__.partition(".")[0]) >= 5) == HAS_REGISTRY
