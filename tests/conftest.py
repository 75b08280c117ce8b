"""Settings that hold for every test: one thread, no network, and no test that is skipped or hangs in silence."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import logging
import os
import time

# Set before torch is imported, which reads these once. The matrices of the tests are tiny: with more than one thread,
# beside a second pytest worker, most of the time goes into waiting for threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"  # where there are several, those that wait leave the core to other tests
os.environ["HF_HUB_OFFLINE"] = "1"

import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.ranks import Ranks

# Torch is imported where tests are collected: the process that only hands them to xdist's workers does without, and
# begins a second earlier.
gc.disable()  # until all tests are collected: of what that makes next to nothing is garbage

# The same examples in every run, and no deadline, which a busy machine would miss. `--hypothesis-profile whole` takes
# as many as Hypothesis would, where a test does not say how many.
settings.register_profile("whole", deadline=None, derandomize=True)
settings.register_profile("pdinfer", settings.get_profile("whole"), max_examples=40)
settings.load_profile("pdinfer")

NO_TIME = "no time left"
EACH_TIME = "not full"
"""What `make test` runs, as pytest's `-m`."""
GOLDEN = (5**0.5 - 1) / 2
DEADLINE = pytest.StashKey[float | None]()
STDERR = pytest.StashKey[int]()
MISSING = pytest.StashKey[Counter[tuple[str, str]]]()
"""How many tests or files are not collected for want of something, of those that were asked for."""
LONGEST_S = 400.0
"""After it a test hangs: longer than limits of their own that tests have, which say more. On two quiet cores none takes
a fifth of it but those that are `full`: these have twice the time, and more where they say how long they are."""
T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pdinfer")
    group.addoption(
        "--far", type=float, help="wait so many seconds for what has to happen, other than tests.forks.FAR_S"
    )
    group.addoption("--host", help="run what is ours under one of tests.hosts.SETTINGS, or the next at each number")
    group.addoption("--longest", type=float, default=LONGEST_S, help="end a test that hangs for so many seconds")
    group.addoption("--minutes", type=float, help="begin no test after so many; what did not run is counted at the end")
    group.addoption(
        "--turn", type=int, default=0, help="begin with other tests than at the turn before, so that all get theirs"
    )


def pytest_configure(config: pytest.Config) -> None:
    if (far_s := config.getoption("--far")) is not None:
        from tests import forks

        forks.FAR_S = far_s  # before any test imports it
    minutes = config.getoption("--minutes")
    config.stash[DEADLINE] = None if minutes is None else time.monotonic() + 60 * minutes
    config.stash[MISSING] = Counter()
    config.stash[STDERR] = os.dup(2)  # a test's own is captured, and lost with its process


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])


def host_of(config: pytest.Config) -> str | None:
    """Return the setting of `--host`."""
    asked = config.getoption("--host")
    if asked is None or not asked.isdigit():
        return asked
    from tests.hosts import SETTINGS

    return [*SETTINGS][int(asked) % len(SETTINGS)]


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if (setting := host_of(config)) is None else f"in a program that sets {setting}"


def needed_s(item: pytest.Item) -> float:
    """Return what a long test says that it needs."""
    full = item.get_closest_marker("full")
    return 60.0 * full.kwargs.get("minutes", 0) if full else 0.0


def watch(item: pytest.Item) -> None:
    """End the process where the test hangs, and print the stacks of its threads: xdist then names the test, counts it
    as failed, and goes on."""
    limit_s = item.config.getoption("--longest") * (2 if item.get_closest_marker("full") else 1) + 3 * needed_s(item)
    faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[STDERR])


def let_logs_through() -> None:
    """Let loggers of torch and transformers hand records on. Where one does not, pytest adds its handlers to it and
    removes them, six times a test, and once a test has imported what makes fifty of them, that takes longer than most
    tests."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith(("torch", "transformers")) and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    watch(item)
    let_logs_through()
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def is_whole(config: pytest.Config) -> bool:
    """Return whether pytest collects all tests, not some that were named."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS


