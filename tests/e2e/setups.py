"""What end-to-end tests share: tiny models, engines joined by any transport, and a reference without engines."""

from __future__ import annotations

import functools
import random
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

import pdinfer as pd
from pdinfer.testing import random_model, tiny_config
from tests.plain_sampling import plain_draw
from tests.waiting import TIMEOUT_S, check_ends, started

TRANSPORTS = ("shared", "loopback", "tcp", "unix")
"""Loopback with one pool for both sides, loopback with a pool each, TCP and Unix sockets."""

PEERS = {"tcp": pd.kv.SocketTransport, "shm": pd.kv.ShmTransport, "mooncake": pd.kv.MooncakeTransport}
"""Transports of `join` that need no more than themselves."""

NEAR_TIE = 1e-4
"""Two best logits closer than this may change places by rounding."""


@functools.cache
def model_of(family: str = "v3", seed: int = 0) -> pd.Model:
    """One model per family for the whole run; nothing changes a model. The one that most tests serve has no more layers
    than kinds of them: a dense one, and one of experts."""
    return random_model(tiny_config(family, **({"num_hidden_layers": 2} if family == "v3" else {})), seed=seed)


def pool_of(model: pd.Model, *, page_size: int = 4, num_pages: int = 256, **more: Any) -> pd.PagePool:
    """A pool of `num_pages` pages; `more` as for CacheConfig."""
    return pd.PagePool(model, pd.CacheConfig(page_size=page_size, num_pages=num_pages, **more))


def prompt_of(length: int, *, seed: int = 0, vocab_size: int = 97) -> tuple[int, ...]:
    """`length` random tokens, the same in every run."""
    rng = random.Random(f"{seed}/{length}")
    return tuple(rng.randrange(vocab_size) for _ in range(length))


def greedy(max_new_tokens: int, **more: Any) -> pd.SamplingParams:
    return pd.SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, **more)


@attrs.define(kw_only=True)
class Setup:
    """A Pairing with the engines behind it; leaving it closes everything."""

    pairing: pd.Pairing
    prefills: list[pd.PrefillEngine]
    decodes: list[pd.DecodeEngine]
    folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def engines(self) -> list[pd.PrefillEngine | pd.DecodeEngine]:
        return [*self.prefills, *self.decodes]

    @property
    def pools(self) -> list[pd.PagePool]:
        return list({id(engine.channel.pool): engine.channel.pool for engine in self.engines}.values())

    def paired_anew(self, **more: Any) -> pd.Pairing:
        """Make another pairing of the same engines, which leave theirs."""
        for engine in self.engines:
            self.pairing.remove(engine, drain_s=0.0)
        return pd.Pairing(self.prefills, self.decodes, **more)

    def check_pools(self) -> None:
        for pool in self.pools:
            pool.check()

    def check_idle(self) -> None:
        """Nothing is unfinished and every page is free or cached, once the last hand-offs have left."""
        end = time.monotonic() + TIMEOUT_S
        while any(engine.num_unfinished for engine in self.engines) and time.monotonic() < end:
            assert self.pairing.step() == []
            time.sleep(0.001)
        for engine in self.engines:
            pool = engine.channel.pool
            assert engine.num_unfinished == 0
            pool.check()
            assert (pool.num_available, pool.num_granted, pool.num_owned) == (pool.num_pages, 0, 0)

    def __enter__(self) -> Setup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pairing.close()
        for engine in self.engines:
            engine.close()
        if self.folder is not None:
            self.folder.cleanup()


def join(
    model: pd.Model,
    transport: str = "shared",
    *,
    prefill_pools: Sequence[pd.PagePool] = (),
    decode_pools: Sequence[pd.PagePool],
    engine: pd.EngineConfig | None = None,
    config: pd.PairingConfig | None = None,
    policy: pd.policy.Policy = pd.policy.least_tokens,
    clock: Callable[[], float] = time.monotonic,
    channel: type[pd.KVChannel] = pd.KVChannel,
) -> Setup:
    """A Pairing of one engine per pool. "shared" takes one decode pool and has prefill use it too."""
    if transport == "shared":
        prefill_pools = decode_pools
    pools = [*prefill_pools, *decode_pools]
    folder = tempfile.TemporaryDirectory(prefix="pd") if transport == "unix" else None
    if transport in ("shared", "loopback"):
        channels = list(channel.loopback(*pools))
    elif folder is not None:
        channels = [
            channel(pool, pd.kv.SocketTransport(path=Path(folder.name) / str(number)))
            for number, pool in enumerate(pools)
        ]
    else:
        channels = [channel(pool, PEERS[transport]()) for pool in pools]
    count = len(prefill_pools)
    prefills = [pd.PrefillEngine(model, end, engine, clock=clock) for end in channels[:count]]
    decodes = [pd.DecodeEngine(model, end, engine, clock=clock) for end in channels[count:]]
    pairing = pd.Pairing(prefills, decodes, config=config, policy=policy, clock=clock)
    return Setup(pairing=pairing, prefills=prefills, decodes=decodes, folder=folder)


