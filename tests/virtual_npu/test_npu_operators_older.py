"""npu:: operators that torch has under another name, on the virtual NPU (arithmetic by the CPU): results and limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from npu_operator_checks import DTYPES, compare, normal, zeros
from torch import Tensor

npu = torch.ops.npu
PAIR = {"x": normal(5, 6), "labels": torch.softmax(normal(5, 6, seed=1), -1)}
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], dict[str, Tensor]]] = {
    "mish": (npu.npu_mish, torch.nn.functional.mish, {"x": normal(4, 5)}),
    "linear": (
        npu.npu_linear,
        torch.nn.functional.linear,
        {"x": normal(3, 4), "weight": normal(5, 4, seed=1), "bias": normal(5, seed=2)},
    ),
    "batched product": (
        lambda a, b: npu.npu_bmmV2(a, b, []),
        torch.matmul,
        {"a": normal(3, 4, 5), "b": normal(3, 5, 2, seed=1)},
    ),
    "transpose, then reshape": (
        lambda x: npu.npu_confusion_transpose(x, [0, 2, 1, 3], [2, 4, 18], True),
        lambda x: x.permute(0, 2, 1, 3).reshape(2, 4, 18),
        {"x": normal(2, 3, 4, 6)},
    ),
    "reshape, then transpose": (
        lambda x: npu.npu_confusion_transpose(x, [0, 2, 1], [2, 12, 6], False),
        lambda x: x.reshape(2, 12, 6).permute(0, 2, 1),
        {"x": normal(2, 3, 4, 6)},
    ),
    "largest": (lambda x: npu.npu_max(x, 1)[0], lambda x: x.amax(1), {"x": normal(3, 4, 5)}),
    "smallest": (lambda x: npu.npu_min(x, -1, True)[0], lambda x: x.amin(-1, True), {"x": normal(3, 4, 5)}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(name: str, dtype: torch.dtype) -> None:
    call, formula, tensors = CASES[name]
    compare(call, formula, tensors, dtype)


def test_soft_targets() -> None:
    labels = PAIR["labels"]
    compare(
        lambda x: npu.npu_softmax_cross_entropy_with_logits(x, labels.npu()),
        lambda x: -(labels.to(x.dtype) * torch.log_softmax(x, -1)).sum(-1),
        {"x": PAIR["x"]},
        torch.float32,
    )


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clipped_swiglu(dtype: torch.dtype, interleaved: bool) -> None:
    x = (normal(4, 8) * 6).to(dtype)
    wide = x.double()
    a, b = (wide[:, ::2], wide[:, 1::2]) if interleaved else wide.chunk(2, -1)
    a, b = a.clamp(max=7), b.clamp(-7, 7)
    found = npu.npu_clipped_swiglu(x.npu(), interleaved=interleaved)
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu(), (a * torch.sigmoid(1.702 * a) * (b + 1)).to(dtype))


def test_gelu_of_one_half() -> None:
    x = normal(3, 8)
    expected = torch.nn.functional.gelu(x[:, :4], approximate="tanh") * x[:, 4:]
    torch.testing.assert_close(npu.npu_gelu_mul(x.npu(), approximate="tanh").cpu(), expected)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_in_place(mode: str) -> None:
    query, key, angle = normal(2, 5, 4, 8).npu(), normal(2, 5, 2, 8, seed=1).npu(), normal(2, 5, 1, 8, seed=2).npu()
    expected = [npu.npu_rotary_mul(x, angle.cos(), angle.sin(), mode) for x in (query, key)]
    npu.npu_apply_rotary_pos_emb(query, key, angle.cos(), angle.sin(), "BSND", mode)
    torch.testing.assert_close(query, expected[0])
    torch.testing.assert_close(key, expected[1])


def test_norms_of_a_sum_in_other_forms() -> None:
    x1, x2, gamma = (t.bfloat16().npu() for t in (normal(3, 8), normal(3, 8, seed=1), normal(8, seed=2)))
    y, rstd, total = npu.npu_add_rms_norm(x1, x2, gamma)
    wide, narrow, rstd_too, total_too = npu.npu_add_rms_norm_cast(x1, x2, gamma)
    assert wide.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in ((wide, y.float()), (narrow, y), (rstd, rstd_too), (total, total_too)))
    assert torch.equal(npu.npu_add_rms_norm_v2(x1, x2, gamma), rstd)
    assert torch.equal(x1, y)
    assert torch.equal(x2, total)


def test_adam_equals_torch() -> None:
    weight = normal(7).requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=0.1, eps=0)
    var, m, v = weight.detach().npu().clone(), torch.zeros(7, device="npu"), torch.zeros(7, device="npu")
    for step in range(1, 4):
        weight.grad = normal(7, seed=step)
        out = npu.npu_apply_adam.out(
            0.9**step, 0.999**step, 0.1, 0.9, 0.999, 0.0, weight.grad.npu(), None, None, out=[var, m, v]
        )
        assert out[0].data_ptr() == var.data_ptr()
        optimizer.step()
    torch.testing.assert_close(var.cpu(), weight.detach())


def test_small_ones() -> None:
    x = normal(2, 3).npu()
    hot = npu.npu_one_hot(torch.tensor([2, 0], dtype=torch.int32).npu(), -1, 3, 5, -1)
    assert hot.cpu().tolist() == [[-1, -1, 5], [5, -1, -1]]
    assert torch.equal(npu.npu_transpose(x, [1, 0]), x.t())
    assert torch.equal(npu.npu_reshape(x, [3, 2]), x.reshape(3, 2))
    assert not npu.npu_get_float_status(npu.npu_alloc_float_status(x)).any()
    assert npu.npu_max(x, 1)[1].dtype == torch.int32
    assert npu.npu_format_cast(x, 29) is x or torch.equal(npu.npu_format_cast(x, 29), x)
    assert npu.npu_format_cast_(x.clone(), x).equal(x)
    cast = npu.npu_dtype_cast_(x.clone(), x.half())
    assert cast.dtype == torch.float16
    torch.testing.assert_close(cast, x.half())


RULED_OUT = {
    "permutation": (lambda: npu.npu_transpose(zeros(2, 3), [0, 2]), "no order of 2 dimensions"),
    "linear of batches": (lambda: npu.npu_linear(zeros(2, 3, 4), zeros(5, 4)), "must be matrices"),
    "soft targets of other sizes": (
        lambda: npu.npu_softmax_cross_entropy_with_logits(zeros(2, 3), zeros(2, 4)),
        "must be alike",
    ),
    "odd clipped swiglu": (lambda: npu.npu_clipped_swiglu(zeros(2, 5)), "size 5 of dimension -1 is odd"),
    "rotary's cosine": (
        lambda: npu.npu_apply_rotary_pos_emb(*[zeros(1, 2, 2, 4)] * 2, *[zeros(1, 2, 1, 2)] * 2),
        "cos is .1, 2, 1, 2., .1, 2, 1, 4. is needed",
    ),
}


@pytest.mark.parametrize(("call", "message"), RULED_OUT.values(), ids=RULED_OUT)
def test_what_these_do_not_take_is_an_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()
