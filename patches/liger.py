"""Patch set `liger`: Liger-Kernel's own patching, planned, recorded and reverted by the engine.

The records say what Liger 0.8.5 rebinds in each family's modeling module, so that a plan can be shown and foreign
patches are noticed before anything runs. `install` then calls Liger's `apply_liger_kernel_to_<family>` with exactly the
options whose targets are planned. Liger's cross entropies stay off: they replace the model's loss and forward, which
belong to the PPO head.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from npu_backend import log
from npu_backend.errors import BackendUnavailableError
from npu_backend.families import families_of
from npu_backend.patches.engine import Patch, PatchSet, Plan, Row

_ROPE = ("apply_rotary_pos_emb",)
_ROPE_AND_VISION = (*_ROPE, "apply_rotary_pos_emb_vision")

# family -> option of Liger's apply function -> what it rebinds in the family's modeling module
REPLACED: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": {"rms_norm": ("LlamaRMSNorm",), "swiglu": ("LlamaMLP",), "rope": _ROPE},
    "mistral": {"rms_norm": ("MistralRMSNorm",), "swiglu": ("MistralMLP",), "rope": _ROPE},
    "gemma2": {"rms_norm": ("Gemma2RMSNorm",), "geglu": ("Gemma2MLP",), "rope": _ROPE},
    "phi3": {"rms_norm": ("Phi3RMSNorm",), "swiglu": ("Phi3MLP",), "rope": _ROPE},
    "qwen2": {"rms_norm": ("Qwen2RMSNorm",), "swiglu": ("Qwen2MLP",), "rope": _ROPE},
    "qwen2_5_vl": {
        "rms_norm": ("Qwen2_5_VLRMSNorm",),
        "swiglu": ("Qwen2MLP",),
        "rope": ("apply_multimodal_rotary_pos_emb",),
    },
    "qwen3": {"rms_norm": ("Qwen3RMSNorm",), "swiglu": ("Qwen3MLP",), "rope": _ROPE},
    "qwen3_moe": {"rms_norm": ("Qwen3MoeRMSNorm",), "swiglu": ("Qwen3MoeExperts",), "rope": _ROPE},
    "qwen3_vl": {"rms_norm": ("Qwen3VLTextRMSNorm",), "rope": _ROPE_AND_VISION},
    "qwen3_vl_moe": {
        "rms_norm": ("Qwen3VLMoeTextRMSNorm",),
        "swiglu": ("Qwen3VLMoeTextExperts",),
        "rope": _ROPE_AND_VISION,
    },
    "qwen3_next": {"rms_norm": ("Qwen3NextRMSNorm",), "swiglu": ("Qwen3NextExperts",)},
    "qwen3_5": {"rms_norm": ("Qwen3_5RMSNorm",), "swiglu": ("Qwen3_5MLP",)},
    "qwen3_5_moe": {"rms_norm": ("Qwen3_5MoeRMSNorm",), "swiglu": ("Qwen3_5MoeExperts",)},
}

_NO_OPTION = "Liger has no option for it in this family"
_GATED_NORM = "Liger has no gated RMSNorm; it stays as transformers has it"
_PARTIAL = "Liger's rope rotates whole heads, this family rotates a part of each; it stays as transformers has it"
_SHARED = "Liger replaces it on live models only (verl's call after the build does), not the class"

# family -> what Liger leaves alone there -> (operator, reason)
LEFT: dict[str, dict[str, tuple[str, str]]] = {
    "qwen2_5_vl": {
        "Qwen2_5_VLMLP": ("gated_mlp", f"the vision tower's MLP: {_NO_OPTION}"),
        "apply_rotary_pos_emb_vision": ("rotary", _NO_OPTION),
    },
    "qwen3_moe": {"Qwen3MoeMLP": ("gated_mlp", f"the MLP of dense layers: {_NO_OPTION}")},
    "qwen3_vl": {"Qwen3VLTextMLP": ("gated_mlp", "Liger takes the option swiglu in this family and ignores it")},
    "qwen3_vl_moe": {"Qwen3VLMoeTextMLP": ("gated_mlp", f"the MLP of dense layers: {_NO_OPTION}")},
    "qwen3_next": {
        "Qwen3NextRMSNormGated": ("rms_norm", _GATED_NORM),
        "Qwen3NextMLP": ("gated_mlp", _SHARED),
        "apply_rotary_pos_emb": ("rotary", _PARTIAL),
    },
    "qwen3_5": {
        "Qwen3_5RMSNormGated": ("rms_norm", _GATED_NORM),
        "apply_rotary_pos_emb": ("rotary", _PARTIAL),
        "apply_rotary_pos_emb_vision": ("rotary", _NO_OPTION),
    },
    "qwen3_5_moe": {
        "Qwen3_5MoeRMSNormGated": ("rms_norm", _GATED_NORM),
        "Qwen3_5MoeMLP": ("gated_mlp", _SHARED),
        "apply_rotary_pos_emb": ("rotary", _PARTIAL),
        "apply_rotary_pos_emb_vision": ("rotary", _NO_OPTION),
    },
}

_MONKEY_PATCH = "liger_kernel.transformers.monkey_patch"
# Liger's autograd functions behind the patches above, which its Ascend backend replaces all together
_ASCEND_FUNCTIONS = (
    "LigerRMSNormFunction",
    "LigerSiLUMulFunction",
    "LigerGELUMulFunction",
    "LigerFusedMoEFunction",
    "LigerRopeFunction",
    "LigerQwen2VLMRopeFunction",
)
TRITON_ASCEND = "3.2.2"
TRITON_ASCEND_INDEX = "https://triton-ascend.osinfra.cn/pypi/simple/"  # PyPI has nothing after 3.2.0
_ALWAYS_OFF = ("cross_entropy", "fused_linear_cross_entropy")
_WHY = {
    "rms_norm": "one kernel for the norm instead of a chain of elementwise ones",
    "gated_mlp": "activation and product in one kernel, recomputed in backward instead of stored",
    "rotary": "one kernel for queries and keys",
    "sparse_moe": "routed experts as grouped matmuls instead of a loop over experts",
}


def install(plan: Plan) -> list[Row]:
    """Run Liger's patching for the planned targets; return the rows for what it was not asked, or not able, to do."""
    monkey_patch = importlib.import_module(_MONKEY_PATCH)
    wanted = {row.target for row in plan.rows if row.state in ("planned", "applied")}
    new = {row.model_type for row in plan.rows if row.state == "planned"}
    rows: list[Row] = []
    turned_off: dict[str, tuple[str, ...]] = {}
    for family in plan.families:
        options = {
            option: any(_target(family, name) in wanted for name in names)
            for option, names in {"rope": (), "rms_norm": (), "swiglu": (), **REPLACED.get(family, {})}.items()
        } | dict.fromkeys(_ALWAYS_OFF, False)
        turned_off[family] = tuple(option for option, on in options.items() if not on)
        if family in new:
            function = getattr(monkey_patch, f"apply_liger_kernel_to_{family}")
            known = inspect.signature(function).parameters
            function(**{option: on for option, on in options.items() if option in known})
            rows += _rows_beside(family, [option for option in options if option not in known], plan.context)
    _keep_off(monkey_patch, turned_off)
    if plan.context.config.use_fused_kernels:
        log.info_rank0(
            "npu-backend: use_liger together with use_fused_kernels: the PPO head computes the log-probs, and Liger's "
            "fused linear cross entropy is not installed"
        )
    return rows


