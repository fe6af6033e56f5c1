"""Every operator that torch_npu registers for its device, run by the CPU on the device's own memory.

One boxed function serves all aten operators: operands become CPU tensors on the same memory (memory.py), the CPU's
kernel runs, new results move to the device, and operands that the schema marks as written are returned themselves.
Views and allocation stay torch_npu's. `special.py` holds the operators that need their own function; `npu::` operators
come from the registry.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from npu_backend.virtual_npu import counting, random, registry
from npu_backend.virtual_npu.devices import check_each_device, check_one_device, current_device, device_of
from npu_backend.virtual_npu.memory import alias, fill, to_device

Kernel = Callable[..., Any]

# Allocation, storage and metadata: torch_npu's own code works on the software runtime as it is.
_KEPT = frozenset(
    """
    aten::_pin_memory aten::_reshape_alias aten::_resize_output_ aten::as_strided aten::as_strided_ aten::contiguous
    aten::empty aten::empty_like aten::empty_strided aten::is_pinned aten::is_set_to aten::new_empty_strided
    aten::record_stream aten::resize_ aten::resize_as_ aten::set_ aten::squeeze aten::unfold aten::unsqueeze aten::view
    aten::view_as_complex aten::view_as_real
    npu::copy_memory_ npu::empty_with_format npu::get_npu_format npu::get_storage_size npu::npu_change_data_ptr
    npu::unsafe_empty_with_format
    """.split()
)
# Packed sequences: the second argument, sizes or lengths, is on the host, and so is the second result of the first two.
_PACKED = ("aten::_pack_padded_sequence", "aten::_pad_packed_sequence", "aten::lstm.data", "aten::gru.data")
_libraries: list[torch.library.Library] = []
_installed = False


def install() -> None:
    """Override torch_npu's kernels. Called once, right after torch_npu is imported."""
    global _installed
    if _installed:
        return
    _installed = True
    from npu_backend.virtual_npu import references, special

    references.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about every kernel that is overridden
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
            if name in registry.REFERENCES or name in special.KERNELS or name.partition(".")[0] in _KEPT:
                continue
            if name.startswith("npu::"):
                implement(name, _without_reference(name))
            elif name.startswith("aten::"):
                _implement_aten(name)
        for name, kernel in special.KERNELS.items():
            implement(name, _counted(name, kernel))
        registry.on_register(_implement_reference)
    if counting.is_wanted():
        counting.report_at_exit()


def implement(name: str, kernel: Kernel, key: str = "PrivateUse1") -> None:
    """Put a kernel into torch's dispatcher in place of torch_npu's; one that this torch does not know is left out."""
    namespace, _, operator = name.partition("::")
    if _overload(name) is None:
        return
    library = torch.library.Library(namespace, "IMPL", key)
    library.impl(operator, counting.measured(name, kernel) if counting.is_wanted() else kernel, allow_override=True)
    _libraries.append(library)  # the kernel lives as long as the library does


def _overload(name: str) -> torch._ops.OpOverload | None:
    namespace, _, operator = name.partition("::")
    base, _, overload = operator.partition(".")
    try:
        found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except AttributeError:
        return None  # torch_npu also registers names in aten that have no schema: nobody can call them
    return found


def _implement_aten(name: str) -> None:
    op = _overload(name)
    if op is None:
        return
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"):
        implement(name, _without_reference(name))
        return
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    if composite and _registered_by_hand(name):
        # torch_npu replaces the composition by C++ that goes straight to device kernels, past this fallback.
        implement(name, op.decompose, "AutogradPrivateUse1")
    implement(name, boxed(op))


def _registered_by_hand(name: str) -> bool:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutogradPrivateUse1"):
        return False
    dump = torch._C._dispatch_dump(name)
    return any(line.startswith("AutogradPrivateUse1:") and "RegisterAutogradNPU" in line for line in dump.splitlines())


# ---- the boxed function ----


