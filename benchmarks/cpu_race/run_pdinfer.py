"""Run the CPU race with pdinfer, as a host that embeds it would. One JSON line per case; see common.py.

    python benchmarks/cpu_race/run_pdinfer.py DIR [--cases prefill:512,decode:8,mixed:64] [--check]

Prefill: one request of one token through `Pairing.local`, from `submit` to its event. Decode: `DecodeEngine.step` with
the batch running. Its sequences were granted and handed off as always, but their context was not computed: the pool is
filled with random latents instead. `host_us` is the time of such a step outside the model, its head and sampling;
`engine_us` is the time outside the runner. Mixed: all requests through one `Pairing.local`. No case reuses a prefix.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from common import MOST_STEPS, Best, Order, now, parser, prompt_ids, run_cases

import pdinfer as pd
from pdinfer.execution import resident
from pdinfer.execution.runner import ModelRunner
from pdinfer.kernels import reference
from pdinfer.kernels.native import ops as native
from pdinfer.kv.view import KVView, PageMemory
from pdinfer.layers import RMSNorm
from pdinfer.process.recording import Recording
from pdinfer.types import Granted, Handoff, HandoffStatus

KV_BYTES = 2 << 30
"""The size of the pool for the mixed traffic."""


class Stopwatch:
    """The seconds spent in the model and the sampling ops, and in the runner around them."""

    def __init__(self) -> None:
        self.compute_s = self.runner_s = 0.0
        self.computes = False

    def computing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time measured; nested calls are not counted twice."""

        def timed(*arguments: Any) -> Any:
            if self.computes:
                return function(*arguments)
            self.computes = True
            started = now()
            found = function(*arguments)
            self.compute_s += now() - started
            self.computes = False
            return found

        return timed


STOPWATCH = Stopwatch()


class TimedRunner(ModelRunner):
    """A runner with its time measured."""

    def decode(self, *arguments: Any) -> Any:
        started = now()
        drawn = super().decode(*arguments)
        STOPWATCH.runner_s += now() - started
        return drawn


class TimedDecode(pd.DecodeEngine):
    """A decode engine whose runner's time is measured."""

    def _make_runner(self) -> ModelRunner:
        return TimedRunner(self.model, self.pool.memory)


def watch_compute() -> None:
    """Measure the time of the model and of sampling (the op, and reading what it drew), before a model is loaded."""
    pd.Model.forward = STOPWATCH.computing(pd.Model.forward)  # type: ignore[method-assign]
    pd.Model.head = STOPWATCH.computing(pd.Model.head)  # type: ignore[method-assign]
    RMSNorm.__call__ = STOPWATCH.computing(RMSNorm.__call__)  # type: ignore[method-assign]
    for provider in (reference, native.rows):
        provider.draw = STOPWATCH.computing(provider.draw)
    resident.read_drawn = STOPWATCH.computing(resident.read_drawn)  # type: ignore[attr-defined]
    Recording.replay = STOPWATCH.computing(Recording.replay)  # type: ignore[method-assign]


def greedy(count: int) -> pd.SamplingParams:
    return pd.SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)


