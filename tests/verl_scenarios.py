"""What `verl_engine.py` runs besides training: cases in which verl alone fails, and what must be refused.

Each function is called as `scenario(folder, run)` in a process with or without our plugin, and returns JSON.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import verl_engine

Run = dict[str, Any]


def head_inputs(folder: Path, run: Run) -> dict[str, str]:
    """verl's head class with inputs that trainers have: `right`, `wrong`, or the error, for each."""
    import torch
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    torch.manual_seed(3)
    hidden, weight = torch.randn(5, 16), torch.randn(5, 16)  # as many tokens as words: a vector can be misread
    labels = torch.tensor([3, 0, 4, 1, 2])
    ignored = torch.where(labels == 4, -100, labels)
    temperatures = torch.tensor([0.5, 0.8, 1.0, 1.3, 2.0])
    cases = {
        "label -100": (hidden, weight, ignored, 1.0),
        "mixed dtypes": (hidden.bfloat16(), weight, labels, 1.0),
        "a temperature per token": (hidden, weight, labels, temperatures),
    }
    found = {}
    for name, (h, w, given, temperature) in cases.items():
        divisor = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
        expected = (h.double() @ w.double().t() / divisor).log_softmax(-1)
        expected = expected.gather(-1, given.clamp(min=0)[:, None])[:, 0].masked_fill(given < 0, 0.0)
        try:
            got = FusedLinearForPPO().forward(h, w, given, temperature)[0]
        except Exception as error:
            found[name] = type(error).__name__
        else:
            found[name] = "right" if torch.allclose(got.double(), expected, atol=1e-4) else "wrong"
    return found


def two_engines(folder: Path, run: Run) -> dict[str, str]:
    """An engine with Liger, then one without in the same process: whose norm the second one got."""
    path = verl_engine.tiny_model(folder, run)
    verl_engine.make_engine(path, {**run, "use_liger": True})
    engine = verl_engine.make_engine(path, {**run, "use_liger": False})
    return {"norm": next(type(m).__name__ for m in engine.module.modules() if type(m).__name__.endswith("RMSNorm"))}


def liger_on_the_instance(folder: Path, run: Run) -> dict[str, Any]:
    """Whose forward each module of a model has that verl built with use_liger, with `run["skip"]` skipped."""
    os.environ["NPU_BACKEND_SKIP"] = run["skip"]
    try:
        engine = verl_engine.make_engine(verl_engine.tiny_model(folder, run), run)
    finally:
        del os.environ["NPU_BACKEND_SKIP"]
    forwards = (getattr(m.forward, "__func__", m.forward) for m in engine.module.modules())
    of_liger = (f.__qualname__ for f in forwards if f.__module__.startswith("liger_kernel"))
    rotary = sys.modules["transformers.models.qwen3.modeling_qwen3"].apply_rotary_pos_emb
    return {"forwards": Counter(of_liger), "rotary": rotary.__module__.partition(".")[0]}


def an_old_liger(folder: Path, run: Run) -> dict[str, Any]:
    """Train where Liger is installed, but lacks what verl's head imports from it."""
    import liger_kernel.ops

    name = "LigerFusedLinearScaledCrossEntropyFunction"
    function = getattr(liger_kernel.ops, name)
    delattr(liger_kernel.ops, name)
    try:
        return verl_engine.train(folder, run)
    finally:
        setattr(liger_kernel.ops, name, function)


def other_outputs(folder: Path, run: Run) -> dict[str, str]:
    """What verl says when it asks the fused head for what only logits can give."""
    engine = verl_engine.make_engine(verl_engine.tiny_model(folder, run), run)
    found = {}
    for wanted in ("calculate_sum_pi_squared", "distillation_use_topk"):
        try:
            verl_engine.log_probs(engine, verl_engine.global_batch(), run, **{wanted: True})
            found[wanted] = ""
        except Exception as error:
            found[wanted] = f"{type(error).__name__}: {error}"
    return found


def a_fallback(folder: Path, run: Run) -> dict[str, Any]:
    """Train with one layer whose activation our operator does not compute."""
    import torch

    build = verl_engine.make_engine

    def with_relu(*args: Any) -> Any:
        engine = build(*args)
        mlp = next(m for m in engine.module.modules() if type(m).__name__ == "Qwen3MLP")
        mlp.act_fn = torch.nn.ReLU()
        return engine

    verl_engine.make_engine = with_relu
    try:
        return verl_engine.train(folder, run)
    finally:
        verl_engine.make_engine = build
