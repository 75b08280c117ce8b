"""Join the changes of this folder, one file each, into the text of the changelog.

    python changes/join.py          # print what is not released yet
    python changes/join.py 0.1.0    # a release: move it to CHANGELOG.md, under this version and today's date

A change is `changes/KIND/NAME.md` or `changes/KIND/GROUP/NAME.md`. Links in it are relative to CHANGELOG.md.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
KINDS = ("added", "changed", "deprecated", "removed", "fixed", "security")
"""The kinds of Keep a Changelog, in its order."""


def joined(folder: Path = HERE) -> str:
    """Return the changes as Markdown, by kind and group; the text is empty when there are none."""
    parts = []
    for kind in KINDS:
        parts += [f"### {kind.capitalize()}\n"] if any((folder / kind).rglob("*.md")) else []
        for group in [folder / kind, *sorted(path for path in (folder / kind).glob("*/"))]:
            entries = [path.read_text("utf-8").strip() for path in sorted(group.glob("*.md"))]
            title = group.name[:1].upper() + group.name[1:].replace("-", " ")
            parts += [f"**{title}**\n"] if entries and group.name != kind else []
            parts += ["".join("- " + entry.replace("\n", "\n  ") + "\n" for entry in entries)] if entries else []
    return "\n".join(parts)


def release(version: str, changelog: Path, folder: Path = HERE) -> None:
    """Move the changes to the top of the changelog's versions, under a version and today's date."""
    text = changelog.read_text("utf-8")
    heading = f"## [{version}] - {datetime.now(UTC):%Y-%m-%d}\n\n"
    intro, mark, before = text.partition("\n## ")
    changelog.write_text(f"{intro.rstrip()}\n\n{heading}{joined(folder)}{mark}{before}", "utf-8")
    for kind in KINDS:
        for path in (folder / kind).rglob("*.md"):
            path.unlink()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        release(sys.argv[1], HERE.parent / "CHANGELOG.md")
    else:
        print(joined(), end="")