def check_ascend_operators() -> None:
    """Make sure that Liger's operators are its Ascend kernels. Liger keeps its CUDA kernels, silently, when its Ascend
    backend cannot be imported, as with the triton-ascend 3.2.0 of PyPI.

    Raises:
        BackendUnavailableError: they are not; with the cause and the repair.
    """
    operators = importlib.import_module("liger_kernel.ops")
    functions = {name: getattr(operators, name, None) for name in _ASCEND_FUNCTIONS}
    foreign = [name for name, function in functions.items() if "._ascend." not in getattr(function, "__module__", "")]
    if not foreign:  # rope is chosen a second time, by a dispatcher at every call
        rope = importlib.import_module("liger_kernel.backends").resolve_impl("rope").impl_name
        foreign = [] if rope.startswith("ascend") else [f"rope ({rope})"]
    if not foreign:
        return
    try:
        importlib.import_module("liger_kernel.ops.backends._ascend.ops")
        cause = "its Ascend backend can be imported, but was not selected (LIGER_KERNEL_IMPL, or CUDA is visible too?)"
    except Exception as error:  # whatever the vendor's packages raise
        cause = f"its Ascend backend cannot be imported: {type(error).__name__}: {error}"
    found = ", ".join(f"{name} {_version(name)}" for name in ("liger-kernel", "triton-ascend", "triton"))
    raise BackendUnavailableError(
        f"use_liger on an NPU: {', '.join(foreign)} of liger_kernel.ops are Liger's CUDA kernels; {cause}. "
        f"Installed: {found}. {_triton_for_npu()}; or set use_liger=False"
    )


