"""Prefill and decode in processes of their own: the same tokens, and a process that dies takes only its own along."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.pairing.request import CANCEL_GRACE_S, DEADLINE_GRACE_S
from pdinfer.process.silence import SESSIONS
from pdinfer.testing import VirtualClock
from tests.e2e.setups import (
    PROMPT,
    Tally,
    by_request,
    collect,
    greedy,
    judged,
    local,
    model_of,
    plain_reference,
    prompt_of,
    reference,
    request,
    step_until,
    tokens_of,
)
from tests.e2e.worker import Worker, Workers, left_of_five
from tests.waiting import TIMEOUT_S, started, wait_until

EXPECTED = list(reference("v3", PROMPT, 5).tokens)
PATIENT = pd.remote.RemoteConfig(silent_s=3600.0)
"""For a client to which silence is no loss: what ends in spite of it was not found out that way."""


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with closing(Workers(4)) as pool:
        yield pool


@attrs.frozen
class Fleet:
    """A Pairing of engines in worker processes."""

    pairing: pd.Pairing
    prefills: list[Worker]
    decodes: list[Worker]
    ports: list[Any]

    def close(self) -> None:
        """Closes, and checks that every engine still alive was closed whole."""
        self.pairing.close()
        for worker in [*self.prefills, *self.decodes]:
            if worker.process.is_alive():
                assert worker.stopped() == (0, 0)

    def step_until(self, num_events: int) -> list[pd.TokenEvent]:
        return step_until(self.pairing, lambda events: len(events) >= num_events)

    def step_until_ended(self, name: str) -> list[pd.TokenEvent]:
        return step_until(
            self.pairing, lambda events: any(event.request_id == name and event.finish_reason for event in events)
        )


@contextmanager
def fleet(
    workers: Workers,
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    clock: Callable[[], float] = time.monotonic,
    pairs: pd.PairingConfig | None = None,
    **more: Any,
) -> Iterator[Fleet]:
    """That many engines of each side; `clock` and its config `pairs` are for the pairing, `more` is for the engines."""
    taken = workers.take(num_prefill + num_decode)
    prefills, decodes = taken[:num_prefill], taken[num_prefill:]
    prefill_ports = [worker.serve("prefill", **more) for worker in prefills]
    decode_ports = [worker.serve("decode", **more) for worker in decodes]
    pairing = pd.Pairing(prefill_ports, decode_ports, policy=pd.policy.round_robin, clock=clock, config=pairs)
    made = Fleet(pairing, prefills, decodes, [*prefill_ports, *decode_ports])
    yield made
    made.close()


def check_greedy(stream: Sequence[pd.TokenEvent]) -> None:
    """The tokens behind PROMPT are the best of the model, each behind those before it."""
    tokens = tokens_of(stream)
    assert tuple(tokens) == judged("v3", PROMPT, tokens).tokens


def check_streams(events: list[pd.TokenEvent], *names: str, count: int = 5) -> None:
    """Those requests, all with the right tokens."""
    streams = by_request(events)
    for name in names:
        assert len(streams[name]) == count
        check_greedy(streams[name])


def test_tokens_are_those_of_one_process(workers: Workers) -> None:
    sampled = pd.SamplingParams(max_new_tokens=20, top_k=8, top_p=0.9, seed=4)
    changed = pd.SamplingParams(
        max_new_tokens=20,
        min_new_tokens=9,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        logit_bias=((5, 3.0),),
        seed=4,
    )
    requests = [
        pd.Request(request_id=f"{length}/{name}", prompt=prompt_of(length), sampling=sampling)
        for length in (1, 16, 50)
        for name, sampling in (("greedy", greedy(20)), ("sampled", sampled), ("changed", changed))
    ]
    with local() as setup:
        alone = by_request(setup.pairing.generate(requests))
    expected = {}
    for one in requests:
        name = str(one.request_id)
        expected[name] = plain_reference(model_of(), one, tokens_of(alone[name]))
        Tally().compare(name, alone[name], expected[name])
    # a pool that is too small for all, so that requests also go back and are prefilled again
    with fleet(workers, num_pages=24, config=pd.EngineConfig(chunked_prefill_size=16)) as processes:
        streams = by_request(processes.pairing.generate(requests))
        assert set(streams) == set(alone)
        for one in requests:
            name = str(one.request_id)
            Tally().compare(name, streams[name], expected[name])
            usage = streams[name][-1].usage
            assert usage is not None
            assert usage.prompt_tokens == len(one.prompt)
            assert usage.ttft_s is not None
            assert usage.ttft_s > 0
            assert usage.timeline is not None
            stages = list(attrs.astuple(usage.timeline))
            assert None not in stages
            if usage.timeline.first_token_s >= usage.timeline.committed_s:  # not granted again after its first token
                pages = stages[:2] + stages[4:]
                prefill = [stages[1], *stages[2:4], stages[6]]  # bytes leave while it computes
                assert pages == sorted(pages)
                assert prefill == sorted(prefill)
            assert stages[-1] == usage.ttft_s


def test_a_logits_processor_is_named_across_processes(workers: Workers) -> None:
    sampling = greedy(12, ignore_eos=True, logits_processor="one_in_five", logits_processor_argument="3", logprobs=4)
    good = request("good", sampling=sampling)
    with fleet(workers, has_processor=True) as processes:
        bad = request("bad", sampling=attrs.evolve(sampling, logits_processor_argument="three"))
        unknown = request("unknown", sampling=attrs.evolve(sampling, logits_processor="json"))
        streams = by_request(processes.pairing.generate([good, bad, unknown]))
    expected = plain_reference(model_of(), good, tokens_of(streams["good"]), partial(left_of_five, 3))
    Tally().compare("good", streams["good"], expected)
    assert [len(event.top_logprobs) for event in streams["good"]] == [4] * 12
    errors = {name: stream[0].error for name, stream in streams.items() if name != "good"}
    assert {type(error) for error in errors.values()} == {pd.RequestError}
    assert "'one_in_five' does not take its argument: ValueError" in str(errors["bad"])
    assert "the prefill engine was given: one_in_five" in str(errors["unknown"])


def test_several_of_each_share_the_work(workers: Workers) -> None:
    with fleet(workers, 2, 2) as processes:
        for number in range(8):
            processes.pairing.submit(request(str(number)))
        check_streams(collect(processes.pairing), *"01234567")


def test_cancel_reaches_the_other_process(workers: Workers, slow: Path) -> None:
    with fleet(workers, slow_while=slow) as processes:
        processes.pairing.submit(request("a", 400))
        processes.pairing.submit(request("b", 400))
        events = processes.step_until(4)
        processes.pairing.cancel("a")
        processes.pairing.cancel("b")
        events += collect(processes.pairing)
        decode = processes.ports[1]
        wait_until(lambda: not decode.load().num_running_requests)
        assert decode.load().num_tokens < 2 * 400
        for stream in by_request(events).values():
            assert stream[-1].finish_reason is pd.FinishReason.CANCELLED
            check_greedy(stream)


def test_a_bad_request_fails_alone(workers: Workers) -> None:
    with fleet(workers) as processes:
        events = list(processes.pairing.generate([request("bad", prompt=(97,)), request("good")]))
    check_streams(events, "good")
    assert isinstance(by_request(events)["bad"][0].error, pd.RequestError)


def test_closing_the_pairing_cancels_what_is_unfinished(workers: Workers, slow: Path) -> None:
    with fleet(workers, slow_while=slow) as processes:
        for name in "ab":
            processes.pairing.submit(request(name, 400))
        events = processes.step_until(2)
        processes.pairing.close()
        processes.pairing.close()
        streams = by_request(events + processes.pairing.step())
    assert [stream[-1].finish_reason for stream in streams.values()] == [pd.FinishReason.CANCELLED] * 2


def test_a_connection_that_breaks_closes_the_engine_behind_it(workers: Workers) -> None:
    (worker,) = workers.take(1)
    worker.serve("decode")
    worker.connection.close()
    assert worker.stopped() == (0, 0)


def test_models_that_differ_are_refused_by_name(workers: Workers) -> None:
    prefill, decode = workers.take(2)
    ports = prefill.serve("prefill", seed=0), decode.serve("decode", seed=1, page_size=16)
    with pytest.raises(pd.LayoutMismatch, match="weights_id") as caught:
        pd.Pairing(*ports)
    assert [name for name, _, _ in caught.value.fields] == ["weights_id"]
    assert len({*caught.value.fields[0]}) == 3
    for worker, port in zip((prefill, decode), ports, strict=True):
        port.close()
        assert worker.stopped() == (0, 0)


def test_pages_of_different_sizes_are_no_difference(workers: Workers) -> None:
    prefill, decode = workers.take(2)
    with pd.Pairing(prefill.serve("prefill", page_size=5), decode.serve("decode", page_size=16)) as pairing:
        assert tokens_of(pairing.generate([request()])) == EXPECTED
    assert (prefill.stopped(), decode.stopped()) == ((0, 0), (0, 0))


def test_a_deadline_is_kept_while_prefill_stands_still(workers: Workers) -> None:
    with fleet(workers, client_config=PATIENT) as processes:
        with processes.prefills[0].frozen():
            began = time.monotonic()
            processes.pairing.submit(request(deadline_s=0.5))
            events = collect(processes.pairing)
            assert time.monotonic() - began >= 0.49
        assert [event.finish_reason for event in events] == [pd.FinishReason.DEADLINE]
        processes.pairing.submit(request("after"))
        check_streams(collect(processes.pairing), "after")


def test_a_host_that_does_nothing_for_a_while_loses_no_port(workers: Workers) -> None:
    """Beats come from threads of their own: a host may wait for its user as long as it likes."""
    with fleet(workers) as processes:
        processes.pairing.submit(request("a", 100))
        processes.step_until(1)
        port = processes.ports[-1]
        time.sleep(SESSIONS.silent_s + 1.0)
        wait_until(lambda: port.load().num_running_requests == 0)
        assert len(port._inbox.peek()) <= 100  # a report per token, at most
        (stream,) = by_request(collect(processes.pairing)).values()
        assert stream[-1].finish_reason is pd.FinishReason.LENGTH
        processes.pairing.submit(request("after"))
        check_streams(collect(processes.pairing), "after")


def test_a_decode_leaves_when_its_long_request_is_done_and_its_process_ends_by_itself(workers: Workers) -> None:
    with fleet(workers, 1, 2) as processes:
        for name in "ab":
            processes.pairing.submit(request(name, 200))
        events = processes.step_until(4)
        leaving = processes.ports[1]
        processes.pairing.remove(leaving, drain_s=TIMEOUT_S)
        leaving.close()
        worker = processes.decodes.pop(0)
        assert worker.stopped() == (0, 0)
        assert worker.end() == 0
        check_streams(events + collect(processes.pairing), *"ab", count=200)


@pytest.mark.parametrize("frozen", [False, True])
def test_closing_from_another_thread_takes_no_longer_when_processes_are_frozen(
    workers: Workers, slow: Path, frozen: bool
) -> None:
    with fleet(workers, 2, 2, client_config=PATIENT, slow_while=slow) as processes:
        pairing, everyone = processes.pairing, [*processes.prefills, *processes.decodes]
        for number in range(8):
            pairing.submit(request(str(number), 200))
        events = processes.step_until(8)
        for worker in everyone:
            if frozen:
                worker.freeze()
        closers = [started(pairing.close) for _ in range(2)]
        wait_until(lambda: bool(events.extend(pairing.step()) or not any(closer.is_alive() for closer in closers)))
        streams = by_request(events + pairing.step())
        assert {stream[-1].finish_reason for stream in streams.values()} == {pd.FinishReason.CANCELLED}
        assert (len(streams), pairing.num_unfinished) == (8, 0)
        for worker in everyone:
            if frozen:
                worker.thaw()


def test_a_deadline_and_a_cancellation_are_kept_while_decode_stands_still(workers: Workers, slow: Path) -> None:
    """Ended by the pairing's clock alone, which stands still but for what the test says."""
    clock = VirtualClock()
    with fleet(workers, clock=clock, client_config=PATIENT, slow_while=slow) as processes:
        processes.pairing.submit(request("a", 400, deadline_s=3600.0))
        processes.pairing.submit(request("b", 400))
        processes.pairing.submit(request("c", 150))
        events = processes.step_until(6)
        with processes.decodes[0].frozen():
            slow.unlink()
            processes.pairing.cancel("b")
            events += processes.pairing.step()
            clock.advance(CANCEL_GRACE_S)
            events += processes.step_until_ended("b")
            clock.advance(3600.0 - CANCEL_GRACE_S)
            events += processes.pairing.step()
            clock.advance(DEADLINE_GRACE_S)
            events += processes.step_until_ended("a")
        events += processes.step_until_ended("c")
        streams = by_request(events)
        ends = {name: stream[-1].finish_reason for name, stream in streams.items()}
        assert ends == {
            "a": pd.FinishReason.DEADLINE,
            "b": pd.FinishReason.CANCELLED,
            "c": pd.FinishReason.LENGTH,
        }
        for stream in streams.values():
            check_greedy(stream)
        processes.pairing.submit(request("a"))
        check_streams(collect(processes.pairing), "a")


