"""Rules that the operators' source keeps: no branch for another vendor, no mask, no layout guessed from sizes."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType

import pytest
import torch

from npu_backend import operators
from npu_backend.operators import gated_mlp, grouped_linear, rms_norm, rotary, sparse_moe

FILES = sorted(Path(inspect.getfile(operators)).parent.glob("*.py"))
MODULES = (rms_norm, gated_mlp, rotary, grouped_linear, sparse_moe)


def code(path: Path) -> list[ast.AST]:
    """Every node of a file but its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value.value = ""
    return list(ast.walk(tree))


@pytest.mark.case("B14")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_literal_names_another_device(path: Path) -> None:
    words = [node.value for node in code(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = [node.attr for node in code(path) if isinstance(node, ast.Attribute)]
    assert not [word for word in (*words, *names) if "cuda" in word.lower()]


@pytest.mark.case("B14")
def test_autocast_of_the_tensors_own_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: bool(asked.append(device)) or True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float16)

    class OnNpu:
        device = type("Device", (), {"type": "npu"})
        dtype = torch.float32

    assert sparse_moe._compute_dtype(OnNpu()) == torch.float16  # type: ignore[arg-type]
    assert asked == ["npu"]


@pytest.mark.case("B19")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_builds_a_mask_or_a_one_hot(path: Path) -> None:
    """An attention mask of S x S is not ours to build, and a one-hot of experts would be int64."""
    called = {ast.unparse(node.func).rpartition(".")[2] for node in code(path) if isinstance(node, ast.Call)}
    assert not called & {"tril", "triu", "one_hot", "full", "ones", "eye"}


@pytest.mark.case("B19")
def test_counting_tokens_takes_one_byte_per_pair_of_choice_and_expert() -> None:
    tokens, top_k, experts = 8192, 8, 128
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.device.type == "meta":
                largest = max(largest, out.numel() * out.element_size())
            return out

    with Sizes():
        grouped_linear.tokens_per_expert(torch.zeros(tokens, top_k, dtype=torch.int64, device="meta"), experts)
    assert largest <= tokens * top_k * experts
    assert largest <= tokens * tokens


@pytest.mark.case("B20")
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_layouts_are_arguments_without_default(module: ModuleType) -> None:
    """Equal sizes mean nothing: who calls says which axis is which, and how weights and group lists are to be read."""
    for name, function in inspect.getmembers(module, inspect.isfunction):
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in ("layout", "out_in", "group_list_type"):
                assert parameter.default is inspect.Parameter.empty, f"{name}({parameter.name})"


@pytest.mark.case("B20")
def test_equal_sizes_do_not_change_what_an_axis_means() -> None:
    """out == in, and heads == sequence: a shape-sniffing helper would not notice the other layout."""
    rows, counts, weight = torch.randn(4, 6), torch.tensor([2, 2]), torch.randn(2, 6, 6)
    first, second = (
        grouped_linear.grouped_linear_reference(rows, counts, [weight], out_in=flag) for flag in (True, False)
    )
    assert not torch.allclose(first, second)
    with pytest.raises(TypeError, match="out_in"):
        grouped_linear.grouped_linear(rows, counts, [weight])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="layout"):
        rotary.rotary(torch.zeros(1, 4, 4, 8), torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))  # type: ignore[call-arg]
