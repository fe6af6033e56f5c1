"""Sphinx reads this (`make docs`): one site, English in docs/ and Chinese in docs/zh/, that needs no network."""

from __future__ import annotations

import functools
import gettext
import logging
import sys
from pathlib import Path
from typing import Any

import sphinx

sys.path.insert(0, str(Path(__file__).parent))

import api
import generate
import jieba
from sphinx.search.zh import SearchChinese

import npu_backend

project = "npu-backend"
copyright = "the npu-backend authors, Apache-2.0"
release = npu_backend.__version__
extensions = ["myst_parser"]
exclude_patterns = ["_build", "chips"]
root_doc = "index"
language = "en"

myst_heading_anchors = 3
suppress_warnings = ["toc.not_included", "toc.empty_glob"]  # a page that is being written is no error
smartquotes = False  # `--option` is no dash

html_theme = "furo"
html_title = f"npu-backend {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
html_copy_source = False
html_search_language = "zh"  # splits Chinese into words, and stems English ones
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_theme_options = {"navigation_with_keys": True}

_CHINESE = gettext.translation("sphinx", Path(sphinx.__file__).parent / "locale", ["zh_CN"], fallback=True)


# what Sphinx's catalogue does not have of the theme's words
_OF_THE_THEME = {"On this page": "本页内容", "Contents": "目录", "Previous": "上一页", "Next": "下一页", "Home": "首页"}
jieba.setLogLevel(logging.WARNING)


class _Search(SearchChinese):
    """Sphinx 9 names the browser's stemmer after the language, and ships none for Chinese: the pages' English words."""

    language_name = "English"


@functools.cache
def _parts(chinese: bool) -> dict[str, str]:
    translate = generate.chinese_texts() if chinese else str
    return {**generate.sections(translate), "api": api.reference(translate)}


def _fill(app: Any, name: str, source: list[str]) -> None:
    """Put what the code knows into a page, as docs/generate.py does."""
    source[0] = generate.build(source[0], _parts(name.startswith("zh/")))


def _speak(app: Any, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """The theme's own words in a page's language, and the way to the same page in the other one."""
    chinese = name.startswith("zh/")
    other = name.removeprefix("zh/") if chinese else f"zh/{name}"
    known = app.env.found_docs
    target = other if other in known else "index" if chinese else "zh/index"
    context["other_language"] = (context["pathto"](target), "English" if chinese else "中文")
    if chinese:
        context.update(language="zh-CN", _=_chinese, gettext=_chinese, ngettext=_CHINESE.ngettext)


def _chinese(text: str) -> str:
    return _OF_THE_THEME.get(text) or _CHINESE.gettext(text)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_search_language(_Search)
    app.connect("source-read", _fill)
    app.connect("html-page-context", _speak)
