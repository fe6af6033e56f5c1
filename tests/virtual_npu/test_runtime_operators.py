"""aten operators on a virtual NPU (arithmetic by the CPU) against plain CPU: torch's operator database, and a model."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from npu_backend.virtual_npu.registry import OperatorError

_opinfo = pytest.importorskip(
    "torch.testing._internal.common_methods_invocations",
    reason="torch's operator database needs the expecttest package",
)

# Elementwise, reductions, indexing, shapes, matmul, normalisation, losses, scans: what training code is made of.
NAMES = """
    add sub mul div pow exp log sqrt rsqrt sigmoid tanh abs neg clamp where maximum lerp sum mean var prod amax argmax
    max.reduction_with_dim cumsum logsumexp softmax.with_dtype log_softmax norm matmul mm bmm addmm baddbmm einsum outer
    linalg.vector_norm nn.functional.linear nn.functional.gelu nn.functional.silu nn.functional.layer_norm
    nn.functional.rms_norm nn.functional.cross_entropy nn.functional.embedding nn.functional.nll_loss
    nn.functional.scaled_dot_product_attention nn.functional.pad nn.functional.conv2d nn.functional.mse_loss
    cat stack split chunk transpose permute expand index_select index_add index_put gather scatter scatter_add
    masked_fill masked_select topk sort unique tril triu roll repeat_interleave flip nonzero histc bincount searchsorted
    renorm fft.rfft fft.irfft stft nn.functional.l1_loss nn.functional.kl_div
""".split()


def _find(name: str):
    base, _, variant = name.partition(".") if name.startswith(("max.", "softmax.", "log_softmax.")) else (name, "", "")
    found = [op for op in _opinfo.op_db if op.name == base and op.variant_test_name == variant]
    return found or [op for op in _opinfo.op_db if op.name == base]


def _to_npu(value):
    return value.detach().to("npu").requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _outputs(op, sample, convert):
    torch.manual_seed(0)
    arguments = tree_map(convert, (sample.input, sample.args, sample.kwargs))
    outputs = op(arguments[0], *arguments[1], **arguments[2])
    leaves = [t for t in tree_flatten(arguments)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    tensors = [t for t in tree_flatten(outputs)[0] if isinstance(t, torch.Tensor)]
    used = [t for t in tensors if t.requires_grad]
    grads = torch.autograd.grad(used, leaves, [torch.ones_like(t) for t in used], allow_unused=True) if used else []
    return tensors, [g for g in grads if g is not None]


@pytest.mark.parametrize("name", NAMES)
def test_operator_equals_the_cpu_forward_and_gradient(name: str) -> None:
    ops = _find(name)
    assert ops, f"torch's operator database has no {name}"
    op = ops[0]
    dtype = torch.float32 if torch.float32 in op.supported_dtypes("cpu") else torch.int64
    with_grad = dtype == torch.float32 and op.supports_autograd
    compared = 0
    for sample in list(op.sample_inputs("cpu", dtype, requires_grad=with_grad))[:3]:
        expected, expected_grads = _outputs(op, sample, lambda value: value)
        got, got_grads = _outputs(op, sample, _to_npu)
        assert len(got) == len(expected)
        assert len(got_grads) == len(expected_grads)
        for mine, theirs in zip(got + got_grads, expected + expected_grads):
            assert mine.device.type == "npu"
            torch.testing.assert_close(mine.cpu(), theirs, equal_nan=True)
            compared += 1
    assert compared


def _qwen3(attention: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen3Config"):
        pytest.skip("this transformers has no Qwen3")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, attn_implementation=attention,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def _use_npu_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3 import modeling_qwen3 as modeling

    def norm(self, x):
        return torch.ops.npu.npu_rms_norm(x, self.weight, self.variance_epsilon)[0]

    def mlp(self, x):
        return self.down_proj(torch.ops.npu.npu_swiglu(torch.cat((self.gate_proj(x), self.up_proj(x)), -1)))

    def rope(q, k, cos, sin, *_, **__):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.ops.npu.npu_rotary_mul(q, cos, sin), torch.ops.npu.npu_rotary_mul(k, cos, sin)

    monkeypatch.setattr(modeling.Qwen3RMSNorm, "forward", norm)
    monkeypatch.setattr(modeling.Qwen3MLP, "forward", mlp)
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", rope)


def _train(model: torch.nn.Module, ids: torch.Tensor, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_trains_as_on_the_cpu_and_its_operators_are_counted(attention, monkeypatch, calls) -> None:
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    expected, expected_weights = _train(_qwen3(attention), ids, 3)
    model = _qwen3(attention).to("npu:1")
    _use_npu_operators(monkeypatch)
    calls()
    losses, weights = _train(model, ids.to("npu:1"), 3)
    counted = calls()
    # Per step: two norms a layer, two on queries and keys, one at the end; one MLP and two rotations a layer.
    for operator, per_step in (("npu_rms_norm", 9), ("npu_swiglu", 2), ("npu_rotary_mul", 4)):
        assert counted[f"npu::{operator}"] == 3 * per_step
        assert counted[f"npu::{operator}_backward"] == 3 * per_step
    assert (counted.get("aten::scaled_dot_product_attention", 0) == 6) == (attention == "sdpa")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=2e-5)


def test_checkpointing_draws_the_same_dropout_again() -> None:
    x = torch.ones(64, device="npu", requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(torch.nn.functional.dropout, x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_an_operator_that_torch_has_for_cuda_only_fails_by_name() -> None:
    """SyncBatchNorm's; torch's own error speaks of arguments from the 'CPU' backend, which are none of the caller's."""
    with pytest.raises(OperatorError, match=r"aten::batch_norm_stats has no CPU reference.*register_reference"):
        torch.batch_norm_stats(torch.ones(4, 3, device="npu"), 1e-5)


def test_gradients_of_a_product_are_checked_numerically() -> None:
    """gradcheck also asks for the gradient of a product to which nothing flows back."""
    operands = [torch.rand(3, 3, dtype=torch.float64, device="npu", requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(torch.matmul, operands)


def test_autocast_scaler_clipping_and_every_adamw() -> None:
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        results = []
        for device in ("cpu", "npu"):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
            data = torch.randn(5, 6)
            model, data = model.to(device), data.to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(data).float().square().mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            results.append([loss.detach().cpu(), norm.cpu(), *(p.detach().cpu() for p in model.parameters())])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
