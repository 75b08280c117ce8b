"""Joins many small cases of a test in one, which says at which of them it failed: each case that pytest knows costs it
more than a product of tiny matrices does."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
FEW = pytest.StashKey[tuple[int, int]]()
"""How many of its joined cases a test runs where it does not run all, and which of the tests that share them it is."""


def spread(cases: Sequence[T], number: int, shift: int = 0) -> list[T]:
    """Return so many of the cases, or all: evenly apart from the last, which is often the largest, and others at
    another `shift`."""
    number = min(number, len(cases))
    return [cases[-1 - (at * len(cases) // number + shift) % len(cases)] for at in range(number)]


def in_pairs(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return so many of the cases that any two values that meet in one of them meet."""
    pairs = [set(itertools.combinations(((name, repr(value)) for name, value in case.items()), 2)) for case in cases]
    left, chosen = set().union(*pairs), []
    while left:
        at = max(range(len(cases)), key=lambda at: len(pairs[at] & left))
        left -= pairs[at]
        chosen.append(cases[at])
    return chosen


def pairs_each_time(test: Callable[..., None]) -> Callable[..., None]:
    """Above a `for_each` of three axes or more: `make test` runs its cases in pairs, all others run them all."""
    test.in_pairs = in_pairs(test.joined[1])  # type: ignore[attr-defined]
    return test


def is_quick(config: pytest.Config) -> bool:
    """Return whether pytest runs what `make test` does."""
    return config.option.markexpr == "not full" and config.getoption("--hypothesis-profile", None) != "whole"


def for_each(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with each of the values, as `pytest.mark.parametrize` does, but all within one case. Above another
    `for_each` there are all combinations. No value may skip the test, since that would skip the others."""
    keys = (names,) if isinstance(names, str) else tuple(names)
    rows = [dict(zip(keys, value if len(keys) > 1 else (value,), strict=True)) for value in values]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        alone, others = getattr(test, "joined", (test, [{}]))
        cases = [{**row, **other} for row in rows for other in others]
        wanted = inspect.signature(alone).parameters

        @functools.wraps(test)
        def run(request: pytest.FixtureRequest, **given: Any) -> None:
            if "request" in wanted:
                given["request"] = request
            few = request.node.stash.get(FEW, None)
            all_ = getattr(run, "in_pairs", cases) if is_quick(request.config) else cases
            for case in all_ if few is None else spread(all_, *few):
                try:
                    with pytest.MonkeyPatch.context() as patch:  # so that no case has what another one patched
                        if "monkeypatch" in wanted:
                            given["monkeypatch"] = patch
                        alone(**given, **case)
                except pytest.skip.Exception as skipped:
                    pytest.fail(f"a joined case must not be skipped: {case}: {skipped}")
                except BaseException as error:
                    error.add_note("with " + ", ".join(f"{name}={value!r}" for name, value in case.items()))
                    raise

        run.joined = alone, cases  # type: ignore[attr-defined]
        asked = [inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        asked += [each for name, each in wanted.items() if name not in {"request", "monkeypatch", *cases[0]}]
        run.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
        return run

    return decorate
