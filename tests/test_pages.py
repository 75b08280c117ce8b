"""What pages lead a newcomer to is there: files, headings, commands, a row for each error, each how-to once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pdinfer.errors import BY_CODE

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
SEARCHED = {
    "quickstart": "docs/start.md",
    "FAQ": "docs/troubleshooting.md",
    "max_tokens": "docs/troubleshooting.md",
    "CUDA out of memory": "docs/troubleshooting.md",
    "/tokenize": "docs/howto/coming-from-other-servers.md",
}
"""What people type into the search of the site, and where they are led."""


def test_every_error_has_its_row_and_reads_as_it_is_raised() -> None:
    pattern = r"^### `(\w+)`: (\w+)\n\n(?:[^>\n].*\n)+\n> (.+)$"
    rows = re.findall(pattern, PAGES["docs/troubleshooting.md"], re.MULTILINE)
    assert {code: name for code, name, _ in rows} == {code: error.__name__ for code, error in BY_CODE.items()}, (
        'docs/troubleshooting.md has a section "`CODE`: Class" for each code, with a sentence that is quoted'
    )
    sources = " ".join(path.read_text("utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    codes = re.findall(r'^    code\b.* = "([A-Z_]+)"$', sources, re.MULTILINE)
    assert sorted(codes) == sorted(BY_CODE), "a class with its own code stands in errors.py, where BY_CODE finds it"
    said = re.sub(r'"\s*f?"', "", sources)  # texts that stand on several lines
    for part in (part for *_, example in rows for part in re.split(r"…|\d+", example)):
        words = part.split()
        runs = [" ".join(words[at : at + 3]) for at in range(len(words) - 2)]
        assert not runs or any(run in said for run in runs), f"no source says: {part}"


def test_every_how_to_is_listed_once_and_every_new_page_is_led_to() -> None:
    listed = re.findall(r"^- \[[^]]*\]\(([\w-]+\.md)\)", PAGES["docs/howto/README.md"], re.MULTILINE)
    there = [path.name for path in sorted((ROOT / "docs/howto").glob("*.md")) if path.stem != "README"]
    assert sorted(listed) == there
    led_to = re.findall(r"\]\((docs/[\w/-]+\.md)\)", PAGES["README.md"])
    assert {*SEARCHED.values(), "docs/support.md", "docs/glossary.md", "docs/howto/README.md"} <= {*led_to}


def test_what_people_search_for_is_on_a_page() -> None:
    assert not [f"{page} does not say {words}" for words, page in SEARCHED.items() if words not in PAGES[page]]


def test_every_cell_of_the_support_matrix_is_held_by_what_it_says() -> None:
    matrix = re.findall(r"^\| ([^|]+?) \|((?: [^|]+ \|){5})$", PAGES["docs/support.md"], re.MULTILINE)[1:]
    holds = dict(re.findall(r"^- \*\*(.+)\*\*: (.+)$", PAGES["docs/support.md"], re.MULTILINE))
    assert len(matrix) > 20
    assert not holds.keys() - {name for name, _ in matrix}
    for name, said in matrix:
        held_by = holds.get(name, "")
        assert ("**ran**" in said) == bool(re.search("`benchmarks/results/[^`]*-gpu-", held_by)), name
        needs_a_test = any(word in said for word in ("**test**", "simulated", "computed", "read"))
        assert needs_a_test == ("`tests/" in held_by), name


def dead_links() -> Iterator[str]:
    """Yield the links to files or headings that are not there."""
    for page, text in PAGES.items():
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", prose):
            path = (ROOT / page).parent / target if target else ROOT / page
            if "://" in target:
                continue
            if not path.exists():
                yield f"{page} leads to {target}"
            elif heading and heading not in headings(path.read_text("utf-8")):
                yield f"{page} leads to {target}#{heading}"


def headings(markdown: str) -> set[str]:
    """Return the headings of a page as links name them."""
    found = re.findall(r"^#+ (.+)$", markdown, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in found}


def unknown_commands() -> Iterator[str]:
    """Yield the programs, commands and results files that pages name and the repository lacks."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    commands = re.findall(r'add_parser\("([\w-]+)"', (ROOT / "src/pdinfer/__main__.py").read_text("utf-8"))
    for page, text in PAGES.items():
        paths = re.findall(r"(?:python|bash) ((?:examples|benchmarks)/[\w/.]+)", text)
        paths += re.findall(r"\bbenchmarks/results/[\w.-]+\.(?:jsonl?|txt)\b", text)
        made = re.findall(r"(?:`|^ {4})make ([\w-]+)", text, re.MULTILINE)
        run = re.findall(r"python -m pdinfer ([\w-]+)", text)
        yield from (f"{page}: {path}" for path in paths if not (ROOT / path).exists())
        yield from (f"{page}: make {name}" for name in made if name not in targets)
        yield from (f"{page}: python -m pdinfer {name}" for name in run if name not in commands)


def test_links_and_commands_of_pages_lead_somewhere() -> None:
    found = [*dead_links(), *unknown_commands()]
    assert not found, "\n".join(found)
