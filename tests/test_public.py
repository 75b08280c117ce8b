"""The public names that hosts use are unchanged."""

from __future__ import annotations

from tests.public import SNAPSHOT, surface


def test_the_public_surface_is_the_one_that_was_committed():
    committed, now = SNAPSHOT.read_text().splitlines(), surface()
    gone = [f"- {line}" for line in committed if line not in now]
    come = [f"+ {line}" for line in now if line not in committed]
    assert not gone + come, "\n".join(["run `python -m tests.public` if this is meant:", *gone, *come])


def test_names_of_every_kind_are_in_it():
    text = SNAPSHOT.read_text()
    for part in ("pd.PagePool.grant(self", "pd.policy.", "pd.remote.serve(", "pd.RequestError: class(PDInferError)"):
        assert part in text
