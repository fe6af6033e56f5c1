"""What `bench --end-to-end` measured: tables, paired comparisons, loss curves, and a plot."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from npu_backend.bench.actor_update import NO_HEAD, OPERATORS, ROWS
from npu_backend.bench.report import host_line

PLAIN = "verl chunked"  # with transformers' operators: what verl does when nothing is set
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; the last one stands, a little too large, for more
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def to_text(found: dict[str, Any]) -> str:
    """A document as tables in Markdown."""
    setting, results = found["setting"], found["results"]
    tokens = setting["sequences"] * setting["length"]
    lines = [host_line(found), ""]
    lines.append(
        f"{setting['ranks']} ranks of {setting['sequences']} x {setting['length']} tokens, {setting['dtype']}, "
        f"{len({result['seed'] for result in results})} seeds"
    )
    for name, facts in found["contestants"].items():
        lines.append(f"* {name}: {facts['version']}")
    lines += [f"* not here: {reason}" for reason in found["absent"]]
    lines += [f"* no operators of {name}: {reason}" for name, reason in found["operators_absent"].items()]
    lines += [f"* {name} failed: {why}" for result in results for name, why in result["failures"].items()]
    for operators, rows in _kinds(found):
        lines += ["", f"## Operators of {operators}, rows with gradients: {_title(rows, setting)}", ""]
        lines += ["| head | ms (fastest - slowest) | ms/token | peak GiB | head's share |", "|---|---|---|---|---|"]
        least = _mean(found, operators, "all", NO_HEAD.name)
        for name in _names(found, operators, rows):
            ms, peak = _mean(found, operators, rows, name), _peak(found, operators, rows, name)
            share = "-" if name == NO_HEAD.name or math.isnan(least) else f"{1 - least / ms:.0%}"
            every = [*itertools.chain(*_times(found, operators, rows, name).values())]
            memory = "-" if peak is None else f"{peak:.2f}"
            cells = (name, f"{ms:.1f} ({min(every):.1f} - {max(every):.1f})", f"{ms / tokens:.5f}", memory, share)
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Time per token below a peer's (95 % interval over the seeds)", ""]
    lines += ["| head | against | rows with gradients | less time |", "|---|---|---|---|"]
    for head, peer, rows, mean, half in comparisons(found):
        interval = "" if math.isnan(half) else f" +- {100 * half:.1f}"
        lines.append(f"| {head} | {peer} | {_title(rows, setting)} | {100 * mean:.1f}{interval} % |")
    if found["curves"]:
        lines += ["", "## Loss curves: root mean square difference from verl's chunked head", ""]
        lines += ["| head | difference | in units of that between two runs of verl's own |", "|---|---|---|"]
        lines += [f"| {name} | {d:.2e} | {r:.2f} |" for name, d, r in curve_differences(found)]
    return "\n".join(lines)


def comparisons(found: dict[str, Any]) -> Iterator[tuple[str, str, str, float, float]]:
    """(head, peer, rows, share of the peer's time that the head saves, half the width of its interval).

    A seed's value is one minus the ratio of the medians over its rounds. First our heads against the others, then what
    operators and head save together: every head on Liger's operators against verl's chunked one on transformers'.
    """
    for operators, rows in _kinds(found):
        names = _names(found, operators, rows)
        for ours, peer in itertools.product(names, names):
            if ours.startswith("npu-backend") and not peer.startswith("npu-backend") and peer != NO_HEAD.name:
                label = f"{ours}, operators of {operators}"
                yield label, peer, rows, *_paired(found, (operators, ours), (operators, peer), rows)
    for rows in ROWS:
        for head in _names(found, OPERATORS[1], rows):
            if head != NO_HEAD.name and PLAIN in _names(found, OPERATORS[0], rows):
                label = f"{head}, operators of {OPERATORS[1]}"
                pair = _paired(found, (OPERATORS[1], head), (OPERATORS[0], PLAIN), rows)
                yield label, f"{PLAIN}, operators of {OPERATORS[0]}", rows, *pair


def curve_differences(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(head, root mean square difference of its losses from verl's chunked head's, the same over that between two runs
    of verl's). A head is compared with both of verl's runs and gets the mean.
    """
    curves = dict(found["curves"])
    verl = [curves.pop(name) for name in (PLAIN, f"{PLAIN}, again") if name in curves]
    if len(verl) < 2:
        return []
    noise = _rms(*verl)
    rows = [(f"{PLAIN}, again", noise, 1.0)]
    for name, losses in curves.items():
        difference = statistics.mean(_rms(losses, other) for other in verl)
        rows.append((name, difference, difference / noise if noise else math.inf if difference else 1.0))
    return rows


def plot(found: dict[str, Any], path: Path) -> None:
    """Bars of the times per token, a panel for operators and rows, and how far the loss curves lie apart, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = _kinds(found)
    tokens = found["setting"]["sequences"] * found["setting"]["length"]
    height = -(-(len(kinds) + 1) // 2)
    figure, grid = pyplot.subplots(height, 2, figsize=(10.4, 2.5 * height), squeeze=False, layout="constrained")
    axes = grid.flatten()
    for axis in axes[len(kinds) + 1 :]:
        axis.remove()
    for axis, (operators, rows) in zip(axes, kinds):
        names = _names(found, operators, rows)[::-1]
        times = [1e3 * _mean(found, operators, rows, name) / tokens for name in names]
        colours = ["tab:red" if name.startswith("npu-backend") else "tab:gray" for name in names]
        axis.bar_label(axis.barh(names, times, color=colours), [f" {us:.1f}" for us in times], fontsize=7)
        axis.margins(x=0.15)
        axis.tick_params(labelsize=7)
        axis.set_xlabel("us/token", fontsize=7)
        axis.set_title(f"operators of {operators}, rows with gradients: {_title(rows, found['setting'])}", fontsize=8)
    axis, reference = axes[len(kinds)], found["curves"].get(PLAIN)
    for name, losses in found["curves"].items():
        if reference and name != PLAIN:
            axis.plot([loss - other for loss, other in zip(losses, reference)], linewidth=0.8, label=name)
    if reference:
        axis.legend(fontsize=6)
    axis.tick_params(labelsize=7)
    axis.set_xlabel("update", fontsize=7)
    axis.set_title(f"loss less that of {PLAIN}", fontsize=8)
    figure.suptitle(f"Actor update: {found['device']}, torch {found['torch']}, {found['setting']['dtype']}", fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _title(rows: str, setting: dict[str, Any]) -> str:
    return "all" if rows == "all" else f"a random {1 - setting['silent']:.0%}"


def _kinds(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The pairs of operators and rows that were measured."""
    return [(o, r) for o, r in itertools.product(OPERATORS, ROWS) if _names(found, o, r)]


def _names(found: dict[str, Any], operators: str, rows: str) -> list[str]:
    """The heads measured there for every seed, in the order of the document."""
    timings = [_timings(result, rows) for result in found["results"] if result["operators"] == operators]
    return [name for name in timings[0] if all(name in others for others in timings)] if timings else []


def _timings(result: dict[str, Any], rows: str) -> dict[str, dict[str, Any]]:
    return {timing["contestant"]: timing for timing in result["timings"] if timing["mode"] == rows}


def _times(found: dict[str, Any], operators: str, rows: str, name: str) -> dict[int, list[float]]:
    """Seed -> the times of its rounds in ms."""
    results = [result for result in found["results"] if result["operators"] == operators]
    return {result["seed"]: _timings(result, rows)[name]["ms"] for result in results}


def _medians(found: dict[str, Any], operators: str, rows: str, name: str) -> dict[int, float]:
    return {seed: statistics.median(ms) for seed, ms in _times(found, operators, rows, name).items()}


def _mean(found: dict[str, Any], operators: str, rows: str, name: str) -> float:
    if name not in _names(found, operators, rows):
        return math.nan
    return statistics.mean(_medians(found, operators, rows, name).values())


def _peak(found: dict[str, Any], operators: str, rows: str, name: str) -> float | None:
    results = [result for result in found["results"] if result["operators"] == operators]
    peaks = [_timings(result, rows)[name]["peak_gib"] for result in results]
    return None if None in peaks else max(peaks)


def _paired(found: dict[str, Any], ours: tuple[str, str], peer: tuple[str, str], rows: str) -> tuple[float, float]:
    """Mean over the seeds of the share of time saved, and half the width of its 95 % interval."""
    first, second = (_medians(found, operators, rows, name) for operators, name in (ours, peer))
    saved = [1 - first[seed] / second[seed] for seed in first if seed in second]
    if len(saved) < 2:
        return statistics.mean(saved), math.nan
    quantile = _T[min(len(saved) - 2, len(_T) - 1)]
    return statistics.mean(saved), quantile * statistics.stdev(saved) / math.sqrt(len(saved))


def _rms(losses: list[float], others: list[float]) -> float:
    return math.sqrt(statistics.mean((a - b) ** 2 for a, b in zip(losses, others)))
