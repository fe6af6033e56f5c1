"""Write the tables of the documentation that the code knows: `python docs/generate.py`, needs packaging, no torch.

A page says where: `<!-- generated: NAME -->` to `<!-- end -->`, NAME being a key of `sections()`. tests/docs/ compares
every page with what would be written. `<!-- built: NAME -->` is filled in only when the site is built (conf.py), for
what is long and changes often. Pages of docs/zh/ take the texts of `zh/translations.json` for those of the code; a text
that has no translation stays English.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from npu_backend import cli, config, errors, families  # noqa: E402
from npu_backend.doctor import document  # noqa: E402
from npu_backend.patches import liger, verl_npu  # noqa: E402
from npu_backend.recognise.forms import FORMS  # noqa: E402

OPERATORS = [op for op in families.OPERATORS if op != "ppo_head"]  # what is recognised in a family's code
TRANSFORMERS = ("5.10.4", "4.57.6")  # releases of tests/recognised/
_GENERATED = re.compile(r"(<!-- generated: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_BUILT = re.compile(r"<!-- built: ([\w -]+) -->(?:\n\*.*\*$)?", re.MULTILINE)  # with the line that stands there for it
Translate = Callable[[str], str]


def sections(translate: Translate = str) -> dict[str, str]:
    """Every generated part by name."""
    return {
        **document.sections(),
        "checks": _checks(translate),
        "variables": _variables(translate),
        "commands": _commands(translate),
        "reasons": _reasons(translate),
        "variants": _variants(translate),
        "families": _families(translate),
        "liger": _liger(translate),
        "errors": _errors(translate),
        "messages": _messages(),
    }


def fill(text: str, parts: dict[str, str]) -> str:
    """A page with its generated parts as they must be now; those of another generator (docker/) stay as they are."""
    return _GENERATED.sub(
        lambda match: f"{match[1]}{parts[match[2]]}\n{match[3]}" if match[2] in parts else match[0], text
    )


def build(text: str, parts: dict[str, str]) -> str:
    """A page as the site shows it.

    Raises:
        KeyError: a page asks for a part that does not exist.
    """
    return _BUILT.sub(lambda match: parts[match[1]], fill(text, parts))


def pages() -> Iterator[tuple[Path, str]]:
    """Every page of the documentation, and what it must be."""
    english, chinese = sections(), sections(chinese_texts())
    for page in sorted([*DOCS.glob("*.md"), *DOCS.glob("zh/*.md")]):
        yield page, fill(page.read_text(encoding="utf-8"), chinese if page.parent.name == "zh" else english)


def message_templates() -> dict[str, list[str]]:
    """The message of every error that the package raises, by class: what the code fills in is written as `...`."""
    names = {name for name in vars(errors) if name.endswith("Error")}
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted([*ROOT.glob("npu_backend/**/*.py"), *ROOT.glob("patches/*.py")]):
        if "npu_backend/patches" in file.as_posix():  # the link to the folder beside it
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for call in (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or not call.args:
                continue
            name = "HeadInputError" if (call.func.id, file.name) == ("_error", "inputs.py") else call.func.id
            if name in names:
                found[name].append(" ".join(_template(call.args[0]).split()))
    return found


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    return "..."


def _messages() -> str:
    parts = []
    for name, templates in sorted(message_templates().items()):
        told = dict.fromkeys(text for text in templates if text.strip(". "))
        parts.append("\n".join([f"### {name}", "", *(f"* `` {text} ``" for text in told)]))
    return "\n\n".join(parts)


def _errors(translate: Translate) -> str:
    rows = []
    for name, error in vars(errors).items():
        if name.endswith("Error"):
            bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
            rows.append([f"`{name}`", bases, translate((error.__doc__ or "").strip())])
    return _table(translate, ("error", "is a", "meaning"), rows)


def _variables(translate: Translate) -> str:
    rows = [[f"`{name}`", f"`{v.values}`", translate(v.meaning)] for name, v in config.VARIABLES.items()]
    return _table(translate, ("variable", "values", "meaning"), rows)


def _checks(translate: Translate) -> str:
    lines = document.sections()["checks"].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split("|", 1)] for line in lines]
    return _table(translate, ("check", "finds"), [[name, translate(finds)] for name, finds in rows])


def _commands(translate: Translate) -> str:
    parts = []
    for name in cli.command_names():
        module = importlib.import_module(f"npu_backend.cli.{name.replace('-', '_')}")
        parser = argparse.ArgumentParser(add_help=False)
        module.add_arguments(parser)
        formatter = argparse.HelpFormatter(parser.prog, width=1000)
        rows = []
        for action in parser._actions:
            written = action.metavar if not action.option_strings else formatter._format_action_invocation(action)
            rows.append([f"`{written}`", translate(formatter._expand_help(action) if action.help else "")])
        told = (module.__doc__ or "").strip()
        summary, _, rest = told.partition("\n\n")
        parts.append(
            f"## npu-backend {name}\n\n{translate(' '.join(summary.split()))}\n\n{_indented(rest, translate)}"
            f"{_table(translate, ('option', 'meaning'), rows)}"
        )
    return "\n\n".join(parts)


def _indented(text: str, translate: Translate) -> str:
    """A docstring's paragraphs; the indented ones are commands."""
    parts = []
    for paragraph in (p for p in text.split("\n\n") if p):
        if paragraph.startswith("    "):
            parts.append("```\n" + "\n".join(line[4:] for line in paragraph.splitlines()) + "\n```")
        else:
            parts.append(translate(" ".join(paragraph.split())))
    return "".join(f"{part}\n\n" for part in parts)


