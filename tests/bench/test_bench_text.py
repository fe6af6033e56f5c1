"""The benchmark's text where numbers are small or nothing was measured."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from npu_backend.bench import contestants, report


def document(share: float, tflops: float, triton: str | None = None) -> dict[str, object]:
    timing = {"contestant": "ours", "mode": "train", "ms": 1.0, "fastest_ms": 1.0, "slowest_ms": 1.0}
    timing |= {"tflops": tflops, "share": share, "peak_gib": None}
    case = {"rows": 8, "hidden": 16, "vocab": 32, "silent_rows": 4, "dtype": "float32"}
    result = {"case": case, "gemm_ms": {"z": 0.1}, "timings": [timing], "error_rows": 8, "errors": {}, "failures": {}}
    return {
        **{"device": "cpu", "torch": "2", "python": "3", "triton": triton, "contestants": {}, "absent": []},
        "results": [result],
    }


def test_small_rates_keep_their_digits_and_a_beaten_floor_is_no_share() -> None:
    text = report.to_text(document(2.07, 0.0123))
    assert "| 0.012 | - |" in text
    assert "(8.2e-05 TFLOPS)" in text
    assert "| 410 | 98% |" in report.to_text(document(0.98, 410.0))


def test_a_host_without_triton_is_said_to_have_none() -> None:
    assert report.to_text(document(1.0, 1.0)).startswith("cpu; torch 2, no triton, Python 3")
    assert "triton 3.9.0," in report.to_text(document(1.0, 1.0, "3.9.0"))


def test_our_own_reason_comes_without_a_name_of_an_exception() -> None:
    _, absent = contestants.find(torch.device("cpu"))
    assert "verl triton: it has no kernels for cpu" in absent
