"""Planted bugs in what pages tell a newcomer: they say what is not, or no longer, so."""

from __future__ import annotations

from tests.planted.mutant import Mutant

PAGES = "test_pages.py::"
_ERRORS = f"{PAGES}test_every_error_has_its_row_and_reads_as_it_is_raised"
_LED = f"{PAGES}test_links_and_commands_of_pages_lead_somewhere"

MUTANTS = [
    Mutant("an error has another code than its row", 'code = "RANK_LOST"', 'code = "RANK"', _ERRORS),
    Mutant(
        "an error reads otherwise than its row",
        "tokens plus max_new_tokens {",
        "tokens and max_new_tokens {",
        _ERRORS,
    ),
    Mutant(
        "a row of an error is missing",
        "### `FORKED`: Forked",
        "### Forked",
        _ERRORS,
        "docs/troubleshooting.md",
    ),
    Mutant("pages tell of a command that is gone", '"build-kernels", help=', '"compile", help=', _LED),
    Mutant(
        "a page leads to a heading that is gone",
        "## 5. A real model on one card",
        "## 5. A real model",
        _LED,
        "docs/start.md",
    ),
    Mutant(
        "a how-to is in no group",
        "- [Profile](profile.md): a timeline of every step\n",
        "",
        f"{PAGES}test_every_how_to_is_listed_once_and_every_new_page_is_led_to",
        "docs/howto/README.md",
    ),
    Mutant(
        "search finds nothing for what people type",
        "### CUDA out of memory",
        "### Out of memory",
        f"{PAGES}test_what_people_search_for_is_on_a_page",
        "docs/troubleshooting.md",
    ),
    Mutant(
        "the matrix says that a thing ran, and no results file holds it",
        "| Mooncake over TCP | **test** | – |",
        "| Mooncake over TCP | **test** | **ran** |",
        f"{PAGES}test_every_cell_of_the_support_matrix_is_held_by_what_it_says",
        "docs/support.md",
    ),
]