def cache_for(num_sequences: int, num_tokens: int) -> pd.CacheConfig:
    size = pd.CacheConfig().page_size
    return pd.CacheConfig(num_pages=num_sequences * (-(-num_tokens // size) + 1), prefix_cache=False)


class PDInfer:
    """One loaded model, and engines made for each case."""

    def __init__(self, folder: str, dtype: str, threads: int, weights: str = "auto") -> None:
        torch.set_num_threads(threads)
        self.model = pd.load_model(folder, dtype=getattr(torch, dtype), weights=weights)
        self.vocab_size = self.model.config.vocab_size
        self.tag: dict[str, object] = {"engine": "pdinfer", "dtype": dtype, "threads": threads}
        self.outside: list[tuple[float, float]] = []

    @contextmanager
    def prefill(self, count: int) -> Iterator[Callable[[], None]]:
        prompt = tuple(prompt_ids(count, self.vocab_size))
        with pd.Pairing.local(self.model, cache=cache_for(2, count + 1)) as pairing:

            def run() -> None:
                pairing.submit(pd.Request(prompt=prompt, sampling=greedy(1)))
                while not (events := pairing.step()):
                    pass
                assert events[0].error is None, events[0].error

            yield run

    @contextmanager
    def decode(self, batch: int, context: int, config: pd.EngineConfig | None = None) -> Iterator[Callable[[], None]]:
        pool = pd.PagePool(self.model, cache_for(batch, context + MOST_STEPS))
        self.fill(pool)
        channel, decode_end = pd.KVChannel.loopback(pool, pool)
        with channel, TimedDecode(self.model, decode_end, config) as decode:
            channel.connect(decode.address)
            self.hand_off(channel, decode, batch, context)
            self.outside = []

            def step() -> None:
                STOPWATCH.compute_s = STOPWATCH.runner_s = 0.0
                started = now()
                events = decode.step()
                seconds = now() - started
                self.outside.append((seconds - STOPWATCH.compute_s, seconds - STOPWATCH.runner_s))
                errors = [event.error for event in events if isinstance(event, pd.TokenEvent) and event.error]
                assert not errors, errors
                assert len(events) >= batch, "not every sequence got its token"

            yield step

    def fill(self, pool: pd.PagePool) -> None:
        """Fill all pages with random latents, of the magnitude that normed latents have."""
        assert isinstance(pool.memory, PageMemory)
        torch.manual_seed(1)
        for pages in KVView.of(pool.memory).latents.values():
            pages.normal_()

    def hand_off(self, channel: pd.KVChannel, decode: pd.DecodeEngine, batch: int, context: int) -> None:
        """Play the prefill for requests of `context` tokens: their first tokens differ, their KV is there."""
        firsts = {}
        for index in range(batch):
            prompt = tuple(prompt_ids(context, self.vocab_size, index + 7))
            firsts[str(index)] = prompt[0]
            request = pd.Request(request_id=str(index), prompt=prompt, sampling=greedy(MOST_STEPS))
            decode.submit(request, writers=(channel.address,))
        for event in decode.step():
            assert isinstance(event, Granted), event
            grant, token = event.grant, firsts[event.request.request_id or ""]
            channel.accept(grant)
            layers = range(self.model.config.num_hidden_layers)
            channel.push(grant, layers=layers, tokens=grant.tokens, pages=grant.pages)
            word = Handoff(
                room=grant.room, writer=channel.address, status=HandoffStatus.LANDED, token=token, logprob=0.0
            )
            channel.finish(grant, word)

    def notes(self) -> dict[str, object]:
        found = zip(*self.outside, strict=True)
        return {
            name: round(1e6 * statistics.median(seconds), 1)
            for name, seconds in zip(("host_us", "engine_us"), found, strict=True)
        }

    def best(self, count: int) -> Best:
        values, tokens = self.model.logits(prompt_ids(count, self.vocab_size))[-1].topk(5)
        return Best(tokens.tolist(), values.tolist())

    def server(self, orders: Sequence[Order]) -> "MixedServer":
        page_bytes = self.model.kv_layout(pd.CacheConfig()).page_bytes
        cache = pd.CacheConfig(num_pages=KV_BYTES // page_bytes, prefix_cache=False)
        return MixedServer(pd.Pairing.local(self.model, cache=cache))


class MixedServer:
    """The mixed traffic through a Pairing, its engines with default settings."""

    def __init__(self, pairing: pd.Pairing) -> None:
        self.pairing = pairing

    def submit(self, index: int, order: Order) -> None:
        request = pd.Request(request_id=str(index), prompt=tuple(order.prompt), sampling=greedy(order.num_new_tokens))
        self.pairing.submit(request)

    def step(self) -> Iterator[int]:
        for event in self.pairing.step():
            if event.error is not None:
                raise SystemExit(f"a request of the mixed traffic failed: {event.error}")
            if event.token is not None:
                yield int(event.request_id)


def main() -> None:
    arguments = parser(__doc__).parse_args()
    watch_compute()
    engine = PDInfer(str(arguments.model), arguments.dtype, arguments.threads)
    run_cases(engine, arguments, engine.server)


if __name__ == "__main__":
    main()
