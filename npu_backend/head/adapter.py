"""One forward for every causal language model, text only or multimodal: log-probs and entropy instead of logits.

`patch_forward_with_backends` gives one model object a forward that runs the model's own forward with its output head
left out (`deferred.py`), and then the PPO head with what the model's forward would have done to the logits. The model's
class stays as it is, and so does every call that asks for logits, such as those of `generate`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from npu_backend import device, log
from npu_backend.config import Environment, parse_backend, parse_bool, read_environment
from npu_backend.errors import HeadInputError, PatchConflictError
from npu_backend.families import families_of
from npu_backend.head.deferred import DeferredLogits, place_of, shadowed, without_head
from npu_backend.head.linear_log_prob import linear_log_prob
from npu_backend.operators import counters
from npu_backend.patches.engine import ENGINE, Row
from npu_backend.patches.targets import MISSING, InstanceSlot, owner_of
from npu_backend.report import PatchReport

BACKEND_ATTRIBUTE = "_verl_fused_kernels_backend"  # verl's name: its adapters, and checks made for them, read it
_WRAPPERS = {  # of an output head: they pass the call on to one of the layers inside, unchanged
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("peft.", "ModulesToSaveWrapper"),
    ("torch.nn", "ModuleDict"),
}
_OP = "ppo_head"
_WHY = "the full logits of a long sequence do not fit into memory"


def patch_forward_with_backends(
    model: nn.Module, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
) -> PatchReport:
    """Let this model's forward return `log_probs` and `entropy`, computed without its full logits.

    The replacement is in the patch manager's ledger: `patch_status` shows it and `revert_patches` undoes it. A deep
    copy of a patched model is patched too, but not in the ledger. A pickled one comes back unpatched. An error changes
    nothing.

    Args:
        model: a Hugging Face causal LM or VLM, before FSDP or torch.compile wraps it; a PEFT model is unwrapped.
        use_fused_kernels: False touches nothing.
        fused_kernels_backend: `torch`, `triton`, `liger` or `auto`; None means `torch`.

    Returns:
        A report of one row, which is applied; disabled, by `use_fused_kernels`, NPU_BACKEND_DISABLE or
        NPU_BACKEND_SKIP; or skipped with the reason, where the model has no output head, is an encoder-decoder, or is
        already held by torch.compile.

    Raises:
        ConfigError: an unknown backend, a boolean that is neither true nor false, or an NPU_BACKEND_* variable.
        BackendUnavailableError: the device that NPU_BACKEND_DEVICE names is not here.
        HeadInputError: `model` is no model; its output head is not a plain linear layer (LoRA or quantisation on it),
            nor one that FSDP or peft's `modules_to_save` wraps, or is not a submodule of it.
        PatchConflictError: this model already has another backend, or a forward that somebody else put on it.
    """
    backend = "torch" if fused_kernels_backend is None else parse_backend(fused_kernels_backend)
    wanted = parse_bool(use_fused_kernels, "use_fused_kernels")
    environment, where = read_environment(), str(device.detect_unless_disabled())
    if not isinstance(model, nn.Module):
        raise HeadInputError(
            f"patch_forward_with_backends: model must be a Hugging Face model (a torch.nn.Module), got {model!r}"
        )
    model = getattr(model, "get_base_model", lambda: model)()
    slot = InstanceSlot(model, "forward")
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    row = Row(str(slot), _OP, model_type, "npu_backend.head", "applied", f"backend {backend}", _WHY)

    def report(status: str, **changes: str) -> PatchReport:
        rows = (dataclasses.replace(row, **changes),)
        return PatchReport(rows=rows, device=where, status=status, versions=device.versions())

    reason = _disabled(environment, model_type) if wanted else "fused head off: use_fused_kernels=False"
    if reason:
        log.info_rank0(f"npu-backend: {reason} ({row.target})")
        return report("nothing applied", state="disabled", reason=reason)
    reason = _unsuitable(model)
    if reason:
        log.warn_rank0(f"npu-backend: no fused head on {row.target}: {reason}")
        return report("nothing applied", state="skipped", reason=reason)
    with ENGINE.lock:
        if _already_has(slot, backend):
            return report("already applied")
        place_of(model, _output_head(model))
        attribute = InstanceSlot(model, BACKEND_ATTRIBUTE)
        forward = types.MethodType(_forward_like(type(model).forward), model)
        ENGINE.put(attribute, backend, dataclasses.replace(row, target=str(attribute)))  # nothing raises from here on
        ENGINE.put(slot, forward, row)
    log.info_rank0(f"npu-backend: fused head on {row.target}: backend {backend}")
    return report("applied")


def _disabled(environment: Environment, model_type: str) -> str:
    """Which variable says that this model gets no fused head, or an empty string."""
    if environment.disable:
        return "NPU_BACKEND_DISABLE=1"
    names = {_OP}
    for family in families_of([model_type]):
        names |= {family, f"{family}.{_OP}"}
    skipped = sorted(names & set(environment.skip))
    return f"NPU_BACKEND_SKIP={','.join(skipped)}" if skipped else ""


def _unsuitable(model: nn.Module) -> str:
    """Why this model keeps its forward, or an empty string.

    Raises:
        HeadInputError: it has an output head, but is no Hugging Face model.
    """
    if "_orig_mod" in model._modules or getattr(model, "_compiled_call_impl", None) is not None:
        return "torch.compile already holds this model and would not see the patch; patch it before compiling it"
    if _embeddings(model) is None:
        return "no output head on this module (no lm_head: get_output_embeddings() gives None)"
    config = getattr(model, "config", None)
    if config is None:
        raise HeadInputError(
            f"patch_forward_with_backends: {type(model).__name__} has an output head but no `config`, so it is no "
            "Hugging Face model. Pass that model itself, or set use_fused_kernels=False"
        )
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder model: its labels are not shifted inputs"
    return ""


def _already_has(slot: InstanceSlot, backend: str) -> bool:
    """Whether our forward is on the object, with this backend.

    Raises:
        PatchConflictError: with another one, or the object has somebody else's forward.
    """
    current = slot.get()
    if owner_of(current) == __name__:
        held = getattr(slot.owner, BACKEND_ATTRIBUTE, None)
        if held == backend:
            return True
        raise PatchConflictError(
            f"{slot}: the fused head is already on this model with backend {held!r}, now {backend!r} is asked for. "
            "Call npu_backend.revert_patches() first, or ask for the same backend"
        )
    inherited = getattr(current, "__func__", None) is type(slot.owner).forward  # what unpickling leaves behind
    if current is not MISSING and not inherited:
        raise PatchConflictError(
            f"{slot}: {owner_of(current)!r} has already put a forward on this very object; patch the model before that"
        )
    return False


def _forward_like(own: Callable[..., Any]) -> Callable[..., Any]:
    """A forward for one model object with its own forward's signature and the arguments that ours adds.

    `generate` reads it: where it finds `logits_to_keep` it says so in each of its calls, which tells them from others.
    """

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _fused_forward(self, args, kwargs)

    signature = inspect.signature(own)
    kinds = inspect.Parameter
    parameters = [p for p in signature.parameters.values() if p.kind is not kinds.VAR_KEYWORD]
    added = [name for name in ("shift_labels", "temperature", "logits_to_keep") if name not in signature.parameters]
    parameters += [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in added]
    parameters += [p for p in signature.parameters.values() if p.kind is kinds.VAR_KEYWORD]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return forward


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _fused_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The patched forward. `type(model).forward` is looked up now, so that class patches made later count too."""
    own_forward = type(model).forward
    signature = inspect.signature(own_forward)
    _, *positional = signature.bind_partial(model, *args).arguments.items()
    inputs = {**dict(positional), **kwargs}
    if _asks_for_logits(inputs):
        if "logits_to_keep" not in signature.parameters:
            inputs.pop("logits_to_keep", None)  # it computes them all
        return own_forward(model, **inputs)
    name = type(model).__name__
    if inputs.pop("return_dict", None) is False:
        raise HeadInputError(f"{name}: return_dict=False has no place for log_probs and entropy; leave it out")
    temperature = inputs.pop("temperature", 1.0)
    labels = _next_tokens(name, inputs)
    head = _output_head(model)
    with without_head(model, head):
        output = own_forward(model, **inputs, return_dict=True)
    logits = getattr(output, "logits", None)
    if not isinstance(logits, DeferredLogits):
        raise HeadInputError(
            f"{name}: its forward, of {owner_of(own_forward)}, does not call its output head, so the fused head cannot "
            "replace it. Set use_fused_kernels=False for this model"
        )
    if labels.shape != logits.shape[:-1]:
        raise HeadInputError(
            f"{name}: {list(labels.shape)} labels for logits of {list(logits.shape[:-1])} positions. With "
            "logits_to_keep pass shift_labels, the next tokens of the positions that are kept, or leave it out"
        )

    log_probs, entropy = _score(model, head, logits, labels, temperature)
    kept = {key: value for key, value in output.items() if key != "logits"}
    output_class = _output_class(type(output))  # type: ignore[arg-type]
    return output_class(**kept, log_probs=log_probs, entropy=entropy)


