"""A host that forks: its children refuse what is their parent's, end none of it, and may make their own."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

import pdinfer as pd
from pdinfer.moe.balance.process import SolverProcess
from pdinfer.process.forked import OfOneProcess
from tests.e2e.setups import (
    PROMPT,
    Setup,
    by_request,
    collect,
    join,
    local,
    model_of,
    pool_of,
    reference,
    remote,
    request,
    tokens_of,
)
from tests.forks import check_ended, fork
from tests.slices import one_in
from tests.waiting import TIMEOUT_S, check_ends, started, wait_until

RIGHT = list(reference("v3", PROMPT, 5).tokens)


def check_serves(pairing: pd.Pairing, name: str) -> None:
    pairing.submit(request(name))
    assert tokens_of(by_request(collect(pairing))[name]) == RIGHT


@contextmanager
def served(kind: str) -> Iterator[tuple[Setup, list[OfOneProcess]]]:
    """A setup over `kind`, and all that belongs to it."""
    with ExitStack() as stack:
        if kind == "shared":
            setup = stack.enter_context(local())
        else:
            setup = stack.enter_context(two_sided(kind))
        engines = setup.engines
        parts = [part for engine in engines for part in (engine.channel, engine.experts)]
        yield setup, [setup.pairing, *engines, *setup.pools, *parts]


def two_sided(kind: str) -> Setup:
    model = model_of()
    pools = [pool_of(model, num_pages=64) for _ in range(2)]
    if kind != "shm":
        return join(model, kind, prefill_pools=pools[:1], decode_pools=pools[1:])
    ends = [pd.KVChannel(pool, pd.kv.ShmTransport()) for pool in pools]
    prefill, decode = pd.PrefillEngine(model, ends[0]), pd.DecodeEngine(model, ends[1])
    return Setup(pairing=pd.Pairing(prefill, decode), prefills=[prefill], decodes=[decode])


def calls_of(thing: OfOneProcess) -> list[Callable[[], object]]:
    """Every public method, called without arguments, and every property."""

    def call(name: str) -> object:
        value = getattr(thing, name)
        return value() if callable(value) else value

    names = {name for base in type(thing).__mro__ for name in vars(base)}
    kept = ("close", "ends", "role", "loopback", "local")
    return [lambda name=name: call(name) for name in names if not name.startswith("_") and name not in kept]


def refuses_all(things: list[OfOneProcess]) -> None:
    """In a child: nothing answers, what ends things does nothing, and all can be printed."""
    for thing in things:
        assert repr(thing).startswith(f"{type(thing).__name__}(a copy")
        for call in calls_of(thing):
            with pytest.raises(pd.Forked, match=r'"spawn"'):
                call()
        with thing if hasattr(thing, "__exit__") else ExitStack():
            pass
        thing.close() if hasattr(thing, "close") else None


@pytest.mark.parametrize(
    ("kind", "num_workers"), one_in(3, itertools.product(["shared", "loopback", "tcp", "unix", "shm"], [2, 1, 4]))
)
def test_children_refuse_and_the_parent_goes_on(kind: str, num_workers: int) -> None:
    with served(kind) as (setup, things):
        pairing = setup.pairing
        check_serves(pairing, "before")
        pairing.submit(request("under way"))
        pairing.step()
        children = [fork(lambda: refuses_all(things)) for _ in range(num_workers)]
        assert tokens_of(by_request(collect(pairing))["under way"]) == RIGHT
        for child in children:
            check_ended(child)
        check_serves(pairing, "after")
        setup.check_idle()


def test_a_child_of_a_thread_ends_by_itself_and_ends_nothing() -> None:
    with served("tcp") as (setup, things):
        check_serves(setup.pairing, "before")
        children: list[int] = []
        check_ends(started(lambda: children.append(fork(lambda: refuses_all(things)))))
        check_ended(children[0])
        check_serves(setup.pairing, "after")


def test_a_child_that_leaves_by_sys_exit_takes_nothing_along(tmp_path: Path) -> None:
    """It runs what is registered to run at the end of a process, and drops all objects."""
    with served("shm") as (setup, things):
        check_serves(setup.pairing, "before")
        script_ended = multiprocessing.get_context("fork").Process(target=refuses_all, args=(things,))
        script_ended.start()
        script_ended.join(TIMEOUT_S)
        assert script_ended.exitcode == 0
        check_serves(setup.pairing, "after")


def test_a_child_may_drop_an_iterator_of_its_parent() -> None:
    with local() as setup:
        events = setup.pairing.generate([request("a")])
        first = next(events)

        def drop() -> None:
            nonlocal events
            with pytest.raises(pd.Forked):
                list(events)
            events = iter(())

        check_ended(fork(drop))
        assert tokens_of([first, *events]) == RIGHT


@pytest.mark.parametrize("engine", [None, pd.EngineConfig(num_threads=1)])
def test_a_child_may_make_its_own_pairing(engine: pd.EngineConfig | None) -> None:
    def make() -> None:
        torch.set_num_threads(1)
        with pd.Pairing.local(model_of(), engine=engine) as pairing:
            check_serves(pairing, "own")
            grandchild = fork(lambda: refuses_all([pairing]))
            check_ended(grandchild)

    with local() as setup:
        check_serves(setup.pairing, "before")
        check_ended(fork(make))
        check_serves(setup.pairing, "after")


def test_threads_that_would_never_come_are_not_waited_for() -> None:
    def make() -> None:
        torch.set_num_threads(2)
        with pytest.raises(pd.Forked, match=r"set_num_threads\(1\)"):
            pd.Pairing.local(model_of())

    with local():
        check_ended(fork(make))


def test_clients_refuse_and_their_engines_stay() -> None:
    with local() as setup:
        clients = map(remote, setup.engines)
        with next(clients) as prefill, next(clients) as decode, pd.Pairing(prefill, decode) as pairing:
            check_serves(pairing, "before")
            check_ended(fork(lambda: refuses_all([pairing, prefill, decode])))
            check_serves(pairing, "after")


def test_a_solver_stays_its_parents() -> None:
    import numpy as np

    from pdinfer.moe.placement.placement import ExpertPlacement

    solver = SolverProcess(lambda: 0.0)
    try:
        load = np.ones((1, 4), np.int64)
        placement = ExpertPlacement(physical_to_logical_map=[[0, 1, 2, 3]], num_logical_experts=4, num_ranks=2)
        solver.ask(load, placement)
        process = solver._process
        assert process is not None
        check_ended(fork(lambda: refuses_all([solver])))
        assert solver._process is process
        answers: list[bytes] = []
        wait_until(lambda: bool(answers.append(solver.poll()) or answers[-1]))
    finally:
        solver.close()


def test_nothing_new_is_made_of_what_is_the_parents() -> None:
    def make() -> None:
        for call in (
            lambda: pd.KVChannel.loopback(setup.pools[0]),
            lambda: pd.DecodeEngine(model_of(), setup.decodes[0].channel),
            lambda: pd.Pairing(setup.prefills[0], setup.decodes[0]),
            lambda: pd.remote.serve(setup.decodes[0], Pipe()[0]),
        ):
            with pytest.raises(pd.Forked, match="spawn"):
                call()

    with local() as setup:
        check_ended(fork(make))
