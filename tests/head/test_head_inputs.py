"""Every kind of bad input is a named error, and every kind of good input means what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import gloo_ranks
import pytest
import torch
from references import HeadCase, assert_head_matches, head_case, run_head

import npu_backend
from npu_backend.errors import HeadInputError
from npu_backend.head.inputs import trusted_values


def head(case: HeadCase):
    return npu_backend.linear_log_prob(case.hidden, case.weight, case.labels, **case.options())[:2]


@pytest.mark.case("D06")
@pytest.mark.parametrize("shape", [(700,), (700, 1), (7, 100), (7, 100, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_temperature_per_row(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    labels_shape = (7, 100) if shape[0] == 7 else (700,)
    temperature = torch.linspace(0.5, 2.0, 700).to(dtype).reshape(shape)
    assert_head_matches(head_case(*labels_shape, temperature=temperature), head, eager_dtype=torch.float32)


@pytest.mark.case("D06")
@pytest.mark.parametrize("temperature", [0.7, torch.tensor(0.7), torch.full((20,), 0.7)])
def test_one_temperature_in_any_form(temperature: float | torch.Tensor) -> None:
    expected = run_head(head_case(20, temperature=0.7), head)
    for name, value in run_head(head_case(20, temperature=temperature), head).items():
        assert torch.equal(value, expected[name])


@pytest.mark.case("D06")
@pytest.mark.parametrize("rows", [20, 101])
def test_temperature_is_never_broadcast_over_the_vocabulary(rows: int) -> None:
    """V = 101: a vector of V values is refused, unless there are V rows: then it is one per row."""
    temperature = torch.linspace(0.5, 2.0, 101)
    if rows == 101:
        assert_head_matches(head_case(rows, temperature=temperature), head)
    else:
        with pytest.raises(HeadInputError, match=r"one value per row, \[20\].*got \[101\]"):
            head(head_case(rows, temperature=temperature))


@pytest.mark.parametrize("shape", [(1,), (19,), (1, 20), (20, 2), (2,), (101,)])
def test_temperature_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(HeadInputError, match="one value per row"):
        head(head_case(20, temperature=torch.ones(shape)))


@pytest.mark.case("D08")
def test_temperature_none_is_one() -> None:
    expected = run_head(head_case(20), head)
    for name, value in run_head(head_case(20, temperature=None), head).items():
        assert torch.equal(value, expected[name])


@pytest.mark.case("D08")
@pytest.mark.parametrize("bad", [0, 0.0, -1, float("nan"), float("inf"), -float("inf")])
def test_temperature_that_is_not_finite_and_positive(bad: float) -> None:
    for temperature in (bad, torch.tensor(float(bad))):
        with pytest.raises(ValueError, match=r"temperature.*above 0"):
            head(head_case(20, temperature=temperature))
    vector = torch.ones(20)
    vector[13] = bad
    with pytest.raises(HeadInputError, match=r"temperature\[13\]"):
        head(head_case(20, temperature=vector))


@pytest.mark.parametrize("bad", [1e-40, 1e-320, pytest.param(10**400, id="10**400")])
def test_temperature_that_float32_cannot_divide_by(bad: float) -> None:
    """Subnormal numbers: the scores would be infinite, and all results NaN."""
    with pytest.raises(HeadInputError, match=r"temperature must be a finite number above 0 \(at least 1\.18e-38\)"):
        head(head_case(20, temperature=bad))
    if bad < 1:
        for dtype in (torch.float32, torch.float64):
            vector = torch.ones(20, dtype=dtype)
            vector[13] = bad
            with pytest.raises(HeadInputError, match=r"temperature\[13\] .*at least 1\.18e-38"):
                head(head_case(20, temperature=vector))
    head(head_case(20, temperature=torch.finfo(torch.float32).tiny))


@pytest.mark.parametrize("bad", ["1.0", True, [1.0], {}, 1j])
def test_temperature_of_a_wrong_type(bad: object) -> None:
    with pytest.raises(HeadInputError, match="temperature must be a finite number"):
        head(head_case(20, temperature=bad))


def test_no_gradient_is_silently_withheld_from_temperature() -> None:
    temperature = torch.tensor(0.7, requires_grad=True)
    with pytest.raises(HeadInputError, match=r"temperature\.detach\(\)"):
        head(head_case(20, temperature=temperature))
    with torch.no_grad():
        head(head_case(20, temperature=temperature))


@pytest.mark.case("D10")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_in_dense_out_flat_in_flat_out(dtype: torch.dtype) -> None:
    dense = head_case(2, 5, dtype=dtype)
    flat = HeadCase(
        dense.hidden.reshape(10, -1),
        dense.weight,
        dense.labels.reshape(10),
        grad_log_probs=dense.grad_log_probs.reshape(10),
        grad_entropy=dense.grad_entropy.reshape(10),
    )
    of_dense, of_flat = run_head(dense, head), run_head(flat, head)
    assert of_dense["log_probs"].shape == of_dense["entropy"].shape == (2, 5)
    assert of_flat["log_probs"].shape == of_flat["entropy"].shape == (10,)
    assert of_dense["grad_hidden"].shape == (2, 5, 64)
    for name, value in of_dense.items():
        assert torch.equal(value.reshape(of_flat[name].shape), of_flat[name])


@pytest.mark.case("D11")
@pytest.mark.parametrize("what", ["freed", "flat shard", "empty shard"])
def test_a_weight_that_fsdp_has_not_gathered(what: str, operators) -> None:
    case = head_case(10)
    weight = case.weight.clone()
    if what == "freed":
        weight.untyped_storage().resize_(0)
    else:
        weight = torch.zeros(300) if what == "flat shard" else torch.zeros(0, 64)
    with operators() as seen, pytest.raises(HeadInputError, match=r"FSDP.*summon_full_params.*unshard"):
        head(replace(case, weight=weight))
    assert not seen  # it was noticed before anything ran


@gloo_ranks.newer_gloo
def test_dtensors_of_rows_are_refused(tmp_path) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        case = head_case(10)
        mesh = init_device_mesh("cpu", (1,))
        for name, argument in (("hidden", "hidden_states"), ("labels", "labels")):
            rows = distribute_tensor(getattr(case, name), mesh, [Shard(0)])
            with pytest.raises(HeadInputError, match=rf"{argument} is a DTensor.*{argument}\.to_local\(\)"):
                head(replace(case, **{name: rows}))
        expected = head(case)
        alone = npu_backend.linear_log_prob(case.hidden, case.weight, case.labels, process_group=dist.group.WORLD)
        assert torch.equal(alone.log_probs, expected[0])  # a group of one rank holds the whole vocabulary
    finally:
        dist.destroy_process_group()


def test_what_is_not_a_process_group_is_refused() -> None:
    case = head_case(10)
    with pytest.raises(HeadInputError, match=r"process_group must be.*mesh\.get_group"):
        npu_backend.linear_log_prob(case.hidden, case.weight, case.labels, process_group="tp")


@pytest.mark.case("D14")
def test_the_missing_argument_is_named() -> None:
    case = head_case(10)
    module = npu_backend.FusedLinearForPPO()
    with pytest.raises(HeadInputError, match=r"labels is missing.*input_ids"):
        npu_backend.linear_log_prob(case.hidden, case.weight, None)
    with pytest.raises(HeadInputError, match=r"labels is missing.*input_ids"):
        module.forward(case.hidden, case.weight, None)
    with pytest.raises(TypeError, match="labels"):
        npu_backend.linear_log_prob(case.hidden, case.weight)
    with pytest.raises(TypeError, match="input_ids"):
        module.forward(case.hidden, case.weight)
    with pytest.raises(HeadInputError, match=r"vocab_weights is missing.*get_output_embeddings"):
        npu_backend.linear_log_prob(case.hidden, None, case.labels)
    with pytest.raises(HeadInputError, match="hidden_states is missing"):
        npu_backend.linear_log_prob(None, case.weight, case.labels)


@pytest.mark.case("D37")
def test_unknown_options_are_type_errors() -> None:
    case = head_case(10)
    for option in ("entropy_coeff", "label_smoothing", "tp_group", "return_unscaled", "chunk_size"):
        with pytest.raises(TypeError, match=option):
            npu_backend.linear_log_prob(case.hidden, case.weight, case.labels, **{option: 1})
    with pytest.raises(TypeError):
        npu_backend.FusedLinearForPPO(softcap=1.0)
    with pytest.raises(TypeError):
        npu_backend.FusedLinearForPPO()(case.hidden, case.weight, case.labels, 1.0, None)


_BAD = {
    "hidden 1-D": ({"hidden": torch.zeros(64)}, "hidden_states must be"),
    "hidden 4-D": ({"hidden": torch.zeros(1, 1, 10, 64)}, "hidden_states must be"),
    "hidden a list": ({"hidden": [1.0]}, "hidden_states must be a tensor, got list"),
    "hidden integers": ({"hidden": torch.zeros(10, 64, dtype=torch.int64)}, "hidden_states must have a floating-point"),
    "hidden complex": (
        {"hidden": torch.zeros(10, 64, dtype=torch.complex64)},
        "hidden_states must have a floating-point",
    ),
    "hidden float8": (
        {"hidden": torch.zeros(10, 64).to(torch.float8_e4m3fn)},
        "hidden_states must have a floating-point",
    ),
    "weight transposed": ({"weight": torch.zeros(64, 101)}, r"\[V, H\] with H = 64.*got \[64, 101\]"),
    "weight 3-D": ({"weight": torch.zeros(1, 101, 64)}, r"vocab_weights must be \[V, H\]"),
    "weight int8": ({"weight": torch.zeros(101, 64, dtype=torch.int8)}, "vocab_weights must have a floating-point"),
    "weight elsewhere": ({"weight": torch.zeros(101, 64, device="meta")}, "vocab_weights is on meta.*on cpu"),
    "labels too long": ({"labels": torch.zeros(11, dtype=torch.int64)}, r"labels must be \[10\].*got \[11\]"),
    "labels reshaped": ({"labels": torch.zeros(2, 5, dtype=torch.int64)}, r"labels must be \[10\].*got \[2, 5\]"),
    "labels floats": ({"labels": torch.zeros(10)}, "labels must have an integer dtype"),
    "labels booleans": ({"labels": torch.zeros(10, dtype=torch.bool)}, "labels must have an integer dtype"),
    "all on meta": (
        {
            "hidden": torch.zeros(10, 64, device="meta"),
            "weight": torch.zeros(101, 64, device="meta"),
            "labels": torch.zeros(10, dtype=torch.int64, device="meta"),
        },
        "hidden_states is on the meta device",
    ),
    "weight sparse": ({"weight": torch.zeros(101, 64).to_sparse()}, r"dense tensor.*sparse.*weights\.to_dense"),
    "weight sparse rows": ({"weight": torch.zeros(101, 64).to_sparse_csr()}, r"dense tensor.*weights\.to_dense"),
    "hidden nested": ({"hidden": torch.nested.nested_tensor([torch.zeros(10, 64)])}, "got a nested one"),
    "labels elsewhere": ({"labels": torch.zeros(10, dtype=torch.int64, device="meta")}, "labels is on meta"),
    "bias too short": ({"bias": torch.zeros(100)}, r"bias must be \[V\] = \[101\].*got \[100\]"),
    "bias integers": ({"bias": torch.zeros(101, dtype=torch.int64)}, "bias must have a floating-point"),
    "bias elsewhere": ({"bias": torch.zeros(101, device="meta")}, "bias is on meta"),
    "temperature elsewhere": ({"temperature": torch.ones(10, device="meta")}, "temperature is on the meta device"),
    "temperature booleans": ({"temperature": torch.ones(10, dtype=torch.bool)}, "temperature must be real"),
    "softcap 0": ({"softcap": 0.0}, "softcap must be a finite number above 0"),
    "softcap text": ({"softcap": "30"}, "softcap must be"),
    "softcap true": ({"softcap": True}, "softcap must be"),
    "scale nan": ({"logit_scale": float("nan")}, "logit_scale must be a finite number"),
    "scale tensor": ({"logit_scale": torch.tensor(2.0)}, "logit_scale must be a finite number"),
    "temperature on meta": ({"temperature": torch.ones((), device="meta")}, "temperature is on the meta device"),
    "temperature sparse": ({"temperature": torch.ones(10).to_sparse()}, r"temperature\.to_dense"),
    "temperature nested": (
        {"temperature": torch.nested.nested_tensor([torch.ones(4), torch.ones(6)])},
        r"temperature must be a dense tensor.*to_padded_tensor\(1\.0\)",
    ),
    "ignore None": ({"ignore_index": None}, "ignore_index must be an integer"),
    "ignore 65 bits": ({"ignore_index": 2**64}, "ignore_index must be an integer of 64 bits"),
    "ignore wraps": ({"ignore_index": 2**63}, "ignore_index must be an integer of 64 bits"),
}


@pytest.mark.parametrize("name", _BAD)
def test_bad_input(name: str) -> None:
    fields, message = _BAD[name]
    with pytest.raises(HeadInputError, match=message):
        head(replace(head_case(10), **fields))


@pytest.mark.parametrize("bad", [-1, -99, 101, 10**6])
def test_a_label_out_of_range_is_named_with_its_position(bad: int) -> None:
    labels = head_case(2, 10).labels.clone()
    labels[1, 3] = bad
    labels[1, 7] = bad
    with pytest.raises(HeadInputError, match=rf"labels\[13\] = {bad} .*2 in all.*\[0, 101\)"):
        head(head_case(2, 10, labels=labels))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_labels_of_any_integer_dtype(dtype: torch.dtype) -> None:
    case = head_case(20)
    assert torch.equal(head(replace(case, labels=case.labels.to(dtype)))[0], head(case)[0])


@pytest.mark.parametrize("temperature", [1.0, torch.ones(20)])
def test_one_host_synchronisation_and_none_for_trusted_values(temperature: float | torch.Tensor, operators) -> None:
    case = head_case(20, temperature=temperature)
    with operators() as seen:
        head(case)
    assert seen["aten._local_scalar_dense.default"] == 1
    with operators() as seen, trusted_values():
        head(case)
    assert seen["aten._local_scalar_dense.default"] == 0
    with pytest.raises(HeadInputError):
        head(replace(case, labels=case.labels + 101))  # the checks are back


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap, torch.func.jacrev, torch.func.jacfwd])
def test_function_transforms_are_refused_by_name(transform: Callable[..., Callable[..., object]]) -> None:
    case = head_case(10)

    def total(hidden: torch.Tensor) -> torch.Tensor:
        return head(replace(case, hidden=hidden))[0].sum()

    with pytest.raises(HeadInputError, match=r"torch\.func and torch\.vmap.*torch\.autograd\.grad"):
        transform(total)(case.hidden)


@pytest.mark.parametrize(
    "bad", [-1, float("nan"), float("inf"), 1e300, pytest.param(10**400, id="10**400"), "big", True]
)
def test_logits_cache_of_a_wrong_value(bad: object) -> None:
    case = head_case(10)
    with pytest.raises(HeadInputError, match="logits_cache_gib must be"):
        npu_backend.linear_log_prob(case.hidden, case.weight, case.labels, logits_cache_gib=bad)