def several(num_prefill: int, num_decode: int, transport: str = "loopback", **more: Any) -> Setup:
    """A Pairing of that many engines, with a pool each; `more` as for `join`."""
    pools = [pool_of(model_of(), num_pages=64) for _ in range(num_prefill + num_decode)]
    return join(model_of(), transport, prefill_pools=pools[:num_prefill], decode_pools=pools[num_prefill:], **more)


PROMPT = prompt_of(9)


def request(name: str | None = "a", count: int = 5, **more: Any) -> pd.Request:
    """`count` greedy tokens after PROMPT: `reference("v3", PROMPT, count)` knows them."""
    return pd.Request(**{"request_id": name, "prompt": PROMPT, "sampling": greedy(count, ignore_eos=True), **more})


def local(*, num_pages: int = 64, model: pd.Model | None = None, **more: Any) -> Setup:
    """One prefill and one decode over one pool of 4-token pages; `more` as for `join`."""
    model = model or model_of()
    return join(model, "shared", decode_pools=[pool_of(model, num_pages=num_pages)], **more)


@contextmanager
def remote(engine: Any, config: pd.remote.RemoteConfig | None = None) -> Iterator[Any]:
    """A client of the engine, which a thread serves. Both end with the block."""
    ours, theirs = Pipe()
    thread = started(pd.remote.serve, engine, theirs, config=config)
    with (pd.remote.PrefillClient if engine.role == "prefill" else pd.remote.DecodeClient)(ours) as client:
        yield client
    check_ends(thread)


def watch(port: Any) -> list[pd.types.Event]:
    """From now on keeps what each step of `port` returns, in one list."""
    seen: list[pd.types.Event] = []
    step = port.step

    def watched() -> list[pd.types.Event]:
        events = step()
        seen.extend(events)
        return events

    port.step = watched
    return seen


def hang(engine: Any, *, takes: bool = True) -> None:
    """From now on `engine` does nothing in a step but, if it `takes`, notice what was submitted and cancelled."""

    def step() -> list[pd.types.Event]:
        if takes:
            engine._take_inbox()
        return []

    engine.step = step
    engine.wait = lambda timeout_s: False


def recover(engine: Any) -> None:
    """Undoes `hang`."""
    del engine.step
    vars(engine).pop("wait", None)


def check_wakes_in(pairing: pd.Pairing, seconds: float) -> None:
    """There is nothing to do now, and a host that sleeps is woken in so many seconds by the clock alone."""
    assert not pairing.wait(0.0)
    assert pairing.wait(seconds)


def step_until(
    pairing: pd.Pairing, condition: Callable[[list[pd.TokenEvent]], object], *, timeout_s: float = TIMEOUT_S
) -> list[pd.TokenEvent]:
    """Steps until it comes true of the events, which are returned. Fails when it does not, and at once when no request
    is left that could make it true."""
    events: list[pd.TokenEvent] = []
    end = time.monotonic() + timeout_s
    while not condition(events):
        assert time.monotonic() < end, f"it did not happen in {timeout_s} s; what came is {events}"
        is_over = not pairing.num_unfinished
        pairing.wait(0.05)
        events += pairing.step()
        assert not is_over or condition(events), (
            f"all requests have ended, and it did not happen; what came is {events}"
        )
    return events


def collect(pairing: pd.Pairing, *, timeout_s: float = TIMEOUT_S) -> list[pd.TokenEvent]:
    """Steps until every request has ended; fails rather than waits for ever."""
    events: list[pd.TokenEvent] = []
    end = time.monotonic() + timeout_s
    while pairing.num_unfinished:
        assert time.monotonic() < end, f"{pairing.num_unfinished} requests did not end within {timeout_s} s"
        events += pairing.step()
        if pairing.num_unfinished:
            pairing.wait(0.05)
    return events + pairing.step()


def arrive(setup: Setup, requests: Iterable[pd.Request], chance: random.Random, share: float) -> list[pd.TokenEvent]:
    """Requests arrive one after another, at this share of the steps; in the end nothing is left of them."""
    waiting, events = list(requests), list[pd.TokenEvent]()
    while waiting or setup.pairing.num_unfinished:
        if waiting and chance.random() < share:
            setup.pairing.submit(waiting.pop(0))
        events += setup.pairing.step()
    setup.check_idle()
    return events


def by_request(events: Iterable[pd.TokenEvent]) -> dict[str, list[pd.TokenEvent]]:
    """The events of each request in order; checks that nothing follows an end and that indices are contiguous."""
    streams: dict[str, list[pd.TokenEvent]] = {}
    for event in events:
        stream = streams.setdefault(event.request_id, [])
        assert not stream or stream[-1].finish_reason is None, f"{event} came after the end"
        assert not stream or event.index == stream[-1].index + 1, f"{event} came after index {stream[-1].index}"
        stream.append(event)
    return streams


def tokens_of(stream: Iterable[pd.TokenEvent]) -> list[int]:
    return [event.token for event in stream if event.token is not None]


