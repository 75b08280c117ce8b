"""Make the pages of the site that have no file below docs/, and the order of all of them, for mkdocs.

- The first page is the top of the README, its first program, and the lines that install pdinfer.
- The reference has a page for each public module, with every public name.
- Files of the repository that a page links to become pages too, so that no link leads out of the site.
"""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()[^)#\s]+")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".jsonl": "json", ".c": "c", ".md": "markdown"}
LOOK_UP = ("troubleshooting", "support", "glossary")
UNDERSTAND = ("reading", "architecture", "protocol", "layouts", "shapes", "kernels", "results")
PROJECT = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}


def on_config(config: Any) -> Any:
    """Order the pages."""
    config.nav = [
        "index.md",
        "start.md",
        "features.md",
        {"How to": ["howto/README.md", *groups((DOCS / "howto" / "README.md").read_text("utf-8"))]},
        {"Look up": [f"{name}.md" for name in LOOK_UP]},
        {"Understand": [f"{name}.md" for name in UNDERSTAND]},
        {"Reference": [{name: f"reference/{name}.md"} for name in reference()]},
        {"Project": ["stability.md", *PROJECT.values()]},
        {"Decisions": ["decisions/README.md", *_folder("decisions", without="README")]},
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that have no file below docs/."""
    from mkdocs.structure.files import File

    made = {"index.md": first_page((ROOT / "README.md").read_text("utf-8"))}
    made |= {page: (ROOT / source).read_text("utf-8") for source, page in PROJECT.items()}
    unreleased = runpy.run_path(str(ROOT / "changes" / "join.py"))["joined"]()
    intro, mark, versions = made["changelog.md"].partition("\n## ")
    made["changelog.md"] = f"{intro.rstrip()}\n\n## Not released yet\n\n{unreleased}{mark}{versions}"
    made |= {f"reference/{name}.md": text for name, text in reference().items()}
    for page in [*DOCS.rglob("*.md"), *(ROOT / source for source in PROJECT)]:
        for source in linked_sources(page):
            made.setdefault(source_page(source), _source_text(source))
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to files of the repository to the pages that show them."""
    here = DOCS / page.file.src_uri
    shown = next((ROOT / source for source, made in PROJECT.items() if made == page.file.src_uri), here)

    def led(found: re.Match[str]) -> str:
        source = _linked(shown, found[0])
        return found[0] if source is None else os.path.relpath(DOCS / source_page(source), here.parent)

    return LINK.sub(led, markdown)


def first_page(readme: str) -> str:
    """Return the top of the README up to its first heading, how to install, and its first program."""
    top = readme[: readme.index("\n## ")]
    install = _first_block("sh", (DOCS / "howto" / "install.md").read_text("utf-8"))
    more = {"Start here": "start.md", "Other ways to install": "howto/install.md", "How to …": "howto/README.md"}
    more |= {"Six files to begin with": "reading.md", "All public names": "reference/pdinfer.md"}
    links = " · ".join(f"[{text}]({page})" for text, page in more.items())
    parts = ["---\nhide: [toc]\n---", top, "## Install", install, "## Run", _first_block("python", readme), links]
    return "\n\n".join(parts) + "\n"


def _first_block(language: str, markdown: str) -> str:
    found = re.search(rf"^```{language}\n.*?^```", markdown, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"the first page shows a block of {language}, and its source has none")
    return found[0]


def groups(markdown: str) -> list[dict[str, list[str]]]:
    """Return the how-tos in the groups that their list has, by the headings of the list."""
    parts = re.split(r"^## (.+)\n", markdown, flags=re.MULTILINE)[1:]
    listed = (re.findall(r"^- \[[^]]*\]\(([\w-]+\.md)\)", part, re.MULTILINE) for part in parts[1::2])
    return [{name: [f"howto/{page}" for page in pages]} for name, pages in zip(parts[::2], listed, strict=True)]


def reference() -> dict[str, str]:
    """Return a page of Markdown for each public module, read from the sources without importing them."""
    package = griffe.load("pdinfer", search_paths=[str(ROOT / "src")], allow_inspection=False, resolve_aliases=True)
    return dict(_pages("pdinfer", package))


def _pages(path: str, module: Any) -> Iterator[tuple[str, str]]:
    inner, parts = {}, [f"# {path}", module.docstring.value.split("\n\n")[0] if module.docstring else ""]
    for name in _public(module):
        member = module.members[name].final_target if module.members[name].is_alias else module.members[name]
        if not member.is_module:
            parts.append(f"::: {path}.{name}")
        elif name in member.members:  # a function named like its file hides it
            options = f"    options:\n      heading: {path}.{name}"
            parts.append(f'<a id="{path}.{name}"></a>\n\n::: {member.path}.{name}\n{options}')
        else:
            inner[name] = member
    yield path, "\n\n".join(parts) + "\n"
    for name, member in inner.items():
        yield from _pages(f"{path}.{name}", member)


def _public(module: Any) -> list[str]:
    """Return the names of `__all__`, or where there is none those that the module defines itself."""
    if module.exports is not None:
        return sorted(str(name) for name in module.exports)
    return sorted(name for name, member in module.members.items() if not name.startswith("_") and not member.is_alias)


def linked_sources(page: Path) -> Iterator[Path]:
    """Yield the files outside docs/ that a page links to, relative to the repository."""
    for target in LINK.findall(page.read_text("utf-8")):
        source = _linked(page, target)
        if source is not None and not source.is_relative_to("docs"):
            yield source


def source_page(source: Path) -> str:
    """Return the page that shows a file of the repository, below docs/."""
    if source.is_relative_to("docs"):
        return str(source.relative_to("docs"))
    return PROJECT.get(str(source)) or f"repository/{source}.md"


def _linked(page: Path, target: str) -> Path | None:
    """Return the file that a link leads to, relative to the repository."""
    path = (page.parent / target).resolve()
    return path.relative_to(ROOT) if "://" not in target and path.is_file() and path.is_relative_to(ROOT) else None


def _source_text(source: Path) -> str:
    language = LANGUAGES.get(source.suffix, "text")
    text = (ROOT / source).read_text("utf-8")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {source}\n\n~~~~{language}\n{text}\n~~~~\n"


def _folder(name: str, *, without: str) -> list[str]:
    return [f"{name}/{page.name}" for page in sorted((DOCS / name).glob("*.md")) if page.stem != without]
