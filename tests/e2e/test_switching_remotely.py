"""An engine in another process, or served by another thread, changes its role while its pairing serves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.engine import roles
from pdinfer.remote import messages
from tests.backends import ROOT
from tests.e2e.setups import collect, greedy, model_of, pool_of, remote
from tests.e2e.test_switching import check_tokens, prompts
from tests.waiting import started

TINY = ROOT / "examples" / "tiny"


@contextmanager
def served(**more: Any) -> Iterator[tuple[pd.Pairing, list[Any]]]:
    """A pairing of two prefills and a decode, each served by a thread."""
    with ExitStack() as stack:
        model = model_of()
        ends = pd.KVChannel.loopback(*(pool_of(model, num_pages=128) for _ in range(3)))
        kinds: list[Any] = [pd.PrefillEngine, pd.PrefillEngine, pd.DecodeEngine]
        ports = [stack.enter_context(remote(kind(model, end, **more))) for kind, end in zip(kinds, ends, strict=True)]
        yield stack.enter_context(pd.Pairing(ports[:2], ports[2])), ports


def test_a_served_engine_serves_the_other_role_and_its_own_again() -> None:
    with served() as (pairing, ports):
        check_tokens(prompts(0), list(pairing.generate(prompts(0))))
        for one in prompts(10):
            pairing.submit(one)
        decode = pairing.switch(ports[0], "decode", drain_s=30.0)
        assert isinstance(decode, pd.remote.DecodeClient)
        assert decode.address == ports[0].address
        check_tokens(prompts(10), collect(pairing))
        pairing.remove(ports[2], drain_s=30.0)
        check_tokens(prompts(0), list(pairing.generate(prompts(0))))
        load = decode.load()
        assert load.prefix_hit_tokens > 0, "what it computed as a prefill is found"
        pairing.add(ports[2])
        assert isinstance(pairing.switch(decode, "prefill", drain_s=30.0), pd.remote.PrefillClient)
        check_tokens(prompts(20), list(pairing.generate(prompts(20))))
        assert pairing.stats.num_switches == 2
        assert pairing.stats.num_ports_lost == 0


def test_requests_that_are_not_drained_move_and_give_the_same_tokens() -> None:
    with served() as (pairing, ports):
        pairing.switch(ports[1], "decode", drain_s=30.0)
        for one in prompts(0, 6):
            pairing.submit(one)
        pairing.step()
        changed = pairing.switch(ports[2], "prefill", drain_s=0.0)
        check_tokens(prompts(0, 6), collect(pairing))
        other = pairing.ports[0]
        pairing.switch(changed, "decode", drain_s=30.0)
        pairing.switch(other, "prefill", drain_s=30.0)
        check_tokens(prompts(0, 6), list(pairing.generate(prompts(0, 6))))  # ids that it may still have had are free


def test_an_engine_of_an_older_pdinfer_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MINOR", 0)
    with served() as (pairing, ports):
        with pytest.raises(pd.ConfigError, match=r"speaks version 7\.0, .* came with 7\.1: update pdinfer there"):
            pairing.switch(ports[0], "decode", drain_s=0.0)
        assert ports[0] in pairing.ports
        check_tokens(prompts(0), list(pairing.generate(prompts(0))))


def test_a_role_that_the_engine_cannot_take_is_refused_before_it_is_drained() -> None:
    with served(other_config=pd.EngineConfig(num_draft_tokens=2)) as (pairing, ports):
        with pytest.raises(pd.ConfigError, match="cannot become 'decode'; it can become nothing"):
            pairing.switch(ports[0], "decode", drain_s=0.0)
        with pytest.raises(pd.ConfigError, match="already"):
            pairing.switch(ports[0], "prefill", drain_s=0.0)
        assert ports[0] in pairing.ports
        check_tokens(prompts(0), list(pairing.generate(prompts(0))))


def test_an_order_that_no_client_of_ours_sends_is_ignored() -> None:
    with served(other_config=pd.EngineConfig(num_draft_tokens=2)) as (pairing, ports):
        ports[0]._line.post(messages.Become("decode"))
        ports[0]._line.post(messages.Become("router"))
        check_tokens(prompts(0), list(pairing.generate(prompts(0))))


def test_an_engine_that_breaks_while_it_changes_is_lost_and_no_request_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(pd.DecodeEngine):
        def _prepare(self) -> None:
            raise pd.PDInferError("the device fell off")

    model = model_of()
    ends = pd.KVChannel.loopback(*(pool_of(model) for _ in range(3)))
    breaking = pd.PrefillEngine(model, ends[0])
    ours, theirs = Pipe()

    def serve() -> None:
        with pytest.raises(pd.PDInferError, match="the device fell off"):
            pd.remote.serve(breaking, theirs)
        theirs.close()

    thread = started(serve)
    client = pd.remote.PrefillClient(ours)
    prefill, decode = pd.PrefillEngine(model, ends[1]), pd.DecodeEngine(model, ends[2])
    with pd.Pairing([client, prefill], decode) as pairing:
        for one in prompts(0):
            pairing.submit(one)
        monkeypatch.setitem(roles.ENGINES, "decode", Broken)
        with pytest.raises(pd.TransferError, match="the process at the other end of a port is gone"):
            pairing.switch(client, "decode", drain_s=30.0)
        check_tokens(prompts(0), collect(pairing))
        assert pairing.ports == (decode, prefill)
        client.close()
    thread.join()


def step_on(pairing: pd.Pairing, switching: Iterator[float], events: list[pd.TokenEvent]) -> None:
    """Step until the switch has ended."""
    for _ in switching:
        events += pairing.step()
        pairing.wait(0.05)


def test_a_spawned_process_changes_its_role_and_may_be_killed_in_between() -> None:
    cache, other = pd.CacheConfig(page_size=4, num_pages=256, memory="shared"), pd.EngineConfig(max_running_requests=3)
    first = pd.remote.spawn_prefill(TINY, cache=cache, progress=False, other_engine=other)
    model = pd.load_model(TINY)
    ends = [pd.KVChannel(pd.PagePool(model, cache), pd.kv.ShmTransport()) for _ in range(2)]
    second, decode = pd.PrefillEngine(model, ends[0]), pd.DecodeEngine(model, ends[1])
    requests = [
        pd.Request(request_id=f"r{number}", prompt=(256, *b"calc 47+38="), sampling=greedy(3)) for number in range(4)
    ]
    answer = (ord("8"), ord("5"), ord(";"))

    def check(events: list[pd.TokenEvent]) -> None:
        for one in requests:
            assert tuple(event.token for event in events if event.request_id == one.request_id) == answer

    with pd.Pairing([first, second], decode) as pairing:
        check(list(pairing.generate(requests)))
        changed = pairing.switch(first, "decode", drain_s=30.0)
        assert changed.process is first.process  # type: ignore[union-attr]
        assert changed.load().max_running_requests == 3  # type: ignore[union-attr]
        pairing.remove(decode, drain_s=30.0)
        check(list(pairing.generate(requests)))
        pairing.add(decode)
        for one in requests:
            pairing.submit(one)
        events = []
        switching = pairing.switching(changed, "prefill", drain_s=30.0)
        os.kill(first.process.pid, signal.SIGSTOP)  # so that the switch cannot be over before it is killed
        for _ in range(3):
            next(switching)
            events += pairing.step()
        os.kill(first.process.pid, signal.SIGKILL)
        with pytest.raises(pd.TransferError):
            step_on(pairing, switching, events)
        check(events + collect(pairing))
        changed.close()