@attrs.frozen
class Reference:
    """A continuation: tokens, their log-probabilities, and by how much each beat the second best."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


def reference(family: str, prompt: tuple[int, ...], count: int) -> Reference:
    """`count` greedy tokens, one call of `Model.logits` each: no engine, no pages, no cache."""
    known = _known(family, prompt)
    while len(known) < count:
        row = model_of(family).logits([*prompt, *(token for token, _, _ in known)])[-1].double()
        best, second = row.topk(2).values.tolist()
        known.append((int(row.argmax()), best - float(row.logsumexp(-1)), best - second))
    tokens, logprobs, margins = zip(*known[:count], strict=True) if count else ((), (), ())
    return Reference(tokens, logprobs, margins)


@functools.cache
def _known(family: str, prompt: tuple[int, ...]) -> list[tuple[int, float, float]]:
    """Token, log-probability and margin of each step that was computed so far: tests ask for prefixes of each other."""
    return []


def judged(family: str, prompt: Sequence[int], tokens: Sequence[int]) -> Reference:
    """The greedy tokens in the place of each of `tokens`, which continue the prompt, by one call of `Model.logits`.
    They are those of `reference` up to the first that differs."""
    rows = model_of(family).logits([*prompt, *tokens])[len(prompt) - 1 : -1].double()
    best, second = rows.topk(2).values.unbind(-1)
    logprobs = best - rows.logsumexp(-1)
    return Reference(*(tuple(each.tolist()) for each in (rows.argmax(-1), logprobs, best - second)))


def plain_reference(
    model: pd.Model,
    request: pd.Request,
    tokens: Sequence[int],
    allowed: Callable[[Sequence[int]], Collection[int]] | None = None,
) -> Reference:
    """What plain loops draw from `Model.logits` in the place of each of `tokens`, which continue the request. `allowed`
    tells which tokens a logits processor leaves behind an output."""
    rows = model.logits([*request.tokens, *tokens[:-1]])[len(request.tokens) - 1 :].tolist()
    drawn = []
    for position, row in enumerate(rows):
        output = [*request.output, *tokens[:position]]
        may_come = None if allowed is None else allowed(output)
        drawn.append(
            plain_draw(row, request.sampling, request.prompt, output, model.config.eos_token_ids, allowed=may_come)
        )
    return Reference(
        tokens=tuple(one.token for one in drawn),
        logprobs=tuple(one.logprob for one in drawn),
        margins=tuple(one.margin for one in drawn),
        top_logprobs=tuple(tuple(one.top_logprobs) for one in drawn),
    )


@attrs.define
class Tally:
    """Compares tokens with the reference. A difference is excused only where the reference itself nearly ties, and then
    ends the comparison of that stream; such excuses must stay rare."""

    num_tokens: int = 0
    near_ties: list[str] = attrs.field(factory=list)

    def compare(self, name: str, stream: Sequence[pd.TokenEvent], expected: Reference) -> None:
        events = [event for event in stream if event.token is not None]
        for position, (event, token) in enumerate(zip(events, expected.tokens, strict=False)):
            self.num_tokens += 1
            if event.token != token:
                margin = expected.margins[position]
                assert margin < NEAR_TIE, f"{name}: token {position} is {event.token}, not {token} (margin {margin})"
                self.near_ties.append(f"{name} token {position} (margin {margin:.1e})")
                return
            assert event.logprob is not None
            assert abs(event.logprob - expected.logprobs[position]) < 1e-4, f"{name}: logprob {position}"
        assert len(events) == len(expected.tokens), f"{name}: {len(events)} tokens, not {len(expected.tokens)}"

    def compare_all(
        self, model: pd.Model, requests: Iterable[pd.Request], streams: Mapping[str, Sequence[pd.TokenEvent]]
    ) -> None:
        """Requests that ran to their length, with the model in one piece."""
        for request in requests:
            stream = streams[request.request_id or ""]
            assert stream[-1].finish_reason is pd.FinishReason.LENGTH, stream[-1]
            self.compare(str(request.request_id), stream, plain_reference(model, request, tokens_of(stream)))

    def check(self) -> None:
        """At most one excuse in 10,000 tokens."""
        for line in self.near_ties:
            print("near tie:", line)
        assert len(self.near_ties) * 10_000 <= self.num_tokens, self.near_ties


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows in which every two values of different factors meet at least once: a small slice of the full product."""
    missing = {(i, a, j, b) for i in range(len(factors)) for j in range(i) for a in factors[i] for b in factors[j]}
    rows = []
    while missing:
        i, a, j, b = min(missing, key=repr)
        row: list[Any] = [None] * len(factors)
        row[i], row[j] = a, b
        for k in (k for k in range(len(factors)) if k not in (i, j)):
            row[k] = max(factors[k], key=lambda value: len(missing & _pairs([*row[:k], value, *row[k + 1 :]])))
        missing -= _pairs(row)
        rows.append(tuple(row))
    return rows


def _pairs(row: Sequence[Any]) -> set[tuple[int, Any, int, Any]]:
    return {
        (i, row[i], j, row[j]) for i in range(len(row)) for j in range(i) if row[i] is not None and row[j] is not None
    }


def broken() -> list[object]:
    """Stand in for the `step` of an engine that is lost."""
    raise RuntimeError("the device fell off")
