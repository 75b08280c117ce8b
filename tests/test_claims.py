"""Every claim of a page is on docs/claims.md, in the page's words, with a test or a results file that exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

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


def wrong_claims() -> Iterator[str]:
    """Yield the claims that their page does not make, or that nothing holds."""
    pages = {name: words(page(name)) for name in SAID}
    for where, says, held_by in CLAIMS:
        if words(says) not in pages[where]:
            yield f"{where} does not say: {says}"
        proofs = re.findall(r"`([^`]+)`", held_by)
        if not proofs:
            yield f"nothing holds: {says}"
        for proof in proofs:  # tests/test_docs.py checks that the tests which a page names exist
            if "::" not in proof and not (proof.startswith("benchmarks/results/") and (ROOT / proof).is_file()):
                yield f"{proof}, which is to hold, is no test and no results file: {says}"


def unclaimed_points() -> Iterator[str]:
    """Yield what pages say that is not on the list, where they promise most."""
    readme, security = page("README.md"), page("SECURITY.md")
    today = readme[readme.index("## What works today") : readme.index("\nNot yet")]
    promised = security[security.index("What follows from it") : security.index("Authentication is")]
    points = [("README.md", row) for row in today.splitlines() if row.startswith("| ") and not row.startswith("| area")]
    points += [("SECURITY.md", row) for row in security.splitlines() if re.match(r"\| .* \| no[,|]? ?\|", row)]
    points += [("SECURITY.md", point) for point in re.split(r"\n- ", promised)[1:]]
    if len(points) <= 20:
        yield f"only {len(points)} points were found"
    for name, point in points:
        if not any(words(says) in words(point) for says in SAID[name]):
            yield f"docs/claims.md has nothing on: {point}"


def test_claims_are_made_and_held_and_every_row_and_every_point_has_one() -> None:
    assert len(CLAIMS) > 100
    found = [*wrong_claims(), *unclaimed_points()]
    assert not found, "\n".join(found)


def test_make_test_all_leaves_nothing_out() -> None:
    makefile = page("Makefile")
    recipe = re.search(r"^test-all:.*\n\t(.*)", makefile, re.MULTILINE)
    assert recipe is not None
    assert re.search(r"pytest -n \d --dist worksteal -q -m 'full or not full'$", recipe[1])
