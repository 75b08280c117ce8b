"""Makes the simulated device for the tests that want it, and Triton's interpreter compute as a GPU does."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext

import pytest

from pdinfer.kernels.ops import OP_NAMES
from tests.conformance.interpreter import as_a_gpu
from tests.conformance.native_builds import BODIES, as_native, built_with, why_no_native
from tests.conftest import MISSING
from tests.joined import FEW, spread
from tests.simulated.device import set_up


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--most-cases", type=int, help="run so many cases of each test and op, the same each time")
    parser.addoption("--native-body", help="run native ops in the bodies for such a CPU: see native_builds.BODIES")


def pytest_configure(config: pytest.Config) -> None:
    """With `--native-body`, let the native ops be those of a library that was compiled so: before cases are made, since
    another body may serve other ops."""
    if body := config.getoption("--native-body"):
        context = ExitStack()
        context.enter_context(as_native(built_with(*BODIES[body])))
        config.add_cleanup(context.close)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the files about kernels in C where there can be none, and what `--most-cases` says."""
    kept = {*items}
    if lacking := why_no_native():
        kept -= (in_c := {item for item in items if item.path.name.startswith("test_native_")})
        config.stash[MISSING][lacking, "test"] += len(in_c)
    if most := config.getoption("--most-cases"):
        kept &= few(items, most)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def few(items: Iterable[pytest.Item], most: int) -> set[pytest.Item]:
    """Return so many cases of each test and op, and let joined ones run as many of theirs as are missing."""
    alike: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        params = (
            item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        )
        ops = [value for value in params if isinstance(value, str) and value in OP_NAMES]
        alike[" ".join((item.nodeid.partition("[")[0], *ops))].append(item)
    kept: set[pytest.Item] = set()
    for all_ in alike.values():
        some = spread(all_, most)
        for at, item in enumerate(some):
            item.stash[FEW] = (-(-most // len(some)), at)
        kept |= {*some}
    return kept


@pytest.fixture(autouse=True)
def simulated(request: pytest.FixtureRequest) -> None:
    """Where a test's `device` is "gpusim", let torch know that name."""
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("device") == "gpusim":
        set_up()


@pytest.fixture(autouse=True, scope="session")
def interpreted() -> Iterator[None]:
    """Where kernels are interpreted (test_triton_interpreter.py starts such runs), let them compute as on a GPU."""
    with as_a_gpu() if os.environ.get("TRITON_INTERPRET") == "1" else nullcontext():
        yield