def _triton_for_npu() -> str:
    """The repair of a host whose triton is not the one that Liger's Ascend kernels need."""
    over = (
        "" if _version("triton") == "none" else "upstream triton lies over it: `pip uninstall -y triton` first, then "
    )
    return (
        "On an NPU Liger 0.8.5 needs triton-ascend from Ascend's own package index (PyPI's is older): "
        f"{over}`pip install --no-deps --force-reinstall triton-ascend=={TRITON_ASCEND} "
        f"--extra-index-url {TRITON_ASCEND_INDEX}`"
    )


class _KeepOff:
    """In place of Liger's `_apply_liger_kernel_to_instance`, which verl calls on the built model with options of its
    own: what this patch set turned off stays off.
    """

    def __init__(self, original: Callable[..., None]) -> None:
        self.original = original
        self.turned_off: dict[str, tuple[str, ...]] = {}
        functools.update_wrapper(self, original)

    def __call__(self, model: Any, **options: Any) -> None:
        family = _family_of(getattr(model, "config", None))
        self.original(model=model, **{**options, **dict.fromkeys(self.turned_off.get(family, ()), False)})


def _keep_off(monkey_patch: Any, turned_off: Mapping[str, tuple[str, ...]]) -> None:
    if not isinstance(monkey_patch._apply_liger_kernel_to_instance, _KeepOff):
        monkey_patch._apply_liger_kernel_to_instance = _KeepOff(monkey_patch._apply_liger_kernel_to_instance)
    monkey_patch._apply_liger_kernel_to_instance.turned_off.update(turned_off)


def _family_of(hf_config: Any) -> str:
    return next(iter(families_of([getattr(hf_config, "model_type", "")])), "")


def _rows_beside(family: str, dropped: list[str], context: Any) -> list[Row]:
    """Rows for options that Liger's function does not have, for its cross entropy, and for what Liger leaves alone."""
    function = f"apply_liger_kernel_to_{family}"

    def row(target: str, op: str, state: str, reason: str) -> Row:
        return Row(target, op, family, PATCH_SET.name, state, reason)

    rows = [row(f"{_MONKEY_PATCH}:{function}", o, "skipped", f"{function} has no option {o}") for o in dropped]
    reason = "it would replace the model's forward, which belongs to the PPO head"
    soc = _wrong_soc(context)
    rows.append(row(f"{_MONKEY_PATCH}:{function}", _ALWAYS_OFF[1], "disabled", f"{reason}; {soc}" if soc else reason))
    return rows + [row(_target(family, name), op, "skipped", why) for name, (op, why) in LEFT.get(family, {}).items()]


# -- why a target is left alone --------------------------------------------------------------------------------------


def _why_not(family: str, option: str, original: Any, context: Any) -> str | None:
    """The predicate of every record: the reason why Liger must not, or cannot, replace this here.

    Raises:
        ImportError: this release of Liger has nothing for this family and transformers; the row is "unavailable".
        BackendUnavailableError: Liger was asked for and cannot be used on this host at all.
    """
    _import_liger(family)
    if context.device.type == "npu":
        check_ascend_operators()
    checks = {"swiglu": _swiglu_does_not_fit, "geglu": _geglu_does_not_fit, "rope": _rope_does_not_fit}
    return checks[option](context) if option in checks else None


