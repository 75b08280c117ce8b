"""What all links hold together, and who gives way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdinfer.kv.transports.base import Budget
from pdinfer.testing import VirtualClock
from tests.unit.kv.channel.channels import Case, handoff
from tests.waiting import wait_until


def test_who_holds_little_or_moves_never_gives_way_first() -> None:
    clock = VirtualClock()
    budget = Budget[str](100, clock)
    assert budget.take("little", 5) is None
    clock.advance(1.0)
    for holder in ("stands still", "moves"):
        assert budget.take(holder, 40) is None
    clock.advance(1.0)
    budget.give("moves", 1)
    assert budget.take("moves", 20) == "stands still"
    assert budget.num_bytes == 64
    assert budget.take("moves", 50) == "moves"
    assert budget.num_bytes == 5


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["take", "give", "drop"]), st.integers(0, 40))))
def test_never_more_than_the_limit_and_every_byte_is_counted_once(steps: list[tuple[str, str, int]]) -> None:
    clock = VirtualClock()
    budget, held = Budget[str](100, clock), dict[str, int]()
    for holder, what, num_bytes in steps:
        clock.advance(1.0)
        if what == "take":
            held[holder] = held.get(holder, 0) + num_bytes
            leaves = budget.take(holder, num_bytes)
            assert (leaves is None) == (sum(held.values()) <= 100)
            if leaves is not None:
                assert held.pop(leaves) >= sum(held.values()) / 4
        elif what == "give":
            taken = min(num_bytes, held.get(holder, 0))
            budget.give(holder, taken)
            if holder in held:
                held[holder] -= taken
        else:
            budget.drop(holder)
            held.pop(holder, None)
        assert budget.num_bytes == sum(held.values()) <= 100


def test_a_link_that_is_read_holds_nothing_in_the_end() -> None:
    case = Case("tcp")
    try:
        prefill, decode, grant, pages = case.room()
        for transfer in case.push_all(prefill, grant, pages):
            wait_until(lambda: transfer.done)  # noqa: B023 - asked at once
        prefill.finish(grant, handoff(grant, prefill))
        wait_until(decode.poll)
        waiting = prefill.transport.limits.waiting  # type: ignore[attr-defined]
        wait_until(lambda: not waiting.num_bytes)
    finally:
        case.close()
