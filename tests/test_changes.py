"""Each change has a file below changes/, and a release joins them into the changelog."""

from __future__ import annotations

import runpy
from pathlib import Path

from tests.backends import ROOT
from tests.releases import released_versions

JOIN = runpy.run_path(str(ROOT / "changes" / "join.py"))


def test_every_file_is_joined_and_short() -> None:
    found, text = sorted((ROOT / "changes").rglob("*.md")), JOIN["joined"]()
    assert not [path for path in found if path.read_text("utf-8").strip().partition("\n")[0] not in text]
    assert not [path for path in found if len(path.read_text("utf-8").splitlines()) > 8]


def test_a_release_moves_the_changes_above_the_versions_before(tmp_path: Path) -> None:
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\nHow to read it.\n\n## [0.1.0] - 2026-12-01\n\n- old\n", "utf-8")
    for name, text in (("fixed/it", "One line\nand another.\n"), ("added/for-hosts/b", "B.\n"), ("added/a", "A.\n")):
        (path := tmp_path / "changes" / f"{name}.md").parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    JOIN["release"]("0.2.0", changelog, tmp_path / "changes")
    found = released_versions(changelog.read_text("utf-8"))
    assert [*found] == ["0.2.0", "0.1.0"]
    told = "### Added\n\n- A.\n\n**For hosts**\n\n- B.\n\n### Fixed\n\n- One line\n  and another.\n\n"
    assert found["0.2.0"].partition("\n\n")[2] == told
    assert not [*(tmp_path / "changes").rglob("*.md")]
