"""What several commands share: naming a model, and printing a report as text or JSON."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from npu_backend import families
from npu_backend.errors import ConfigError


class Report(Protocol):
    """A report of `npu_backend.report`."""

    def to_dict(self) -> dict[str, Any]: ...


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say which model and which patch set, and --json."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model-type", metavar="NAME", help="a model type of transformers, for example qwen3")
    which.add_argument(
        "--config",
        metavar="FILE",
        help="YAML or JSON: verl's configuration, its model part, or a model's config.json",
    )
    parser.add_argument("--use-liger", action="store_true", help="the patch set of Liger-Kernel instead of ours")
    add_json_argument(parser)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def model_config(args: argparse.Namespace) -> dict[str, Any]:
    """The model_config that the options describe.

    Raises:
        ConfigError: the file cannot be read or means nothing, or nobody knows this model type.
    """
    config: dict[str, Any] = {}
    if args.config is not None:
        config = _from_file(Path(args.config))
    elif args.model_type is not None:
        config = {"hf_config": _hf_config({"model_type": args.model_type}, "--model-type")}
    if args.use_liger:
        config["use_liger"] = True
    return config


def emit(report: Report, *, as_json: bool) -> None:
    """Print a report on stdout."""
    print(json.dumps(report.to_dict(), indent=2) if as_json else report)


def check_output(option: str, file: Path) -> None:
    """Find out before long work whether a file can be written.

    Raises:
        ConfigError: it cannot.
    """
    try:
        known = file.stat()
    except FileNotFoundError:
        known = None
    except (OSError, ValueError) as error:  # a name too long, a file taken for a folder, a null byte
        raise ConfigError(f"{option} {file}: no file can be written there: {error}") from error
    if file.is_dir() or not os.access(file if known else file.parent, os.W_OK):
        raise ConfigError(f"{option} {file}: no file can be written there; name one in a folder that exists")


def check_picture(option: str, file: Path) -> None:
    """The same for a picture. Whether there is matplotlib to draw it is for others to say.

    Raises:
        ConfigError: it cannot be written, or matplotlib has no format of that suffix.
    """
    check_output(option, file)
    if file.suffix and importlib.util.find_spec("matplotlib") is not None:
        from matplotlib.backend_bases import FigureCanvasBase

        formats = sorted(FigureCanvasBase.get_supported_filetypes())
        if file.suffix[1:].lower() not in formats:
            raise ConfigError(f"{option} {file}: matplotlib writes no {file.suffix}; known: {', '.join(formats)}")


def _from_file(path: Path) -> dict[str, Any]:
    where = f"--config {path}"
    content = read_file(path, "--config")
    if "model_type" in content:  # a model's config.json
        return {"hf_config": _hf_config(content, where)}
    part = content.get("actor_rollout_ref", content)  # verl's whole configuration
    model = part.get("model", part) if isinstance(part, Mapping) else part
    if not isinstance(model, Mapping):
        raise ConfigError(f"{where}: actor_rollout_ref.model must be a mapping, got {type(model).__name__}")
    config = dict(model)
    given, folder = config.get("hf_config"), config.get("path")
    if given is not None:
        config["hf_config"] = _hf_config(given, f"{where}: hf_config")
    elif folder:
        file = Path(os.path.expanduser(str(folder))) / "config.json"
        config["hf_config"] = _hf_config(read_file(file, f"{where}: path"), str(file))
    return config


def read_file(path: Path, where: str) -> Mapping[str, Any]:
    """The mapping that a YAML or JSON file holds.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML too
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: not UTF-8, or a date that does not exist
        why = getattr(error, "strerror", None) or error  # an OSError's text would name the file once more
        raise ConfigError(f"{where}: {path} cannot be read: {why}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where}: {path} must hold a mapping, got {type(content).__name__}")
    return content


def _hf_config(content: Any, where: str) -> Any:
    """A configuration object; only its model type where this transformers lacks a family that we know."""
    from transformers import CONFIG_MAPPING

    from npu_backend.model_configs import config_of

    name = content.get("model_type") if isinstance(content, Mapping) else None
    if isinstance(name, str) and name in families.FAMILIES and name not in CONFIG_MAPPING:
        return {"model_type": name}
    try:
        return config_of(content)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
