"""Start a worker for each chip, hand it the models, and collect what it finds into a report."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from npu_backend.ascend.models import Model
from npu_backend.ascend.report import CheckReport
from npu_backend.ascend.toolchain import Toolchain
from npu_backend.errors import BackendUnavailableError

DTYPES = ("bfloat16", "float16", "float32")
LIGER = ("ascend", "as-installed")
Progress = Callable[[str, int, int], None]


def check(
    models: Sequence[Model],
    socs: Sequence[str],
    dtypes: Sequence[str],
    toolchain: Toolchain,
    *,
    liger: str | None = None,
    lengths: Sequence[int] = (),
    progress: Progress = lambda soc, done, total: None,
) -> CheckReport:
    """Compile every kernel that these models need on these chips, each once.

    Args:
        models: Which vocabularies, hidden sizes and (for Liger) layers.
        socs: Names of `npu_backend.soc`.
        dtypes: Of parameters and activations, some of `DTYPES`.
        toolchain: What to compile with.
        liger: None for our own kernels; "ascend" for Liger's Ascend kernels; "as-installed" for those that Liger takes
            with this very triton-ascend.
        lengths: For Liger: numbers of tokens in a batch.
        progress: Called with the chip, the kernels done and all kernels.

    Raises:
        BackendUnavailableError: the worker cannot run, for example because Liger is not installed.
    """
    if liger and importlib.util.find_spec("liger_kernel") is None:
        raise BackendUnavailableError(
            "--liger needs the release of liger-kernel that you will train with, and it is not installed: `pip install "
            "--no-deps liger-kernel==0.8.5` (without --no-deps pip brings another triton)"
        )
    types = {model.name: model.model_type for model in models}
    report = CheckReport(toolchain.describe(), types, liger or "", tuple(sorted(set(lengths))))
    for soc in socs:
        request = {
            "soc": soc,
            "dtypes": list(dtypes),
            "compiler": toolchain.build,
            "liger": liger,
            "lengths": list(lengths),
            "models": [
                {
                    "name": model.name,
                    "vocab_size": model.vocab_size,
                    "hidden_size": model.hidden_size,
                    "softcap": model.softcap,
                    "bias": model.bias,
                    "config": dict(model.config),
                }
                for model in models
            ],
        }
        _serve(request, toolchain, report, progress)
    report.sort()
    return report


def _serve(request: dict[str, Any], toolchain: Toolchain, report: CheckReport, progress: Progress) -> None:
    command = [sys.executable, "-m", "npu_backend.ascend.worker"]
    done, total = 0, 0
    temporary = partial(tempfile.TemporaryFile, "w+", encoding="utf-8", errors="replace")
    with temporary() as source, temporary() as errors:
        json.dump(request, source)
        source.seek(0)
        environment = toolchain.environment()
        with subprocess.Popen(
            command, stdin=source, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as worker:
            for line in worker.stdout or ():
                message = json.loads(line)
                report.add(message)
                total = message.get("total", total)
                done += "row" in message
                progress(request["soc"], done, total)
        if worker.returncode:
            errors.seek(0)
            raise BackendUnavailableError(
                f"the compile check's worker ended with {worker.returncode}: {errors.read().strip()[-1500:]}"
            )