def boxed(op: torch._ops.OpOverload) -> Kernel:
    """The kernel for one operator: the CPU's, on the memory of the device tensors."""
    schema = op._schema
    names = [argument.name for argument in schema.arguments]
    resizable = [i for i, argument in enumerate(schema.arguments) if argument.is_out]
    written = [_written_argument(schema, result) for result in schema.returns]
    draws = _draws(op)
    label = _label(op)
    each, packed, host_result = label.startswith("aten::_foreach_"), label in _PACKED, label in _PACKED[:2]
    host_indices = any("Optional[Tensor]]" in str(argument.type) for argument in schema.arguments)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        registry.count(label)
        device = device_of(args) or device_of(kwargs.values()) or current_device()
        if each:
            check_each_device(label, (*args, *kwargs.values()))
        else:
            operands = (args[0], *args[2:]) if packed else args
            check_one_device(label, device, (*operands, *kwargs.values()), host_indices=host_indices)
        if packed and args[1].device.type != "cpu":
            raise RuntimeError(f"'{names[1]}' argument should be a 1D CPU int64 tensor, but is on {args[1].device}")
        cpu_args = [to_cpu(value) for value in args]
        cpu_kwargs = {name: to_cpu(value) for name, value in kwargs.items()}
        outs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index in resizable:
            place: Any = (cpu_args, index) if index < len(args) else (cpu_kwargs, names[index])
            targets = args[index] if index < len(args) else kwargs[names[index]]
            own = place[0][place[1]] = _own_memory(place[0][place[1]])
            outs.extend([(targets, own)] if isinstance(own, torch.Tensor) else zip(targets, own))
        with torch._C._AutoDispatchBelowAutograd():
            if not draws:
                result = op(*cpu_args, **cpu_kwargs)
            elif "generator" in names:
                cpu_kwargs["generator"] = random.cpu_generator(device, kwargs.get("generator"))
                result = op(*cpu_args, **cpu_kwargs)
            else:
                with random.seeded(random.next_seed(device)):
                    result = op(*cpu_args, **cpu_kwargs)
            for out, values in outs:
                if out.shape != values.shape:
                    out.resize_(values.shape)
                fill(out, values)
            if each and result is not None:
                return [to_device(value, place.device) for value, place in zip(result, next(filter(_is_list, args)))]
            if host_result:
                return to_device(result[0], device), result[1]
            return _results(result, written, names, args, kwargs, device)

    return kernel


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _own_memory(out: Any) -> Any:
    """An `out=` operand, or a list of them, in memory that the CPU's kernel may resize."""
    return out.clone() if isinstance(out, torch.Tensor) else [tensor.clone() for tensor in out]


def _written_argument(schema: Any, result: Any) -> int | None:
    """Index of the argument that this result is (`Tensor(a!)`), or None for a new one."""
    if result.alias_info is None or not result.alias_info.is_write:
        return None
    return next(
        i
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.before_set == result.alias_info.before_set
    )


