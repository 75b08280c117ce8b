"""The soak itself: its timetable follows from the seed, and its checker finds what is planted."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

import pdinfer as pd
from pdinfer.errors import TransferError
from tests.backends import ROOT, child_environment
from tests.e2e.setups import local, model_of, plain_reference
from tests.soak.book import Book, not_whole
from tests.soak.fronts import soak as front_ends
from tests.soak.measure import LEAST, MIB, Usage, leaks
from tests.soak.ranks import FAULTS, episode
from tests.soak.rolling import roll
from tests.soak.timetable import FAULTS_PER_ROUND, MORTAL, ROUND_S, SECONDS, Case, case, restarts, timetable


def test_the_timetable_is_a_function_of_the_seed() -> None:
    one, same, other = ([timetable(seed, "tcp", number) for number in range(7)] for seed in (1, 1, 2))
    assert one == same != other
    assert one != [timetable(1, "shm", number) for number in range(7)]
    assert [fault.kind for fault in one[0]] == PINNED  # in another process too
    faults = [fault for faults in one for fault in faults]
    assert {kind: sum(fault.kind == kind for fault in faults) for kind in SECONDS} == dict.fromkeys(
        SECONDS, 7 * FAULTS_PER_ROUND // len(SECONDS)
    )
    assert {fault.seat for fault in faults if fault.kind == "kill"} <= set(MORTAL)
    assert all(0 <= fault.at_s <= ROUND_S for fault in faults)
    assert all(bool(fault.attack) is (fault.kind == "attack") for fault in faults)
    cases = [case(1, "tcp", number) for number in range(200)]
    assert cases == [case(1, "tcp", number) for number in range(200)]
    assert any(each.request.output for each in cases)
    assert any(each.request.deadline_s for each in cases)
    assert any(each.cancel_after_s for each in cases)
    assert {each.request.sampling.temperature == 0.0 for each in cases} == {True, False}
    episodes = [episode(1, number) for number in range(len(FAULTS))]
    assert episodes == [episode(1, number) for number in range(len(FAULTS))]
    assert {each.fault for each in episodes} == set(FAULTS)


PINNED = ["cut", "freeze", "attack", "hang", "stall"]


def long_case() -> Case:
    """Return a sampled request with many tokens."""
    cases = (case(1, "tcp", number) for number in range(200))
    return next(
        each
        for each in cases
        if each.request.sampling.temperature
        and each.request.sampling.max_new_tokens - len(each.request.output) > 9
        and each.request.sampling.ignore_eos
    )


def stream_of(request: pd.Request) -> list[pd.TokenEvent]:
    """Return the correct stream."""
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_new_tokens - len(request.output):
        tokens.append(plain_reference(model_of(), request, [*tokens, 0]).tokens[-1])
    expected = plain_reference(model_of(), request, tokens)
    events = [
        pd.TokenEvent(request_id=str(request.request_id), token=token, index=len(request.output) + at, logprob=logprob)
        for at, (token, logprob) in enumerate(zip(expected.tokens, expected.logprobs, strict=True))
    ]
    return [*events[:-1], attrs.evolve(events[-1], finish_reason=pd.FinishReason.LENGTH)]


def told_of(stream: list[pd.TokenEvent]) -> list[str]:
    """Return what the book says of a stream."""
    book = Book(model_of())
    book.submitted(long_case())
    book.heard(stream)
    return [*book.broken, *(f"open: {name}" for name in book.open)]


def test_the_book_finds_what_is_planted() -> None:
    good = stream_of(long_case().request)
    assert told_of(good) == []
    other = (good[4].token or 0) + 1
    assert "wrong_tokens" in told_of([*good[:4], attrs.evolve(good[4], token=other % 97), *good[5:]])[0]
    off = attrs.evolve(good[4], logprob=(good[4].logprob or 0.0) + 0.01)
    assert "wrong_logprobs" in told_of([*good[:4], off, *good[5:]])[0]
    assert "events_after_the_end" in told_of([*good, good[-1]])[0]
    assert "events_out_of_order" in told_of([*good[:3], *good[4:]])[0]
    assert told_of(good[:-1]) == [f"open: {good[0].request_id}"]
    assert "wrong_lengths" in told_of([*good[:-2], attrs.evolve(good[-2], finish_reason=pd.FinishReason.LENGTH)])[0]
    assert "wrong_lengths" in told_of([*good[:-1], attrs.evolve(good[-1], finish_reason=pd.FinishReason.STOP)])[0]
    end = attrs.evolve(good[5], token=None, logprob=None, finish_reason=pd.FinishReason.FAILED)
    assert told_of([*good[:5], attrs.evolve(end, error=TransferError("gone"))]) == []
    assert "nameless_failures" in told_of([*good[:5], end])[0]


@pytest.mark.parametrize("settled_s", [0.0, 6.0])
def test_what_is_lost_or_waits_counts_beside_ports_that_live(settled_s: float) -> None:
    book, request_id = Book(model_of()), str(long_case().request.request_id)
    book.submitted(long_case())
    for _ in range(65):
        book.passed(1.0, settled_s)
    end = pd.TokenEvent(request_id=request_id, token=None, index=0, finish_reason=pd.FinishReason.FAILED)
    book.heard([attrs.evolve(end, error=TransferError("no"))])
    kinds = [sentence.partition(":")[0] for sentence in book.broken]
    assert kinds == (["long_waits", "lost_beside_ports"] if settled_s else [])
    assert book.longest_s == (61.0 if settled_s else 0.0)


def test_in_a_soak_of_restarts_all_four_are_killed() -> None:
    faults = [fault for number in range(9) for fault in restarts(1, "tcp", number)]
    assert {(fault.kind, fault.seat) for fault in faults} == {*itertools.product(("kill", "freeze"), range(4))}


def test_a_planted_lost_page_is_found() -> None:
    with local() as setup:
        for engine in setup.engines:
            assert not_whole(engine.load()) == ""
        pages = setup.pools[0].own(1)
        for engine in setup.engines:
            assert not_whole(engine.load()) == "63 free and 0 cached pages of 64"
        setup.pools[0].release(pages)
        load = setup.decodes[0].load()
        assert not_whole(attrs.evolve(load, num_granted_requests=2)) == "2 granted"
        assert not_whole(attrs.evolve(setup.prefills[0].load(), unsent_bytes=7)) == "7 unsent_bytes"


@pytest.mark.parametrize(
    ("name", "step"), [("rss_bytes", 6 * MIB), ("threads", 1), ("descriptors", 3), ("files", 1), ("none", 0)]
)
def test_growth_is_found_behind_the_warm_up(name: str, step: int) -> None:
    warm = [Usage(index * 100 * MIB, 10 * index, 10 * index, index) for index in range(4)]
    flat = [Usage(400 * MIB + index % 3 * MIB, 40 + index % 2, 40, 4) for index in range(8)]
    series = [*warm, *flat]
    if step:
        series = [attrs.evolve(one, **{name: getattr(one, name) + at * step}) for at, one in enumerate(series)]
    assert [leak.split()[0] for leak in leaks(series)] == [name] * bool(step)
    assert leaks(series[: LEAST - 1]) == []


@pytest.mark.full
def test_engines_are_replaced_under_load() -> None:
    found = roll(2, 12, num_quiet=4)
    assert found["broken"] == []
    assert (found["lost"], found["wrong_tokens"]) == (0, 0)
    assert 0 < found["drained_at_once"] < found["replacements"] == 12
    assert found["moved"] > 0


@pytest.mark.full(minutes=5)
def test_front_ends_and_engines_die_by_turns() -> None:
    found = front_ends(3, 1.0, every_s=6.0)
    assert found["broken"] == []
    assert (found["lost"], found["wrong_tokens"]) == (0, 0)
    assert found["faults"]
    assert sum(found["ends"].values()) > 0


@pytest.mark.full
def test_a_minute_of_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tests.soak", "--minutes", "1", "--seed", "1", "--transports", "tcp,shm"]
    done = subprocess.run(
        [*command, "--ranks", "--out", str(out)], cwd=ROOT, env=child_environment(), check=False, timeout=900
    )
    *_, result = map(json.loads, out.read_text().splitlines())
    assert done.returncode == 0, result["broken"]
    assert result["counts"]["requests"] == sum(result["ends"].values()) > 0
    assert result["faults"]
