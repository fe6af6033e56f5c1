"""The built site in a real browser: every page in both languages, every internal link, the search, two window sizes.

Needs Debian's Chromium and the environment of `make docs`; says "not run" where one of them is missing. Screenshots go
to build/site-screenshots.
"""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urldefrag, urljoin

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE, SCREENSHOTS = ROOT / "build/site", ROOT / "build/site-screenshots"
SPHINX, CHROMIUM = ROOT / ".venv-docs/bin/python", shutil.which("chromium")
WINDOWS = {"phone": (390, 844), "desktop": (1440, 900)}
# Shows a page in a frame as wide as a window, and says how wide the page has made itself.
FRAME = """<!doctype html><p id=width></p><iframe id=frame></iframe><script>
const [page, width, height] = location.hash.slice(1).split(","), frame = document.getElementById("frame");
frame.style.border = 0; frame.width = width; frame.height = height;
frame.onload = () => document.getElementById("width").textContent = frame.contentDocument.documentElement.scrollWidth;
frame.src = page;
</script>"""

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="not run: no chromium (apt-get install chromium)"),
    pytest.mark.skipif(not SPHINX.exists(), reason="not run: no .venv-docs (make docs)"),
    pytest.mark.timeout(1500),
]


class Page(HTMLParser):
    """The links, the names that a link may point at, the language and the visible words of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.language = ""
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.names.update(value for key in ("id", "name") if (value := found.get(key)))
        if tag == "html":
            self.language = found.get("lang") or ""
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


class Handler(http.server.SimpleHTTPRequestHandler):
    """The site, and FRAME."""

    def do_GET(self) -> None:
        if self.path != "/frame":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(FRAME.encode())
        return None

    def log_message(self, *args: object) -> None:
        pass


def browse(url: str, *options: str) -> tuple[str, str]:
    """What the browser has made of a page once its scripts have run, and what it logged."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=10000", *options, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The site as just built, served on this machine only."""
    subprocess.run([SPHINX, "-m", "sphinx", "-q", "-W", "docs", SITE], cwd=ROOT, check=True, timeout=600)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def errors_in(log: str) -> list[str]:
    return [line for line in log.splitlines() if "CONSOLE" in line and re.search(r"Uncaught|Error|404", line)]


def test_every_page_and_every_internal_link(address: str) -> None:
    """From the front page along the links that the browser shows; a link's name must be in the page it leads to."""
    pages: dict[str, Page] = {}
    waiting, wanted = [urljoin(address, "index.html")], []
    while waiting:
        url = waiting.pop()
        if url in pages:
            continue
        dom, log = browse(url, "--dump-dom")
        assert not errors_in(log), f"{url}: {errors_in(log)}"
        pages[url] = Page(dom)
        for link in pages[url].links:
            target, name = urldefrag(urljoin(url, link))
            if not target.startswith(address):
                continue
            file = SITE / unquote(target.removeprefix(address))
            assert file.exists(), f"{url}: {link}"
            if file.suffix == ".html":
                waiting.append(target)
                wanted.append((url, target, unquote(name)))
    for url, target, name in wanted:
        assert not name or name in pages[target].names, f"{url}: {target}#{name}"
    built = {file.relative_to(SITE).as_posix() for file in SITE.rglob("*.html")}
    assert built - {url.removeprefix(address) for url in pages} <= {"search.html", "genindex.html"}
    for url, page in pages.items():
        chinese = url.startswith(urljoin(address, "zh/"))
        assert page.language.startswith("zh" if chinese else "en"), url


def test_nothing_is_fetched_from_elsewhere() -> None:
    """A host without a network shows the whole site."""
    for page in SITE.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(
            r"<(?:script|img|iframe)[^>]+src=\"https?:|<link[^>]+rel=\"stylesheet\"[^>]+https?:", text
        ), page


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("logits_cache_gib", "ppo_head.html"),
        ("temperature", "head.html"),
        ("故障", "zh/troubleshooting.html"),
        ("环境变量", "zh/configuration.html"),
    ],
)
def test_search(address: str, words: str, found: str) -> None:
    dom, log = browse(f"{address}search.html?q={quote(words)}", "--dump-dom")
    assert not errors_in(log)
    results = {urldefrag(urljoin(address, link))[0] for link in re.findall(r'<li[^>]*>\s*<a href="([^"]+)"', dom)}
    assert urljoin(address, found) in results, results


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    "page", ["index", "api", "troubleshooting", "flows", "models", "zh/index", "zh/api", "zh/choosing", "zh/flows"]
)
def test_window_sizes(address: str, page: str, window: str) -> None:
    """A person looks at the screenshots. Tables and code scroll by themselves: no page is wider than its window."""
    width, height = WINDOWS[window]
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    picture = SCREENSHOTS / f"{page.replace('/', '-')}-{window}.png"
    size = f"--window-size={width},{height}"
    browse(f"{address}{page}.html", size, "--hide-scrollbars", f"--screenshot={picture}")
    assert picture.stat().st_size > 10_000
    dom, _ = browse(f"{address}frame#/{page}.html,{width},{height}", "--hide-scrollbars", "--dump-dom")
    assert re.search(rf'id="width">{width}<', dom), re.findall(r'id="width">.*?<', dom)
