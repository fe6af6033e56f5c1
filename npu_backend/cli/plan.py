"""Show what would be patched for a model, and why not what is left alone; nothing is changed.

    npu-backend plan --model-type qwen3
    npu-backend plan --config verl_config.yaml --use-liger

Without a model every family is shown. The exit status is 1 when something cannot be had for the model that was named.
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
    named = args.model_type is not None or args.config is not None
    return int(named and any(row.state in _FINDINGS for row in report.rows))
