"""The benchmark's results as text, as JSON, and as a plot."""

from __future__ import annotations

import importlib.util
import json
import math
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from npu_backend.bench.contestants import Contestant
from npu_backend.bench.measure import Result
from npu_backend.errors import BackendUnavailableError, ConfigError

_MODES = {
    "no_grad": "forward without gradients",
    "train": "forward and backward",
    "train_silent": "forward and backward, {silent:.0%} of the rows (random) with zero upstream gradients",
}


def describe(device: torch.device, label: str, heads: list[Contestant], absent: list[str]) -> dict[str, Any]:
    """What the numbers depend on: device, versions, and the command."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "command": " ".join(["npu-backend", *sys.argv[1:]]),
        "device": label,
        "device_type": device.type,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "contestants": {head.name: {"version": head.version, "note": head.note} for head in heads},
        "absent": absent,
    }


def document(about: dict[str, Any], results: list[Result]) -> dict[str, Any]:
    """Everything, as JSON can hold it."""
    return dict(finite({**about, "results": [result.to_dict() for result in results]}))


def finite(value: Any) -> Any:
    """The value with None where a number was not measured: JSON has no NaN."""
    if isinstance(value, float):
        return round(value, 10) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def read(path: Path, show: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    """A document that `bench --output` wrote and `show` can turn into text.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"bench --read {path}: cannot be read as JSON: {error}") from error
    try:
        show(found)
        known = bool(found["results"])
    except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        known = False
    if not known:
        raise ConfigError(f"bench --read {path}: this is not a document that bench --output wrote")
    return dict(found)


def to_text(found: dict[str, Any]) -> str:
    """A document as tables in Markdown."""
    lines = [host_line(found), ""]
    for name, facts in found["contestants"].items():
        lines.append(f"* {name}: {facts['version']}" + (f"; {facts['note']}" if facts["note"] else ""))
    lines += [f"* not here: {reason}" for reason in found["absent"]]
    for result in found["results"]:
        lines += ["", *_shape(result)]
    return "\n".join(lines)


def host_line(found: dict[str, Any]) -> str:
    """Where a document was measured, in one line."""
    triton = f"triton {found['triton']}" if found["triton"] else "no triton"
    return f"{found['device']}; torch {found['torch']}, {triton}, Python {found['python']}"


def _shape(result: dict[str, Any]) -> list[str]:
    case = result["case"]
    one = 2 * case["rows"] * case["hidden"] * case["vocab"]
    rates = ", ".join(f"{name} {ms:.2f} ms ({_rate(one / ms / 1e9)} TFLOPS)" for name, ms in result["gemm_ms"].items())
    lines = [f"## N={case['rows']} H={case['hidden']} V={case['vocab']} {case['dtype']}", "", f"GEMMs: {rates}"]
    for mode, title in _MODES.items():
        timings = [timing for timing in result["timings"] if timing["mode"] == mode]
        title = title.format(silent=case["silent_rows"] / case["rows"])
        lines += ["", f"### {title}", "", "| head | ms (fastest - slowest) | TFLOPS | share of floor | peak+ GiB |"]
        lines.append("|---|---|---|---|---|")
        lines += [
            f"| {t['contestant']} | {t['ms']:.2f} ({t['fastest_ms']:.2f} - {t['slowest_ms']:.2f}) "
            f"| {_rate(t['tflops'])} | {_share(t['share'])} "
            f"| {'-' if t['peak_gib'] is None else format(t['peak_gib'], '.2f')} |"
            for t in timings
        ]
    lines += ["", f"### relative error to float64, first {result['error_rows']} rows", ""]
    lines += ["| head | log-probs | entropy | dx | dW |", "|---|---|---|---|---|"]
    for name, errors in result["errors"].items():
        cells = ["-" if value is None else f"{value:.1e}" for value in errors.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines + [f"* {name} failed: {reason}" for name, reason in result["failures"].items()]


def _rate(tflops: float) -> str:
    """Two digits at least, however slow the device."""
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"


def _share(share: float) -> str:
    """Nothing where a head seems to beat its own GEMMs by more than noise: the shape is too small to be timed."""
    return f"{share:.0%}" if share < 1.1 else "-"


def check_plot() -> None:
    """Find out whether a plot can be drawn before anything is measured.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailableError("bench --plot needs matplotlib: pip install 'npu-backend[plot]'")


def plot(found: dict[str, Any], path: Path) -> None:
    """Bars of the times of a document, one row of panels a shape, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = found["results"]
    figure, axes = pyplot.subplots(
        len(results), len(_MODES), figsize=(5.2 * len(_MODES), 2.9 * len(results)), squeeze=False, layout="constrained"
    )
    for row, result in zip(axes, results):
        case = result["case"]
        for axis, (mode, title) in zip(row, _MODES.items()):
            timings = [timing for timing in result["timings"] if timing["mode"] == mode][::-1]
            colours = ["tab:red" if t["contestant"].startswith("npu-backend") else "tab:gray" for t in timings]
            bars = axis.barh([t["contestant"] for t in timings], [t["ms"] for t in timings], color=colours)
            axis.bar_label(bars, [f" {t['ms']:.1f}" for t in timings], fontsize=7)
            axis.margins(x=0.15)
            axis.tick_params(labelsize=7)
            axis.set_xlabel("ms", fontsize=7)
            name = title.format(silent=case["silent_rows"] / case["rows"]).replace(", ", ",\n")
            axis.set_title(f"N={case['rows']} H={case['hidden']} V={case['vocab']}\n{name}", fontsize=8)
    figure.suptitle(f"{found['device']}, torch {found['torch']}, {results[0]['case']['dtype']}", fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
