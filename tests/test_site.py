"""The site builds without a warning, shows every public name with its signature, and needs nobody else's server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.backends import ROOT, child_environment, script
from tests.public import SNAPSHOT
from tests.releases import path_of
from tests.test_pages import SEARCHED

pytestmark = pytest.mark.full
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that a browser loads by itself, and where they say what."""


class Page(HTMLParser):
    """The ids of a page, where its links lead, and what a browser loads to show it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.ids.update(values.get(name, "") for name in ("id", "name"))
        self.links += [values["href"]] if tag == "a" and "href" in values else []
        self.loads += [values[LOADS[tag]]] if LOADS.get(tag) in values else []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=child_environment(NO_MKDOCS_2_WARNING="1"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}


def test_no_link_is_dead(site: Path, pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":  # whose links begin at the root of a server
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            ids = pages[target].ids if target in pages else set()
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in ids):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead
    assert sum(len(page.links) for page in pages.values()) > 1000


def test_every_public_name_is_there_with_its_signature(site: Path, pages: dict[Path, Page]) -> None:
    shown = set[str]().union(*(page.ids for path, page in pages.items() if path.parent.name == "reference"))
    lines = SNAPSHOT.read_text("utf-8").splitlines()
    assert not [path_of(line) for line in lines if path_of(line).replace("pd.", "pdinfer.", 1) not in shown]
    page = re.sub(r"<[^>]*>", "", (site / "reference" / "pdinfer.html").read_text("utf-8"))
    assert max(map(len, re.findall(r"^    \w+: .*,$", page, re.MULTILINE))) < 100  # or else the page clips them
    assert "CacheConfig(\n    *,\n    page_size: int = 64,\n" in page
    text = re.sub(r"\s", "", page)
    for signature in (
        "generate(requests:",
        "Pairing(prefill:PrefillPort|Sequence[PrefillPort],",
        "CacheConfig(*,page_size:int=64,",
    ):
        assert signature in text


def test_it_is_read_without_a_network(pages: dict[Path, Page]) -> None:
    loaded = {load for page in pages.values() for load in page.loads}
    assert not [load for load in loaded if urlsplit(load).netloc]
    assert any(load.endswith(".css") for load in loaded)


def test_search_finds_pages_and_names(site: Path) -> None:
    entries = json.loads((site / "search/search_index.json").read_text("utf-8"))["docs"]
    texts = {entry["location"]: f"{entry['title']} {entry['text']}" for entry in entries}
    assert {
        "security.html",
        "stability.html",
        "howto/install.html",
        "reference/pdinfer.html#pdinfer.Pairing.generate",
    } <= texts.keys()
    for words, page in SEARCHED.items():
        location = page.removeprefix("docs/").removesuffix(".md") + ".html"
        assert any(words in text for at, text in texts.items() if at.partition("#")[0] == location), words


def test_the_first_page_is_the_top_of_the_readme_and_ten_lines_that_run(site: Path) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    first = script("docs/site.py").first_page(readme)
    assert readme[: readme.index("\n## ")] in first
    program = re.search(r"^```python\n(.*?)^```", first, re.MULTILINE | re.DOTALL)
    assert program is not None
    assert program[1] in readme  # so that tests/test_examples.py runs it
    assert len(program[1].splitlines()) <= 12
    assert "Request ──► Pairing" in (site / "index.html").read_text("utf-8")
