"""Recognition: which code is one form and which is not, what the installed transformers holds, and drift."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import transformers
from torch_free import needs_torch

from npu_backend import families, recognise
from npu_backend.patches.targets import load
from npu_backend.recognise import normalise, source
from npu_backend.recognise.forms import FORMS

TABLES = Path(__file__).parent / "recognised"
NORM = """
class Norm(nn.Module):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)
"""


def form(code: str, name: str = "Norm", header: str = "import torch\nfrom torch import nn") -> str:
    """The digest of a definition in made-up source."""
    tree = ast.parse(f"{header}\n{textwrap.dedent(code)}")
    definitions = {n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    imports = {"torch": "torch", "nn": "torch.nn", "F": "torch.nn.functional"}
    return normalise.digest(normalise.form_of(source.Module("made.up", definitions, imports), definitions[name]))


# -- what is one form -------------------------------------------------------------------------------------------------


def test_names_hints_docstrings_decorators_and_unread_parameters_are_no_part_of_a_form() -> None:
    other = '''
    @use_kernel_forward_from_hub("RMSNorm")
    class Norm(nn.Module):
        def forward(self, x: torch.Tensor, position_ids=None) -> torch.Tensor:
            """Says something."""
            kind: torch.dtype = x.dtype
            x = x.to(torch.float32)
            v = x.pow(2).mean(-1, keepdim=True)
            x = x * torch.rsqrt(v + self.variance_epsilon)
            return self.weight * x.to(kind)
    '''
    assert form(other.replace("kind: torch.dtype =", "kind =")) == form(NORM)
    assert FORMS[form(NORM)] == ("rms_norm", "plain")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.weight *", "(1.0 + self.weight) *"),
        ("self.variance_epsilon", "self.eps"),
        ("self.variance_epsilon", "1e-6"),
        (".mean(-1, keepdim=True)", ".sum(-1, keepdim=True)"),
        ("hidden_states.pow(2)", "hidden_states.pow(3)"),
        ("torch.float32", "torch.float64"),
        ("self.weight * hidden_states.to(input_dtype)", "(self.weight * hidden_states).to(input_dtype)"),
        ("torch.rsqrt", "torch.sqrt"),
        ("+ self", "- self"),
    ],
)
def test_what_changes_the_result_changes_the_form(old: str, new: str) -> None:
    assert old in NORM
    assert FORMS.get(form(NORM.replace(old, new))) != ("rms_norm", "plain")


def test_a_helper_is_part_of_the_form() -> None:
    rotary = """
    def {half}(x):
        return torch.cat(({sign}x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    def apply(q, cos, sin):
        return q * cos + {half}(q) * sin
    """
    plain = form(rotary.format(half="rotate_half", sign="-"), "apply")
    assert form(rotary.format(half="turn", sign="-"), "apply") == plain
    assert form(rotary.format(half="rotate_half", sign=""), "apply") != plain


def test_a_method_is_part_of_the_form_and_a_subclass_that_changes_it_is_seen() -> None:
    code = """
    class Norm(nn.Module):
        def _norm(self, x):
            return x * {how}

        def forward(self, x):
            return self._norm(x) * self.weight
    """
    assert form(code.format(how="2")) != form(code.format(how="3"))
    heir = "\nclass Heir(Norm):\n    def _norm(self, x):\n        return x\n"
    tree = ast.parse(textwrap.dedent(code.format(how="2")) + heir)
    module = source.Module("made.up", {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}, {})
    assert recognise._overridden(module, module.definitions["Norm"])
    assert not recognise._overridden(module, module.definitions["Heir"])


# -- what is found ----------------------------------------------------------------------------------------------------


def variants(family: str) -> dict[str, str]:
    if not importlib.util.find_spec(f"transformers.models.{family}"):
        pytest.skip(f"this transformers has no {family}")
    return {found.target.rpartition(":")[2]: found.variant for found in recognise.operators(family)}


def test_nanochat_turns_the_other_way_and_is_left_alone() -> None:
    """Its rotate_half has the other sign; everything else is the common form."""
    assert variants("nanochat")["apply_rotary_pos_emb"] == ""


def test_blt_pairs_neighbours_and_is_left_alone() -> None:
    """Its rotate_half interleaves; everything else is the common form."""
    assert variants("blt")["apply_rotary_pos_emb"] == ""


def test_llama_and_its_borrowers() -> None:
    found = {"LlamaRMSNorm.forward": "plain", "LlamaMLP.forward": "split", "apply_rotary_pos_emb": "standard"}
    assert variants("llama") == found
    assert variants("qwen2_5_vl")["Qwen2MLP.forward"] == "split"  # imported from another family


def test_what_is_only_named_like_an_operator_is_reported_with_a_reason() -> None:
    rows = {f.target.rpartition(":")[2]: f.variant for f in recognise.operators("starcoder2")}
    assert rows["Starcoder2MLP.forward"] == ""


@pytest.mark.parametrize(
    ("model_type", "family"),
    [("qwen3", "qwen3"), ("qwen2_5_vl_text", "qwen2_5_vl"), ("gemma3_text", "gemma3"), ("no_such_model", None)],
)
def test_the_family_of_a_model_type(model_type: str, family: str | None) -> None:
    assert source.family_of(model_type) == family


def test_every_model_type_of_transformers_has_the_family_that_transformers_says() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    expected = {t: model_type_to_module_name(t) for t in CONFIG_MAPPING_NAMES}
    here = {t: family for t, family in expected.items() if family in source.families()}
    assert len(here) > 300
    found = {t: source.family_of(t) for t in here}
    assert {t: family for t, family in found.items() if family is not None and family != here[t]} == {}
    assert list(found.values()).count(None) <= 3  # types that no configuration file spells out


@needs_torch
def test_every_form_names_a_factory() -> None:
    for op, variant in FORMS.values():
        assert op in families.OPERATORS
        assert callable(load(f"npu_backend.operators.{op}:{variant}"))


def test_looking_imports_neither_transformers_nor_torch() -> None:
    code = "import sys; from npu_backend import recognise; assert recognise.operators('llama'); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"transformers", "torch", "triton"} & set(out.split())


# -- drift ------------------------------------------------------------------------------------------------------------


def test_what_is_recognised_in_this_transformers_is_what_the_committed_table_says() -> None:
    """A release that is not in the tables has none: run tests/virtual_npu/recognised_sweep.py to make it."""
    path = TABLES / f"transformers-{transformers.__version__}.json"
    assert path.exists(), f"no table for transformers {transformers.__version__}"
    table = {
        family: {entry["name"]: entry["variant"] for entry in entries}
        for family, entries in json.loads(path.read_text()).items()
    }
    found = {}
    for family in recognise.families():
        known = {f.target.rpartition(":")[2]: f.variant for f in recognise.operators(family) if f.op != "sparse_moe"}
        found[family] = {name: variant for name, variant in known.items() if variant}
    assert {family: known for family, known in found.items() if known} == table


GOALS = {"5.10.4": {"rms_norm": 120, "gated_mlp": 95, "rotary": 110, "all": 75}}
GOALS["4.57.6"] = {name: goal * 2 // 3 for name, goal in GOALS["5.10.4"].items()}


@pytest.mark.parametrize("version", GOALS)
def test_the_tables_show_the_goals_reached_and_nothing_different(version: str) -> None:
    """Counted in families whose own operator, run through its replacement on a virtual NPU, equalled the original."""
    table = json.loads((TABLES / f"transformers-{version}.json").read_text())
    results = {entry["result"].partition(":")[0] for entries in table.values() for entry in entries}
    assert results <= {"equal", "not compared", "left alone"}
    equal = {
        op: {f for f, entries in table.items() if any(e["op"] == op and e["result"] == "equal" for e in entries)}
        for op in ("rms_norm", "gated_mlp", "rotary")
    }
    equal["all"] = equal["rms_norm"] & equal["gated_mlp"] & equal["rotary"]
    assert {op: len(families) for op, families in equal.items() if len(families) < GOALS[version][op]} == {}
