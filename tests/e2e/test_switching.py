"""An engine changes its role while its pairing serves. Tokens are those of a pairing that never changed."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.aio import AsyncPairing
from tests.e2e.setups import (
    Setup,
    broken,
    by_request,
    collect,
    greedy,
    join,
    model_of,
    pool_of,
    prompt_of,
    reference,
    step_until,
    tokens_of,
)

COUNT = 6
LENGTH = 22
"""Tokens of a prompt: five whole pages of 4, and two."""


def prompts(first: int, count: int = 3) -> list[pd.Request]:
    return [
        pd.Request(request_id=f"r{seed}", prompt=prompt_of(LENGTH, seed=seed), sampling=greedy(COUNT, ignore_eos=True))
        for seed in range(first, first + count)
    ]


def check_tokens(requests: list[pd.Request], events: list[pd.TokenEvent]) -> None:
    streams = by_request(events)
    for one in requests:
        assert tuple(tokens_of(streams[str(one.request_id)])) == tuple(reference("v3", one.prompt, COUNT).tokens)


def setup_of(num_prefill: int, num_decode: int, transport: str = "loopback", **more: Any) -> Setup:
    pools = [pool_of(model_of(), num_pages=128, **more) for _ in range(num_prefill + num_decode)]
    return join(model_of(), transport, prefill_pools=pools[:num_prefill], decode_pools=pools[num_prefill:])


def switch(setup: Setup, port: Any, role: str, **more: Any) -> Any:
    """Switch, and have the setup look after the engine that comes of it."""
    changed = setup.pairing.switch(port, role, **{"drain_s": 10.0, **more})
    setup.prefills = [one for one in setup.pairing.ports if isinstance(one, pd.PrefillEngine)]
    setup.decodes = [one for one in setup.pairing.ports if isinstance(one, pd.DecodeEngine)]
    return changed


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_tokens_before_during_and_after_a_switch_are_those_without_one(transport: str) -> None:
    before, during, after, back = (prompts(first) for first in (0, 10, 20, 30))
    with setup_of(2, 1, transport) as setup:
        check_tokens(before, list(setup.pairing.generate(before)))
        old = setup.prefills[0]
        for one in during:
            setup.pairing.submit(one)
        new = switch(setup, old, "decode")
        assert isinstance(new, pd.DecodeEngine)
        assert (new.model, new.pool, new.channel) == (old.model, old.pool, old.channel)
        assert new in setup.pairing.ports
        assert old not in setup.pairing.ports
        check_tokens(during, collect(setup.pairing))
        assert old.step() == []
        check_tokens(after, list(setup.pairing.generate(after)))
        assert isinstance(switch(setup, new, "prefill"), pd.PrefillEngine)
        check_tokens(back, list(setup.pairing.generate(back)))
        assert setup.pairing.stats.num_switches == 2
        assert setup.pairing.stats.num_ports_lost == 0
        setup.check_idle()


def alone(setup: Setup, request: pd.Request) -> pd.types.Usage:
    """Serve one request and return its usage."""
    events = list(setup.pairing.generate(attrs.evolve(request, request_id=None)))
    assert tuple(tokens_of(events)) == tuple(reference("v3", request.prompt, COUNT).tokens)
    usage = events[-1].usage
    assert usage is not None
    return usage


def found(engine: pd.PrefillEngine | pd.DecodeEngine) -> int:
    return engine.load().prefix_hit_tokens


def test_pages_that_an_engine_computed_itself_are_found_in_either_role() -> None:
    (one, other) = prompts(0, 2)
    with setup_of(2, 1) as setup:
        only, late = setup.prefills
        setup.pairing.remove(late, drain_s=0.0)
        alone(setup, one)
        setup.pairing.add(late)
        decode = switch(setup, only, "decode")
        setup.pairing.remove(setup.decodes[0] if setup.decodes[0] is not decode else setup.decodes[1], drain_s=0.0)
        kept = decode.pool.num_cached
        assert kept == LENGTH // 4
        alone(setup, one)
        assert found(decode) == LENGTH // 4 * 4, "as a decode it finds what it computed as a prefill"
        grown = decode.pool.num_cached
        assert kept < grown < 2 * kept, "no second copy, and the pages behind"
        alone(setup, one)
        assert decode.pool.num_cached == grown, "those behind are found, too"
        alone(setup, other)


def test_what_a_prefill_writes_behind_them_is_found_for_that_prefill_alone() -> None:
    (one,) = prompts(0, 1)
    longer = attrs.evolve(one, prompt=(*one.prompt, *prompt_of(12, seed=9)))
    with setup_of(3, 1) as setup:
        only, late, last = setup.prefills
        for port in (late, last):
            setup.pairing.remove(port, drain_s=0.0)
        alone(setup, one)
        setup.pairing.add(late)
        decode = switch(setup, only, "decode")
        setup.pairing.remove(next(port for port in setup.decodes if port is not decode), drain_s=0.0)
        hits = []
        for port, other in ((late, last), (late, last), (last, late)):
            if port not in setup.pairing.ports:
                setup.pairing.add(port)
                setup.pairing.remove(other, drain_s=0.0)
            before = found(decode)
            alone(setup, longer)
            hits.append(found(decode) - before)
        own, all_full = LENGTH // 4 * 4, (len(longer.prompt) - 1) // 4 * 4
        assert hits == [own, all_full, own]


def test_a_prefill_does_not_dial_a_decode_that_became_one() -> None:
    with setup_of(1, 2) as setup:
        (dialling,) = setup.prefills
        changed = switch(setup, setup.decodes[0], "prefill")
        assert changed.address not in dialling.channel.snapshot().wanted
        assert not dialling.channel.connected(changed.address)
        assert changed.channel.connected(setup.decodes[0].address)


def test_an_engine_that_was_switched_away_touches_nothing_any_more() -> None:
    with setup_of(2, 1) as setup:
        old = setup.prefills[0]
        new = switch(setup, old, "decode")
        new.channel.transport.in_doubt = True  # which a step of the engine that has it deals with
        assert old.step() == []
        assert new.channel.transport.in_doubt
        new.step()
        assert not new.channel.transport.in_doubt


def test_pages_that_another_prefill_wrote_are_not_found_as_a_prefill() -> None:
    (one,) = prompts(0, 1)
    for trust, hits in (("writer", 0), ("all", LENGTH // 4 * 4)):
        with setup_of(1, 2, trust_domain=trust) as setup:
            spare = setup.decodes[1]
            setup.pairing.remove(spare, drain_s=0.0)
            alone(setup, one)
            setup.pairing.add(spare)
            old = setup.prefills[0]
            prefill = switch(setup, next(each for each in setup.decodes if each is not spare), "prefill")
            setup.pairing.remove(old, drain_s=0.0)
            alone(setup, one)
            assert found(prefill) == hits


def test_a_switch_that_would_do_harm_is_refused_and_changes_nothing() -> None:
    with setup_of(2, 1) as setup, setup_of(1, 1) as others:
        prefill, decode = setup.prefills[0], setup.decodes[0]
        for port, role, why in (
            (others.prefills[0], "decode", "no port of this pairing"),
            (prefill, "prefill", "already"),
            (prefill, "router", "a role is"),
            (decode, "prefill", "there is no decode port"),
        ):
            with pytest.raises(pd.ConfigError, match=why):
                setup.pairing.switch(port, role, drain_s=0.0)
        for drain_s in (-1.0, math.inf, 10**400):
            for change in (partial(setup.pairing.switch, role="decode"), setup.pairing.remove):
                with pytest.raises(pd.ConfigError, match="drain_s must be "):
                    change(prefill, drain_s=drain_s)
            with pytest.raises(pd.ConfigError, match="drain_s must be "):
                setup.pairing.follow(SimpleNamespace(watch=list, dial=print), drain_s=drain_s)
        assert setup.pairing.ports == (decode, *setup.prefills)
        check_tokens(prompts(0), list(setup.pairing.generate(prompts(0))))


def test_a_role_whose_steps_the_model_cannot_run_is_refused() -> None:
    model = model_of()
    ends = pd.KVChannel.loopback(*(pool_of(model) for _ in range(3)))
    drafting = pd.EngineConfig(num_draft_tokens=2)
    first, second = (pd.PrefillEngine(model, end, other_config=drafting) for end in ends[:2])
    with pd.Pairing([first, second], pd.DecodeEngine(model, ends[2])) as pairing:
        with pytest.raises(pd.ConfigError, match="MTP"):
            pairing.switch(first, "decode", drain_s=0.0)
        assert first in pairing.ports
        assert not first.closed


def test_each_role_has_its_own_config() -> None:
    model = model_of()
    ends = pd.KVChannel.loopback(*(pool_of(model) for _ in range(3)))
    config, other = pd.EngineConfig(chunked_prefill_size=8), pd.EngineConfig(max_running_requests=2)
    first = pd.PrefillEngine(model, ends[0], config, other_config=other)
    with pd.Pairing([first, pd.PrefillEngine(model, ends[1])], pd.DecodeEngine(model, ends[2])) as pairing:
        decode = pairing.switch(first, "decode", drain_s=0.0)
        assert isinstance(decode, pd.DecodeEngine)
        assert decode.config == other
        again = pairing.switch(decode, "prefill", drain_s=0.0)
        assert isinstance(again, pd.PrefillEngine)
        assert again.config == config


def test_each_time_in_a_role_has_a_trace_of_its_own(tmp_path: Path) -> None:
    model, config = model_of(), pd.EngineConfig(trace=str(tmp_path))
    ends = pd.KVChannel.loopback(*(pool_of(model) for _ in range(3)))
    first = pd.PrefillEngine(model, ends[0], config)
    with pd.Pairing([first, pd.PrefillEngine(model, ends[1])], pd.DecodeEngine(model, ends[2])) as pairing:
        pairing.switch(pairing.switch(first, "decode", drain_s=0.0), "prefill", drain_s=0.0)
    short = first.address.engine_id[:4].hex()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"decode-{short}.json", f"prefill-{short}-2.json", f"prefill-{short}.json"]


def test_engines_that_were_switched_away_are_not_kept() -> None:
    model = model_of()
    ends = pd.KVChannel.loopback(*(pool_of(model) for _ in range(3)))
    first = pd.PrefillEngine(model, ends[0])
    gone = weakref.ref(first)
    with pd.Pairing([first, pd.PrefillEngine(model, ends[1])], pd.DecodeEngine(model, ends[2])) as pairing:
        pairing.switch(first, "decode", drain_s=0.0)
        del first
        gc.collect()
        assert gone() is None


def test_a_request_that_no_other_port_holds_keeps_its_port_in_its_role() -> None:
    model = model_of()
    pools = [pool_of(model, num_pages=num_pages) for num_pages in (32, 4, 32)]
    ends = pd.KVChannel.loopback(*pools)
    prefill, (small, large) = pd.PrefillEngine(model, ends[0]), (pd.DecodeEngine(model, end) for end in ends[1:])
    with pd.Pairing(prefill, [small, large]) as pairing:
        pairing.submit(prompts(0)[0])
        with pytest.raises(pd.ConfigError, match="28 tokens fits no decode port but"):
            pairing.switch(large, "prefill", drain_s=10.0)
        check_tokens(prompts(0, 1), collect(pairing))
        assert isinstance(pairing.switch(large, "prefill", drain_s=10.0), pd.PrefillEngine)


def test_the_last_port_of_a_role_is_switched_when_asked_and_requests_wait_for_another() -> None:
    model = model_of()
    ends = pd.KVChannel.loopback(*(pool_of(model) for _ in range(3)))
    prefill, spare = pd.PrefillEngine(model, ends[0]), pd.PrefillEngine(model, ends[1])
    config = pd.PairingConfig(port_wait_s=60.0)
    with pd.Pairing([prefill, spare], pd.DecodeEngine(model, ends[2]), config=config) as pairing:
        decode = pairing.ports[0]
        waiting = prompts(0)
        prefill_again = pairing.switch(decode, "prefill", drain_s=10.0, leaves_none=True)
        for one in waiting:
            pairing.submit(one)
        assert pairing.step() == []
        pairing.switch(prefill_again, "decode", drain_s=10.0)
        check_tokens(waiting, collect(pairing))


@pytest.mark.parametrize("after", [0, 1, 9])
def test_requests_that_are_not_drained_in_time_move_and_give_the_same_tokens(after: int) -> None:
    during = prompts(0, 4)
    for role in ("decode", "prefill"):
        with setup_of(2, 2) as setup:
            for one in during:
                setup.pairing.submit(one)
            events = step_until(setup.pairing, lambda events: sum(event.token is not None for event in events) >= after)
            port = setup.prefills[0] if role == "decode" else setup.decodes[0]
            switch(setup, port, role, drain_s=0.0)
            check_tokens(during, events + collect(setup.pairing))
            setup.check_idle()


def until_needed(setup: Setup, port: Any) -> list[pd.TokenEvent]:
    """Step until a request needs the port."""
    return step_until(setup.pairing, lambda _: setup.pairing._broker.assigned(port.address) != [])


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_port_that_dies_while_it_is_drained_loses_no_request(side: str) -> None:
    during = prompts(0, 4)
    with setup_of(2, 2) as setup:
        for one in during:
            setup.pairing.submit(one)
        port: Any = (setup.prefills if side == "prefill" else setup.decodes)[0]
        events = until_needed(setup, port)
        switching = setup.pairing.switching(port, "decode" if side == "prefill" else "prefill", drain_s=60.0)
        next(switching)
        port.step = broken
        events += setup.pairing.step()
        with pytest.raises(pd.TransferError, match="lost while it was drained"):
            next(switching)
        check_tokens(during, events + collect(setup.pairing))
        assert setup.pairing.stats.num_switches == 0
        (setup.prefills if side == "prefill" else setup.decodes).remove(port)
        setup.check_idle()


def test_a_host_that_steps_gets_the_events_and_may_think_better_of_it() -> None:
    during = prompts(0)
    with setup_of(2, 1) as setup:
        for one in during:
            setup.pairing.submit(one)
        port = setup.prefills[0]
        events = until_needed(setup, port)
        switching = setup.pairing.switching(port, "decode", drain_s=60.0)
        next(switching)
        with pytest.raises(pd.ConfigError, match="leaves already: let that end, or close its iterator"):
            setup.pairing.switch(port, "decode", drain_s=0.0)
        switching.close()
        assert port in setup.pairing.ports
        check_tokens(during, events + collect(setup.pairing))
        for _ in setup.pairing.switching(port, "decode", drain_s=60.0):
            setup.pairing.step()
        assert setup.pairing.stats.num_switches == 1
        assert len(setup.pairing.ports) == 3


def test_an_asyncio_host_switches_while_streams_go_on() -> None:
    async def serve(pairing: pd.Pairing) -> list[pd.TokenEvent]:
        async with AsyncPairing(pairing) as host:
            port = pairing.ports[1]
            streams = asyncio.ensure_future(read(host, prompts(0)))
            changed = await host.switch(port, "decode", drain_s=10.0)
            assert changed.role == "decode"
            with pytest.raises(pd.ConfigError, match="no port of this pairing"):
                await host.switch(port, "decode", drain_s=10.0)
            return [*await streams, *await read(host, prompts(10))]

    async def read(host: AsyncPairing, requests: list[pd.Request]) -> list[pd.TokenEvent]:
        return [event for one in requests async for event in host.stream(one)]

    with setup_of(2, 1) as setup:
        check_tokens([*prompts(0), *prompts(10)], asyncio.run(serve(setup.pairing)))


def test_a_switch_keeps_no_id_reserved_and_its_directories_know_the_new_port(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noted:
        """A directory that names nothing, and how it is followed."""

        def watch(self) -> list[Any]:
            return []

        def dial(self, entry: Any) -> Any:
            raise NotImplementedError

    with setup_of(1, 2) as setup:
        setup.pairing.follow(Noted())
        (following,) = setup.pairing._followings
        old = setup.decodes[0]
        with following._changing:  # its threads have begun
            following._ports["a"] = (Any, old)  # type: ignore[assignment]
        setup.pairing._broker._awaiting_release.add("r0", old.address)
        joining = setup.pairing._joining
        beside = joining.beside

        def looked_at(port: Any) -> Iterator[float]:
            following.look()  # while the engine has neither role
            assert following._ports["a"][1] is old
            yield from beside(port)

        monkeypatch.setattr(joining, "beside", looked_at)
        changed = setup.pairing.switch(old, "prefill", drain_s=0.0)
        assert following._ports["a"][1] is changed
        assert len(setup.pairing._broker._awaiting_release) == 0
