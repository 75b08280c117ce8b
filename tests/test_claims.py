"""Every claim of a page is in claims.toml, in the page's words, with a test or a results file that exists."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def words(text: str) -> str:
    """Return the text without line breaks, and without the marks of a table or of emphasis that differ between
    pages."""
    return " ".join(re.sub(r"\*\*|^\s*(?:[-*]|\d+\.)\s", "", text, flags=re.MULTILINE).split())


def page(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


CLAIMS: dict[str, dict[str, list[str]]] = tomllib.loads(page("tests/claims.toml"))


def wrong_claims() -> Iterator[str]:
    """Yield the claims that their page does not make, or that nothing holds."""
    for where, claims in CLAIMS.items():
        text = words(page(where))
        for says, held_by in claims.items():
            if words(says) not in text:
                yield f"{where} does not say: {says}"
            if not held_by:
                yield f"nothing holds: {says}"
            for proof in held_by:  # tests/test_docs.py checks that the tests exist
                if "::" not in proof and not (proof.startswith("benchmarks/results/") and (ROOT / proof).is_file()):
                    yield f"{proof}, which is to hold, is no test and no results file: {says}"


def unclaimed_points() -> Iterator[str]:
    """Yield what pages say that is not in the list, where they promise most."""
    features, security = page("docs/features.md"), page("SECURITY.md")
    promised = security[security.index("What follows from it") : security.index("Authentication is")]
    points = [("docs/features.md", row) for row in re.findall(r"^\| .*", features, re.MULTILINE)[1:]]
    points += [("SECURITY.md", row) for row in security.splitlines() if re.match(r"\| .* \| no[,|]? ?\|", row)]
    points += [("SECURITY.md", point) for point in re.split(r"\n- ", promised)[1:]]
    if len(points) <= 20:
        yield f"only {len(points)} points were found"
    for name, point in points:
        if not any(words(says) in words(point) for says in CLAIMS[name]):
            yield f"tests/claims.toml has nothing on: {point}"


def test_claims_are_made_and_held_and_every_row_and_every_point_has_one() -> None:
    assert sum(map(len, CLAIMS.values())) > 100
    found = [*wrong_claims(), *unclaimed_points()]
    assert not found, "\n".join(found)


def test_make_test_all_leaves_nothing_out() -> None:
    makefile = page("Makefile")
    recipe = re.search(r"^test-all:.*\n\t(.*)", makefile, re.MULTILINE)
    assert recipe is not None
    assert re.search(r"pytest -n \d --dist worksteal -q -m 'full or not full'$", recipe[1])
