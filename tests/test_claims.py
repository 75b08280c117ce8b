"""Every claim of a page is on docs/claims.md, in the page's words, with a test or a results file that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def words(text: str) -> str:
    """Return the text without line breaks, and without the marks of a table or of emphasis that differ between
    pages."""
    return " ".join(re.sub(r"\*\*|^\s*(?:[-*]|\d+\.)\s", "", text, flags=re.MULTILINE).split())


def page(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


CLAIMS = [
    tuple(cell.strip() for cell in line.strip("|").split(" | "))
    for line in page("docs/claims.md").splitlines()
    if re.match(r"\| (?:\w+/)*[\w.-]+\.md \|", line)
]
SAID = {name: [says for where, says, _ in CLAIMS if where == name] for name in {where for where, _, _ in CLAIMS}}


@pytest.mark.parametrize(("where", "says", "held_by"), CLAIMS)
def test_a_claim_is_made_there_and_held(where: str, says: str, held_by: str) -> None:
    assert words(says) in words(page(where)), f"{where} does not say this"
    proofs = re.findall(r"`([^`]+)`", held_by)
    assert proofs
    for proof in proofs:  # tests/test_docs.py checks that the tests which a page names exist
        assert "::" in proof or (proof.startswith("benchmarks/results/") and (ROOT / proof).is_file()), proof


def test_every_row_and_every_point_has_a_claim() -> None:
    """Where a page promises most, it says nothing that is not on the list."""
    readme, security = page("README.md"), page("SECURITY.md")
    today = readme[readme.index("## What works today") : readme.index("\nNot yet")]
    promised = security[security.index("What follows from it") : security.index("Authentication is")]
    points = [("README.md", row) for row in today.splitlines() if row.startswith("| ") and not row.startswith("| area")]
    points += [("SECURITY.md", row) for row in security.splitlines() if re.match(r"\| .* \| no[,|]? ?\|", row)]
    points += [("SECURITY.md", point) for point in re.split(r"\n- ", promised)[1:]]
    assert len(points) > 20
    for name, point in points:
        assert any(words(says) in words(point) for says in SAID[name]), f"docs/claims.md has nothing on: {point}"


def test_make_test_all_leaves_nothing_out() -> None:
    makefile = page("Makefile")
    recipe = re.search(r"^test-all:.*\n\t(.*)", makefile, re.MULTILINE)
    assert recipe is not None
    assert re.search(r"pytest -n \d --dist worksteal -q -m 'full or not full'$", recipe[1])
