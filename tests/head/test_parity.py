"""The head against full logits in float64: values and gradients, over dtypes, sizes and options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from references import HeadCase, assert_head_matches, full_logits_head, head_case, max_error, run_head

import npu_backend
from npu_backend.head import inputs, rows_eager
from npu_backend.head.chunked import ChunkedHead, Plan
from npu_backend.head.linear_log_prob import in_chunks


def head(case: HeadCase):
    return npu_backend.linear_log_prob(case.hidden, case.weight, case.labels, **case.options())[:2]


def head_with_chunks_of(chunk_rows: int):
    def run(case: HeadCase):
        return in_chunks(
            case.hidden,
            case.weight,
            case.labels,
            **case.options(),
            chunk_rows=chunk_rows,
        )[:2]

    return run


@pytest.mark.case("D01")
@pytest.mark.parametrize("vocab_size", [97, 1000, 32000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_are_never_positive_and_match(vocab_size: int, dtype: torch.dtype) -> None:
    got = assert_head_matches(head_case(64, hidden_size=128, vocab_size=vocab_size, dtype=dtype), head)
    assert got["log_probs"].max() <= 0
    assert got["entropy"].min() >= 0
    if dtype == torch.float32:
        reference, _ = full_logits_head(head_case(64, hidden_size=128, vocab_size=vocab_size).to(torch.float64))
        assert max_error(got["log_probs"], reference) < 1e-3


@pytest.mark.case("D09")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_outputs_are_float32(dtype: torch.dtype) -> None:
    got = assert_head_matches(head_case(700, dtype=dtype), head)
    assert got["log_probs"].dtype == got["entropy"].dtype == torch.float32
    assert got["grad_hidden"].dtype == got["grad_weight"].dtype == dtype


@pytest.mark.parametrize("weight_dtype", [torch.float64, torch.float32])
def test_float64_is_computed_in_float64(weight_dtype: torch.dtype) -> None:
    """Gradients of float64 inputs are as good as float64, although the outputs are float32."""
    case = head_case(600, dtype=torch.float64)
    case = replace(case, weight=case.weight.to(weight_dtype))
    got, reference = run_head(case, head), run_head(case.to(torch.float64), full_logits_head)
    assert got["log_probs"].dtype == got["entropy"].dtype == torch.float32
    for name in ("grad_hidden", "grad_weight"):
        scale = float(reference[name].abs().max())
        assert max_error(got[name], reference[name]) < 8 * torch.finfo(got[name].dtype).eps * scale


@pytest.mark.case("D21", "D05")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_per_token_gradients_of_any_sign_and_zeros(dtype: torch.dtype) -> None:
    case = head_case(1100, dtype=dtype)
    advantage = case.grad_log_probs.masked_fill(torch.arange(1100) % 3 == 0, 0.0)
    assert_head_matches(replace(case, grad_log_probs=advantage), head)


@pytest.mark.parametrize(
    ("log_probs_used", "entropy_used"),
    [(True, False), (False, True), (True, True)],
    ids=["log_probs", "entropy", "both"],
)
def test_either_output_alone_may_be_used(log_probs_used: bool, entropy_used: bool) -> None:
    case = head_case(40)
    case = replace(
        case,
        grad_log_probs=case.grad_log_probs if log_probs_used else None,
        grad_entropy=case.grad_entropy if entropy_used else None,
    )
    assert_head_matches(case, head)


@pytest.mark.case("C10")
@pytest.mark.parametrize("margin", [9.0, 11.5, 14.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_a_confident_row_keeps_its_precision(margin: float, dtype: torch.dtype) -> None:
    """1 - p at the label, p near 0.999 and beyond, is not the difference of two rounded numbers near 1."""
    hidden = torch.zeros(4, 32, dtype=dtype)
    hidden[:, 0] = 1.0  # makes the logits exact: what is measured is the gradient, not the rounding of the GEMM
    weight = head_case(1, hidden_size=32).weight.to(dtype)
    weight[:, 0] = 0.0
    weight[7, 0] = margin
    case = HeadCase(hidden, weight, torch.full((4,), 7), grad_log_probs=torch.ones(4))
    got, reference = run_head(case, head), run_head(case.to(torch.float64), full_logits_head)
    for name in ("grad_hidden", "grad_weight"):
        of_label = reference[name][7] if name == "grad_weight" else reference[name]
        error = (got[name].double() - reference[name]).norm() / of_label.norm()
        assert error <= 0.01


_OPTIONS = {
    "bias": {"bias": torch.linspace(-1, 1, 101)},
    "scale": {"logit_scale": 0.0625},
    "softcap": {"softcap": 3.0},
    "temperature": {"temperature": 0.7},
    "all": {"bias": torch.linspace(-1, 1, 101), "logit_scale": 1.5, "softcap": 2.0, "temperature": 0.7},
    "all by row": {"logit_scale": 1.5, "softcap": 2.0, "temperature": torch.linspace(0.5, 2, 600)},
}


@pytest.mark.parametrize("name", _OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_scale_softcap_then_temperature(name: str, dtype: torch.dtype) -> None:
    fields = dict(_OPTIONS[name])
    if "bias" in fields:
        fields["bias"] = fields["bias"].to(dtype)
    assert_head_matches(head_case(600, dtype=dtype, **fields), head)


@pytest.mark.case("D32")
def test_temperature_one_gives_the_unscaled_log_probs() -> None:
    """The map of the case: there is no `return_unscaled`; the same call with temperature=1.0 is the unscaled one."""
    case = head_case(50, temperature=0.7)
    unscaled, scaled = head(replace(case, temperature=1.0))[0], head(case)[0]
    logits = (case.hidden @ case.weight.t()).log_softmax(-1)
    torch.testing.assert_close(unscaled, logits.gather(1, case.labels[:, None])[:, 0])
    assert not torch.allclose(scaled, unscaled, atol=1e-2)


def test_padded_vocabulary_of_minus_infinity_contributes_nothing() -> None:
    case = head_case(33, vocab_size=128, labels=torch.arange(33) % 100)
    bias = torch.zeros(128)
    bias[100:] = -torch.inf
    padded = run_head(replace(case, bias=bias, temperature=0.5), head)
    cut = run_head(replace(case, weight=case.weight[:100], bias=bias[:100], temperature=0.5), head)
    for name in ("log_probs", "entropy", "grad_hidden"):
        torch.testing.assert_close(padded[name], cut[name])
    for name in ("grad_weight", "grad_bias"):
        torch.testing.assert_close(padded[name][:100], cut[name])
        assert (padded[name][100:] == 0).all()


@pytest.mark.case("D24")
def test_rows_far_beyond_what_32_bits_can_index() -> None:
    """N * V = 3.0e9 elements would wrap a 32-bit offset; no chunk gets near it, and rows are indexed on their own."""
    rows, vocab_size = 20_000, 151_936
    hidden = torch.zeros(rows, 1)
    hidden[-1] = 1.0
    weight = torch.zeros(vocab_size, 1)
    weight[-1] = 12.0
    labels = torch.full((rows,), inputs.IGNORED)
    labels[-1] = vocab_size - 1
    plan = Plan(rows_eager, 512, torch.float32, 1.0, None, 1.0, False, 0)
    chunks = list(plan.chunks(rows))
    assert chunks[0].start == 0
    assert chunks[-1].stop == rows
    assert max((rows.stop - rows.start) * vocab_size for rows in chunks) < 2**31
    last = chunks[-1]  # only the chunk that matters is computed: the whole would take minutes here
    log_probs, _ = ChunkedHead.apply(hidden[last], weight, None, labels[last], None, plan)
    expected = 12.0 - torch.logsumexp(weight[:, 0].double(), 0)
    assert abs(float(log_probs[-1]) - float(expected)) < 1e-5


@settings(max_examples=25)
@given(
    rows=st.integers(0, 40),
    vocab_size=st.integers(1, 50),
    hidden_size=st.integers(1, 20),
    chunk_rows=st.integers(1, 45),
    ignored_every=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_any_shape_and_chunk_size(
    rows: int, vocab_size: int, hidden_size: int, chunk_rows: int, ignored_every: int, seed: int
) -> None:
    """In float64, where what is wrong stands out: a few roundings of float32 follow no rule in so small examples."""
    case = head_case(rows, hidden_size=hidden_size, vocab_size=vocab_size, seed=seed, dtype=torch.float64)
    case = replace(case, labels=case.labels.masked_fill(torch.arange(rows) % ignored_every == 1, -100))
    reference = run_head(case, full_logits_head)
    for name, value in run_head(case, head_with_chunks_of(chunk_rows)).items():
        torch.testing.assert_close(
            value, reference[name].to(value.dtype), msg=lambda text, name=name: f"{name}: {text}"
        )
