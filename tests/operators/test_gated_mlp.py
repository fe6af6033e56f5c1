"""Gated MLPs: what npu_swiglu and npu_geglu are given, float64 parity of the forms, and other activations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import operator_references as exact
import pytest
import torch
from fake_torch_npu import FakeTorchNpu
from operator_references import DTYPES, normal
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from npu_backend.operators import counters, gated_mlp

H, INNER = 16, 24
CONFIG = SimpleNamespace(
    hidden_size=H, intermediate_size=INNER, hidden_act="silu", hidden_activation="gelu_pytorch_tanh"
)


def calling(module: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward` with the weights as arguments, so that their gradients are compared too."""

    def call(x: Tensor, **weights: Tensor) -> Tensor:
        twin = copy.deepcopy(module)
        for name, weight in weights.items():
            layer = getattr(twin, name)
            del layer.weight
            layer.weight = weight
        return forward(twin, x)

    return call


def split(x: Tensor, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor) -> Tensor:
    return linear(silu(linear(x, gate_proj)) * linear(x, up_proj), down_proj)


def fused(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> Tensor:
    gate, up = linear(x, gate_up_proj).chunk(2, -1)
    return linear(silu(gate) * up, down_proj)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, H), (2, 5, H)])
@pytest.mark.parametrize(
    ("kind", "factory", "reference"),
    [(Qwen3MLP, gated_mlp.split, split), (Qwen2_5_VLMLP, gated_mlp.split, split), (Phi3MLP, gated_mlp.fused, fused)],
)
def test_parity(
    kind: Any, factory: Any, reference: Any, shape: tuple[int, ...], dtype: torch.dtype, npu: FakeTorchNpu, context: Any
) -> None:
    module = kind(CONFIG)
    weights = {
        name: (layer.weight.detach()).to(dtype)
        for name, layer in module.named_children()
        if isinstance(layer, nn.Linear)
    }
    given = {"x": normal(*shape, dtype=dtype), **weights}
    exact.assert_parity(
        calling(module, factory(kind.forward, context)), calling(module, kind.forward), reference, given
    )
    assert npu.count("npu_swiglu") == counters.calls()["gated_mlp"] == 1


@pytest.mark.case("B06")
def test_swiglu_of_nothing_has_the_right_shape_and_a_graph(npu: FakeTorchNpu) -> None:
    gate_up = torch.zeros(0, 8, requires_grad=True)
    out = gated_mlp.swiglu(gate_up)
    assert out.shape == (0, 4)
    out.sum().backward()
    assert gate_up.grad is not None
    assert npu.seen == []


@pytest.mark.case("B06")
@pytest.mark.parametrize(
    "view",
    [lambda t: t[:, ::2], lambda t: t.t().contiguous().t(), lambda t: t[1:, 4:12], lambda t: t[:1].expand(6, -1)],
)
def test_swiglu_of_a_strided_tensor(view: Callable[[Tensor], Tensor], npu: FakeTorchNpu) -> None:
    given = view(normal(6, 16))
    assert torch.equal(gated_mlp.swiglu(given), gated_mlp.swiglu_reference(given.contiguous()))
    assert all(operand.is_contiguous() for operand in npu.operands("npu_swiglu"))


@pytest.mark.case("B06")
@pytest.mark.parametrize("shape", [(3, 7), (7,), (0, 7)])
def test_swiglu_of_an_odd_axis_names_the_size(shape: tuple[int, ...], npu: FakeTorchNpu) -> None:
    with pytest.raises(ValueError, match="size is 7"):
        gated_mlp.swiglu(torch.zeros(shape))


@pytest.mark.parametrize(("name", "approximate"), [("gelu", 0), ("gelu_new", 1), ("gelu_pytorch_tanh", 1)])
def test_an_mlp_that_gates_with_gelu_is_computed_as_geglu(
    name: str, approximate: int, npu: FakeTorchNpu, context: Any
) -> None:
    module = Gemma2MLP(SimpleNamespace(**{**vars(CONFIG), "hidden_activation": name}))
    weights = {layer: getattr(module, layer).weight.detach() for layer in ("gate_proj", "up_proj", "down_proj")}

    def reference(x: Tensor, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor) -> Tensor:
        gate = gelu(linear(x, gate_proj), approximate="tanh" if approximate else "none")
        return linear(gate * linear(x, up_proj), down_proj)

    patched = calling(module, gated_mlp.split(Gemma2MLP.forward, context))
    exact.assert_parity(patched, calling(module, Gemma2MLP.forward), reference, {"x": normal(2, 5, H), **weights})
    assert [(called, args[1:]) for called, args, _ in npu.seen] == [("npu_geglu", (-1, approximate, True))]


@pytest.mark.parametrize("activation", [torch.nn.ReLU(), torch.nn.Mish()])
def test_another_activation_goes_to_the_original(activation: Any, npu: FakeTorchNpu, context: Any) -> None:
    module, x = Gemma2MLP(CONFIG), normal(3, H)
    module.act_fn = activation
    assert torch.equal(gated_mlp.split(Gemma2MLP.forward, context)(module, x), module(x))
    assert npu.seen == []
    assert list(counters.fallbacks()) == ["gated_mlp"]


@pytest.mark.parametrize(
    ("hidden_act", "skipped"), [("gelu", False), ("relu", True), ("silu", False), ("relu2", True), (None, False)]
)
def test_the_plan_asks_the_model_for_its_activation(hidden_act: str | None, skipped: bool, npu: FakeTorchNpu) -> None:
    for config in (
        SimpleNamespace(hidden_act=hidden_act, model_type="x"),
        {"model_type": "x", "text_config": {"hidden_act": hidden_act}},
        SimpleNamespace(model_type="vl", text_config=SimpleNamespace(model_type="t", hidden_activation=hidden_act)),
    ):
        reason = gated_mlp.requires(Gemma2MLP.forward, SimpleNamespace(hf_config=config))
        assert bool(reason) == skipped
        assert not reason or str(hidden_act) in reason


@pytest.mark.parametrize(
    "x", [torch.zeros(0, H), torch.zeros(3, H, dtype=torch.float64), torch.zeros(3, H, device="meta")]
)
def test_what_the_operator_must_not_take_goes_to_the_original(x: Tensor, npu: FakeTorchNpu, context: Any) -> None:
    module = Qwen3MLP(CONFIG).to(x.device, x.dtype)
    got, expected = gated_mlp.split(Qwen3MLP.forward, context)(module, x), module(x)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert npu.seen == []
    assert sum(counters.fallbacks()["gated_mlp"].values()) == 1


def test_the_projections_stay_modules_so_adapters_and_hooks_run(npu: FakeTorchNpu, context: Any) -> None:
    module = Qwen3MLP(CONFIG)
    x = normal(3, H)
    before = module(x)
    module.gate_proj.register_forward_hook(lambda _module, _args, out: 2 * out)
    got = gated_mlp.split(Qwen3MLP.forward, context)(module, x)
    assert torch.allclose(got, module(x), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(got, before, rtol=1e-2)


def test_autocast_gives_what_the_original_gives(npu: FakeTorchNpu, context: Any) -> None:
    module, x = Qwen3MLP(CONFIG), normal(3, H)
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = gated_mlp.split(Qwen3MLP.forward, context)(module, x), module(x)
    assert got.dtype == expected.dtype == torch.bfloat16
    exact_result = split(
        *(t.double() for t in (x, module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight))
    )
    exact.assert_close_to(got, exact_result, expected)
