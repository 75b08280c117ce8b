"""The harness can fail: some run meets each known bug when it is put back; the same run is clean without it."""

from __future__ import annotations

import pytest

from tests.sim import rank_bugs  # noqa: F401 - adds its own to BUGS
from tests.sim.bugs import BUGS, find
from tests.sim.world import World
from tests.slices import one_in


def test_there_are_enough_of_them() -> None:
    assert len(BUGS) >= 12


def test_each_of_them_can_be_put_back() -> None:
    """Most are put back in the long run alone, and what they patch may have moved."""
    for bug in BUGS.values():
        with pytest.MonkeyPatch.context() as patch:
            bug.patch(patch)


RARE = [pytest.param(name, marks=pytest.mark.full) for name, bug in BUGS.items() if bug.rare]


@pytest.mark.parametrize("name", [*one_in(12, [name for name, bug in BUGS.items() if not bug.rare]), *RARE])
def test_a_bug_that_is_put_back_is_found(name: str) -> None:
    seed, how = find(name)
    assert how
    World(seed, BUGS[name].focus).run()
