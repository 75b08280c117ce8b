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
        ("0P1D", {}, "a cluster is named like"),
        ("P9999D1", {}, "a cluster is named like"),
        ("9999P1D", {}, "at most 1024"),
        ("1P1D", {"ranks": 0}, "ranks must be"),
        ("1P1D", {"decode": {"ranks": 2.0}}, "ranks must be"),
        ("8P1D", {"ranks": 129}, "8 engines of 129 ranks are more than 1024"),
        ("1P1D", {"ranks": 2, "colocated": True}, "colocated engines have one rank"),
        ("1P2D", {"colocated": True}, "come in pairs"),
        ("1P1D", {"num_pagez": 4}, "num_pagez: no field"),
        ("1P1D", {"accept_rate": 1.5}, "accept_rate must be .* at least 0 and at most 1"),
        ("1P1D", {"max_running_requests": 0}, "max_running_requests"),
        ("1P1D", {"bytes_per_s": 0.0, "token_bytes": 8}, "bytes_per_s must be"),
        ("1P1D", {"bytes_per_s": 1e9}, "say how large a token is"),
        ("1P1D", {"step_cv": 3.0}, "step_cv"),
        ("1P1D", {"changes": (Change(engine="D1", at_s=1.0, speed=0.5),)}, "a change is for"),
        ("1P1D", {"decode_s": 0.01}, "decode_s must be Callable"),
        ("1P1D", {"decode_s": lambda rows: math.nan}, "decode_s must return seconds"),
        ("1P1D", {"decode_s": lambda rows: -1.0}, "decode_s must return seconds"),
        ("1P1D", {"prefill_s": lambda rows: None}, "prefill_s must return seconds"),
    ],
)
def test_what_does_not_fit_is_refused(shape: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planning.cluster(shape, **{**GIVEN, **more})


def test_sides_have_limits_of_their_own() -> None:
    found = planning.cluster("2P3D", **GIVEN, page_size=32, prefill={"num_pages": 7}, decode={"num_pages": 9})
    assert (found.num_prefills, found.num_decodes, found.name) == (2, 3, "2P3D")
    assert (found.prefill.num_pages, found.decode.num_pages) == (7, 9)
    assert found.prefill.cache.page_size == found.decode.cache.page_size == 32


@pytest.mark.parametrize("shape", ["P3x3D4", "P4D9", "4P9D", "P1D1"])
def test_a_name_means_the_engines_that_a_profile_of_that_name_has(shape: str) -> None:
    found, of_profile = planning.cluster(shape, **GIVEN), planning.profile(f"deepseek-v3-h800-{shape}")
    assert (found.num_prefills, found.num_decodes) == (len(of_profile.prefill), len(of_profile.decode))
    assert found.name == shape


def test_functions_of_arrays_are_known_by_their_answers() -> None:
    def takes_arrays(decode_s: Any) -> bool:
        return planning.cluster("1P1D", prefill_s=lambda rows: 0.01, decode_s=decode_s).decode.takes_arrays

    def branches(rows: StepRows) -> float:
        return 0.02 if rows.num_context_tokens > 4000 else 0.01

    assert takes_arrays(lambda rows: 0.01 + 1e-8 * rows.num_context_tokens)
    assert takes_arrays(lambda rows: 0.01)
    assert not takes_arrays(branches)
    assert not takes_arrays(lambda rows: max(0.01, 1e-6 * rows.num_context_tokens))
