"""Engines, ports and their processes that say what cannot be so: it costs a request or the port, by name, and what they
said reaches no user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.remote import messages
from pdinfer.remote.messages import LoadMessage, Ready, Stepped
from pdinfer.testing import VirtualClock
from pdinfer.types import Usage
from tests.e2e.setups import (
    PROMPT,
    Setup,
    by_request,
    collect,
    greedy,
    hang,
    join,
    local,
    model_of,
    pool_of,
    recover,
    reference,
    request,
    step_until,
    tokens_of,
    watch,
)
from tests.golden.samples import GRANT
from tests.waiting import TIMEOUT_S, check_ends, started, wait_until

EXPECTED = list(reference("v3", PROMPT, 5).tokens)


def altered(engine: pd.PrefillEngine, name: str, **values: Any) -> None:
    """From now on the hand-off of this request says something else."""
    finish = engine.channel.finish

    def lie(grant: pd.PageGrant, handoff: pd.Handoff) -> Any:
        return finish(grant, attrs.evolve(handoff, **values) if grant.request_id == name else handoff)

    engine.channel.finish = lie  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"token": 97}, "no token of this vocabulary"),
        ({"token": 2**31 - 1}, "no token of this vocabulary"),
        ({"token": None}, "no token of this vocabulary"),
        ({"logprob": None}, "none of the token that it brings"),
        ({"top_logprobs": ((5, -0.5), (97, -1.0))}, "no token of this vocabulary"),
        ({"top_logprobs": ((1, -0.5), (2, -0.6), (3, -0.7))}, "3 log-probabilities that nobody asked for"),
        ({"num_cached_tokens": len(PROMPT) + 1}, "10 of 9 tokens were cached"),
    ],
)
def test_a_hand_off_that_cannot_be_so_fails_its_request_alone(values: dict[str, Any], said: str) -> None:
    with local() as setup:
        altered(setup.prefills[0], "bad", **values)
        for name in ("bad", "good"):
            setup.pairing.submit(request(name, sampling=greedy(5, ignore_eos=True, logprobs=2)))
        streams = by_request(collect(setup.pairing))
        (last,) = streams["bad"]
        assert (last.finish_reason, last.token, last.top_logprobs) == (pd.FinishReason.FAILED, None, ())
        assert isinstance(last.error, pd.TransferError)
        assert said in str(last.error)
        assert last.usage is not None
        assert last.usage.cached_tokens == 0
        assert tokens_of(streams["good"]) == EXPECTED
        setup.check_idle()


@pytest.mark.parametrize("values", [{"num_cached_tokens": -5}, {"queue_s": float("nan")}], ids=str)
def test_a_hand_off_out_of_bounds_costs_the_link_and_its_rooms(values: dict[str, Any]) -> None:
    """The link comes back by itself; here no request gets a second attempt."""
    pools = [pool_of(model_of(), num_pages=64) for _ in range(2)]
    engine = pd.EngineConfig(max_attempts=1)
    with join(model_of(), "tcp", prefill_pools=pools[:1], decode_pools=pools[1:], engine=engine) as setup:
        altered(setup.prefills[0], "bad", **values)
        setup.pairing.submit(request("bad"))
        (last,) = collect(setup.pairing)
        assert (last.finish_reason, last.token) == (pd.FinishReason.FAILED, None)
        assert "not a message" in str(last.error)
        assert f"handoff.{next(iter(values))}" in str(last.error)
        for number in range(5):  # the prefill may notice later than the decode that the link is gone
            setup.pairing.submit(request(f"good {number}"))
            events = collect(setup.pairing)
            if events[-1].error is None:
                break
            assert isinstance(events[-1].error, pd.TransferError)
        assert tokens_of(events) == EXPECTED, events[-1].error


def test_text_of_a_prefills_error_is_escaped_in_the_event_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    error = pd.RequestError("\x1b[2Jpwned\r\nfake log line \u202e")
    with local() as setup, caplog.at_level("DEBUG", "pdinfer"):
        altered(setup.prefills[0], "a", status=pd.types.HandoffStatus.ABORTED, error=error)
        setup.pairing.submit(request())
        (last,) = collect(setup.pairing)
        assert isinstance(last.error, pd.RequestError)
        assert str(last.error) == r"\x1b[2Jpwned\r\nfake log line \u202e"
        assert all(record.getMessage().isprintable() for record in caplog.records)


# -- rooms that are given up ------------------------------------------------------------------------------------------


def test_a_decode_is_not_done_before_the_writers_of_what_it_gave_up_have_stopped() -> None:
    with local() as setup:
        prefill, decode = setup.prefills[0], setup.decodes[0]
        hang(prefill)
        setup.pairing.submit(request())
        setup.pairing.step()
        setup.pairing.cancel("a")
        (last,) = collect(setup.pairing)
        assert last.finish_reason is pd.FinishReason.CANCELLED
        assert decode.channel.pool.num_granted > 0
        assert decode.num_unfinished == 1
        assert not decode.drain(0.01)
        recover(prefill)
        setup.check_idle()
        assert decode.drain(0.01)


def test_a_sequence_waits_for_the_pages_of_a_room_that_is_given_up_instead_of_losing_its_own() -> None:
    with local(num_pages=8) as setup:
        prefill, decode = setup.prefills[0], setup.decodes[0]
        seen = watch(decode)
        setup.pairing.submit(request(count=16))
        events = step_until(setup.pairing, lambda _: decode.load().num_running_requests)
        hang(prefill)
        setup.pairing.submit(request("b", cache_salt=b"another"))
        events += setup.pairing.step()
        assert decode.load().num_granted_requests == 1, "b has what is left of the pages"
        setup.pairing.cancel("b")
        for _ in range(20):
            events += setup.pairing.step()
        assert decode.num_unfinished == 2  # a, and the room of b
        assert decode.load().num_running_requests == 1
        assert [event.grant.request_id for event in seen if isinstance(event, pd.Granted)] == ["a", "b"]
        recover(prefill)
        events += collect(setup.pairing)
        assert tokens_of(by_request(events)["a"]) == list(reference("v3", PROMPT, 16).tokens)
        setup.check_idle()


@pytest.mark.parametrize("failed", [True, False])
def test_a_grant_that_comes_late_is_not_forwarded_when_decode_was_asked_to_end_the_request(failed: bool) -> None:
    with local(clock=VirtualClock()) as setup:
        prefill, decode = setup.prefills[0], setup.decodes[0]
        submitted: list[str | None] = []
        submit = prefill.submit
        prefill.submit = lambda one, grant: (submitted.append(one.request_id), submit(one, grant))[1]  # type: ignore[method-assign]
        step, late = decode.step, []
        decode.step = lambda: late.extend(step()) or []  # type: ignore[method-assign,func-returns-value]
        setup.pairing.submit(request())
        setup.pairing.step()
        assert [type(event) for event in late] == [pd.Granted]
        decode.step = list  # type: ignore[method-assign] # it does not answer yet
        if failed:  # for want of a prefill, which is then back
            setup.pairing.remove(prefill, drain_s=0.0)
            setup.pairing.add(prefill)
        else:
            setup.pairing.cancel("a")
        assert setup.pairing.step() == []
        decode.step = lambda: late  # type: ignore[method-assign]
        assert setup.pairing.step() == []
        del decode.step
        assert submitted == []
        (last,) = collect(setup.pairing)
        assert last.finish_reason is (pd.FinishReason.FAILED if failed else pd.FinishReason.CANCELLED)
        setup.check_idle()


# -- events that cannot be --------------------------------------------------------------------------------------------


USAGE = Usage(prompt_tokens=len(PROMPT), output_tokens=1, cached_tokens=0, queue_s=0.0, ttft_s=0.0)
EVENT = pd.TokenEvent(request_id="a", token=5, index=0, logprob=-0.5)
LENGTH, CANCELLED = pd.FinishReason.LENGTH, pd.FinishReason.CANCELLED


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"index": 1}, "token 1 came when token 0 was due"),
        ({"index": 2**31 - 1}, "came when token 0 was due"),
        ({"token": None}, "a token of None came with None"),
        ({"token": None, "finish_reason": LENGTH}, "a token of None came with"),
        ({"finish_reason": CANCELLED}, "a token of 5 came with"),
        ({"token": None, "finish_reason": CANCELLED}, "nobody had cancelled it: the decode was closed"),
        ({"top_logprobs": ((1, -0.5),)}, "1 log-probabilities came that nobody asked for"),
        ({"finish_reason": LENGTH, "usage": attrs.evolve(USAGE, output_tokens=2)}, "counts 2 tokens, and 1 came"),
        ({"finish_reason": LENGTH, "usage": attrs.evolve(USAGE, prompt_tokens=8)}, "8 tokens of its prompt of 9"),
        ({"finish_reason": LENGTH, "usage": attrs.evolve(USAGE, cached_tokens=11)}, "11 of its tokens were cached"),
        ({"finish_reason": LENGTH, "usage": attrs.evolve(USAGE, num_accepted_tokens=1)}, "1 of 0 drafts were accepted"),
    ],
)
def test_an_event_that_cannot_be_costs_the_port_and_reaches_nobody(values: dict[str, Any], said: str) -> None:
    with local() as setup:
        hang(setup.decodes[0])
        setup.pairing.submit(request())
        assert setup.pairing.step() == []
        setup.decodes[0].step = lambda: [attrs.evolve(EVENT, **values)]  # type: ignore[method-assign]
        (last,) = collect(setup.pairing)
        assert (last.finish_reason, last.token, last.index) == (pd.FinishReason.FAILED, None, 0)
        assert isinstance(last.error, pd.TransferError)
        assert said in str(last.error)
        assert setup.pairing.stats.num_ports_lost == 1


def test_a_port_with_the_identity_of_another_does_not_join() -> None:
    with local() as setup:
        for port in setup.engines:
            with pytest.raises(pd.ConfigError, match="is a port of this pairing already"):
                setup.pairing.add(port)
        setup.pairing.submit(request())
        assert tokens_of(collect(setup.pairing)) == EXPECTED


# -- engines in other processes ---------------------------------------------------------------------------------------


class Other:
    """The other end of a client, which says what we make it say."""

    def __init__(self, setup: Setup, role: str = "decode") -> None:
        self.engine: Any = getattr(setup, f"{role}s")[0]
        self.load = self.engine.load()
        ours, self.theirs = Pipe()
        self.say(self.ready())
        made = pd.remote.DecodeClient if role == "decode" else pd.remote.PrefillClient
        self.client: Any = made(ours)

    def ready(self, **values: Any) -> Ready:
        load = LoadMessage(**{self.engine.role: self.load})
        fields = {
            "address": self.engine.address,
            "limits": self.engine.limits,
            "load": load,
            "version": messages.VERSION,
        }
        return Ready(**{**fields, **values})

    def step(self, num_seen: int = 0, **values: Any) -> Stepped:
        return Stepped(num_seen, **{"load": LoadMessage(**{self.engine.role: self.load}), **values})

    def say(self, *reports: messages.Report) -> None:
        for report in reports:
            self.theirs.send_bytes(messages.encode(report))


@pytest.fixture
def setup() -> Iterator[Setup]:
    with local() as made:
        yield made


@pytest.fixture
def other(setup: Setup) -> Iterator[Other]:
    made = Other(setup)
    yield made
    made.client.close()
    made.theirs.close()


def stranger(address: pd.PeerAddress) -> pd.PeerAddress:
    return attrs.evolve(address, epoch=address.epoch + 1)


LIES: dict[str, tuple[Callable[[Other], messages.Report], str]] = {
    "ready twice": (lambda other: other.ready(), "it has said who it is twice"),
    "no load": (lambda other: other.step(load=LoadMessage()), "it tells of no load of a decode engine"),
    "another role": (
        lambda other: other.step(
            load=LoadMessage(prefill=pd.PrefillEngine(model_of(), pd.KVChannel.loopback(pool_of(model_of()))[0]).load())
        ),
        "it tells of no load of a decode engine",
    ),
    "another engine": (
        lambda other: other.step(
            load=LoadMessage(decode=attrs.evolve(other.load, address=stranger(other.load.address)))
        ),
        "another engine than the one it said it is",
    ),
    "submits nobody made": (lambda other: other.step(1), "it has seen 1 of 0 submits, 0 before"),
    "a token of no vocabulary": (
        lambda other: other.step(tokens=[attrs.evolve(EVENT, token=97)]),
        "token 97 is not one",
    ),
    "an alternative of none": (
        lambda other: other.step(tokens=[attrs.evolve(EVENT, top_logprobs=((3, -1.0), (98, -2.0)))]),
        "token 98 is not one",
    ),
    "a load below zero": (
        lambda other: other.step(load=LoadMessage(decode=attrs.evolve(other.load, num_running_tokens=-1))),
        "num_running_tokens",
    ),
    "a time that is none": (
        lambda other: other.step(load=LoadMessage(decode=attrs.evolve(other.load, busy_s=float("nan")))),
        "busy_s",
    ),
    "a pool without pages": (
        lambda other: other.step(load=LoadMessage(decode=attrs.evolve(other.load, num_total_pages=0))),
        "num_total_pages",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_report_that_cannot_be_costs_the_port_and_changes_nothing(other: Other, lie: str) -> None:
    made, said = LIES[lie]
    other.say(other.step(), made(other))
    with pytest.raises(pd.TransferError, match="sent an invalid message") as raised:
        wait_until(lambda: other.client.step() != [])
    assert said in str(raised.value)
    load = other.client.load()
    assert attrs.evolve(load, step_age_s=None) == attrs.evolve(other.load, step_age_s=None)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"version": 1}, "it speaks version 1, this end speaks 7"),
        ({"version": 8}, "it speaks version 8, this end speaks 7"),
        ({"required": ("colour", "taste")}, "it requires features this end does not have: colour, taste"),
        ({"addresses": (pd.PeerAddress(b"another", 1, 0),)}, "in two ways"),
        ({"leaders": (pd.PeerAddress(b"another", 1, 0),)}, "in two ways"),
        (None, "another engine than the one it said it is"),
    ],
    ids=["older", "newer", "features", "two ways", "other leaders", "a step instead"],
)
def test_an_engine_that_is_not_ready_for_this_client_is_refused(
    setup: Setup, values: dict[str, Any] | None, said: str
) -> None:
    made = Other(setup)
    made.client.close()
    ours, theirs = Pipe()
    theirs.send_bytes(messages.encode(made.step() if values is None else made.ready(**values)))
    with pytest.raises(pd.TransferError, match=said):
        pd.remote.DecodeClient(ours)
    theirs.close()


def test_submits_count_on_top_of_a_load_until_it_includes_them(other: Other) -> None:
    for name in "abc":
        other.client.submit(request(name), writers=[])
    load = other.client.load()
    assert (load.num_waiting_requests, load.num_waiting_tokens) == (3, 3 * len(PROMPT))
    for num_seen, left in ((0, 3), (1, 2), (3, 0)):
        other.say(other.step(num_seen, load=LoadMessage(decode=attrs.evolve(other.load, num_tokens=10 + num_seen))))
        wait_until(lambda: other.client.load().num_tokens == 10 + num_seen)  # noqa: B023 - asked at once
        load = other.client.load()
        assert (load.num_waiting_requests, load.num_waiting_tokens) == (left, left * len(PROMPT))
    other.say(other.step(2))
    with pytest.raises(pd.TransferError, match="it has seen 2 of 3 submits, 3 before"):
        wait_until(lambda: other.client.step() != [])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_served_engine_tells_how_many_submits_it_has_seen(setup: Setup, role: str) -> None:
    engine: Any = getattr(setup, f"{role}s")[0]
    ours, theirs = Pipe()
    thread = started(pd.remote.serve, engine, theirs)
    packed = messages.PackedRequest.of(request())
    for number in range(2):
        send(
            ours,
            messages.SubmitPrefillMessage(packed, stray_grant(setup))
            if role == "prefill"
            else messages.SubmitDecodeMessage(packed, ()),
        )
        num_seen = 0
        while num_seen <= number:
            report = messages.decode_report(ours.recv_bytes())
            num_seen = report.num_seen if isinstance(report, Stepped) else 0
        assert num_seen == number + 1
    send(ours, messages.Close())
    check_ends(thread)
    ours.close()


def stray_grant(setup: Setup) -> messages.PackedGrant:
    """For pages that nobody expects."""
    return messages.PackedGrant.of(attrs.evolve(GRANT, writers=(setup.prefills[0].address,)))


@pytest.mark.parametrize("refused", [True, False])
def test_an_answer_about_another_peer_is_not_taken_for_the_one_that_was_asked(other: Other, refused: bool) -> None:
    asked = pd.PeerAddress(b"asked", 1, 0)
    earlier = pd.PeerAddress(b"earlier", 1, 0)
    no = pd.TransferError("not this one")
    about_earlier = messages.Connected(earlier, None if refused else no)
    about_asked = messages.Connected(asked, no if refused else None)
    known: list[object] = []

    def answer() -> None:
        while not isinstance(command := messages.decode_command(other.theirs.recv_bytes()), messages.ConnectMessage):
            pass
        assert command.peer == asked
        other.say(about_earlier, messages.BeatMessage(is_draining=True))
        wait_until(lambda: other.client.is_draining)  # then it has heard the answer before
        known.append({**other.client._answers})
        other.say(about_asked)

    thread = started(answer)
    if refused:
        with pytest.raises(pd.TransferError, match="not this one"):
            other.client.connect(asked, timeout_s=TIMEOUT_S)
    else:
        other.client.connect(asked, timeout_s=TIMEOUT_S)
    check_ends(thread)
    assert known == [{asked: None}]


def test_a_hostile_command_stops_a_served_engine_by_name(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = Pipe()
    thread = started(pd.remote.serve, setup.decodes[0], theirs)
    with caplog.at_level("INFO", "pdinfer"):
        send(ours, messages.ConnectMessage(setup.prefills[0].address, float("nan")))
        check_ends(thread)
    assert any("timeout_s" in record.getMessage() for record in caplog.records)
    ours.close()


def send(connection: Connection, message: messages.Command) -> None:
    connection.send_bytes(messages.encode(message))
