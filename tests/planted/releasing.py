"""Bugs in what users meet first: installing, the site, and what a release promises."""

from __future__ import annotations

from tests.planted.mutant import Mutant

PUBLIC = "tests/test_public.py::"
CHANGED = PUBLIC + "test_what_breaks_old_code_is_a_change"
RULES = "tests/releases.py"

MUTANTS = [
    Mutant(
        "a new parameter that must be given is no change",
        RULES,
        "            and all(one.default is not None for name, one in ours.items() if name not in theirs)\n",
        "",
        CHANGED,
    ),
    Mutant(
        "parameters may change their places",
        RULES,
        "            and list(self.by_place)[: len(before.by_place)] == list(before.by_place)\n",
        "",
        CHANGED,
    ),
    Mutant(
        "a default may become another",
        RULES,
        "before.default in (None, self.default)",
        "(before.default is None or self.default is not None)",
        CHANGED,
    ),
    Mutant(
        "what the release being made deprecates may go in it",
        RULES,
        r" - \d{4}-\d\d-\d\d\n",
        r" - ",
        PUBLIC + "test_what_a_release_deprecated_may_go",
    ),
    Mutant(
        "a deprecated name takes those that begin like it along",
        RULES,
        'f"{path}.".startswith(f"{name}.")',
        "path.startswith(name)",
        PUBLIC + "test_what_a_release_deprecated_may_go",
    ),
    Mutant(
        "an extra that nobody can find out about",
        "docs/howto/install.md",
        "| `plot` |",
        "| plot |",
        "tests/test_install.py::test_the_page_lists_every_extra",
    ),
]
