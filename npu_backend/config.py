"""Configuration: `model_config` and the environment, parsed strictly. The only place that reads either."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from npu_backend import families
from npu_backend.errors import ConfigError, did_you_mean

IMPL_BACKENDS = ("torch", "triton", "liger", "auto")
DEVICE_TYPES = ("npu", "cuda", "cpu")
_KEYS = ("use_liger", "use_fused_kernels", "fused_kernel_options", "hf_config")
_NOT_MEANT = ("tf_config",)  # verl's Megatron configuration is but a letter away from hf_config
_PREFIX = "NPU_BACKEND_"
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


def cache_folder() -> Path:
    """For what this package builds and measures: `$XDG_CACHE_HOME/npu-backend`, else `~/.cache/npu-backend`.

    Raises:
        ConfigError: neither is known, as in a container for a user whom it does not list.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache.startswith("~"):
        raise ConfigError("no folder for caches: this user has no home directory; set XDG_CACHE_HOME, or HOME")
    return Path(cache) / "npu-backend"


def read_config(model_config: Any = None) -> BackendConfig:
    """Read the keys that concern us from `None`, a mapping, an OmegaConf node, verl's frozen config, or an object.

    Raises:
        ConfigError: a boolean that is neither true nor false, `fused_kernel_options` that is not a mapping, an
            `impl_backend` that does not exist, a key that is nearly one of ours or cannot be read, or a setting of the
            head among `fused_kernel_options` that only an environment variable has.
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
    _check_keys(model_config, _KEYS, "model_config")
    _check_keys(options, ("impl_backend",), "model_config.fused_kernel_options")
    for name, variable in VARIABLES.items():
        if _get(options, variable.field) is not None:
            raise ConfigError(
                f"model_config.fused_kernel_options.{variable.field} is not read; set the environment variable {name}"
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


def _check_keys(source: Any, ours: tuple[str, ...], where: str) -> None:
    """Refuse what is nearly one of our keys: it would pass for somebody else's and change nothing, silently."""
    foreign = [key for key in source if key not in ours + _NOT_MEANT] if _is_mapping(source) else []
    for key in foreign:
        hint = did_you_mean(key, ours, cutoff=0.88)  # use_lgier is 0.89 like use_liger; spmd_backend 0.75 like ours
        if hint:
            raise ConfigError(f"{where} has a key {key!r} that means nothing{hint}")


def parse_bool(value: Any, where: str) -> bool:
    """A strict boolean: true, false or their string forms; `None` is False. Anything else is a ConfigError."""
    text = "false" if value is None else str(value).strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{where} must be true or false, got {value!r}")
    return text == "true"


def _parse_flag(text: str, where: str) -> bool:
    """A boolean environment variable, which people also write as 1 or 0."""
    if text.lower() not in ("1", "0", "true", "false"):
        raise ConfigError(f"{where} must be 1 or 0 (also true or false), got {text!r}")
    return text.lower() in ("1", "true")


def parse_backend(value: Any) -> str:
    """The name of an implementation of the PPO head, checked."""
    if value not in IMPL_BACKENDS:
        raise ConfigError(
            f"fused_kernel_options.impl_backend={value!r} is not one of {', '.join(IMPL_BACKENDS)}"
            f"{did_you_mean(value, IMPL_BACKENDS)}"
        )
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
        fields = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
        pending.extend(_get(fields, name) for name in fields)  # not values(): OmegaConf's fails where one is missing
    return tuple(found)


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read and check every NPU_BACKEND_* variable, of this process unless others are given.

    Raises:
        ConfigError: an unknown variable, or a value that means nothing; it lists what is known.
    """
    environ = os.environ if environ is None else environ
    unknown = sorted(k for k in environ if k.startswith(_PREFIX) and k not in VARIABLES)
    if unknown:
        names = [name.removeprefix(_PREFIX) for name in VARIABLES]  # with the prefix they are all alike
        hint = did_you_mean(unknown[0].removeprefix(_PREFIX), names)
        raise ConfigError(f"unknown environment variable {unknown[0]}; known: {', '.join(VARIABLES)}{hint}")
    return _parse_environment(tuple(environ.get(name, "").strip() for name in VARIABLES))


@functools.lru_cache(maxsize=8)
def _parse_environment(texts: tuple[str, ...]) -> Environment:
    given = {name: text for name, text in zip(VARIABLES, texts, strict=True) if text}
    return Environment(**{VARIABLES[name].field: VARIABLES[name].parse(text, name) for name, text in given.items()})


def _parse_skip(text: str, where: str) -> tuple[str, ...]:
    names = tuple(_canonical(part.strip()) for part in text.split(",") if part.strip())
    for name in names:
        family, _, operator = name.partition(".")
        known = (
            (families.is_family(family) and operator in families.OPERATORS)
            if operator
            else (name in families.OPERATORS or families.is_family(name))
        )
        if not known:
            dotted = (f"{family}.{operator}" for family in families.FAMILIES for operator in families.OPERATORS)
            hint = did_you_mean(name, [*families.OPERATORS, *families.ALIASES, *families.all_families(), *dotted])
            raise ConfigError(
                f"{where} names {name!r}, which is neither an operator ({', '.join(families.OPERATORS)}), nor a family "
                f"({', '.join(families.FAMILIES)}, or another folder of transformers.models), nor one operator of a "
                f"family (qwen3.rms_norm){hint}"
            )
    return names


def _canonical(name: str) -> str:
    """The name with `rope` and the like replaced by the operator's own."""
    family, dot, operator = name.rpartition(".")
    return f"{family}{dot}{families.ALIASES.get(operator, operator)}"


