"""Bugs in what users meet first: installing, the site, and what a release promises."""

from __future__ import annotations

from tests.planted.mutant import Mutant

PUBLIC = "test_public.py::"
CHANGED = PUBLIC + "test_what_breaks_old_code_is_a_change_and_what_it_does_not_notice_is_none"

MUTANTS = [
    Mutant(
        "a new parameter that must be given is no change",
        "            and all(one.default is not None for name, one in ours.items() if name not in theirs)\n",
        "",
        CHANGED,
        where="releases.py",
    ),
    Mutant(
        "parameters may change their places",
        "            and list(self.by_place)[: len(before.by_place)] == list(before.by_place)\n",
        "",
        CHANGED,
        where="releases.py",
    ),
    Mutant(
        "a default may become another",
        "before.default in (None, self.default)",
        "(before.default is None or self.default is not None)",
        CHANGED,
        where="releases.py",
    ),
    Mutant(
        "what the release being made deprecates may go in it",
        r" - \d{4}-\d\d-\d\d\n",
        r" - ",
        PUBLIC + "test_what_a_release_deprecated_may_go",
        where="releases.py",
    ),
    Mutant(
        "a deprecated name takes those that begin like it along",
        'f"{path}.".startswith(f"{name}.")',
        "path.startswith(name)",
        PUBLIC + "test_what_a_release_deprecated_may_go",
        where="releases.py",
    ),
    Mutant(
        "an extra that nobody can find out about",
        "| `plot` |",
        "| plot |",
        "test_install.py::test_the_page_lists_every_extra",
        where="install.md",
    ),
]
