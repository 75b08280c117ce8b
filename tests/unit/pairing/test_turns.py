"""Engines that compute in one thread, in simulated time: how long prefill holds up what decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.execution.drafting import Draft
from pdinfer.execution.sampling import Draw, Drawn
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.model.batch import Row
from pdinfer.pairing.ports import Ports
from pdinfer.scheduling.rules import WORTH_A_STEP
from pdinfer.testing import VirtualClock, random_model
from tests.unit.planning.simulation.timed import NUM_LAYERS, TOKEN, PlainModel, SameToken

STEP_S, TOKEN_S = 0.05, 0.002
"""What a prefill step of 512 tokens takes on a core or two."""
DECODE_S, SEQUENCE_S = 0.05, 0.01


@attrs.frozen
class SlowRunner(SameToken):
    """A runner whose steps take time of a clock and compute nothing."""

    clock: VirtualClock
    chunks: list[int] = attrs.field(factory=list)

    def prefill(self, rows: Sequence[Row]) -> Iterator[tuple[int, None]]:
        self.chunks.append(sum(len(row.tokens) for row in rows))
        self.clock.advance(STEP_S + TOKEN_S * self.chunks[-1])
        yield from ((layer, None) for layer in range(NUM_LAYERS))

    def decode(self, rows: Sequence[Row], draws: Sequence[Draw], drafts: Sequence[Draft]) -> list[list[Drawn]]:
        self.clock.advance(DECODE_S + SEQUENCE_S * len(rows))
        return [[Drawn(token=TOKEN, logprob=-1.0)] for _ in rows]


def pair(clock: VirtualClock, **config: Any) -> tuple[pd.Pairing, SlowRunner]:
    """Return a Pairing of two engines in this thread, and the runner of both."""
    runner, asked = SlowRunner(clock), pd.EngineConfig(**config)

    class Prefill(pd.PrefillEngine):
        def _make_runner(self) -> Any:
            return runner

    class Decode(pd.DecodeEngine):
        def _make_runner(self) -> Any:
            return runner

    model: Any = PlainModel()
    pool = pd.PagePool(model, pd.CacheConfig(num_pages=2000, prefix_cache=False))
    ends = KVChannel.loopback(pool, pool)
    prefill, decode = (kind(model, end, asked, clock=clock) for kind, end in zip((Prefill, Decode), ends, strict=True))
    return pd.Pairing(prefill, decode, clock=clock), runner


def submit(pairing: pd.Pairing, name: str, num_tokens: int, num_new: int) -> None:
    sampling = pd.SamplingParams(max_new_tokens=num_new, ignore_eos=True, temperature=0.0)
    pairing.submit(pd.Request(request_id=name, prompt=(3,) * num_tokens, sampling=sampling))


def run(pairing: pd.Pairing, clock: VirtualClock, until: str | None = None) -> dict[str, list[float]]:
    """Step until everything has ended, or `until` has. Return when the tokens of each request came."""
    times: dict[str, list[float]] = {}
    while pairing.num_unfinished:
        ended = False
        for event in pairing.step():
            assert event.error is None
            times.setdefault(event.request_id, []).append(clock())
            ended |= event.finish_reason is not None and event.request_id == until
        if ended:
            break
    return times


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def learned(clock: VirtualClock, **config: Any) -> tuple[pd.Pairing, SlowRunner]:
    """Return a pair that has taken steps of many sizes."""
    pairing, runner = pair(clock, **config)
    for at in range(12):
        submit(pairing, f"before {at}", 40 * (at + 1), 3)
        run(pairing, clock)
    runner.chunks.clear()
    return pairing, runner


@pytest.mark.parametrize("target_itl_s", [0.5, 1.0, 2.0])
def test_a_running_sequence_is_held_up_no_longer_than_the_target(target_itl_s: float) -> None:
    clock = VirtualClock()
    pairing, runner = learned(clock, target_itl_s=target_itl_s)
    submit(pairing, "runs", 10, 60)
    pairing.step()
    submit(pairing, "long", 6000, 2)
    submit(pairing, "also", 2000, 2)
    times = run(pairing, clock)
    held_up = [gap for gap in gaps(times["runs"]) if gap > 0.1]
    assert held_up
    assert max(held_up) <= 1.05 * target_itl_s
    assert max(held_up) >= 0.9 * target_itl_s  # and the chunks are no smaller than they need be
    assert sum(runner.chunks) == 8010


def test_without_a_target_and_without_chunks_nothing_is_cut() -> None:
    for config in ({"target_itl_s": None}, {"chunked_prefill_size": -1, "target_itl_s": 0.5}):
        clock = VirtualClock()
        pairing, runner = learned(clock, **config)
        submit(pairing, "runs", 10, 60)
        pairing.step()
        submit(pairing, "long", 4000, 2)
        run(pairing, clock)
        assert 4000 in runner.chunks


def test_chunks_are_whole_while_nothing_decodes() -> None:
    clock = VirtualClock()
    pairing, runner = learned(clock, target_itl_s=0.5)
    submit(pairing, "long", 6000, 2)
    run(pairing, clock)
    assert runner.chunks == [4096, 1904]


def test_the_first_steps_of_an_engine_keep_to_the_best_speed_so_far() -> None:
    """The terms of its costs are not told apart yet."""
    clock = VirtualClock()
    pairing, runner = pair(clock, target_itl_s=1.0)
    submit(pairing, "runs", 400, 40)
    while not runner.chunks:
        pairing.step()
    submit(pairing, "long", 6000, 2)
    times = run(pairing, clock, until="runs")
    assert 0.5 < max(gaps(times["runs"])) <= 1.2
    assert runner.chunks[1] < 600


def test_an_impossible_target_leaves_steps_that_are_worth_their_cost() -> None:
    clock = VirtualClock()
    pairing, runner = learned(clock, target_itl_s=0.01)
    submit(pairing, "runs", 10, 60)
    pairing.step()
    submit(pairing, "long", 3000, 2)
    run(pairing, clock)
    assert min(runner.chunks[1:-1]) >= 0.9 * WORTH_A_STEP * STEP_S / TOKEN_S


def test_a_prefill_that_leaves_the_pairing_takes_no_turns_any_more() -> None:
    clock = VirtualClock()
    pairing, _ = pair(clock)
    told: list[object] = []
    port: Any = next(port for port in pairing.ports if port.role == "prefill")
    port.take_turns = told.append
    ports = Ports()
    ports.add(port)
    ports.drop(port.address)
    assert callable(told[0])
    assert told[1:] == [None]


def test_clients_of_engines_elsewhere_do_not_hold_anybody_up() -> None:
    clock = VirtualClock()
    pairing, runner = learned(clock, target_itl_s=0.5)
    prefill: Any = next(port for port in pairing.ports if port.role == "prefill")
    decode: Any = next(port for port in pairing.ports if port.role == "decode")
    assert prefill._decoding_s() is None  # nothing runs
    submit(pairing, "runs", 10, 60)
    while not runner.chunks:
        pairing.step()
    pairing.step()
    assert prefill._decoding_s() == pytest.approx(DECODE_S + SEQUENCE_S, rel=0.1)
    assert decode.next_step_s() == prefill._decoding_s()
    pairing._ports.decodes = {decode.address: object()}  # type: ignore[dict-item]
    assert prefill._decoding_s() is None


def test_cut_chunks_give_the_same_tokens() -> None:
    model = random_model()
    given: dict[float | None, list[tuple[str, int, int | None]]] = {}
    sizes: dict[float | None, int] = {}
    for target_itl_s in (None, 1e-6):
        engine = pd.EngineConfig(target_itl_s=target_itl_s)
        with pd.Pairing.local(model, cache=pd.CacheConfig(page_size=4, num_pages=200), engine=engine) as pairing:
            prefill: Any = next(port for port in pairing.ports if port.role == "prefill")
            submit(pairing, "runs", 3, 24)
            while not pairing.step():
                pass
            submit(pairing, "long", 60, 4)
            events = [event for _ in iter(lambda: pairing.num_unfinished, 0) for event in pairing.step()]
            given[target_itl_s] = sorted((event.request_id, event.index, event.token) for event in events)
            sizes[target_itl_s] = prefill._scheduler.num_steps
    assert given[None] == given[1e-6]
    assert sizes[1e-6] > sizes[None]