@functools.cache
def _import_liger(family: str) -> None:
    """Import what patching this family needs; see `_why_not` for what it raises."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise BackendUnavailableError(
            "use_liger=True, but liger-kernel is not installed: `pip install --no-deps liger-kernel` (without "
            "--no-deps pip puts upstream triton over triton-ascend), or set use_liger=False"
        )
    release = f"liger-kernel {_version('liger-kernel')}"
    try:
        monkey_patch = importlib.import_module(_MONKEY_PATCH)
        if not hasattr(monkey_patch, f"apply_liger_kernel_to_{family}"):
            raise ImportError(f"{release} has no patches for {family}")
        importlib.import_module(f"liger_kernel.transformers.model.{family}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "triton":
            raise BackendUnavailableError(
                f"use_liger=True, but {release} finds no triton that it can use ({error}). {_triton_for_npu()}. "
                "On CUDA: `pip install triton`"
            ) from error
        raise ImportError(f"{release} cannot be used with transformers {_version('transformers')}: {error}") from error
    except Exception as error:
        raise BackendUnavailableError(
            f"use_liger=True, but {release} is broken here: importing it raised {type(error).__name__}: {error}. "
            "Reinstall it (`pip install --no-deps --force-reinstall liger-kernel`) or set use_liger=False"
        ) from error


def _swiglu_does_not_fit(context: Any) -> str | None:
    activation = _text_setting(context, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        return f"this model's activation is {activation!r}, Liger's kernel computes silu only"
    if _text_setting(context, "mlp_bias", False):
        return "this model's MLP has biases, Liger's replacement has none"
    return _wrong_soc(context)


def _geglu_does_not_fit(context: Any) -> str | None:
    activation = _text_setting(context, "hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        return f"this model's activation is {activation!r}, Liger's kernel computes gelu_pytorch_tanh only"
    return None


def _rope_does_not_fit(context: Any) -> str | None:
    parameters = _text_setting(context, "rope_parameters", None) or {}
    part = parameters.get("partial_rotary_factor") or _text_setting(context, "partial_rotary_factor", 1.0)
    if part != 1.0 and context.device.type != "cuda":
        return f"this model rotates {part:g} of each head, Liger's Ascend kernel would rotate all of it"
    return None


def _wrong_soc(context: Any) -> str | None:
    name = context.device.name
    if context.device.type == "npu" and not name.startswith("Ascend910"):
        return f"SoC {name}: Liger's SwiGLU and fused linear cross entropy are for Ascend910 chips"
    return None


def _text_setting(context: Any, name: str, default: Any) -> Any:
    """A setting of the model's text part; `default` where no configuration was given or it says nothing."""
    config = getattr(context.hf_config, "text_config", None) or context.hf_config
    value = getattr(config, name, None)
    return default if value is None else value


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


# -- the records -----------------------------------------------------------------------------------------------------


def _target(family: str, name: str) -> str:
    return f"transformers.models.{family}.modeling_{family}:{name}"


def _operator(option: str, name: str) -> str:
    if option in ("swiglu", "geglu"):
        return "sparse_moe" if name.endswith("Experts") else "gated_mlp"
    return {"rope": "rotary"}.get(option, option)


def _patch(family: str, option: str, name: str) -> Patch:
    op = _operator(option, name)
    return Patch(
        target=_target(family, name),
        replacement="",
        op=op,
        family=family,
        why=_WHY[op],
        upstream="https://github.com/linkedin/Liger-Kernel",
        remove_when="Liger can take back its own patches",
        requires=f"npu_backend.patches.liger:why_not.{family}.{option}",
    )


# The predicates under the names that the records use, e.g. "npu_backend.patches.liger:why_not.qwen3.rms_norm".
why_not = types.SimpleNamespace(
    **{
        family: types.SimpleNamespace(**{option: functools.partial(_why_not, family, option) for option in options})
        for family, options in REPLACED.items()
    }
)

PATCH_SET = PatchSet(
    "liger",
    tuple(
        _patch(family, option, name)
        for family, options in REPLACED.items()
        for option, names in options.items()
        for name in names
    ),
    install="npu_backend.patches.liger:install",
    touches=(_MONKEY_PATCH,),
)
