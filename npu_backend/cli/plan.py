"""Show what would be patched for a model, and why not what is left alone; nothing is changed.

    npu-backend plan --model-type qwen3
    npu-backend plan --config verl_config.yaml --use-liger

Without a model every family is shown. The exit status is 1 when a model was named and one of its rows is unavailable,
failed or stale. A skipped row, on a CPU every one, is no finding.
"""

from __future__ import annotations

import argparse

from npu_backend.cli import _shared

add_arguments = _shared.add_model_arguments
_FINDINGS = ("unavailable", "failed", "stale")


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from npu_backend.manager import plan_patches

    report = plan_patches(_shared.model_config(args))
    _shared.emit(report, as_json=args.json)
    if not args.json and report.device.startswith("cpu") and any(row.state == "skipped" for row in report.rows):
        print("to see it as on an NPU: npu-backend run --virtual-npu -- npu-backend plan ...")
    named = args.model_type is not None or args.config is not None
    return int(named and any(row.state in _FINDINGS for row in report.rows))
