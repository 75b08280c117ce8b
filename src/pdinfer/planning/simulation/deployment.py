"""What is simulated: engines with the limits of real ones, the seconds of their steps, links, and what happens to them.

Step times are functions that the host gives. They are asked with `StepRows`, the sizes of one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from pdinfer.checks import as_float, clip, float_field, float_in, instance_of, int_field, int_in, typed
from pdinfer.config import CacheConfig, EngineConfig, PairingConfig
from pdinfer.errors import ConfigError
from pdinfer.planning.shapes import MAX_ENGINES, engine_nodes
from pdinfer.values import Value

MANY_PAGES = 2**31 - 1
"""The pages of a pool whose size is not given: more than any load fills."""
_PROBES = (1, 7, 4096, 100_000)


@attrs.frozen
class StepRows:
    """The sizes of one step. A row is the part of one request that it runs.

    `num_tokens` are run, over all rows: one per row at decode. `num_context_tokens` is the sum of the contexts, the
    tokens that are run included. `num_pairs` counts pairs of a token and one that it attends to, itself included; at
    decode it equals `num_context_tokens`. At decode both may be numpy arrays, with an item for each step of a burst.
    Means over attention groups, of which some may have nothing, are fractions.
    """

    num_rows: float
    num_tokens: float
    num_context_tokens: Any
    num_pairs: Any


StepSeconds = Callable[[StepRows], Any]
"""The seconds of a step."""


@attrs.frozen(kw_only=True)
class Change(Value):
    """From `at_s` on, the engine ("P0", "D1") runs at `speed` times its own speed, from its next step on, on all its
    ranks. At a speed of 0 it is gone, at once and for good."""

    engine: str = attrs.field(validator=instance_of(str))
    at_s: float = attrs.field(validator=float_in(0.0, 1e9, low_included=True), converter=as_float)
    speed: float = attrs.field(validator=float_in(0.0, 1e3, low_included=True), converter=as_float)


@attrs.frozen(kw_only=True)
class Stall(Value):
    """The host of the Pairing does nothing for `for_s` seconds from `at_s` on: it sends, forwards and reads nothing."""

    at_s: float = attrs.field(validator=float_in(0.0, 1e9, low_included=True), converter=as_float)
    for_s: float = attrs.field(validator=float_in(0.0, 1e6), converter=as_float)


@attrs.frozen(kw_only=True)
class Network(Value):
    """The links between engines. Each engine's end carries `bytes_per_s`, which its transfers share max-min; None is
    without limit. A token has `token_bytes`. A chunk's bytes leave in `num_pushes` equal parts as its layers are
    computed, so the last part is what compute cannot hide. A hand-off lands `latency_s` after its last byte."""

    bytes_per_s: float | None = float_field(0.0, 1e18, default=None)
    token_bytes: int = int_field(0, 1 << 40, default=0)
    num_pushes: int = int_field(1, 1 << 16, default=1)
    latency_s: float = float_field(0.0, 3600.0, default=0.0, low_included=True)

    def __attrs_post_init__(self) -> None:
        """Refuse a link whose transfers would never begin."""
        rate = self.bytes_per_s
        if rate is not None and self.token_bytes < 1:
            raise ConfigError(f"bytes_per_s is {rate:g} and token_bytes {self.token_bytes}: say how large a token is")


@attrs.frozen(kw_only=True)
class EngineModel(Value):
    """All engines of one side: their data-parallel `ranks`, the limits and pool of each rank, and the seconds of its
    steps. `takes_arrays` says that `step_s` answers for many steps at once."""

    step_s: StepSeconds
    engine: EngineConfig
    cache: CacheConfig
    takes_arrays: bool = False
    ranks: int = attrs.field(default=1, validator=int_in(1, MAX_ENGINES))

    def name_of(self, side: str, number: int) -> str:
        """Return the name of the rank that has `number` others before it on its side: D1.3, or D1 if it is the only one
        of its engine."""
        engine, rank = divmod(number, self.ranks)
        return f"{side}{engine}" if self.ranks == 1 else f"{side}{engine}.{rank}"

    @property
    def num_pages(self) -> int:
        """The pages of each pool."""
        return self.cache.num_pages or MANY_PAGES


@attrs.frozen(kw_only=True)
class Cluster(Value):
    """Engines to simulate. Make it with `cluster`."""

    shape: str
    num_prefills: int
    num_decodes: int
    prefill: EngineModel
    decode: EngineModel
    pairing: PairingConfig
    network: Network
    changes: tuple[Change, ...]
    stalls: tuple[Stall, ...]
    colocated: bool
    step_cv: float = attrs.field(validator=float_in(0.0, 2.0, low_included=True), converter=as_float)
    accept_rate: float = attrs.field(validator=float_in(0.0, 1.0, low_included=True), converter=as_float)

    def __attrs_post_init__(self) -> None:
        for count, ranks in ((self.num_prefills, self.prefill.ranks), (self.num_decodes, self.decode.ranks)):
            if count * ranks > MAX_ENGINES:
                raise ConfigError(f"{count} engines of {ranks} ranks are more than {MAX_ENGINES} ranks on one side")
            if self.colocated and ranks > 1:
                raise ConfigError(f"colocated engines have one rank each, got ranks={ranks}")

    @property
    def name(self) -> str:
        """Its shape, such as 4P4D or P3x3D4."""
        return self.shape + (" colocated" if self.colocated else "")

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of its summaries should know: what its name says of engines of several nodes."""
        (num_prefills, of_prefill), (num_decodes, of_decode) = ((len(n), n[0]) for n in engine_nodes(self.shape))
        if of_prefill == of_decode == 1:
            return ()
        told = (
            f"{self.shape} has {num_prefills} x {of_prefill} nodes of prefill and {num_decodes} x {of_decode} of decode"
        )
        return (f"{told}; {of_prefill}P{of_decode}D has {of_prefill} prefills and {of_decode} decodes",)


