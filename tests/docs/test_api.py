"""The API page (docs/api.py) says of every public name what it takes, returns and raises, in both languages."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import scripts

import npu_backend
from npu_backend import errors

DOCS = Path(__file__).resolve().parents[2] / "docs"
HEAD = ("linear_log_prob", "linear_cross_entropy", "FusedLinearForPPO", "LinearLogProbOutput")


@pytest.fixture(scope="module")
def api():
    return scripts.load(DOCS / "api.py")


@pytest.fixture(scope="module")
def sections(api) -> dict[str, str]:
    """Name -> its section in English."""
    parts = re.split(r"^## (.+)$", api.reference(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def test_every_public_name_has_its_section(sections) -> None:
    named = {name for name in npu_backend.__all__ if name not in ("__version__", "virtual_npu", *vars(errors))}
    assert set(sections) == named | {"virtual_npu.activate"}


def test_every_parameter_and_every_error_of_a_function_is_told(sections) -> None:
    for name, text in sections.items():
        found = npu_backend.virtual_npu.activate if "." in name else getattr(npu_backend, name)
        if inspect.isfunction(found):
            for parameter in inspect.signature(found).parameters:
                assert f"\n| `{parameter}` | " in text, f"{name}: {parameter}"
            assert name == "patch_status" or "\n| raises | when |" in text, name
    raised = set(re.findall(r"`(\w+Error)`", " ".join(sections.values())))
    assert {"ConfigError", "HeadInputError", "PatchConflictError", "BackendUnavailableError"} <= raised
    assert all(issubclass(getattr(npu_backend, name), npu_backend.NPUBackendError) for name in raised - {"ValueError"})


@pytest.mark.parametrize("name", HEAD)
def test_shapes_and_dtypes_of_the_head_are_told(sections, name: str) -> None:
    text = sections[name]
    assert re.search(r"\[N\] or \[B, S\]|shaped like", text)
    assert "float32" in text or "LinearLogProbOutput" in text


def test_chinese_readers_get_every_text_that_a_user_needs(api) -> None:
    """Of the API, the commands, the variables, the errors and doctor's checks."""
    generate = scripts.load(DOCS / "generate.py")
    known, untranslated = generate.chinese_texts(), []

    def translate(text: str) -> str:
        if known(text) == text and re.search(r"[a-z]{3}", re.sub(r"`[^`]*`", "", text)):
            untranslated.append(text)
        return known(text)

    for part in (api.reference, generate._commands, generate._variables, generate._errors, generate._checks):
        part(translate)
    assert not untranslated, f"docs/zh/translations.json lacks {untranslated}"
