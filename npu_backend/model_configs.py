"""Configurations of transformers' models, without torch: of a model type, a config.json's content, a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npu_backend import families
from npu_backend.errors import ConfigError, did_you_mean


def default_config(model_type: str, **settings: Any) -> Any:
    """The configuration that transformers gives a model type by default, with these settings.

    Raises:
        ConfigError: as `config_of`.
    """
    return config_of({"model_type": model_type, **settings})


def config_of(content: Any) -> Any:
    """The configuration object that transformers makes of what a config.json holds.

    Raises:
        ConfigError: this is no mapping with a model type, this release of transformers does not know the type, or it
            refuses another value.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    name = content.get("model_type") if isinstance(content, Mapping) else None
    if not isinstance(name, str):
        raise ConfigError(
            f"a model's configuration is a mapping with a model_type such as 'qwen3', not {content!r:.80}"
        )
    if name not in CONFIG_MAPPING:
        raise ConfigError(
            f"model type {name!r} is unknown to this release of transformers; known to npu-backend: "
            f"{', '.join(families.FAMILIES)}{did_you_mean(name, CONFIG_MAPPING)}"
        )
    try:
        return AutoConfig.for_model(**content)
    except Exception as error:  # errors of many kinds; their text names the key
        raise ConfigError(f"transformers refuses this configuration of {name}: {one_line(error)}") from error


def checkpoint_config(folder: str | os.PathLike[str]) -> Any:
    """The configuration in a checkpoint's folder; nothing is downloaded.

    Raises:
        ConfigError: there is no config.json, or transformers refuses it.
    """
    from transformers import AutoConfig

    if not os.path.isfile(Path(folder) / "config.json"):  # False for a name too long, where Path.is_file raises
        raise ConfigError(f"{str(folder)!r} is no checkpoint's folder: it has no config.json")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # errors of many kinds
        raise ConfigError(f"transformers refuses {Path(folder) / 'config.json'}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """An error of transformers, which can be a page, as a part of ours."""
    return " ".join(f"{type(error).__name__}: {error}".split())
