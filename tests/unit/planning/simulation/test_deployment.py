"""A cluster to simulate is refused, with what is wrong, before anything runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pdinfer import planning
from pdinfer.errors import ConfigError
from pdinfer.planning import Change, StepRows

GIVEN: dict[str, Any] = {"prefill_s": lambda rows: 0.01, "decode_s": lambda rows: 0.01}


@pytest.mark.parametrize(
    ("shape", "more", "said"),
    [
        ("P0D1", {}, "shape of a cluster"),
        ("4P4D", {}, "shape of a cluster"),
        ("P9999D1", {}, "at most 1024"),
        ("P1D2", {"colocated": True}, "come in pairs"),
        ("P1D1", {"num_pagez": 4}, "num_pagez: no field"),
        ("P1D1", {"accept_rate": 1.5}, "accept_rate must be .* at least 0 and at most 1"),
        ("P1D1", {"max_running_requests": 0}, "max_running_requests"),
        ("P1D1", {"bytes_per_s": 0.0, "token_bytes": 8}, "bytes_per_s must be"),
        ("P1D1", {"bytes_per_s": 1e9}, "say how large a token is"),
        ("P1D1", {"step_cv": 3.0}, "step_cv"),
        ("P1D1", {"changes": (Change(engine="D1", at_s=1.0, speed=0.5),)}, "a change is for"),
        ("P1D1", {"decode_s": 0.01}, "must be a function"),
        ("P1D1", {"decode_s": lambda rows: math.nan}, "decode_s must return seconds"),
        ("P1D1", {"decode_s": lambda rows: -1.0}, "decode_s must return seconds"),
        ("P1D1", {"prefill_s": lambda rows: None}, "prefill_s must return seconds"),
    ],
)
def test_what_does_not_fit_is_refused(shape: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planning.cluster(shape, **{**GIVEN, **more})


def test_sides_have_limits_of_their_own() -> None:
    found = planning.cluster("P2D3", **GIVEN, page_size=32, prefill={"num_pages": 7}, decode={"num_pages": 9})
    assert (found.num_prefills, found.num_decodes, found.name) == (2, 3, "P2D3")
    assert (found.prefill.num_pages, found.decode.num_pages) == (7, 9)
    assert found.prefill.cache.page_size == found.decode.cache.page_size == 32


def test_functions_of_arrays_are_known_by_their_answers() -> None:
    def takes_arrays(decode_s: Any) -> bool:
        return planning.cluster("P1D1", prefill_s=lambda rows: 0.01, decode_s=decode_s).decode.takes_arrays

    def branches(rows: StepRows) -> float:
        return 0.02 if rows.num_context_tokens > 4000 else 0.01

    assert takes_arrays(lambda rows: 0.01 + 1e-8 * rows.num_context_tokens)
    assert takes_arrays(lambda rows: 0.01)
    assert not takes_arrays(branches)
    assert not takes_arrays(lambda rows: max(0.01, 1e-6 * rows.num_context_tokens))
