"""verl's two surfaces: `FusedLinearForPPO` and `linear_cross_entropy`."""

from __future__ import annotations

import inspect
import timeit

import pytest
import torch
from references import HeadCase, assert_head_matches, head_case, run_head

import npu_backend
from npu_backend.errors import HeadInputError


def test_the_module_has_verls_signature() -> None:
    assert list(inspect.signature(npu_backend.FusedLinearForPPO).parameters) == ["chunk_size", "impl_backend"]
    forward = inspect.signature(npu_backend.FusedLinearForPPO.forward)
    assert list(forward.parameters)[1:] == ["hidden_states", "vocab_weights", "input_ids", "temperature"]
    assert forward.parameters["temperature"].default == 1.0


@pytest.mark.parametrize("chunk_size", [1, 7, 512, 10_000])
@pytest.mark.parametrize("shape", [(60,), (3, 20)])
def test_the_module_computes_what_the_function_does(chunk_size: int, shape: tuple[int, ...]) -> None:
    module = npu_backend.FusedLinearForPPO(chunk_size=chunk_size)

    def forward(case: HeadCase):
        return module.forward(case.hidden, case.weight, case.labels, temperature=case.temperature)

    assert_head_matches(head_case(*shape, temperature=0.8), forward)


def test_the_module_is_stateless_and_cheap_to_construct() -> None:
    module = npu_backend.FusedLinearForPPO()
    assert not list(module.parameters())
    assert not module.state_dict()
    seconds = min(timeit.repeat(npu_backend.FusedLinearForPPO, number=100, repeat=3)) / 100
    assert seconds < 1e-3  # verl constructs one on every forward


@pytest.mark.parametrize("chunk_size", [0, -1, 1.5, "512", True, None])
def test_a_bad_chunk_size(chunk_size: object) -> None:
    with pytest.raises(HeadInputError, match="chunk_size must be a positive integer"):
        npu_backend.FusedLinearForPPO(chunk_size=chunk_size)


@pytest.mark.parametrize(
    ("hidden_shape", "labels_shape"),
    [((30,), (30,)), ((3, 10), (3, 10)), ((30, 1), (1, 30)), ((1, 30), (30,)), ((30,), (1, 30)), ((1, 1), (1, 1))],
)
def test_linear_cross_entropy_takes_verls_and_megatrons_layouts(
    hidden_shape: tuple[int, ...], labels_shape: tuple[int, ...]
) -> None:
    case = head_case(*labels_shape)
    expected = run_head(
        case, lambda given: npu_backend.linear_log_prob(given.hidden, given.weight, given.labels, temperature=0.7)[:2]
    )
    got = run_head(
        case,
        lambda given: npu_backend.linear_cross_entropy(
            given.hidden.reshape(*hidden_shape, 64), given.weight, given.labels, 0.7, "none", None
        ),
    )
    assert got["log_probs"].shape == labels_shape
    for name, value in got.items():
        assert torch.equal(value, expected[name])


def test_linear_cross_entropy_refuses_what_it_would_misread() -> None:
    case = head_case(4, 5)
    with pytest.raises(HeadInputError, match=r"labels must be \[5, 4\]"):  # [S, B, H] with [B, S] and B > 1
        npu_backend.linear_cross_entropy(case.hidden.transpose(0, 1), case.weight, case.labels)
    for reduction in ("sum", "mean", "None", None):
        with pytest.raises(HeadInputError, match="reduction="):
            npu_backend.linear_cross_entropy(case.hidden, case.weight, case.labels, 1.0, reduction)
    with pytest.raises(HeadInputError, match="labels is missing"):
        npu_backend.linear_cross_entropy(case.hidden, case.weight, None)
    for name in ("hidden", "labels"):
        nested = {"hidden": case.hidden, "labels": case.labels, name: torch.nested.nested_tensor([getattr(case, name)])}
        with pytest.raises(HeadInputError, match="got a nested one"):
            npu_backend.linear_cross_entropy(nested["hidden"], case.weight, nested["labels"])
