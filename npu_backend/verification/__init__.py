"""Patched against unpatched: every operator and the PPO head, forward and gradients, on this process's device.

models.py   tiny models of each family, their inputs, and how often a model should call each operator
replay.py   record the calls that a model makes, and run one again: original, replacement, float64 reference
check.py    `verify`: which models, which patches, and the report
"""

from __future__ import annotations

from npu_backend.verification.check import verify

__all__ = ["verify"]
