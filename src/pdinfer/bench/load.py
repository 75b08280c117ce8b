"""The requests of a run and their times: loads are plain values, made by seed, that `run` sends and a simulator
replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from pdinfer.bench.traces import BLOCK_TOKENS, MAX_LENGTH, MAX_SEED, Arrival, Trace, check_arrivals, rng_of
from pdinfer.checks import check_int, clip, int_field, int_in, is_int, is_number, one_of, typed
from pdinfer.errors import ConfigError
from pdinfer.values import Value

Lengths = int | tuple[int, int] | Trace
"""The tokens of each request: a number, (least, most) drawn uniformly, or those of a trace, in its order."""
MAX_REQUESTS = 10_000_000
MAX_CV = 1e6
"""Beyond it, and below its inverse, gaps are lost to rounding."""
MODES = ("burst", "closed_loop", "open_loop", "replay")


@attrs.frozen(kw_only=True)
class Load(Value):
    """Requests with the times at which they are due, in seconds since the run begins, in order.

    In the mode "closed_loop" `at_s` is when a client starts, for the first `max_concurrency` requests; each of the
    others is due when one before it ends. In other modes times do not depend on what is served, and
    `max_concurrency` only holds requests back: they still count as due. Raises ConfigError for another mode than those
    of MODES, for what are no arrivals in order, and for a closed loop without `max_concurrency`."""

    mode: str = attrs.field(validator=one_of(*MODES))
    arrivals: tuple[Arrival, ...]
    max_concurrency: int | None = int_field(1, MAX_REQUESTS, default=None)
    request_rate: float | None = None
    speed: float | None = None
    seed: int = attrs.field(default=0, validator=int_in(0, MAX_SEED))
    name: str = ""
    block_tokens: int = attrs.field(default=BLOCK_TOKENS, validator=int_in(1, MAX_LENGTH))
    environment: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        check_arrivals("a load", self.arrivals)
        for arrival in self.arrivals:
            _check_blocks(arrival, self.block_tokens)
        if self.mode == "closed_loop":
            check_int("max_concurrency of a closed loop", self.max_concurrency, 1)


@typed
def burst(num_requests: int, *, prompt_tokens: Lengths, output_tokens: Lengths, seed: int = 0) -> Load:
    """Send all requests at once."""
    return _load("burst", [0.0] * _count(num_requests), prompt_tokens, output_tokens, seed)


@typed
def closed_loop(
    concurrency: int,
    num_requests: int,
    *,
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    ramp_s: float = 0.0,
    seed: int = 0,
) -> Load:
    """Keep `concurrency` requests in flight. The clients start one after the other, spread over `ramp_s`."""
    _count(concurrency, "concurrency")
    _finite("ramp_s", ramp_s, above=False)
    starts = [ramp_s * min(at, concurrency) / concurrency for at in range(_count(num_requests))]
    return _load("closed_loop", starts, prompt_tokens, output_tokens, seed, max_concurrency=concurrency)


@typed
def open_loop(
    request_rate: float,
    num_requests: int,
    *,
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    arrivals: str = "poisson",
    cv: float = 1.0,
    max_concurrency: int | None = None,
    seed: int = 0,
) -> Load:
    """Send `request_rate` requests a second, whatever is served. `arrivals` are "poisson", "constant", or "gamma" with
    the coefficient of variation `cv` between them. The first request is due at 0."""
    _finite("request_rate", request_rate)
    if not is_number(cv) or not 1.0 / MAX_CV <= cv <= MAX_CV:
        raise ConfigError(f"cv must be from {1.0 / MAX_CV:g} to {MAX_CV:g}, got {clip(cv)}")
    rng, count = rng_of(seed), _count(num_requests)
    mean_s = 1.0 / request_rate
    draws: dict[str, Callable[[], np.ndarray]] = {
        "constant": lambda: np.full(count - 1, mean_s),
        "poisson": lambda: rng.exponential(mean_s, count - 1),
        "gamma": lambda: rng.gamma(1 / cv**2, mean_s * cv**2, count - 1),
    }
    if arrivals not in draws:
        raise ConfigError(f"arrivals must be one of {', '.join(draws)}, got {clip(arrivals)}")
    if max_concurrency is not None:
        _count(max_concurrency, "max_concurrency")
    times_s = [0.0, *np.cumsum(draws[arrivals]()).tolist()]
    return _load(
        "open_loop",
        times_s,
        prompt_tokens,
        output_tokens,
        seed,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        notes=(f"arrivals: {arrivals}" + (f", CV {cv:g}" if arrivals == "gamma" else ""),),
    )


@typed
def replay(trace: Trace, *, speed: float = 1.0, num_requests: int | None = None, seed: int = 0) -> Load:
    """Send the requests of a trace at its times, divided by `speed`. `num_requests` takes the first ones only."""
    _finite("speed", speed)
    chosen = trace.arrivals if num_requests is None else trace.arrivals[: _count(num_requests)]
    first_s = chosen[0].at_s
    return Load(
        mode="replay",
        arrivals=tuple(attrs.evolve(arrival, at_s=(arrival.at_s - first_s) / speed) for arrival in chosen),
        speed=speed,
        seed=seed,
        name=trace.name,
        block_tokens=trace.block_tokens,
        environment=(("trace", trace.name), ("trace_format", trace.format), ("trace_sha256", trace.sha256)),
        notes=trace.notes,
    )


def _load(
    mode: str, times_s: Sequence[float], prompt_tokens: Lengths, output_tokens: Lengths, seed: int, **more: Any
) -> Load:
    """Return requests at these times. Where both lengths are of one trace, prefixes are those of the trace too."""
    rng = rng_of(seed, 1)
    if isinstance(prompt_tokens, Trace) and prompt_tokens is output_tokens:
        known = prompt_tokens.arrivals
        arrivals = tuple(attrs.evolve(known[at % len(known)], at_s=time_s) for at, time_s in enumerate(times_s))
        return Load(mode=mode, arrivals=arrivals, block_tokens=prompt_tokens.block_tokens, seed=seed, **more)
    prompts = _lengths("prompt_tokens", prompt_tokens, len(times_s), rng)
    outputs = _lengths("output_tokens", output_tokens, len(times_s), rng)
    arrivals = tuple(
        Arrival(at_s=at_s, prompt_tokens=prompt, output_tokens=output)
        for at_s, prompt, output in zip(times_s, prompts, outputs, strict=True)
    )
    return Load(mode=mode, arrivals=arrivals, seed=seed, **more)


def _check_blocks(arrival: Arrival, block_tokens: int) -> None:
    """Raise ConfigError for hashes that are not those of all blocks of the prompt."""
    needed, told = -(-arrival.prompt_tokens // block_tokens), len(arrival.hash_ids)
    if told not in (0, needed):
        raise ConfigError(
            f"{arrival.prompt_tokens} tokens have {needed} blocks of block_tokens={block_tokens}, and this prompt has "
            f"{told} hash_ids: give one for each block, or none"
        )


def _lengths(name: str, lengths: Lengths, count: int, rng: np.random.Generator) -> list[int]:
    if isinstance(lengths, Trace):
        known = [getattr(arrival, name) for arrival in lengths.arrivals]
        return [known[at % len(known)] for at in range(count)]
    low, high = lengths if isinstance(lengths, tuple) and len(lengths) == 2 else (lengths, lengths)
    if not is_int(low) or not is_int(high) or not 1 <= low <= high <= 2**31:
        raise ConfigError(f"{name} must be an int from 1 to 2^31, (least, most), or a trace, got {clip(lengths)}")
    return [int(value) for value in rng.integers(low, high, count, endpoint=True)]


def _count(value: int, name: str = "num_requests") -> int:
    if not is_int(value) or not 1 <= value <= MAX_REQUESTS:
        raise ConfigError(f"{name} must be an int from 1 to {MAX_REQUESTS}, got {clip(value)}")
    return value


def _finite(name: str, value: float, *, above: bool = True) -> None:
    if not is_number(value) or value < 0:
        raise ConfigError(f"{name} must be a finite number, at least 0, got {clip(value)}")
    if above and value == 0:
        raise ConfigError(f"{name} must be greater than 0")


_ROOT = -1


class PromptMaker:
    """Makes the prompts of a load, with tokens below `vocab_size`, the same ones for the same seed and order.

    A block's tokens are drawn from its hash. Its first token is another one than that of every block after the same
    prefix, so that prompts differ right where their hashes do, until a prefix has been followed by as many blocks as
    there are tokens. A prompt without hashes is a block of its own."""

    @typed
    def __init__(self, vocab_size: int, *, block_tokens: int = 512, seed: int = 0) -> None:
        check_int("vocab_size", vocab_size, 2, 2**31)
        check_int("block_tokens", block_tokens, 1, MAX_LENGTH)
        check_int("seed", seed, 0, MAX_SEED)
        self._vocab_size = vocab_size
        self._block_tokens = block_tokens
        self._seed = seed
        self._first: dict[int, int] = {}
        self._num_children: dict[int, int] = {}
        self._num_made = 0

    def prompt(self, arrival: Arrival) -> tuple[int, ...]:
        """Return the prompt of a request: `arrival.prompt_tokens` token ids. Raises ConfigError for `hash_ids` that are
        not one for each block."""
        _check_blocks(arrival, self._block_tokens)
        self._num_made += 1
        if not arrival.hash_ids:
            return self._block(_ROOT, -1 - self._num_made, arrival.prompt_tokens)
        tokens: list[int] = []
        parent = _ROOT
        for hash_id in arrival.hash_ids:
            left = min(self._block_tokens, arrival.prompt_tokens - len(tokens))
            tokens += self._block(parent, hash_id, left)
            parent = hash_id
        return tuple(tokens)

    def _block(self, parent: int, block: int, count: int) -> tuple[int, ...]:
        first = self._first.get(block)
        if first is None:
            child = self._num_children.get(parent, 0)
            self._num_children[parent] = child + 1
            first = self._first[block] = child % self._vocab_size
        rng = np.random.default_rng([self._seed, block < 0, abs(block)])
        rest = rng.integers(0, self._vocab_size, self._block_tokens if block >= 0 else count)
        return (first, *rest[1:count].tolist())