def _results(
    result: Any,
    written: list[int | None],
    names: list[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> Any:
    if not any(index is not None for index in written):
        return from_cpu(result, device)
    values = result if len(written) > 1 else (result,)
    mapped = tuple(
        from_cpu(value, device) if i is None else args[i] if i < len(args) else kwargs[names[i]]
        for value, i in zip(values, written)
    )
    return mapped if len(written) > 1 else mapped[0]


def to_cpu(value: Any) -> Any:
    """An argument as the CPU's kernel wants it."""
    if isinstance(value, torch.Tensor):
        return alias(value)
    if isinstance(value, (list, tuple)):
        return [to_cpu(item) for item in value]
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    return value


def from_cpu(value: Any, device: torch.device, given: dict[int, torch.Tensor] | None = None) -> Any:
    """A result as the caller wants it. `given`: device tensors that CPU tensors stand for, by the latter's identity."""
    if isinstance(value, torch.Tensor):
        return given[id(value)] if given and id(value) in given else to_device(value, device)
    if isinstance(value, (list, tuple)):
        return type(value)(from_cpu(item, device, given) for item in value)
    return value


# ---- npu:: operators ----


def _label(op: torch._ops.OpOverload) -> str:
    return op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")


def _counted(name: str, kernel: Kernel) -> Kernel:
    def counted(*args: Any, **kwargs: Any) -> Any:
        registry.count(name)
        return kernel(*args, **kwargs)

    return counted


def _without_reference(name: str) -> Kernel:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise registry.OperatorError(
            f"{name} has no CPU reference on the virtual NPU. Declare one, a function of CPU tensors with the same "
            f"arguments: @npu_backend.virtual_npu.register_reference({name!r}); docs/virtual_npu.md shows how"
        )

    return fail


def _implement_reference(reference: registry.Reference) -> None:
    op = _overload(reference.name)
    if op is None:
        return  # a reference of an operator that this torch_npu does not have
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        implement(reference.name, _reference_kernel(reference, op))
        if reference.differentiable:
            implement(reference.name, _recomputed(reference, _draws(op)), "AutogradPrivateUse1")


def _draws(op: torch._ops.OpOverload) -> bool:
    """Whether the operator takes random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


def _run_reference(reference: registry.Reference, args: Any, kwargs: dict[str, Any], seed: int | None) -> Any:
    """The reference on CPU operands. No torch function: `with torch.device("npu")` must not reach its own tensors."""
    drawing = nullcontext() if seed is None else random.seeded(seed)
    with torch._C.DisableTorchFunction(), drawing:
        return reference.function(*args, **kwargs)


def _reference_kernel(reference: registry.Reference, op: torch._ops.OpOverload) -> Kernel:
    draws = _draws(op)
    arguments = op._schema.arguments
    written = [a.name for a in arguments if a.name == "out" or (a.alias_info is not None and a.alias_info.is_write)]
    places = {argument.name: i for i, argument in enumerate(arguments)}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        registry.count(reference.counted_as)
        device = device_of(args) or device_of(kwargs.values()) or current_device()
        check_one_device(reference.counted_as, device, (*args, *kwargs.values()))
        cpu_args, cpu_kwargs = [to_cpu(value) for value in args], {name: to_cpu(v) for name, v in kwargs.items()}
        with torch._C._AutoDispatchBelowAutograd():
            seed = random.next_seed(device) if draws else None
            result = _run_reference(reference, cpu_args, cpu_kwargs, seed)
            given: dict[int, torch.Tensor] = {}  # a result that is one of the written operands is that operand
            for name in written:
                inside = name in kwargs
                place: Any = name if inside else places[name]
                given |= _by_identity((cpu_kwargs if inside else cpu_args)[place], (kwargs if inside else args)[place])
            return from_cpu(result, device, given)

    return kernel


def _by_identity(cpu: Any, own: Any) -> dict[int, torch.Tensor]:
    return {id(cpu): own} if isinstance(cpu, torch.Tensor) else {id(c): o for c, o in zip(cpu, own)}


def _recomputed(reference: registry.Reference, draws: bool) -> Kernel:
    """An autograd kernel whose backward differentiates the reference on the CPU, with the forward's random numbers."""

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, kwargs: dict[str, Any], *args: Any) -> Any:
            registry.count(reference.counted_as)
            device = device_of(args) or current_device()
            check_one_device(reference.counted_as, device, (*args, *kwargs.values()))
            ctx.kwargs = kwargs
            ctx.seed = random.next_seed(device) if draws else None
            ctx.tensors = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor)]
            ctx.others = [None if isinstance(value, torch.Tensor) else value for value in args]
            ctx.save_for_backward(*(args[i] for i in ctx.tensors))
            cpu_kwargs = {name: to_cpu(value) for name, value in kwargs.items()}
            return from_cpu(_run_reference(reference, [to_cpu(value) for value in args], cpu_kwargs, ctx.seed), device)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            registry.count(f"{reference.counted_as}_backward")
            args = list(ctx.others)
            for i, saved in zip(ctx.tensors, ctx.saved_tensors):
                args[i] = alias(saved).detach().requires_grad_(ctx.needs_input_grad[i + 1])
            wanted = [i for i in ctx.tensors if ctx.needs_input_grad[i + 1]]
            cpu_kwargs = {name: to_cpu(value) for name, value in ctx.kwargs.items()}
            with torch.enable_grad():
                outputs = _run_reference(reference, [to_cpu(value) for value in args], cpu_kwargs, ctx.seed)
            upstream = [alias(grad) for grad in grads]
            found = torch.autograd.grad(outputs, [args[i] for i in wanted], upstream, allow_unused=True)
            results: list[torch.Tensor | None] = [None] * (len(args) + 1)
            for i, gradient in zip(wanted, found):
                results[i + 1] = None if gradient is None else to_device(gradient, grads[0].device)
            return tuple(results)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return Recomputed.apply(kwargs, *args)  # type: ignore[no-untyped-call]

    return kernel
