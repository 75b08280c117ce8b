"""The public names that hosts use are unchanged, and those of a release go only after a deprecation."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import pdinfer as pd
from tests.public import RELEASED, SNAPSHOT, surface
from tests.releases import deprecated, lost, path_of, released_versions

CHANGELOG = (SNAPSHOT.parents[1] / "CHANGELOG.md").read_text("utf-8")
WARNED = """## [0.3.0] - unreleased
### Deprecated
- `pd.Too.late`
## [0.2.0] - 2027-01-02
### Added
- `pd.Engine.step` is faster
### Deprecated
- `pd.Engine.run`: call `step`. `pd.old` goes, too.
## [0.1.0] - 2026-12-01
"""
UNNOTICED = [
    ("pd.f(x: 'int') -> 'int'", "pd.f(x: 'int', y: 'int' = 0) -> 'int'"),
    (
        "pd.f(x: 'int', *, z: 'int' = 1) -> 'int'",
        "pd.f(x: 'int', y: 'int' = 0, *, a: 'str' = '', z: 'int' = 1) -> 'int'",
    ),
    ("pd.f(x: 'int') -> 'int'", "pd.f(x: 'str | int | None' = None) -> 'int'"),
    ("pd.C: class() (*, a: 'int' = 1) -> None", "pd.C: class() (*, b: 'int' = 0, a: 'int' = 1) -> None"),
    ("pd.C.a: property", "pd.C.a: member_descriptor"),
]
"""Lines of the list before and now, between which old code notices no difference."""
BREAKING = [
    ("pd.f(x: 'int') -> 'int'", "pd.g(x: 'int') -> 'int'"),
    ("pd.f(x: 'int') -> 'int'", "pd.f(x: 'int', y: 'int') -> 'int'"),
    ("pd.f(x: 'int') -> 'int'", "pd.f(y: 'int') -> 'int'"),
    ("pd.f(x: 'int', y: 'int') -> 'int'", "pd.f(y: 'int', x: 'int') -> 'int'"),
    ("pd.f(x: 'int') -> 'int'", "pd.f(*, x: 'int') -> 'int'"),
    ("pd.f(x: 'int' = 1) -> 'int'", "pd.f(x: 'int' = 2) -> 'int'"),
    ("pd.f(x: 'int' = 1) -> 'int'", "pd.f(x: 'int') -> 'int'"),
    ("pd.f(x: 'int | None') -> 'int'", "pd.f(x: 'int') -> 'int'"),
    ("pd.f(x: 'int') -> 'int'", "pd.f(x: 'int') -> 'str'"),
    ("pd.f(*xs: 'int') -> 'int'", "pd.f() -> 'int'"),
    ("pd.E: class(PDInferError) (...)", "pd.E: class() (...)"),
    ("pd.C.a: property", "pd.C.a(self) -> 'int'"),
    ("pd.LIMIT: int", "pd.LIMIT: str"),
]


def test_the_public_surface_is_the_one_that_was_committed():
    committed, now = SNAPSHOT.read_text().splitlines(), surface()
    gone = [f"- {line}" for line in committed if line not in now]
    come = [f"+ {line}" for line in now if line not in committed]
    assert not gone + come, "\n".join(["run `python -m tests.public` if this is meant:", *gone, *come])


@pytest.mark.parametrize("kind", [pd.DecodeEngine, pd.remote.DecodeClient])
def test_classes_show_on_every_python_what_their_init_takes(kind: type):
    """Those before 3.11.4 ask `__new__` of a class that does not say it."""
    assert ["self", *kind.__signature__.parameters] == list(inspect.signature(kind.__init__).parameters)


def test_hosts_have_few_names_to_know():
    paths = [re.split(r"[:(]", line)[0].split(".") for line in surface()]
    members = {".".join(path[-2:]) for path in paths if path[-2][:1].isupper()}
    assert len([name for name in dir(pd) if not name.startswith("_")]) <= 50
    assert len(members) <= 900


def test_names_of_every_kind_are_in_it():
    text = SNAPSHOT.read_text()
    for part in ("pd.PagePool.grant(self", "pd.policy.", "pd.remote.serve(", "pd.RequestError: class(PDInferError)"):
        assert part in text


def without_lists(changelog: str, folder: Path) -> list[str]:
    """Return the released versions whose public names nobody kept."""
    return [version for version in released_versions(changelog) if not (folder / f"{version}.txt").is_file()]


def test_every_release_has_its_list_of_names(tmp_path: Path):
    assert not without_lists(CHANGELOG, RELEASED), "run `python -m tests.public --release` on the commit of the release"
    (tmp_path / "0.1.0.txt").touch()
    assert without_lists(WARNED, tmp_path) == ["0.2.0"]


def test_what_was_released_is_still_there():
    for version in list(released_versions(CHANGELOG))[:1]:
        released = (RELEASED / f"{version}.txt").read_text("utf-8").splitlines()
        assert not lost(released, surface(), CHANGELOG), "deprecate these names in a release first: docs/stability.md"


def test_every_line_of_today_is_read_and_fits_itself():
    now = surface()
    assert lost(now, now, "") == []
    assert lost(now, now[1:], "") == [path_of(now[0])]


def test_what_breaks_old_code_is_a_change_and_what_it_does_not_notice_is_none():
    assert not [f"{before}: {now}" for before, now in UNNOTICED if lost([before], [now], "")]
    assert not [f"{before}: {now}" for before, now in BREAKING if lost([before], [now], "") != [path_of(before)]]


def test_what_a_release_deprecated_may_go():
    assert deprecated(WARNED) == {"pd.Engine.run", "pd.old"}
    names = ["pd.Engine.run(self)", "pd.Engine.runner(self)", "pd.old.f(x)", "pd.older: str", "pd.Too.late: str"]
    assert lost(names, [], WARNED) == ["pd.Engine.runner", "pd.Too.late", "pd.older"]