# -- the last tests use processes up ------------------------------------------------------------------------------


def test_requests_of_a_killed_prefill_go_to_another(workers: Workers) -> None:
    with fleet(workers, 2, 1, client_config=PATIENT) as processes:
        with processes.prefills[0].frozen():
            for number in range(6):
                processes.pairing.submit(request(str(number), 12))
            events = processes.step_until(6)
            processes.prefills[0].kill()
            events += collect(processes.pairing)
        check_streams(events, *"012345", count=12)
        processes.pairing.submit(request("after"))
        check_streams(collect(processes.pairing), "after")


def test_requests_of_a_killed_decode_go_on_at_another_promptly(workers: Workers, slow: Path) -> None:
    with fleet(workers, 1, 2, client_config=PATIENT, slow_while=slow) as processes:
        for number in range(6):
            processes.pairing.submit(request(str(number), 100))
        events = processes.step_until(12)
        processes.decodes[0].kill()
        slow.unlink()
        processes.pairing.submit(request("after"))
        events += collect(processes.pairing)
        check_streams(events, "0", "1", "2", "3", "4", "5", count=100)
        check_streams(events, "after")
        stats = processes.pairing.stats
        assert stats.num_ports_lost == 1
        assert stats.num_moved >= 3  # "after" may have been on its way too


def test_without_any_prefill_requests_fail_promptly_if_none_will_come(workers: Workers) -> None:
    with fleet(workers, client_config=PATIENT, pairs=pd.PairingConfig(port_wait_s=0.0)) as processes:
        with processes.prefills[0].frozen():
            processes.pairing.submit(request("waiting"))
            processes.pairing.step()
            wait_until(lambda: processes.pairing.step() == [] and processes.pairing.num_unfinished == 1)
            processes.prefills[0].kill()
            events = collect(processes.pairing)
            processes.pairing.submit(request("late"))
            events += collect(processes.pairing)
        assert {name: stream[-1].finish_reason for name, stream in by_request(events).items()} == dict.fromkeys(
            ("waiting", "late"), pd.FinishReason.FAILED
        )