@typed
def cluster(
    shape: str,
    *,
    prefill_s: StepSeconds,
    decode_s: StepSeconds,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    bytes_per_s: float | None = None,
    token_bytes: int = 0,
    num_pushes: int = 1,
    latency_s: float = 0.0,
    pairing: PairingConfig | None = None,
    changes: Sequence[Change] = (),
    stalls: Sequence[Stall] = (),
    colocated: bool = False,
    step_cv: float = 0.0,
    accept_rate: float = 0.0,
    ranks: int = 1,
    **limits: Any,
) -> Cluster:
    """Return `shape` ("4P4D": 4 prefills and 4 decodes; "P3x3D4": 3 prefills of 3 nodes and a decode of 4, see
    `planning.shapes`) as a value to simulate.

    `prefill_s` and `decode_s` give the seconds of a step (`StepRows`). `limits` are fields of EngineConfig and
    CacheConfig, for both sides; `prefill` and `decode` have those of one side. Without `num_pages` a pool never fills.
    An engine has `ranks` data-parallel ranks, whatever its nodes, or as many as `prefill` or `decode` says. Each is a
    port with limits, a pool and a link of its own. They take their steps together: one lasts as long as it takes the
    slowest of them. `bytes_per_s` to `latency_s` are those of `Network`. With `colocated`, prefill i and decode i share
    one device, on which they take turns, and one pool, of which `decode` says the size; they serve each other alone.
    Steps scatter around their times with the coefficient of variation `step_cv`, drawn by the seed of a run. With
    `num_draft_tokens` a step of decode checks drafts, each of which is right with the chance `accept_rate` if those
    before it are. Raises ConfigError for what does not fit together, and for step times that are no seconds.
    """
    num_prefills, num_decodes = map(len, engine_nodes(shape))
    limits["ranks"] = ranks
    if colocated and num_prefills != num_decodes:
        raise ConfigError(f"colocated engines come in pairs; {shape} has {num_prefills} and {num_decodes}")
    names = {f"P{at}" for at in range(num_prefills)} | {f"D{at}" for at in range(num_decodes)}
    for change in changes:
        if change.engine not in names:
            raise ConfigError(f"a change is for {clip(change.engine)}, and {shape} has P0 to D{num_decodes - 1}")
    return Cluster(
        shape=shape,
        num_prefills=num_prefills,
        num_decodes=num_decodes,
        prefill=_engine_model("prefill_s", prefill_s, {**limits, **(prefill or {})}, one_token=False),
        decode=_engine_model("decode_s", decode_s, {**limits, **(decode or {})}, one_token=True),
        pairing=pairing or PairingConfig(),
        network=Network(bytes_per_s=bytes_per_s, token_bytes=token_bytes, num_pushes=num_pushes, latency_s=latency_s),
        changes=tuple(changes),
        stalls=tuple(sorted(stalls, key=lambda stall: stall.at_s)),
        colocated=colocated,
        step_cv=step_cv,
        accept_rate=accept_rate,
    )


def _engine_model(name: str, step_s: StepSeconds, limits: Mapping[str, Any], *, one_token: bool) -> EngineModel:
    engine_fields, cache_fields = (set(attrs.fields_dict(kind)) for kind in (EngineConfig, CacheConfig))
    unknown = sorted(set(limits) - engine_fields - cache_fields - {"ranks"})
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: no field of EngineConfig or CacheConfig")
    engine = EngineConfig(**{key: value for key, value in limits.items() if key in engine_fields})
    return EngineModel(
        step_s=step_s,
        engine=engine,
        cache=CacheConfig(**{key: value for key, value in limits.items() if key in cache_fields}),
        takes_arrays=_probe(name, step_s, one_token=one_token),
        ranks=limits["ranks"],
    )


def _probe(name: str, step_s: StepSeconds, *, one_token: bool) -> bool:
    """Return whether the function answers for arrays as it does for numbers. Raise ConfigError when it does not answer
    with seconds."""
    if not callable(step_s):
        raise ConfigError(f"{name} must be a function from StepRows to seconds, got {clip(step_s)}")
    rows = [StepRows(1, 1 if one_token else size, size, size) for size in _PROBES]
    told = [seconds(name, step_s, row) for row in rows]
    if not one_token:
        return False
    sizes = np.array(_PROBES)
    try:
        at_once = np.broadcast_to(step_s(StepRows(1, 1, sizes, sizes)), sizes.shape)
        return bool(np.allclose(at_once, told, rtol=1e-12, atol=0.0))
    except Exception:  # noqa: BLE001 - the host's own function, which need not know arrays
        return False


def seconds(name: str, step_s: StepSeconds, rows: StepRows) -> float:
    """Return the seconds of one step. Raise ConfigError unless they are finite and not negative."""
    told = step_s(rows)
    try:
        took_s = float(told)
    except (TypeError, ValueError, OverflowError):
        took_s = math.nan
    if not 0.0 <= took_s < math.inf:
        raise ConfigError(f"{name} must return seconds, finite and at least 0; for {rows} it returned {clip(told)}")
    return took_s
