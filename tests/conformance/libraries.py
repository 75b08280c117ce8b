"""Libraries for cards, as their adapters see them where tests put a stand-in in their place."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import attrs
import pytest

from pdinfer.kernels import hopper, resolve


@contextmanager
def installed(adapter: ModuleType, library: ModuleType | None) -> Iterator[None]:
    """Let `adapter` find `library`, or none, and think of every device as of a card that it serves. It comes before
    torch, and nothing else does."""
    name = adapter.__name__.rpartition(".")[2]
    known = (name, "composition", "torch", "reference")
    providers = [attrs.evolve(each, devices=()) for each in resolve.PROVIDERS if each.name in known]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(sys.modules, name, library)
        monkeypatch.setattr(hopper, "why_not", lambda _device, *library: hopper._why_absent(*library))
        monkeypatch.setattr(resolve, "PROVIDERS", tuple(providers))
        hopper._why_absent.cache_clear()
        yield
    hopper._why_absent.cache_clear()


def check_parameters(stand_in: Callable[..., Any], library: str) -> None:
    """Check that a function of a stand-in has no parameter of another name than the library's, whose parameters are
    named in order, and that what it takes by position comes in this order. So our calls fit the library's too."""
    theirs = library.split()
    ours = [each for each in inspect.signature(stand_in).parameters.values() if each.name != "self"]
    assert {each.name for each in ours} <= {*theirs}
    by_position = [each.name for each in ours if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert by_position == theirs[: len(by_position)]