def _reasons(translate: Translate) -> str:
    rows = [[f"`{op}`", *map(translate, texts)] for op, texts in verl_npu._REASONS.items()]
    rows += [
        [f"`{block.op}`, transformers 4", *map(translate, (block.why, block.upstream, block.remove_when))]
        for block in {patch.why: patch for patch in verl_npu.PATCH_SET.patches}.values()
    ]
    return _table(translate, ("operator", "why", "upstream", "removed when"), rows)


def _variants(translate: Translate) -> str:
    forms: dict[tuple[str, str], int] = defaultdict(int)
    for known in FORMS.values():
        forms[known] += 1
    rows = []
    for op, variant in forms:
        tree = ast.parse((ROOT / f"npu_backend/operators/{op}.py").read_text(encoding="utf-8"))
        (factory,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == variant)
        about = (ast.get_docstring(factory) or "").split("\n\n")[0]
        rows.append([f"`{op}`", f"`{variant}`", str(forms[op, variant]), translate(" ".join(about.split()))])
    return _table(translate, ("operator", "variant", "forms", "for"), rows)


def _families(translate: Translate) -> str:
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for release in TRANSFORMERS:
        text = (ROOT / f"tests/recognised/transformers-{release}.json").read_text(encoding="utf-8")
        for family, operators in json.loads(text).items():
            for op in {one["op"] for one in operators if one["variant"]}:
                found[family][op].append(release.partition(".")[0])
    rows = [[f"`{name}`", *(", ".join(found[name].get(op, ())) for op in OPERATORS)] for name in sorted(found)]
    return _table(translate, ("family", *OPERATORS), [row for row in rows if any(row[1:])])


def _liger(translate: Translate) -> str:
    rows = []
    for family, options in liger.REPLACED.items():
        takes = ", ".join(f"`{name}`" for names in options.values() for name in names)
        leaves = "; ".join(f"`{name}`: {translate(why)}" for name, (_, why) in liger.LEFT.get(family, {}).items())
        rows.append([f"`{family}`", takes, leaves])
    return _table(translate, ("family", "Liger replaces", "stays as it is"), rows)


def _table(translate: Translate, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [[translate(column) for column in columns], ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def chinese_texts() -> Translate:
    """What translates a text of the code, if there is a translation."""
    known: dict[str, str] = json.loads((DOCS / "zh/translations.json").read_text(encoding="utf-8"))
    return lambda text: known.get(text, text)


def main() -> None:
    """Write every page whose generated parts have changed."""
    for page, text in pages():
        if page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
