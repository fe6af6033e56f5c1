"""Documented limits of npu:: operators are errors on the virtual NPU (arithmetic by the CPU); unknown ones say so."""

from __future__ import annotations

import pytest
import torch

from npu_backend import virtual_npu
from npu_backend.errors import ConfigError, NPUBackendError

npu = torch.ops.npu
D = "npu"


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=D)


def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=D)


def gmm(x: torch.Tensor, weight: torch.Tensor, group_list: torch.Tensor | None, **options: int) -> object:
    chosen = {"split_item": 2, "group_type": 0, "group_list_type": 1, **options}
    return npu.npu_grouped_matmul([x], [weight], group_list=group_list, **chosen)


RULED_OUT = {
    # B04: the device wants gamma in the input's dtype
    "gamma in another dtype": (lambda: npu.npu_rms_norm(rand(2, 4), rand(4, dtype=torch.bfloat16)), "one dtype"),
    "gamma of another size": (lambda: npu.npu_rms_norm(rand(2, 4), rand(3)), "last sizes"),
    "norm of float64": (lambda: npu.npu_rms_norm(rand(2, 4).double(), rand(4).double()), "float64"),
    # B06
    "odd swiglu": (lambda: npu.npu_swiglu(rand(2, 5)), "size 5 of dimension -1 is odd"),
    "swiglu of integers": (lambda: npu.npu_swiglu(ints(1, 2)), "int64"),
    "swiglu dimension": (lambda: npu.npu_swiglu(rand(2, 4), 2), "dim=2"),
    # B02, B03
    "rotary head of 896": (lambda: npu.npu_rotary_mul(rand(1, 1, 1, 896), *[rand(1, 1, 1, 896)] * 2), "896"),
    "rotary head odd": (lambda: npu.npu_rotary_mul(rand(1, 1, 2, 5), *[rand(1, 1, 2, 5)] * 2), "even"),
    "rotary of 3 dimensions": (lambda: npu.npu_rotary_mul(rand(1, 2, 4), *[rand(1, 2, 4)] * 2), "3 dimensions"),
    "rotary partial": (lambda: npu.npu_rotary_mul(rand(1, 1, 2, 8), *[rand(1, 1, 2, 4)] * 2), "head size 8"),
    "rotary batch of 1000": (lambda: npu.npu_rotary_mul(rand(1000, 1, 2, 4), *[rand(1, 1, 2, 4)] * 2), "below 1000"),
    "rotary mode": (lambda: npu.npu_rotary_mul(rand(1, 1, 2, 4), *[rand(1, 1, 2, 4)] * 2, "full"), "'full'"),
    # B08
    "counts taken for sums": (
        lambda: gmm(rand(5, 4), rand(3, 4, 2), ints(3, 0, 2), group_list_type=0),
        "must not fall",
    ),
    "sums taken for counts": (lambda: gmm(rand(5, 4), rand(3, 4, 2), ints(3, 3, 5)), "covers 11 rows, x has 5"),
    "negative count": (lambda: gmm(rand(5, 4), rand(3, 4, 2), ints(6, -1, 0)), "negative"),
    "groups without a list": (lambda: gmm(rand(5, 4), rand(3, 4, 2), None), "group_list is missing"),
    "as many groups as experts": (lambda: gmm(rand(5, 4), rand(3, 4, 2), ints(3, 2)), "2 groups"),
    "group list of int32": (lambda: gmm(rand(5, 4), rand(3, 4, 2), ints(3, 0, 2, dtype=torch.int32)), "int32"),
    "weight in another dtype": (lambda: gmm(rand(5, 4), rand(3, 4, 2).half(), ints(3, 0, 2)), "one dtype"),
    "inner size": (lambda: gmm(rand(1, 65536), rand(1, 65536, 1), ints(1)), "below 65536"),
    "group type": (lambda: gmm(rand(5, 4), rand(3, 4, 2), ints(3, 0, 2), group_type=1), "group_type=1"),
    "129 tensors": (lambda: npu.npu_grouped_matmul([rand(1, 1)] * 129, [rand(1, 1)] * 129), "129"),
    # A04: dense [tokens, experts] weights where unpermute wants [tokens, top_k]
    "probs for every expert": (
        lambda: npu.npu_moe_token_unpermute(rand(4, 3), ints(0, 1, 2, 3, dtype=torch.int32), rand(2, 8)),
        "must weigh the 4 permuted rows",
    ),
    "permute of floats": (lambda: npu.npu_moe_token_permute(rand(2, 3), rand(2, 2)), "indices is torch.float32"),
    "permute rows": (lambda: npu.npu_moe_token_permute(rand(2, 3), ints(1)), "1 rows, tokens 2"),
    "padded": (lambda: npu.npu_moe_token_permute(rand(1, 3), ints(1), None, True), "padded_mode"),
    "label out of range": (lambda: npu.npu_cross_entropy_loss(rand(2, 3), ints(0, 3)), "0 to 2"),
    "labels of int32": (lambda: npu.npu_cross_entropy_loss(rand(1, 3), ints(0, dtype=torch.int32)), "int64"),
    "logits of 3 dimensions": (lambda: npu.npu_cross_entropy_loss(rand(1, 2, 3), ints(0)), r"\[N, C\]"),
    "z-loss": (lambda: npu.npu_cross_entropy_loss(rand(1, 3), ints(0), return_zloss=True), "z-loss"),
}


@pytest.mark.case("A04", "B02", "B03", "B04", "B06", "B08")
@pytest.mark.parametrize(("call", "message"), RULED_OUT.values(), ids=RULED_OUT)
def test_what_the_documentation_rules_out_is_an_error(call, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as caught:
        call()
    assert isinstance(caught.value, NPUBackendError)
    assert "npu::" in str(caught.value)


def test_an_operator_without_a_reference_says_how_to_add_one() -> None:
    with pytest.raises(
        NPUBackendError, match=r"npu::npu_ciou has no CPU reference.*register_reference\('npu::npu_ciou'\)"
    ):
        npu.npu_ciou(rand(4, 2), rand(4, 2))


def test_a_reference_can_be_added_and_is_counted(calls) -> None:
    @virtual_npu.register_reference("npu::npu_sort_v2")
    def sort(x: torch.Tensor, dim: int = -1, descending: bool = False) -> torch.Tensor:
        assert x.device.type == "cpu"
        return x.sort(dim, descending).values

    result = npu.npu_sort_v2(torch.tensor([2.0, -1.0], device=D))
    assert result.tolist() == [-1.0, 2.0]
    assert calls()["npu::npu_sort_v2"] == 1
    with pytest.raises(ConfigError, match="has a reference already"):
        virtual_npu.register_reference("npu::npu_sort_v2")
    with pytest.raises(ConfigError, match="namespace::name"):
        virtual_npu.register_reference("npu_sort_v2")
