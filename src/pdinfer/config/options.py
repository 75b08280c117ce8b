"""The host's choices: the cache, and the limits of engines, of a Pairing and of connections.

All values are frozen and checked when made, so one that exists can be used. Every violation raises ConfigError with the
field, its value and the range."""

from __future__ import annotations

import os
from typing import Any

import attrs

from pdinfer.checks import Validator, a_bool, clip, float_field, int_field, is_int, one_of
from pdinfer.config.hf import STORED_DTYPES
from pdinfer.errors import ConfigError
from pdinfer.process.silence import SESSIONS
from pdinfer.values import Value

MAX_REQUESTS = 1 << 20
MAX_STEP_TOKENS = 1 << 24
MAX_TOTAL_TOKENS = 1 << 40
MAX_DEADLINE_S = 30 * 24 * 3600
TARGET_ITL_S: float | None = 2.0
"""The prefill of a large model on a CPU costs a tenth more so, and half as much again at 1 s: docs/decisions/0043."""


def _fraction(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, float) or not 0 < value < 1:
        raise ConfigError(f"{attribute.name} must be a number greater than 0 and less than 1, got {clip(value)}")


def _chunk(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if not is_int(value) or (value != -1 and not 1 <= value <= MAX_STEP_TOKENS):  # type: ignore[operator]
        raise ConfigError(
            f"{attribute.name} must be -1 (unlimited) or an int from 1 to {MAX_STEP_TOKENS}, got {clip(value)}"
        )


def _graph_sizes(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not (
        isinstance(value, tuple) and all(is_int(size) and 1 <= size <= MAX_REQUESTS for size in value)
    ):
        raise ConfigError(f"{attribute.name} must be ints from 1 to {MAX_REQUESTS} or None, got {clip(value)}")


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list | range) else value


def _path_of(what: str) -> Validator:
    def check(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is not None and not (isinstance(value, str | os.PathLike) and os.fspath(value)):
            raise ConfigError(f"{attribute.name} must be the path of a {what}, got {clip(value)}")

    return check


def _promised(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not isinstance(value, SLO):
        raise ConfigError(f"{attribute.name} must be an SLO or None, got {clip(value)}")
    late = [name for name in ("itl_p99_s", "e2e_s") if getattr(value, name, None) is not None]
    if late:
        raise ConfigError(
            f"{attribute.name} limits {' and '.join(late)}, and nobody knows at submit how long an answer gets: "
            "promise ttft_s, ttft_per_token_s and tpot_s, and measure the others with bench.run(slo=)"
        )


@attrs.frozen(kw_only=True)
class CacheConfig(Value):
    """The KV cache of one engine: how many pages of how many tokens, in which format, in which kind of memory.

    `kv_format` "auto" is the model's dtype. "fp8" packs what is cached (656 bytes per token and layer of a DeepSeek-V3
    instead of 1152). The number of pages is given directly (`num_pages`), or as the fraction of the device's memory
    that weights and pages take together (`mem_fraction_static`, as in SGLang). Without either the pool decides. A
    fraction gives the pages what it leaves beyond all memory that is in use when the pool is made: on a GPU as its
    driver says, without the buffers of DeepEP, on a CPU as the kernel says of the machine or container. So the second
    pool of a process gets what a higher fraction adds to the first, and ranks on one machine's CPU, which see the same
    memory, take equal parts. `memory` is about pools in main memory: "shared" can be mapped by other processes of the
    host, and "pinned" is page-locked. The pool of a model on a GPU is there, and takes only "auto".

    Ops of Ascend want pages in parts: with `rope_apart` the rotated keys lie beside the latents and not in one row with
    them, and `index_format` "int8" keeps index keys as INT8 with a float16 scale per token ("auto" is the `kv_format`).
    Ops of other devices join the parts in every call. Both sides of a Pairing need the same, and a model is loaded with
    the `cache` of such pools.

    With `prefix_cache` full pages outlive their request until their room is needed. They serve later requests that
    begin with the same tokens and have the same `cache_salt`. At decode `trust_domain` "writer" gives what a prefill
    wrote, and what was computed from it, only to requests that the same prefill serves. "all" says that all prefills
    are trusted alike, and then decode reuses pages across them."""

    page_size: int = int_field(1, 256, default=64)
    kv_format: str = attrs.field(default="auto", validator=one_of("auto", *STORED_DTYPES, "fp8"))
    rope_apart: bool = attrs.field(default=False, validator=a_bool)
    index_format: str = attrs.field(default="auto", validator=one_of("auto", "int8"))
    num_pages: int | None = int_field(1, 2**31 - 1, default=None)
    mem_fraction_static: float | None = attrs.field(default=None, validator=attrs.validators.optional(_fraction))
    memory: str = attrs.field(default="auto", validator=one_of("auto", "shared", "pinned"))
    prefix_cache: bool = attrs.field(default=True, validator=a_bool)
    trust_domain: str = attrs.field(default="writer", validator=one_of("writer", "all"))

    def __attrs_post_init__(self) -> None:
        if self.num_pages is not None and self.mem_fraction_static is not None:
            raise ConfigError(
                f"num_pages = {self.num_pages} and mem_fraction_static = {self.mem_fraction_static} both size the "
                f"cache: give one of them"
            )
        if self.rope_apart and self.kv_format == "fp8":
            raise ConfigError(
                'rope_apart is for pages of floats, and kv_format "fp8" packs latents and rotated keys into one row; '
                "give one of them"
            )


@attrs.frozen(kw_only=True)
class EngineConfig(Value):
    """The limits of one engine.

    `chunked_prefill_size` is the most prompt tokens of a prefill step. -1 runs every prompt in one piece, and then
    `max_prefill_tokens` caps the tokens that one step admits across prompts. While sequences decode in the thread that
    steps a prefill, as in `Pairing.local`, it makes its chunks so small that a running sequence has its next token
    within about `target_itl_s`, by what steps have taken so far: see `PrefillEngine.take_turns`. None keeps the chunks
    as they are. `max_total_tokens` caps the tokens that
    fit in the pages in use, those of running and of granted requests; None lets them fill the pool. `growth_watermark`
    is the least fraction of pages kept free for running sequences to grow into; after retractions it is higher for a
    while. `max_attempts` counts tries of one request, the first included. Prefill starts no prompt for a decode to
    which more than `send_window_bytes` of finished KV are on their way. With `num_draft_tokens` decode lets the model's
    MTP layer propose that many tokens per step and checks them in one batch: the tokens stay the same, and there are
    fewer steps.

    On a GPU `warm_up` captures decode steps of `graph_batch_sizes` sequences, and a step runs as the next larger one.
    None captures 1, 2, 4, … up to 256 and `max_running_requests`; () captures none. On a CPU steps of so many sequences
    are recorded when they come for the second time; None records any number up to 64. `print(decode.graphs)` says so.

    `num_threads` is how many threads torch's ops use in this engine's steps and in its `warm_up`; afterwards the thread
    that steps has its own number again. None leaves the number to the host. With `keep_freed_memory` the process's
    malloc keeps the memory that steps on a CPU free, see `pdinfer.process.memory`. `trace` names a folder: when the
    engine is closed, a timeline of its newest steps is written there, see `pdinfer.trace`.

    With `eplb_rebalance_num_iterations` experts are placed anew every so many steps, by the counts of
    `ExpertConfig.expert_distribution_recorder_mode`. At most `rebalance_max_bytes` of weights are sent for it; None
    sends as many as need be. On the way to a new placement a rank sends and receives at most `rebalance_bytes_per_step`
    in a step, though one expert at least; 0 moves all at once."""

    max_running_requests: int = int_field(1, MAX_REQUESTS, default=256)
    max_queued_requests: int = int_field(1, MAX_REQUESTS, default=4096)
    chunked_prefill_size: int = attrs.field(default=4096, validator=_chunk)
    target_itl_s: float | None = float_field(0, 3600, default=TARGET_ITL_S, or_none=True)
    max_prefill_tokens: int = int_field(1, MAX_STEP_TOKENS, default=16384)
    max_total_tokens: int | None = int_field(1, MAX_TOTAL_TOKENS, default=None)
    growth_watermark: float = float_field(0, 0.5, default=0.02, low_included=True)
    max_attempts: int = int_field(1, 100, default=3)
    send_window_bytes: int = int_field(1, 1 << 40, default=64 << 20)
    num_draft_tokens: int = int_field(0, 3, default=0)
    graph_batch_sizes: tuple[int, ...] | None = attrs.field(default=None, converter=_as_tuple, validator=_graph_sizes)
    num_threads: int | None = int_field(1, 1024, default=None)
    keep_freed_memory: bool = attrs.field(default=True, validator=a_bool)
    trace: str | os.PathLike[str] | None = attrs.field(default=None, validator=_path_of("folder"))
    eplb_rebalance_num_iterations: int | None = int_field(1, 1 << 30, default=None)
    rebalance_max_bytes: int | None = int_field(0, 1 << 50, default=None)
    rebalance_bytes_per_step: int = int_field(0, 1 << 50, default=64 << 20)


MOE_A2A_BACKENDS = ("auto", "local", "all_to_all", "all_to_all_int8", "deep_ep")


@attrs.frozen(kw_only=True)
class ExpertConfig(Value):
    """The spread of a model's experts over ranks, and the way of tokens to them.

    `num_redundant_experts` is how many slots a layer has beyond one per expert, over all ranks; a placement says that
    itself. `ep_dispatch_algorithm` says which copy of an expert a token goes to (`DispatchRule`). A node has
    `ranks_per_node` ranks; None means all of them. `moe_a2a_backend` "auto" is "local" on one rank and "all_to_all" (of
    torch.distributed) on several; "all_to_all_int8" does the same with rows in INT8, for experts that are held in INT8
    with a scale per token. For "deep_ep" the `deepep_mode` "normal" is for prefill and tuned by the file
    `deepep_config`; "low_latency" is for decode; "elastic" is DeepEP's second API and for both. Steps of the last
    two have at most `num_max_dispatch_tokens_per_rank` tokens per rank. "elastic" takes `deepep_num_sms`
    multiprocessors; None leaves that to DeepEP, whose sources advise against it for routers that choose groups of
    experts first. With `two_batch_overlap` half of a step's tokens travel while the other half computes.
    `expert_distribution_recorder_mode` counts the choices of routers, over the last
    `expert_distribution_recorder_buffer_size` steps ("window") or over all steps ("stat"), see
    `moe.ExpertLoadRecorder`."""

    num_redundant_experts: int = int_field(0, 1 << 16, default=0)
    ep_dispatch_algorithm: str = attrs.field(default="static", validator=one_of("static", "dynamic", "nearest"))
    ranks_per_node: int | None = int_field(1, 1 << 16, default=None)
    moe_a2a_backend: str = attrs.field(default="auto", validator=one_of(*MOE_A2A_BACKENDS))
    deepep_mode: str = attrs.field(default="normal", validator=one_of("normal", "low_latency", "elastic"))
    deepep_config: str | os.PathLike[str] | None = attrs.field(default=None, validator=_path_of("file"))
    deepep_num_sms: int | None = int_field(4, 160, default=None)
    num_max_dispatch_tokens_per_rank: int = int_field(1, 1 << 16, default=128)
    two_batch_overlap: bool = attrs.field(default=False, validator=a_bool)
    expert_distribution_recorder_mode: str = attrs.field(default="off", validator=one_of("off", "window", "stat"))
    expert_distribution_recorder_buffer_size: int = int_field(1, 1 << 20, default=1000)

    def __attrs_post_init__(self) -> None:
        tuned = self.moe_a2a_backend == "deep_ep" and self.deepep_mode == "normal"
        if self.deepep_config is not None and not tuned:
            raise ConfigError(
                'deepep_config is for moe_a2a_backend "deep_ep" in deepep_mode "normal", these are '
                f'"{self.moe_a2a_backend}" and "{self.deepep_mode}"'
            )
        if self.deepep_num_sms is not None and (self.deepep_mode != "elastic" or self.deepep_num_sms % 2):
            raise ConfigError(
                f'deepep_num_sms must be even and is for deepep_mode "elastic", got {self.deepep_num_sms} for '
                f'"{self.deepep_mode}"; the files of deepep_config have one for "normal"'
            )


@attrs.frozen(kw_only=True)
class SLO(Value):
    """Limits in seconds that a request has to keep, all of them. None means no limit.

    TTFT may take max(`ttft_s`, `ttft_per_token_s` * prompt tokens), so that long prompts get more time. TPOT is
    (E2E - TTFT) / (output tokens - 1), and a request of one token has none. `itl_p99_s` bounds the 99th percentile of
    the gaps between the tokens of one request, `e2e_s` its whole time. Raises ConfigError when there is no limit."""

    ttft_s: float | None = float_field(0.0, 1e6, default=None)
    tpot_s: float | None = float_field(0.0, 1e6, default=None)
    ttft_per_token_s: float | None = float_field(0.0, 1e6, default=None)
    itl_p99_s: float | None = float_field(0.0, 1e6, default=None)
    e2e_s: float | None = float_field(0.0, 1e6, default=None)

    def __attrs_post_init__(self) -> None:
        """Refuse an SLO that every request meets."""
        if all(limit is None for limit in attrs.astuple(self)):
            raise ConfigError("an SLO needs a limit: give ttft_s, tpot_s, ttft_per_token_s, itl_p99_s or e2e_s")

    def ttft_limit_s(self, prompt_tokens: int) -> float | None:
        """Return the longest TTFT of a prompt of that length, in seconds, or None."""
        if self.ttft_per_token_s is None:
            return self.ttft_s
        return max(self.ttft_s or 0.0, self.ttft_per_token_s * prompt_tokens)


@attrs.frozen(kw_only=True)
class PairingConfig(Value):
    """The limits of one Pairing: requests in its own queue, requests that wait per decode, and times in seconds.

    `default_deadline_s` is for requests that bring no deadline; None lets them take as long as they need. `port_wait_s`
    is how long requests wait for a port to join when no port of one side is left that could serve them; 0 fails them at
    once. None is 60 s if the last port of that side that was lost is in another process, which comes back or is started
    again, and else 0. A request that a decode holds already, and whose prefill is gone, waits 60 s at most.

    A request that loses a port goes on at another one, as often as ports are lost while it waits; docs/decisions/0056
    says which losses are counted. With `continue_elsewhere` it does so even after it has given tokens. This is on by
    default: tokens depend on seed and position, so the stream is the one that a retraction would have given. With
    `fair_share` tenants, that is requests of equal `cache_salt`, take turns in the queue by the tokens they ask for,
    within a priority. It is off by default, because salts need not name tenants; see docs/decisions/0022."""

    max_queued_requests: int = int_field(1, MAX_REQUESTS, default=1024)
    max_queued_per_decode: int = int_field(1, MAX_REQUESTS, default=256)
    default_deadline_s: float | None = float_field(0, MAX_DEADLINE_S, default=None)
    connect_timeout_s: float = float_field(0, 3600, default=10.0)
    port_wait_s: float | None = float_field(0, 3600, default=None, low_included=True)
    continue_elsewhere: bool = attrs.field(default=True, validator=a_bool)
    fair_share: bool = attrs.field(default=False, validator=a_bool)
    slo: SLO | None = attrs.field(default=None, validator=_promised)


@attrs.frozen(kw_only=True)
class RemoteConfig(Value):
    """The times that either end of a served engine's connection waits, in seconds. This is the table of defaults of
    `pdinfer.remote`.

    A client that has not heard its engine for `silent_s` reports to its Pairing that the port is lost. It then goes on
    listening for `return_s`, or dials for as long if it can, and once it succeeds the Pairing uses the port again.
    `serve` goes on with what it runs, and waits as long for a client that is silent, or for another connection when it
    has a listener. `hung_s` is how long a step may take: a port whose step takes longer is lost in the same way. None
    uses what the engine says of itself, see `hung_after_s`. When the client is gone for good and a step does not end
    for another `exit_s`, the engine's process ends without it."""

    silent_s: float = float_field(1, 3600, default=SESSIONS.silent_s, low_included=True)
    return_s: float = float_field(0, 86400, default=60.0, low_included=True)
    hung_s: float | None = float_field(0, 86400, default=None)
    exit_s: float = float_field(0, 3600, default=10.0)


HUNG_S = 60.0
HUNG_FACTOR = 20.0


def hung_after_s(longest_warm_up_s: float) -> float:
    """Return how long a step may take where no `hung_s` is given: HUNG_S, or HUNG_FACTOR times the longest step of the
    warm-up, whichever is more. Without a warm-up, a first step that compiles its kernels may be taken for one that
    hangs."""
    return max(HUNG_S, HUNG_FACTOR * longest_warm_up_s)