def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str) -> list[pytest.Item] | None:
    """Make no cases of a test that `make test` does not run: see tests/tiers.py."""
    config = collector.config
    if not name.lower().startswith("test") or not is_whole(config) or config.option.markexpr != EACH_TIME:
        return None
    from tests.tiers import is_run_each_time

    return None if is_run_each_time(f"{collector.nodeid}::{name}") else []


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave out of `make test` what tests/tiers.py says, unless it was asked for by name."""
    if not is_whole(item.config):
        return
    from tests.tiers import is_run_each_time

    if not is_run_each_time(item.nodeid):
        item.add_marker(pytest.mark.full)


def pytest_runtest_setup(item: pytest.Item) -> None:
    deadline = item.config.stash[DEADLINE]
    if deadline is not None and time.monotonic() + needed_s(item) > deadline:
        pytest.skip(NO_TIME)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    watch(item)  # once more, since pytest cancels it when a test fails


def pytest_collection_finish() -> None:
    """Leave what pytest has collected out of every later collection of garbage, which would look through it all. The
    little garbage among it is not worth a look either."""
    gc.freeze()
    gc.set_threshold(
        10_000, 20, 20
    )  # garbage of tests is small, and to look for it as often as a host took 5 % of a run
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """With `--host`, let what is ours run as in a program that has set torch so. A fixture would be made for each of
    thousands of tests."""
    if (setting := host_of(session.config)) is None:
        return (yield)
    from tests.conformance import op_suite
    from tests.hosts import LEFT_BY_STEPS, around_ours

    with around_ours(setting), pytest.MonkeyPatch.context() as patch:
        if setting not in LEFT_BY_STEPS:
            patch.setattr(op_suite, "HOST", setting)
        return (yield)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that run jobs as ranks: see tests/ranks.py."""
    from tests.ranks import Ranks

    ranks = Ranks()
    yield ranks
    ranks.close()


def turned(items: list[T], turn: int) -> list[T]:
    """Rotate the tests by a step of the golden section at each turn, so that after a few turns in a row every test was
    early once."""
    first = int(turn * GOLDEN % 1 * len(items))
    return items[first:] + items[:first]


@pytest.hookimpl(trylast=True)  # of the tests that were asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, and leave out those that measure seconds, unless they were asked for, and those that need CUDA
    where there is none."""
    import torch

    torch.set_num_threads(1)
    if is_whole(config) and "timed" not in config.option.markexpr:
        timed = [item for item in items if item.get_closest_marker("timed")]
        config.hook.pytest_deselected(items=timed)
        items[:] = [item for item in items if item not in timed]
    items[:] = turned(items, config.getoption("--turn"))
    # Tests that need ranks come first: `--dist worksteal` gives the beginning to one worker, and others steal from the
    # end, so that only one worker has these processes.
    items.sort(key=lambda item: "ranks" not in getattr(item, "fixturenames", ()))
    leave_out(config, items, lacking)
    if torch.cuda.is_available():
        return
    leave_out(config, items, lambda item: "CUDA" if item.get_closest_marker("gpu") else None)


def leave_out(config: pytest.Config, items: list[pytest.Item], reason: Callable[[pytest.Item], str | None]) -> None:
    """Leave out the tests for which there is a reason, the name of what is missing, and count them under it."""
    missing = {item: name for item in items if (name := reason(item))}
    config.stash[MISSING].update((name, "test") for name in missing.values())
    config.hook.pytest_deselected(items=[*missing])
    items[:] = [item for item in items if item not in missing]


def lacking(item: pytest.Item) -> str | None:
    """Return the first library that the test says it needs and that is not installed."""
    needed = (name for mark in item.iter_markers("needs") for name in mark.args)
    return next((name for name in needed if importlib.util.find_spec(name) is None), None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["missing"] = [*session.config.stash[MISSING].elements()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # each worker of xdist collects all tests
    node.config.stash[MISSING] |= Counter(map(tuple, getattr(node, "workeroutput", {}).get("missing", ())))


def skipped_for(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """Return the libraries that skipped tests would have needed: `["triton (3 tests)"]`.

    Understands `pytest.importorskip`, in a test and at the top of a module. Other skips have reasons of their own and
    are not counted.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        unit = "module" if isinstance(report, pytest.CollectReport) else "test"
        if missing := re.search(r"could not import '(\w+)", reason):
            counts[missing[1], unit] += 1
    return in_words(counts)


def in_words(counts: Counter[tuple[str, str]]) -> list[str]:
    return [f"{name} ({count} {unit}{'s' * (count > 1)})" for (name, unit), count in sorted(counts.items())]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Called where the reports of all xdist workers arrive; a worker has no terminal.
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "information":
                terminalreporter.write_line(f"for information: {value}")
    late = [report for report in terminalreporter.stats.get("skipped", []) if NO_TIME in str(report.longrepr)]
    if late:
        terminalreporter.write_line(f"{len(late)} tests did not run for lack of time; another turn begins elsewhere")
    if libraries := skipped_for(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(f"skipped for a missing library: {', '.join(libraries)}")
    if missing := in_words(+terminalreporter.config.stash[MISSING]):
        terminalreporter.write_line(f"not collected for want of {', '.join(missing)}")
