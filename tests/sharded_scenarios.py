"""What tests/head/test_sharded.py runs on four ranks: the head with weights that FSDP has sharded.

Every number is an error over what is allowed, so 1 is the limit. float32: 1e-5 of the largest entry of what one process
with all the data gets; a lost or doubled reduction is of order 1. bfloat16: the rule of `references`.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import tiny_models
import torch
import torch.distributed as dist
from references import HeadCase, error_bound, full_logits_head, head_case, max_error
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import npu_backend
from npu_backend.head.selection import row_compaction

ROWS, VOCAB = 5, 101  # of one rank and step; a vocabulary that divides evenly among no ranks
TEMPERATURE = 0.7


def scenarios() -> Iterator[tuple[str, float]]:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    meshes = {
        "1 rank": init_device_mesh("cpu", (4, 1), mesh_dim_names=("others", "alone"))["alone"],
        "2 ranks": grid["shard"],
        "4 ranks": init_device_mesh("cpu", (4,)),
        "2 x 2 ranks": grid,
    }
    for (name, mesh), dtype in itertools.product(meshes.items(), (torch.float32, torch.bfloat16)):
        yield f"direct, {name}, {dtype}", _direct(mesh, dtype, _distribute)
    yield "direct, wider weight under autocast", _direct(grid["shard"], torch.bfloat16, _distribute_wide)
    with row_compaction(True):
        yield "direct, rows left out", _direct(grid["shard"], torch.float32, _distribute)
    yield "direct, frozen weight", _frozen(grid["shard"])
    if hasattr(fsdp, "fully_shard"):
        yield from _with_fsdp2(meshes)
    for family, original in itertools.product(("qwen2", "qwen2_tied"), (True, False)):
        wrap = _fsdp1_original if original else _fsdp1_flat
        yield f"fsdp1 {family} use_orig_params={original}", _model(family, grid["shard"], wrap)
    yield "fsdp1 head its own unit", _model("qwen2", grid["shard"], _fsdp1_head)


def _with_fsdp2(meshes: dict[str, DeviceMesh]) -> Iterator[tuple[str, float]]:
    grid = meshes["2 x 2 ranks"]
    yield "direct, fsdp and tensor parallel", _direct(grid, torch.float32, _shard_both_ways, grid["replicate"])
    for name, mesh in meshes.items():
        yield f"fsdp2 untied, {name}", _model("qwen2", mesh, _fsdp2)
    for name in ("2 ranks", "2 x 2 ranks"):
        yield f"fsdp2 tied, {name}", _model("qwen2_tied", meshes[name], _fsdp2)
    yield "fsdp2 with bias", _model("phi", grid["shard"], _fsdp2)
    yield "fsdp2 bfloat16", _model("qwen2", grid["shard"], _fsdp2_mixed, torch.bfloat16)
    if importlib.util.find_spec("peft"):
        yield "fsdp2 modules_to_save", _model("qwen2", grid["shard"], _fsdp2, prepare=_with_lora)


# -- the head alone, called outside any forward -----------------------------------------------------------------------


def _parameters(dtype: torch.dtype) -> HeadCase:
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(9)).to(dtype)
    return head_case(1, vocab_size=VOCAB, dtype=dtype, bias=bias)


def _batch(step: int, number: int, dtype: torch.dtype) -> HeadCase:
    case = head_case(ROWS, vocab_size=VOCAB, dtype=dtype, seed=100 + 10 * step + number, temperature=TEMPERATURE)
    case.labels[0] = case.ignore_index
    case.grad_log_probs[2 * number :: 3] = 0.0  # of one rank more rows are silent than of another
    case.grad_entropy[2 * number :: 3] = 0.0
    return case


def _loss(log_probs: Tensor, entropy: Tensor, case: HeadCase) -> Tensor:
    return (log_probs * case.grad_log_probs + entropy * case.grad_entropy).sum()


def _distribute(case: HeadCase, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    return distribute_tensor(case.weight, mesh, placements), distribute_tensor(case.bias, mesh, placements)


def _distribute_wide(case: HeadCase, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    return _distribute(case.to(torch.float32), mesh)


def _shard_both_ways(case: HeadCase, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """As FSDP2 does it over a linear layer that tensor parallelism has divided already: a strided shard."""
    head = nn.Linear(case.weight.shape[1], VOCAB)
    head.weight.data, head.bias.data = case.weight, case.bias
    parallelize_module(head, mesh["shard"], ColwiseParallel())
    fsdp.fully_shard(head, mesh=mesh["replicate"])
    assert head.weight.device_mesh.ndim == 2
    return head.weight.detach(), head.bias.detach()


def _direct(mesh: DeviceMesh, dtype: torch.dtype, shard: Callable[..., Any], data: DeviceMesh | None = None) -> float:
    """Two steps that accumulate; `data` is the mesh whose ranks have different rows."""
    given = _parameters(dtype)
    weight, bias = (part.requires_grad_() for part in shard(given, mesh))
    ranks = (mesh if data is None else data).mesh.flatten().tolist()
    own = ranks.index(dist.get_rank())
    hidden = []
    for step in range(2):
        case = _batch(step, own, dtype)
        hidden.append(case.hidden.requires_grad_())
        wide = torch.autocast("cpu", dtype=dtype) if weight.dtype != dtype else nullcontext()
        with wide:
            log_probs, entropy, _ = npu_backend.linear_log_prob(
                case.hidden, weight, case.labels, bias=bias, temperature=TEMPERATURE
            )
        _loss(log_probs, entropy, case).backward()
    for part in (weight, bias):
        assert part.grad.placements == part.placements, (part.grad.placements, part.placements)
        assert part.grad.dtype == part.dtype
    got = [weight.grad.full_tensor(), bias.grad.full_tensor(), *(h.grad for h in hidden)]

    def one_process(like: torch.dtype) -> list[Tensor]:
        whole = given.to(like)
        whole.weight.requires_grad_()
        whole.bias.requires_grad_()
        mine = []
        for step, number in itertools.product(range(2), range(len(ranks))):
            case = replace(_batch(step, number, dtype).to(like), weight=whole.weight, bias=whole.bias)
            case.hidden.requires_grad_()
            (_loss(*full_logits_head(case), case) / len(ranks)).backward()
            if number == own:
                mine.append(case.hidden.grad * len(ranks))
        return [whole.weight.grad, whole.bias.grad, *mine]

    return _worst(got, one_process(torch.float64), one_process(dtype), dtype)


def _frozen(mesh: DeviceMesh) -> float:
    given = _parameters(torch.float32)
    weight, bias = _distribute(given, mesh)
    case = _batch(0, 0, torch.float32)
    reference = replace(case.to(torch.float64), weight=given.weight.double(), bias=given.bias.double())
    for one in (case, reference):
        one.hidden.requires_grad_()
    log_probs, entropy, _ = npu_backend.linear_log_prob(
        case.hidden, weight, case.labels, bias=bias, temperature=TEMPERATURE
    )
    _loss(log_probs, entropy, case).backward()
    _loss(*full_logits_head(reference), reference).backward()
    assert weight.grad is None
    assert bias.grad is None
    return _worst([case.hidden.grad], [reference.hidden.grad], [], torch.float32)


def _worst(got: list[Tensor], wanted: list[Tensor], eager: list[Tensor], dtype: torch.dtype) -> float:
    """The largest error over what is allowed."""
    if dtype == torch.float32:
        return max(max_error(g, w) / (1e-5 * float(w.abs().max())) for g, w in zip(got, wanted))
    return max(max_error(g, w) / error_bound(e, w, dtype) for g, w, e in zip(got, wanted, eager))


# -- whole models, through the adapter --------------------------------------------------------------------------------


def _fsdp2(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    """As verl does: a unit per layer, one for an untied head, and the root."""
    units = list(model.model.layers)
    if not model.config.tie_word_embeddings:
        units.append(model.lm_head)
    for unit in (*units, model):
        fsdp.fully_shard(unit, mesh=mesh, **options)
    return model


def _fsdp2_mixed(model: Any, mesh: DeviceMesh) -> Any:
    return _fsdp2(model, mesh, mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def _fsdp1(model: Any, mesh: DeviceMesh, units: set[Any], use_orig_params: bool) -> Any:
    return fsdp.FullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        auto_wrap_policy=lambda module, recurse, **_: recurse or module in units,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def _fsdp1_original(model: Any, mesh: DeviceMesh) -> Any:
    return _fsdp1(model, mesh, set(model.model.layers), use_orig_params=True)


def _fsdp1_flat(model: Any, mesh: DeviceMesh) -> Any:
    return _fsdp1(model, mesh, set(model.model.layers), use_orig_params=False)


def _fsdp1_head(model: Any, mesh: DeviceMesh) -> Any:
    return _fsdp1(model, mesh, {*model.model.layers, model.lm_head}, use_orig_params=True)


def _with_lora(model: Any) -> None:
    """LoRA in the layers and a trained copy of the head beside the frozen original, in place."""
    import peft

    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.3)  # the same on every rank: `build` has set the seed


def _full_logits_loss(model: Any, ids: Tensor) -> Tensor:
    log_p = (model(input_ids=ids).logits.float() / TEMPERATURE).log_softmax(-1)
    of_label = log_p.gather(-1, ids.roll(-1, -1)[..., None])[..., 0]
    return (of_label - 0.1 * (log_p.exp() * log_p).sum(-1)).mean()


def _model(
    family: str,
    mesh: DeviceMesh,
    wrap: Callable[..., Any],
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[Any], None] = lambda _: None,
) -> float:
    """Two steps that accumulate, the first without a reduction."""
    model = tiny_models.build(family)
    prepare(model)
    whole, eager = copy.deepcopy(model), copy.deepcopy(model).to(dtype)
    npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    ranks = mesh.mesh.flatten().tolist()
    own = ranks.index(dist.get_rank())
    batches = [tiny_models.tokens(2 * len(ranks), 7, seed=seed) for seed in range(2)]
    for ids in batches:
        _full_logits_loss(whole, ids).backward()
        _full_logits_loss(eager, ids).backward()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    wrapped = wrap(model, mesh)
    for step, ids in enumerate(batches):
        is_fsdp1 = isinstance(wrapped, fsdp.FullyShardedDataParallel)
        if not is_fsdp1:
            wrapped.set_requires_gradient_sync(step == 1)
        with wrapped.no_sync() if is_fsdp1 and step == 0 else nullcontext():
            output = wrapped(input_ids=ids[2 * own : 2 * own + 2], temperature=TEMPERATURE, use_cache=False)
            (output.log_probs + 0.1 * output.entropy).mean().backward()
    gradients = _gradients(wrapped)
    assert set(gradients) == set(names)
    wanted, of_eager = ({n: p.grad for n, p in one.named_parameters()} for one in (whole, eager))
    return _worst(*([one[name] for name in names] for one in (gradients, wanted, of_eager)), dtype)


def _gradients(wrapped: Any) -> dict[str, Tensor]:
    if not isinstance(wrapped, fsdp.FullyShardedDataParallel):
        return {name: p.grad.full_tensor() for name, p in wrapped.named_parameters() if p.requires_grad}
    with torch.no_grad():  # put the gradients where the parameters are: those can be gathered, flat or not
        for parameter in wrapped.parameters():
            if parameter.numel():
                parameter.copy_(parameter.grad)
    with fsdp.FullyShardedDataParallel.summon_full_params(wrapped):
        return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in wrapped.named_parameters()}
