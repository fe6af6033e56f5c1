"""accelerate and peft train on the virtual NPU (arithmetic by the CPU) as on the CPU.

accelerate's wheel carries programs by which its authors test a machine: they run here unmodified. Its basic example
needs a data set from the network, so the same flow is written here, as is the one of peft's quick start.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from references import assert_close_to
from torch import Tensor, nn
from torch.utils.data import DataLoader

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")
Results = dict[str, Tensor]
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


# ---- accelerate's own programs ----


# test_ops: gather, broadcast, pad, reduce; test_sync: accumulation of gradients; test_merge_weights: FSDP checkpoints
SLOW = [
    ("test_script", 1),
    ("test_ops", 1),
    ("test_ops", 2),
    ("test_sync", 1),
    ("test_sync", 2),
    ("test_merge_weights", 2),
]
TOO_SLOW_FOR_EVERY_RUN = [pytest.mark.slow, pytest.mark.timeout(600)]


SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"
# Their data are drawn anew in each run, and a gradient that comes out next to zero misses their relative tolerance.
SEEDED = """
import runpy, numpy
draw = numpy.random.default_rng
numpy.random.default_rng = lambda seed=None: draw(0 if seed is None else seed)
runpy.run_path({program!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "processes"),
    [("test_script", 2), *(pytest.param(*case, marks=TOO_SLOW_FOR_EVERY_RUN) for case in SLOW)],
)
def test_a_program_of_accelerate(script: str, processes: int, tmp_path: Path) -> None:
    program = tmp_path / "seeded.py"
    program.write_text(SEEDED.format(program=str(SCRIPTS / f"{script}.py")))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    options = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *options, *(["--multi_gpu"] if processes > 1 else []), str(program)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    if script == "test_script":  # says what it found
        assert "Device: npu" in done.stdout
        assert f"Num processes: {processes}" in done.stdout


# ---- the flow of its basic example ----


def flat(parameters: Iterable[Tensor]) -> Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in parameters])


def classifier() -> nn.Module:
    """A small BERT for two classes, without dropout."""
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16}
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TINY, **options))


def sentences(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Padded token ids; the label says whether an id of the upper half comes first."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 97, (count, 9), generator=generator)
    lengths = torch.randint(3, 10, (count, 1), generator=generator)
    mask = (torch.arange(9) < lengths).long()
    return [
        {"input_ids": row * keep, "attention_mask": keep, "labels": (row[0] > 48).long()}
        for row, keep in zip(ids, mask)
    ]


def accelerated(model: nn.Module, cpu: bool, mixed_precision: str) -> Results:
    """Two epochs of training, each with its evaluation: losses, the logits of the evaluation, trained parameters."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=cpu, mixed_precision=mixed_precision)
    assert accelerator.device.type == ("cpu" if cpu else "npu")
    accelerate.utils.set_seed(1)
    train, evaluation = DataLoader(sentences(16, 0), 4, shuffle=True), DataLoader(sentences(6, 1), 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 2, 8)
    model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)
    losses, logits = [], []
    for _ in range(2):
        model.train()
        for batch in train:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        model.eval()
        for batch in evaluation:
            with torch.no_grad():
                outputs = model(**batch)
            logits.append(accelerator.gather_for_metrics(outputs.logits).cpu())
    trained = flat(accelerator.unwrap_model(model).parameters())
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return {"losses": torch.stack(losses), "logits": torch.cat(logits), "trained parameters": trained}


def cross_entropy_of_devices(logits: Tensor, labels: Tensor, **others: Any) -> Tensor:
    """As autocast of CUDA and torch_npu has it: the log-softmax in the logits' dtype. The CPU's casts the logits."""
    with torch.autocast("cpu", enabled=False):
        return nn.functional.nll_loss(logits.log_softmax(-1).float(), labels)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_the_flow_of_accelerates_basic_example(mixed_precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got = accelerated(classifier(), cpu=False, mixed_precision=mixed_precision)
    exact = accelerated(classifier().double(), cpu=True, mixed_precision="no")
    if mixed_precision == "bf16":
        monkeypatch.setattr(nn.functional, "cross_entropy", cross_entropy_of_devices)
    eager = accelerated(classifier(), cpu=True, mixed_precision=mixed_precision)
    assert got["logits"].shape == (12, 2)
    assert got["losses"][-1] != got["losses"][0]
    for name, value in got.items():
        assert_close_to(value, exact[name], eager[name], what=name)


# ---- peft ----


def adapted(options: dict[str, Any], cpu: bool, dtype: torch.dtype, folder: Path) -> Results:
    """As in peft's quick start: wrap, train with transformers' Trainer, save, load, merge."""
    import peft

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    base = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TINY))
    start = {name: value.clone() for name, value in base.state_dict().items()}
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", **options)
    model = peft.get_peft_model(base, config).to(dtype)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "run"), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2,
        adam_epsilon=1e-5, use_cpu=cpu, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0,
    )  # fmt: skip
    ids = torch.randint(1, 97, (8, 11), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.train()
    assert next(model.parameters()).device.type == ("cpu" if cpu else "npu")
    model.save_pretrained(str(folder / "adapter"))
    fresh = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TINY))
    fresh.load_state_dict(start)
    loaded = peft.PeftModel.from_pretrained(fresh.to("cpu" if cpu else "npu", dtype), str(folder / "adapter"))
    merged = loaded.to(dtype).merge_and_unload()
    logits = merged(ids.to(merged.device)).logits.detach().cpu()
    trained = flat(p for p in model.parameters() if p.requires_grad)
    losses = torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return {"losses": losses, "logits of the merged model": logits, "trained adapters": trained}


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("options", [{"lora_dropout": 0.0}, {"use_dora": True}], ids=["LoRA", "DoRA"])
def test_the_flow_of_pefts_quick_start(options: dict[str, Any], tmp_path: Path) -> None:
    got = adapted(options, False, torch.float32, tmp_path / "npu")
    eager = adapted(options, True, torch.float32, tmp_path / "cpu")
    exact = adapted(options, True, torch.float64, tmp_path / "exact")
    assert got["losses"][-1] < got["losses"][0]
    for name, value in got.items():
        assert_close_to(value, exact[name], eager[name], what=name)