def _parse_choice(choices: tuple[str, ...], fold: Callable[[str], str]) -> Callable[[str, str], str]:
    def parse(text: str, where: str) -> str:
        if fold(text) not in choices:
            raise ConfigError(f"{where}={text!r} is not one of {', '.join(choices)}{did_you_mean(text, choices)}")
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


class Variable(NamedTuple):
    """An environment variable: which field of `Environment` it sets, how, to which values, and what that means."""

    field: str
    parse: Callable[[str, str], Any]
    values: str
    meaning: str


VARIABLES = {
    "NPU_BACKEND_DISABLE": Variable("disable", _parse_flag, "1, 0", "nothing is patched and verl stays as it is"),
    "NPU_BACKEND_STRICT": Variable(
        "strict",
        _parse_flag,
        "1, 0",
        "every fallback (a backend, an operator's input, a set with nothing for the model) is an error; "
        "NPU_BACKEND_DEVICE=npu makes a missing NPU one",
    ),
    "NPU_BACKEND_SKIP": Variable(
        "skip",
        _parse_skip,
        "rope,qwen3_moe,qwen3.rms_norm",
        "operators, families, or operators of a family to leave alone",
    ),
    "NPU_BACKEND_DEVICE": Variable(
        "device",
        _parse_choice(DEVICE_TYPES, str.lower),
        ", ".join(DEVICE_TYPES),
        "the device to decide for; an error where it is not there. Not set: npu, else cuda, else cpu",
    ),
    "NPU_BACKEND_VIRTUAL_NPU": Variable(
        "virtual_npu", _parse_devices, "1 to 64", "virtual devices; `npu-backend run --virtual-npu` sets it"
    ),
    "NPU_BACKEND_LOGITS_CACHE_GIB": Variable(
        "logits_cache_gib", _parse_gib, "a number, auto", "GiB of logits that the PPO head may keep for backward"
    ),
    "NPU_BACKEND_BATCH_INVARIANT": Variable(
        "batch_invariant", _parse_flag, "1, 0", "backend `torch`: a row's result does not depend on the batch around it"
    ),
    "NPU_BACKEND_LOG": Variable(
        "log", _parse_choice(LOG_LEVELS, str.upper), ", ".join(LOG_LEVELS), "how much is logged"
    ),
}


def _get(source: Any, key: str) -> Any:
    """One key of a mapping, of anything with a `.get` (verl's frozen config, OmegaConf), or an attribute."""
    if source is None:
        return None
    try:
        if isinstance(source, Mapping):
            return source.get(key)
        if hasattr(type(source), "get"):
            return source.get(key, None)
        return getattr(source, key, None)
    except Exception as error:  # a property that fails, an OmegaConf node that interpolates what is not there
        raise ConfigError(
            f"model_config: {key} of a {type(source).__name__} cannot be read: {type(error).__name__}: {error}. Give "
            "it a value, or pass a mapping with the keys that npu-backend reads"
        ) from error


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) or (hasattr(type(value), "get") and hasattr(type(value), "keys"))
