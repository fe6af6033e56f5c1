"""The pages say what the code says, their links lead somewhere, and both languages know the same messages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import scripts

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(p for p in ROOT.glob("*/README.md") if p.parent != DOCS)])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Read by those who change the package: English only. Every other page is for users, and has a Chinese one.
FOR_DEVELOPERS = {"adapter", "add_operator", "architecture", "cost_model", "head"}
FOR_USERS = sorted({page.stem for page in DOCS.glob("*.md")} - FOR_DEVELOPERS)
# Of a page for users: commands, variables and settings; figures.
SETTINGS = re.compile(r"NPU_BACKEND_\w+|--[a-z][a-z-]+|use_\w+|impl_backend|logits_cache_gib|shift_labels")
FIGURES = re.compile(r"(?<![A-Za-z_])\d+(?:[.,]\d+)*")
# The first page says other things in Chinese, the second explains what it includes.
OTHER_FIGURES = ("index", "what_runs_on_your_chip")


@pytest.fixture(scope="module")
def generate():
    """docs/generate.py, which is in no package."""
    return scripts.load(DOCS / "generate.py")


def prose(text: str) -> str:
    """A page without its code blocks and comments."""
    return re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """What `#...` may name in a page: its headings as GitHub and MyST spell them, and the labels that MyST knows."""
    headings = re.findall(r"^#{1,3} (.+)$", prose(text), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


def test_generated_parts_are_what_the_code_says(generate) -> None:
    stale = [page.name for page, text in generate.pages() if page.read_text(encoding="utf-8") != text]
    assert not stale, f"{stale}: run `python docs/generate.py`"


def test_a_marker_that_names_nothing_is_an_error(generate) -> None:
    with pytest.raises(KeyError):
        generate.build("<!-- built: no such part -->", generate.sections())


def test_every_part_has_a_page(generate) -> None:
    """What is generated and shown nowhere is dead code."""
    marked = re.compile(r"<!-- (?:generated|built): (.+) -->")
    assert set(generate.sections()) <= {name for page in PAGES for name in marked.findall(page.read_text("utf-8"))}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):  # another site
            continue
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), f"{name}: {target}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found.read_text(encoding="utf-8")), f"{name}: {target}"


def string_templates() -> list[str]:
    """Every string of the source, f-strings with `...` for what is filled in."""
    found = []
    for file in [*ROOT.glob("npu_backend/**/*.py"), *ROOT.glob("patches/*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "..." for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return [" ".join(text.split()) for text in found]


def messages(language: str) -> list[str]:
    """The messages that the troubleshooting page has an entry for."""
    text = (DOCS / language / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^### `(.+?)`", text, re.MULTILINE)


def is_said(message: str, templates: list[str]) -> bool:
    """Whether some code has this message."""
    pieces = [re.escape(piece.strip()) for piece in message.split("...") if piece.strip(" ;.")]
    return any(re.search(".*".join(pieces), text) for text in templates)


def test_quoted_messages_are_those_of_the_code() -> None:
    templates = string_templates()
    python_s_own = {"AttributeError"}
    unsaid = [message for message in messages("") if message not in python_s_own and not is_said(message, templates)]
    assert not unsaid
    assert not is_said("impl_backend=... is " + "no message of any code", templates)


def test_both_languages_know_the_same_messages() -> None:
    assert messages("zh") == messages("")


def both(name: str) -> tuple[str, str]:
    """A page in English and in Chinese."""
    english, chinese = ((DOCS / folder / f"{name}.md").read_text(encoding="utf-8") for folder in ("", "zh"))
    return english, chinese


@pytest.mark.parametrize("name", FOR_USERS)
def test_a_page_for_users_is_there_in_chinese(name: str) -> None:
    _, chinese = both(name)
    assert len(re.findall(r"[\u4e00-\u9fff]", chinese)) > 50
    assert f"\n{name}\n" in (DOCS / "zh" / "index.md").read_text(encoding="utf-8") or name == "index"


@pytest.mark.parametrize("name", FOR_USERS)
def test_the_chinese_page_has_every_setting_and_no_figure_of_its_own(name: str) -> None:
    """The prose around them is the translator's; a figure that the English page has no more is an old one."""
    english, chinese = both(name)
    assert set(SETTINGS.findall(english)) <= set(SETTINGS.findall(chinese))
    if name not in OTHER_FIGURES:
        assert set(FIGURES.findall(chinese)) <= set(FIGURES.findall(english))


def test_chinese_pages_lead_to_chinese_pages() -> None:
    """To the English one of a page only from the page itself, for what is left out."""
    for page in DOCS.glob("zh/*.md"):
        for name in re.findall(r"\]\(\.\./(\w+)\.md", page.read_text(encoding="utf-8")):
            assert name in FOR_DEVELOPERS or name == page.stem, f"{page.name}: {name}.md"


def test_every_folder_at_the_top_explains_itself() -> None:
    """By its README, its docstring, or (docs/) its first page. Hidden folders but .ci belong to tools."""
    folders = [f for f in ROOT.iterdir() if f.is_dir() and (f.name == ".ci" or f.name[0] != ".")]
    for folder in (f for f in folders if f.name not in ("build", "dist", "__pycache__")):
        pages = [folder / name for name in ("README.md", "index.md", "__init__.py") if (folder / name).exists()]
        assert pages, f"{folder.name}/ says nowhere what it is"
        said = pages[0].read_text(encoding="utf-8")
        assert re.match(r'# .+\n\n[\w`]|"""\w', said), f"{pages[0]}: say what the folder is in the first lines"


def test_the_layers_of_the_architecture_are_those_of_the_imports() -> None:
    """The table of docs/architecture.md names what import-linter checks, in its order, and the whole package."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.findall(r'^  "(\(?npu_backend\..+)",$', settings, re.MULTILINE)
    layer_of = {name: n for n, layer in enumerate(layers) for name in re.findall(r"npu_backend\.([\w.]+)", layer)}
    rows = re.findall(r"^\| (`.+?) \|", (DOCS / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
    told = [name for row in rows for name in re.findall(r"`(.+?)`", row)]
    assert set(told) == set(layer_of)
    assert [layer_of[name] for name in told] == sorted(layer_of.values())
    package = {path.stem for path in (ROOT / "npu_backend").glob("[a-z]*") if path.name != "py.typed"}
    assert {name.partition(".")[0] for name in told} == package
