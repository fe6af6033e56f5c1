"""Configuration: `model_config` and the environment, parsed strictly. The only place that reads either."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from npu_backend import families
from npu_backend.errors import ConfigError

IMPL_BACKENDS = ("torch", "triton", "liger", "auto")
DEVICE_TYPES = ("npu", "cuda", "cpu")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class BackendConfig:
    """What a `model_config` says. `model_types` is empty when it names no model: then every family is meant."""

    use_liger: bool = False
    use_fused_kernels: bool = False
    impl_backend: str = "torch"
    impl_backend_given: bool = False
    model_types: tuple[str, ...] = ()
    hf_config: Any = None

    def __str__(self) -> str:
        model = ", ".join(self.model_types) or "every family"
        return f"use_liger={self.use_liger}, model_type={model}"


@dataclass(frozen=True)
class Environment:
    """The NPU_BACKEND_* variables."""

    disable: bool = False
    strict: bool = False
    skip: tuple[str, ...] = ()
    device: str | None = None
    virtual_npu: int = 0
    logits_cache_gib: float | str | None = None
    batch_invariant: bool = False
    log: str | None = None


def read_config(model_config: Any = None) -> BackendConfig:
    """Read the keys that concern us from `None`, a mapping, an OmegaConf node, verl's frozen config, or an object.

    Raises:
        ConfigError: a boolean that is neither true nor false, `fused_kernel_options` that is not a mapping, or an
            `impl_backend` that does not exist.
    """
    if isinstance(model_config, (str, bytes, int, float, list, tuple, set)):
        raise ConfigError(f"model_config must be None, a mapping or an object with attributes, got {model_config!r}")
    bare = not hasattr(type(model_config), "get")  # verl's own configuration has a model_type of another meaning
    if bare and _get(model_config, "hf_config") is None and isinstance(_get(model_config, "model_type"), str):
        raise ConfigError("model_config is a Hugging Face configuration itself; pass {'hf_config': config}")
    options = _get(model_config, "fused_kernel_options")
    if options is not None and not _is_mapping(options):
        raise ConfigError(
            f"model_config.fused_kernel_options must be a mapping such as {{'impl_backend': 'torch'}}, "
            f"got {type(options).__name__} {options!r}"
        )
    named = _get(options, "impl_backend")
    hf_config = _get(model_config, "hf_config")
    model_types = model_types_of(hf_config)
    if hf_config is not None and not model_types:
        raise ConfigError(f"model_config.hf_config has no model_type, so no patch can be chosen; got {hf_config!r}")
    return BackendConfig(
        use_liger=parse_bool(_get(model_config, "use_liger"), "model_config.use_liger"),
        use_fused_kernels=parse_bool(_get(model_config, "use_fused_kernels"), "model_config.use_fused_kernels"),
        impl_backend="torch" if named is None else parse_backend(named),
        impl_backend_given=named is not None,
        model_types=model_types,
        hf_config=hf_config,
    )


def parse_bool(value: Any, where: str) -> bool:
    """A strict boolean: true, false or their string forms; `None` is False. Anything else is a ConfigError."""
    text = "false" if value is None else str(value).strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{where} must be true or false, got {value!r}")
    return text == "true"


def _parse_flag(text: str, where: str) -> bool:
    """A boolean environment variable, which people also write as 1 or 0."""
    return parse_bool({"1": "true", "0": "false"}.get(text, text), where)


def parse_backend(value: Any) -> str:
    """The name of an implementation of the PPO head, checked."""
    if value not in IMPL_BACKENDS:
        raise ConfigError(f"fused_kernel_options.impl_backend={value!r} is not one of {', '.join(IMPL_BACKENDS)}")
    return str(value)


def model_types_of(hf_config: Any) -> tuple[str, ...]:
    """The model types that a Hugging Face configuration contains, its own first, then those of its sub-configs."""
    found: dict[str, None] = {}  # a dict keeps the order
    pending, seen = [hf_config], set()
    while pending:
        config = pending.pop(0)
        model_type = _get(config, "model_type")
        if id(config) in seen or not isinstance(model_type, str):
            continue
        seen.add(id(config))
        if model_type:
            found[model_type] = None
        pending.extend(config.values() if isinstance(config, Mapping) else getattr(config, "__dict__", {}).values())
    return tuple(found)


def read_environment() -> Environment:
    """Read and check every NPU_BACKEND_* variable.

    Raises:
        ConfigError: an unknown variable, or a value that means nothing; it lists what is known.
    """
    unknown = sorted(k for k in os.environ if k.startswith("NPU_BACKEND_") and k not in _VARIABLES)
    if unknown:
        raise ConfigError(f"unknown environment variable {unknown[0]}; known: {', '.join(_VARIABLES)}")
    return _parse_environment(tuple(os.environ.get(name, "").strip() for name in _VARIABLES))


@functools.lru_cache(maxsize=8)
def _parse_environment(texts: tuple[str, ...]) -> Environment:
    given = {name: text for name, text in zip(_VARIABLES, texts, strict=True) if text}
    return Environment(**{_VARIABLES[name][0]: _VARIABLES[name][1](text, name) for name, text in given.items()})


def _parse_skip(text: str, where: str) -> tuple[str, ...]:
    names = tuple(_canonical(part.strip()) for part in text.split(",") if part.strip())
    for name in names:
        family, _, operator = name.partition(".")
        known = (
            (family in families.FAMILIES and operator in families.OPERATORS)
            if operator
            else (name in families.OPERATORS or name in families.FAMILIES)
        )
        if not known:
            raise ConfigError(
                f"{where} names {name!r}, which is neither an operator ({', '.join(families.OPERATORS)}), nor a family "
                f"({', '.join(families.FAMILIES)}), nor one operator of a family (qwen3.rms_norm)"
            )
    return names


def _canonical(name: str) -> str:
    """The name with `rope` and the like replaced by the operator's own."""
    family, dot, operator = name.rpartition(".")
    return f"{family}{dot}{families.ALIASES.get(operator, operator)}"


