"""The demo's picture: reward, loss and entropy over the steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from npu_backend.errors import ConfigError


def check(path: str) -> None:
    """Find out before the work starts whether a picture can be written there.

    Raises:
        ConfigError: matplotlib is absent, or there is no such folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: `pip install matplotlib`, or leave --plot out")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {Path(path).absolute().parent}; create it first")


def write(path: str, steps: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw one panel each for reward, loss and entropy; the file's suffix decides the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(10, 3), layout="constrained")
    numbers = [step["step"] for step in steps]
    for panel, name in zip(panels, ("reward", "loss", "entropy")):
        panel.plot(numbers, [step[name] for step in steps], marker="o")
        panel.set(title=name, xlabel="step", xticks=numbers)
    figure.suptitle(title, fontsize="small")
    figure.savefig(path)
    pyplot.close(figure)
