"""verl's plugin: puts the patch manager and the PPO head into verl's FSDP engine, without a change to verl.

verl >= 0.9.0 loads this module at the end of `import verl` (entry point group `verl.plugins`); older releases do with
VERL_USE_EXTERNAL_MODULES=npu_backend.verl_plugin. Loading it only registers what shall happen once verl itself imports
the modules concerned: importing them here would cost seconds in every process and settle verl's platform too early.

verl logs a plugin's failure at DEBUG only, so this module never raises at import and speaks for itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from npu_backend import config, families, log
from npu_backend.errors import HeadInputError, NPUBackendError
from npu_backend.post_import import when_imported

_hooked: list[str] = []
_missing: list[str] = []
_announced = False


def _replace(module: ModuleType, name: str, build: Callable[[Any], Any]) -> None:
    """Rebind `module.name` or `module.Class.name` to `build(original)`, or note that this verl has no such thing."""
    where = f"{module.__name__}.{name}"
    class_name, _, attribute = name.rpartition(".")
    owner = vars(module).get(class_name) if class_name else module
    original = getattr(owner, attribute, None)
    if original is None:
        _note_missing(where)
        return
    setattr(owner, attribute, build(original))
    _hooked.append(where)
    log.logger.debug("npu-backend: hooked %s", where)


def _note_missing(where: str) -> None:
    _missing.append(where)
    log.warn_rank0(f"npu-backend: this verl has no {where}; it stays as it is")


def _engine_setup(original: Callable[..., None]) -> Callable[..., None]:
    """`apply_npu_fsdp_patches`, called when an FSDP engine is built; a bad configuration stops the run here."""

    @functools.wraps(original)
    def apply_npu_fsdp_patches(model_config: Any = None) -> None:
        from npu_backend import manager

        _announce()
        manager.apply_npu_fsdp_patches(model_config)

    return apply_npu_fsdp_patches


def _fused_linear(original: type) -> type:
    """`FusedLinearForPPO`, which verl's own model adapters construct on every forward."""
    from npu_backend.head.modules import FusedLinearForPPO

    return FusedLinearForPPO


def _forward_with_backends(original: Callable[..., None]) -> Callable[..., None]:
    """`patch_forward_with_backends`: one adapter for every model, an error for one that it cannot serve."""

    @functools.wraps(original)
    def patch_forward_with_backends(
        model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
    ) -> None:
        from npu_backend.head import adapter

        adapter.patch_forward_with_backends(model, use_fused_kernels, fused_kernels_backend)

    return patch_forward_with_backends


def _linear_cross_entropy(original: Callable[..., Any]) -> Callable[..., Any]:
    """verl's Triton head, which its FSDP and Megatron engines call; Megatron's with a tensor-parallel group."""

    @functools.wraps(original)
    def linear_cross_entropy(*args: Any, **kwargs: Any) -> Any:
        from npu_backend.head import linear_log_prob

        return linear_log_prob.linear_cross_entropy(*args, **kwargs)

    return linear_cross_entropy


def _train_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """An engine's update: its metrics say how many inputs our operators and the head handed back in it."""

    @functools.wraps(original)
    def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        from npu_backend.operators import counters

        before = counters.totals()
        output = original(self, *args, **kwargs)
        now = counters.totals()
        if "metrics" in output:  # the same names on every rank: verl gathers them over the ranks
            output["metrics"] |= {f"npu_backend/fallbacks/{op}": now[op] - before[op] for op in families.OPERATORS}
        return output

    return train_batch


def _model_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """What an engine takes from the model's output. Other outputs than log-probs and entropy need the logits: verl
    itself refuses `calculate_sum_pi_squared` with the fused head by name, and forgets this one.
    """

    @functools.wraps(original)
    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: Any, *rest: Any, **more: Any
    ) -> Any:
        found = original(self, output, output_args, micro_batch, *rest, **more)
        asked = [micro_batch.get(name, False) for name in ("use_fused_kernels", "distillation_use_topk")]
        if all(getattr(flag, "data", flag) for flag in asked) and "distillation_losses" not in found:
            raise HeadInputError(
                "distillation over the top k logits (distillation_use_topk) is not supported with "
                "use_fused_kernels=True: the fused head keeps no logits. Set use_fused_kernels=False"
            )
        return found

    return prepare_model_outputs


_HOOKS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "verl.workers.engine.fsdp.utils": {"apply_npu_fsdp_patches": _engine_setup},
    "verl.utils.experimental.torch_functional": {"FusedLinearForPPO": _fused_linear},
    "verl.models.transformers.monkey_patch": {"patch_forward_with_backends": _forward_with_backends},
    "verl.utils.kernel.linear_cross_entropy": {"linear_cross_entropy": _linear_cross_entropy},
    "verl.workers.engine.base": {"BaseEngine.train_batch": _train_batch},
    "verl.workers.engine.fsdp.transformer_impl": {"FSDPEngineWithLMHead.prepare_model_outputs": _model_outputs},
}


def _announce() -> None:
    """One line on rank 0, when the first engine is built: by then it is known what could be hooked."""
    global _announced
    if not _announced:
        _announced = True
        log.show(config.read_environment().log)
        every = [f"{module}.{name}" for module, names in _HOOKS.items() for name in names]
        waiting = [name for name in every if name not in _hooked and not name.startswith(tuple(_missing))]
        parts = {"hooked": _hooked, "on import": waiting, "absent from this verl": _missing}
        log.info_rank0("npu-backend in verl: " + "; ".join(f"{k} {', '.join(v)}" for k, v in parts.items() if v))


def _on_import(module: ModuleType, names: dict[str, Callable[[Any], Any]]) -> None:
    for name, build in names.items():
        try:
            _replace(module, name, build)
        except Exception as error:  # verl's own import must go on
            log.logger.warning("npu-backend: %s.%s could not be hooked: %s", module.__name__, name, error)


def _load() -> None:
    try:
        environment = config.read_environment()
        log.show(environment.log)
        disabled = environment.disable
    except NPUBackendError as error:  # said now, raised by the first call that needs the configuration
        log.logger.warning("npu-backend: %s", error)
        disabled = False
    if disabled:
        log.warn_once("verl_plugin.disabled", "npu-backend: NPU_BACKEND_DISABLE=1, verl stays as it is")
        return
    for name, names in _HOOKS.items():
        if _has_module(name):
            when_imported(name, functools.partial(_on_import, names=names))
        else:
            _note_missing(name)
    log.info_rank0("npu-backend: the plugin is loaded into verl; it hooks each part when verl imports that")


def _has_module(name: str) -> bool:
    """Whether the verl that is being imported has this module, by its files: nothing is imported for the answer."""
    package, *path = name.split(".")
    roots = getattr(sys.modules.get(package), "__path__", None)
    if roots is None:  # this module was imported by itself, before verl
        return True
    places = [Path(root, *path) for root in roots]
    return any(place.with_suffix(".py").exists() or (place / "__init__.py").exists() for place in places)


_load()