def _parse_choice(choices: tuple[str, ...], fold: Callable[[str], str]) -> Callable[[str, str], str]:
    def parse(text: str, where: str) -> str:
        if fold(text) not in choices:
            raise ConfigError(f"{where}={text!r} is not one of {', '.join(choices)}")
        return fold(text)

    return parse


def _parse_devices(text: str, where: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise ConfigError(f"{where}={text!r} must be a number of virtual devices from 1 to 64")
    return int(text)


def _parse_gib(text: str, where: str) -> float | str:
    if text.lower() == "auto":
        return "auto"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"{where}={text!r} must be auto, or a number of GiB, 0 or more")
    return value


_VARIABLES: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "NPU_BACKEND_DISABLE": ("disable", _parse_flag),
    "NPU_BACKEND_STRICT": ("strict", _parse_flag),
    "NPU_BACKEND_SKIP": ("skip", _parse_skip),
    "NPU_BACKEND_DEVICE": ("device", _parse_choice(DEVICE_TYPES, str.lower)),
    "NPU_BACKEND_VIRTUAL_NPU": ("virtual_npu", _parse_devices),
    "NPU_BACKEND_LOGITS_CACHE_GIB": ("logits_cache_gib", _parse_gib),
    "NPU_BACKEND_BATCH_INVARIANT": ("batch_invariant", _parse_flag),
    "NPU_BACKEND_LOG": ("log", _parse_choice(LOG_LEVELS, str.upper)),
}


def _get(source: Any, key: str) -> Any:
    """One key of a mapping, of anything with a `.get` (verl's frozen config, OmegaConf), or an attribute."""
    if source is None:
        return None
    if isinstance(source, Mapping):
        return source.get(key)
    if hasattr(type(source), "get"):
        return source.get(key, None)
    return getattr(source, key, None)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) or (hasattr(type(value), "get") and hasattr(type(value), "keys"))
