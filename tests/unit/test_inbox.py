"""A box that many threads fill and one empties: nothing is lost, and no wake-up is missed."""

from __future__ import annotations

import threading
import time

from pdinfer.inbox import Inbox
from tests.forks import FAR_S
from tests.waiting import check_ends, started

TIMEOUT_S = FAR_S


def test_items_come_out_once_and_in_order() -> None:
    inbox = Inbox[int]()
    for item in range(3):
        inbox.put(item)
    assert inbox.peek() == inbox.peek() == [0, 1, 2]
    assert inbox.take() == [0, 1, 2]
    assert inbox.take() == inbox.peek() == []


def test_what_is_peeked_is_a_copy() -> None:
    inbox = Inbox[int]()
    inbox.put(1)
    inbox.peek().clear()
    assert inbox.take() == [1]


def test_a_wake_before_the_sleep_counts() -> None:
    inbox = Inbox[int]()
    assert not inbox.wait(0.0)
    inbox.wake()
    assert inbox.wait(0.0)
    assert inbox.wait(0.0), "until somebody takes"
    assert inbox.take() == []
    assert not inbox.wait(0.0)


def test_a_sleep_ends_with_its_time() -> None:
    start = time.monotonic()
    assert not Inbox[int]().wait(0.03)
    assert 0.03 <= time.monotonic() - start < TIMEOUT_S


def test_a_put_ends_a_sleep() -> None:
    inbox = Inbox[int]()
    putting = threading.Timer(0.02, inbox.put, (5,))
    putting.start()
    start = time.monotonic()
    assert inbox.wait(TIMEOUT_S)
    assert time.monotonic() - start < TIMEOUT_S
    assert inbox.take() == [5]
    putting.join()


def test_listeners_hear_every_wake_and_may_use_the_box() -> None:
    inbox, other = Inbox[int](), Inbox[int]()
    seen: list[list[int]] = []
    inbox.listen(lambda: seen.append(inbox.peek()))
    inbox.listen(other.wake)
    inbox.put(1)
    inbox.wake()
    assert seen == [[1], [1]]
    assert other.wait(0.0)


def test_many_threads_lose_nothing() -> None:
    inbox = Inbox[tuple[int, int]]()
    num_threads, num_items = 6, 400

    def fill(number: int) -> None:
        for item in range(num_items):
            inbox.put((number, item))

    threads = [started(fill, number) for number in range(num_threads)]
    taken: list[tuple[int, int]] = []
    while len(taken) < num_threads * num_items:
        assert inbox.wait(TIMEOUT_S), f"a wake-up was missed after {len(taken)} items"
        taken += inbox.take()
    check_ends(*threads)
    for number in range(num_threads):
        assert [item for who, item in taken if who == number] == list(range(num_items))


def test_two_threads_hand_a_token_back_and_forth() -> None:
    left, right = Inbox[int](), Inbox[int]()
    failures: list[str] = []

    def play(mine: Inbox[int], theirs: Inbox[int]) -> None:
        for turn in range(200):
            if not mine.wait(TIMEOUT_S):
                failures.append(f"nothing came in turn {turn}")
                return
            for token in mine.take():
                theirs.put(token + 1)

    threads = [started(play, *boxes) for boxes in ((left, right), (right, left))]
    left.put(0)
    check_ends(*threads)
    assert not failures
    assert left.take() == [400]
