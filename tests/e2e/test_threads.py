"""`submit`, `cancel` and `load` come from any thread while one thread steps."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import pdinfer as pd
from tests.e2e.setups import PROMPT, by_request, join, local, model_of, pool_of, reference, request, tokens_of
from tests.waiting import TIMEOUT_S, started

NUM_THREADS = 4


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    """Make threads switch after microseconds instead of milliseconds, so that races happen."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def together(work: Callable[[int], None], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Run `work(0)` to `work(NUM_THREADS - 1)` in threads that start together, and `meanwhile` repeatedly until they
    end. Fail when one raised or does not end."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(NUM_THREADS)

    def run(number: int) -> None:
        barrier.wait(TIMEOUT_S)
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            errors.append(error)

    threads = [started(run, number) for number in range(NUM_THREADS)]
    end = time.monotonic() + TIMEOUT_S
    while any(thread.is_alive() for thread in threads):
        assert time.monotonic() < end, "a thread does not end"
        meanwhile()
    if errors:
        raise errors[0]


def test_every_request_of_every_thread_ends_once() -> None:
    events: list[pd.TokenEvent] = []
    with local(num_pages=40) as setup:
        pairing = setup.pairing

        def work(number: int) -> None:
            rng = random.Random(number)
            for index in range(20):
                pairing.submit(request(f"{number}/{index}", rng.choice([1, 5, 12])))
                if rng.random() < 0.3:
                    pairing.cancel(f"{rng.randrange(NUM_THREADS)}/{rng.randrange(20)}")
                setup.prefills[0].load()
                setup.decodes[0].load()

        together(work, lambda: events.extend(pairing.step()))
        assert pairing.drain(TIMEOUT_S)
        events += pairing.step()
        setup.check_idle()
    streams = by_request(events)
    assert len(streams) == 20 * NUM_THREADS
    for stream in streams.values():
        last, tokens = stream[-1], tokens_of(stream)
        assert tuple(tokens) == reference("v3", PROMPT, 12).tokens[: len(tokens)]
        assert last.finish_reason in (pd.FinishReason.LENGTH, pd.FinishReason.CANCELLED)


def test_one_id_is_taken_once() -> None:
    with local() as setup:
        for number in range(30):
            taken: list[str] = []

            def work(_: int, number: int = number, taken: list[str] = taken) -> None:
                with contextlib.suppress(pd.RequestError):
                    taken.append(setup.pairing.submit(request(str(number))))

            together(work)
            assert len(taken) == 1
        assert setup.pairing.num_unfinished == 30


def test_the_queue_never_holds_more_than_it_may() -> None:
    for _ in range(10):
        with local(config=pd.PairingConfig(max_queued_requests=10)) as setup:
            taken: list[str] = []

            def work(number: int, pairing: pd.Pairing = setup.pairing, taken: list[str] = taken) -> None:
                for index in range(10):
                    try:
                        taken.append(pairing.submit(request(f"{number}/{index}")))
                    except pd.Overloaded:
                        return

            together(work)
            assert len(taken) == setup.pairing.num_unfinished == 10


def test_a_request_taken_while_the_pairing_closes_still_ends() -> None:
    for _ in range(20):
        with local() as setup:
            taken: list[str] = []

            def work(number: int, pairing: pd.Pairing = setup.pairing, taken: list[str] = taken) -> None:
                if number == 0:
                    pairing.close()
                    return
                with contextlib.suppress(pd.RequestError):
                    for index in range(20):
                        name = pairing.submit(request(f"{number}/{index}"))
                        taken.append(name)

            together(work)
            assert setup.pairing.num_unfinished == 0
            assert sorted(event.request_id for event in setup.pairing.step()) == sorted(taken)


def test_requests_are_taken_while_ports_join_and_leave() -> None:
    model = model_of()
    pools = [pool_of(model) for _ in range(4)]
    with join(model, "loopback", prefill_pools=pools[:3], decode_pools=pools[3:]) as setup:

        def work(number: int) -> None:
            for index in range(80):
                setup.pairing.submit(request(f"{number}/{index}"))

        def come_and_go() -> None:
            for port in setup.prefills[1:]:
                setup.pairing._ports.drop(port.address)
            for port in setup.prefills[1:]:
                setup.pairing._ports.add(port)

        together(work, come_and_go)