def _score(
    model: nn.Module, head: nn.Module, logits: DeferredLogits, labels: Tensor, temperature: Any
) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy), [B, S]: the PPO head in the place of the head's forward.

    It runs through the head's own call: FSDP's hooks gather and free the weight when it shards the head by itself, and
    peft's wrapper chooses between the original layer and the trained copies of it.
    """
    asked = getattr(model, BACKEND_ATTRIBUTE)

    def forward(layer: nn.Linear, hidden: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, entropy, ran = linear_log_prob(
            hidden,
            layer.weight,
            labels,
            temperature=temperature,
            bias=layer.bias,
            logit_scale=None if logits.logit_scale == 1.0 else logits.logit_scale,
            softcap=logits.softcap,
            impl_backend=asked,
        )
        assert entropy is not None  # it is computed unless one asks not to
        if asked not in (ran, "auto"):
            counters.note_fallback(_OP, f"backend {asked} fell back to {ran}")
        return log_probs, entropy

    with ExitStack() as shadows:
        for layer in _layers(model, head):
            shadows.enter_context(shadowed(layer, "forward", functools.partial(forward, layer)))
        scored = head(logits.hidden)
    if not isinstance(scored, tuple):
        raise HeadInputError(
            f"{type(model).__name__}: {type(head).__name__} did not hand on what the fused head gave it, as for "
            "a batch of mixed adapters. Use one adapter per batch, or set use_fused_kernels=False"
        )
    return scored


def _asks_for_logits(inputs: dict[str, Any]) -> bool:
    """Whether a call is one of `generate`, or like it: no label and no temperature, but a cache or a few logits."""
    if any(inputs.get(name) is not None for name in ("labels", "shift_labels", "temperature")):
        return False
    for name in ("logits_to_keep", "past_key_values", "use_cache"):
        value = inputs.get(name)
        if value is not None and not (isinstance(value, int) and value == 0):  # False is 0
            return True
    return False


def _next_tokens(name: str, inputs: dict[str, Any]) -> Tensor:
    """The label of each position, [B, S]; takes the labels out of `inputs`, so that the model computes no loss.

    Rolling gives the last position of each sequence the first token, as verl's adapters do: mask it in the loss.
    """
    labels: Tensor | None = inputs.pop("labels", None)
    shift_labels: Tensor | None = inputs.pop("shift_labels", None)
    if shift_labels is not None:
        return shift_labels
    given = inputs.get("input_ids") if labels is None else labels
    if given is None:
        raise HeadInputError(
            f"{name}: no labels for the fused head: pass shift_labels (the next token of each position), labels or "
            "input_ids. For logits, pass logits_to_keep or use_cache=True and none of these"
        )
    if _sequence_parallel_size() > 1:
        raise HeadInputError(
            f"{name}: under sequence parallel (Ulysses, {_sequence_parallel_size()} ranks) each rank has a part of the "
            "sequence and cannot know the token after its last one. Shift the whole sequence, cut it, pass shift_labels"
        )
    return torch.roll(given, shifts=-1, dims=-1)


def _sequence_parallel_size() -> int:
    """Ranks that share one sequence in verl; 1 where verl is not loaded."""
    ulysses = sys.modules.get("verl.utils.ulysses")
    return 1 if ulysses is None else int(ulysses.get_ulysses_sequence_parallel_world_size())


def _embeddings(model: nn.Module) -> Any:
    return getattr(model, "get_output_embeddings", lambda: None)()


def _output_head(model: nn.Module) -> nn.Module:
    """The model's output head: a linear layer and nothing more, or a wrapper that passes calls on to such layers.

    Raises:
        HeadInputError: there is none now, or it is something else.
    """
    head: nn.Module | None = _embeddings(model)
    if head is None:
        raise HeadInputError(
            f"{type(model).__name__}: no output head on this module; the fused head runs where lm_head is"
        )
    _layers(model, head)
    return head


def _layers(model: nn.Module, part: Any) -> list[nn.Linear]:
    """The plain linear layers of which a call of the head runs one: only a weight and a bias are used of it."""
    plain = isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward and "forward" not in vars(part)
    if plain and not getattr(part, "_hf_tp_plan", None):
        return [part]
    if any(c.__name__ == name and c.__module__.startswith(m) for c in type(part).__mro__ for m, name in _WRAPPERS):
        return [layer for child in part.children() for layer in _layers(model, child)]
    adapters = ", ".join(getattr(part, "active_adapters", ()))
    what = f"{type(part).__module__}.{type(part).__name__}" + (f" with adapter {adapters}" if adapters else "")
    raise HeadInputError(
        f"{type(model).__name__}: the output head is {what}, not a plain linear layer. The fused head uses a weight "
        "and a bias and would ignore the rest: keep lm_head out of LoRA, quantisation and tensor parallelism, or set "
        "use_fused_kernels=False"
    )


@functools.cache
def _output_class(base: type) -> type:
    """The model's own output class with two fields more; `logits` is None in it."""

    def reduce(output: Any) -> tuple[Any, ...]:  # pickle looks a class up by its name, and this one has no place
        return _rebuilt_output, (base, dict(output.items()))

    fields = [(name, "Any", dataclasses.field(default=None)) for name in ("log_probs", "entropy")]
    namespace = {"__module__": __name__, "__reduce__": reduce}
    return dataclasses.make_dataclass(f"{base.__name__}ForPPO", fields, bases=(base,), namespace=namespace)


def _rebuilt_output(base: type, values: dict[str, Any]) -> Any:
    """What a pickled or copied output comes back from."""
    return _output_class(base)(**values)
