"""The values that travel: requests, grants, hand-offs and events. All are frozen, and none holds a tensor.
The bounds in their types apply to what a peer sends (`pdinfer.bounds`). A request is checked when it is submitted.

One request's life in these types:

    Request ─► Granted(PageGrant, Request) ─► Handoff ─► TokenEvent … TokenEvent(finish_reason=…)
            └► Refused
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Annotated

import attrs
from msgspec import Meta

from pdinfer.bounds import (
    FEW,
    SOME,
    Count,
    Digest,
    EngineId,
    Epoch,
    Index,
    Indexes,
    Logprob,
    Name,
    Packed,
    Room,
    Score,
    Seconds,
    TopLogprobs,
)
from pdinfer.checks import instance_of, token_ids
from pdinfer.errors import PDInferError
from pdinfer.stop import StopMatcher
from pdinfer.values import Value


class FinishReason(enum.Enum):
    """Why a request ended. Those in COMPLETE carry a token; all others come with `token=None`."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"


COMPLETE = frozenset({FinishReason.STOP, FinishReason.LENGTH})
"""The reasons of an answer that is whole. With any other one a request ended early."""


class HandoffStatus(enum.Enum):
    """LANDED: every granted token was sent. ABORTED: the writer has stopped and will not write any more."""

    LANDED = "landed"
    ABORTED = "aborted"


@attrs.frozen(kw_only=True)
class SamplingParams(Value):
    """The rules by which tokens are drawn from the logits of one request.

    `temperature` 0 is greedy; `top_k` 0 is off; `top_p` 1.0 and `min_p` 0.0 are off. A token is a pure function of
    (logits, these parameters, the tokens so far). Batches, chunks and re-prefills change logits by rounding alone,
    which rarely decides between two tokens: docs/howto/same-tokens.md says what is promised. `seed=None` lets the
    Pairing draw one. What changes the logits is applied in this order:

    - `logit_bias`: (token id, bias) pairs, from -100 to 100, which are added;
    - `repetition_penalty`: positive logits of tokens in prompt or output are divided by it, negative ones multiplied;
    - `frequency_penalty` and `presence_penalty`: subtracted from a token's logit once per time it is in the output, and
      once if it is there at all; the prompt does not count;
    - `min_new_tokens`: no token ends the request (a stop token, or eos unless `ignore_eos`) before this many have come,
      and neither does `Request.stop`;
    - `logits_processor`: the name of a processor that the engines were given, which gets `logits_processor_argument`,
      for example a JSON schema: see docs/howto/structured-output.md;
    - temperature, `top_k`, `top_p`, `min_p`.

    `logprobs` is how many of the best tokens come with each token in `top_logprobs`; there are fewer when the logits of
    the others are -inf. Log-probabilities are log-softmax of the raw logits, before any of these changes."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logits_processor: str | None = None
    logits_processor_argument: str = ""


@attrs.frozen(kw_only=True)
class Request(Value):
    """One prompt to continue: token ids, in any sequence of ints or one-dimensional array or tensor of ints, kept as a
    tuple. Anything but token ids raises ConfigError (see `token_ids`). Everything else, and whether the model has these
    tokens, is checked when the request is submitted: see `admission.check_request`.

    `output` holds tokens that were already emitted, when the request is resumed. A higher `priority` goes first.
    `deadline_s` counts seconds from `Pairing.submit`. Prefixes are shared only between requests of equal `cache_salt`.
    Fair shares, waits and pages kept for growth reckon with `expected_new_tokens`, or else with `max_new_tokens`.

    `stop` has sequences of tokens, each of which ends the request once it is in the output, or a matcher that decides,
    such as `text.StopStrings`. The event of the token that completes a sequence is the last, with STOP. The Pairing
    looks for it in the thread that steps; engines take only `sampling.stop_token_ids`. One that is `alone` is computed
    in steps of its own; a Pairing sets it on a request that may be what breaks engines (docs/decisions/0056)."""

    request_id: str | None = None
    prompt: tuple[int, ...] = attrs.field(converter=token_ids)
    output: tuple[int, ...] = attrs.field(default=(), converter=token_ids)
    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: bytes = b""
    stop: tuple[tuple[int, ...], ...] | StopMatcher = ()
    alone: bool = False
    expected_new_tokens: int | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and the output so far, which prefill has to run."""
        return self.prompt + self.output if self.output else self.prompt


@attrs.frozen(kw_only=True)
class RequestLimits(Value):
    """The requests that an engine accepts: token ids below `vocab_size`, up to `max_tokens` tokens of prompt and
    output, and the logits processors it was given."""

    name: Name
    vocab_size: Annotated[int, Meta(ge=1, le=2**31)]
    max_tokens: Count
    logits_processors: Annotated[tuple[Name, ...], FEW] = ()


@attrs.frozen
class PeerAddress(Value):
    """The identity of a channel's end, and how to reach it. A restarted peer has a new `epoch`, so it is a new peer.
    Its hash is of what tells most apart, since tables of ports and links are read for every choice."""

    engine_id: EngineId
    epoch: Epoch = attrs.field(hash=False)
    rank: Index
    endpoints: Annotated[tuple[Name, ...], FEW] = attrs.field(default=(), hash=False)

    def __str__(self) -> str:
        """Return the text for messages: "engine 3fa1b2c4 (tcp://127.0.0.1:4000)"."""
        return f"engine {self.engine_id.hex()[:8]} ({', '.join(self.endpoints) or 'in this process'})"


PeerKey = tuple[bytes, int, int]
"""(engine_id, epoch, rank): the identity of a peer, whatever its endpoints."""


peer_key: Callable[[PeerAddress], PeerKey] = attrgetter("engine_id", "epoch", "rank")
"""Returns the identity in an address."""


@attrs.frozen(kw_only=True)
class PageGrant(Value):
    """Decode's reservation and the right to write it, for one attempt (`room`, 16 random bytes).

    `writers` are all ranks of prefill that have the request, its leader first. Each writes a part of the tokens to each
    of the `destinations`, which are the ranks of decode. `tokens` is the range [first missing, end) that must arrive.
    It starts on a page border of decode's page size. `pages[i]` holds tokens [tokens.start + i * page_size, …) on every
    destination, and `generations[i]` dates that page."""

    room: Room
    request_id: Name
    writers: Annotated[tuple[PeerAddress, ...], SOME]
    destinations: Annotated[tuple[PeerAddress, ...], SOME]
    tokens: range
    pages: Indexes
    generations: Indexes
    layout_id: Digest


@attrs.frozen(kw_only=True)
class NamedState(Value):
    """A tensor that travels next to the pages, e.g. "mtp.hidden": `ModelRunner.states` makes it and `ModelRunner.draft`
    reads it. Receivers drop names that they do not know, and no end asks another which it knows: decode has to be able
    to go on without it. What decode cannot do without belongs into the pages, whose layouts both ends compare. A
    hand-off with all of its states is one frame (`kv.transports.base.MAX_FRAME_BYTES`)."""

    name: Name
    version: Index
    dtype: Name
    shape: Indexes
    data: Packed


@attrs.frozen(kw_only=True)
class Handoff(Value):
    """One writer's last message about a room: LANDED with the first token, or ABORTED with the reason.

    `first_byte_s` and `last_byte_s` count from the grant. Decode's end of the channel fills them in."""

    room: Room
    writer: PeerAddress
    status: HandoffStatus
    error: PDInferError | None = None
    token: Index | None = None
    logprob: Logprob | None = None
    top_logprobs: TopLogprobs = ()
    state: Annotated[tuple[NamedState, ...], FEW] = ()
    num_cached_tokens: Index = 0
    queue_s: Seconds = 0.0
    compute_s: Seconds = 0.0
    first_byte_s: Seconds | None = None
    last_byte_s: Seconds | None = None


@attrs.frozen(kw_only=True)
class Granted(Value):
    """Decode has reserved pages. `request` is what prefill must run, with the output so far."""

    grant: PageGrant
    request: Request


@attrs.frozen(kw_only=True)
class Refused(Value):
    """Decode cannot take the request, and holds nothing for it."""

    request_id: Name
    error: PDInferError


@attrs.frozen(kw_only=True)
class Timeline(Value):
    """The times at which a request reached each stage, in seconds since `submit` of the object that emitted the event.
    None means that it did not reach the stage, or that the author of the event does not know. `queued_s` is when decode
    got the request, as soon as its pair was chosen. `granted_s` to `committed_s` are those of the last attempt,
    `queued_s` and `first_token_s` those of the request. Prefill counts its own time from its `submit`, which is taken
    for the moment of the grant."""

    queued_s: Seconds | None = None
    granted_s: Seconds | None = None
    prefill_began_s: Seconds | None = None
    prefill_ended_s: Seconds | None = None
    first_byte_s: Seconds | None = None
    last_byte_s: Seconds | None = None
    committed_s: Seconds | None = None
    first_token_s: Seconds | None = None


@attrs.frozen(kw_only=True)
class Usage(Value):
    """The usage of a finished request. Seconds count from `submit` of the object that emitted the event. Prefill found
    `cached_tokens` of the prompt in its pages and did not compute them. `num_draft_tokens` were proposed for it, and
    `num_accepted_tokens` of them were the model's own choice. A Pairing adds its last `choice`; `num_retries` counts
    the attempts that were made again, at one decode or at another."""

    prompt_tokens: Count
    output_tokens: Count
    cached_tokens: Count
    queue_s: Seconds
    ttft_s: Seconds | None
    timeline: Timeline | None = None
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0
    choice: Choice | None = None
    num_retries: Count = 0


@attrs.frozen(kw_only=True)
class TokenEvent(Value):
    """One token of one request, or its end, or both. `index` counts output tokens from 0. `at_s` is when it was
    made, in seconds since `submit` of the object that emitted it; None for a request that was never accepted."""

    request_id: Name
    token: Index | None
    index: Index
    logprob: Logprob | None = None
    top_logprobs: TopLogprobs = ()
    finish_reason: FinishReason | None = None
    error: PDInferError | None = None
    usage: Usage | None = None
    at_s: Seconds | None = None


Event = Granted | Refused | TokenEvent


@attrs.frozen(kw_only=True)
class Link(Value):
    """A prefill and a decode that reach each other. `bytes_per_s` is the average speed at which payloads of the prefill
    arrived at the decode, without the time that they waited at the prefill, or None before the first. `inflight_bytes`
    were pushed and have not left prefill's pages yet. For an engine with several ranks, both are measured at its first
    rank. `backlog_bytes` have to cross the link before those of a new request: all that belong to requests that this
    pair serves and that have not arrived whole."""

    prefill: PeerAddress
    decode: PeerAddress
    bytes_per_s: float | None = None
    inflight_bytes: int = 0
    backlog_bytes: int = 0


class TokensByPort(Mapping[PeerAddress, int]):
    """The number of tokens of a prompt that each port holds, asked for many ports at once."""

    def at(self, addresses: Sequence[PeerAddress]) -> Sequence[int]:
        """Return what each of these ports holds, 0 for one that does not report it."""
        return [self.get(address, 0) for address in addresses]

    def at_prefill(self, address: PeerAddress) -> int:
        """Return what a prefill holds, without a look at other ports."""
        return self.get(address, 0)


@attrs.frozen(kw_only=True)
class RequestShape(Value):
    """The facts about a request that a policy may know. `ordinal` counts the choices a Pairing has made so far. `links`
    are all pairs that reach each other, among the ports that the policy is shown; without any, all pairs do.
    `found_tokens` has the tokens at the beginning of this prompt that the pages of a port hold, where there are any."""

    ordinal: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_new_tokens: int
    priority: int = 0
    links: Sequence[Link] = ()
    found_tokens: Mapping[PeerAddress, int] = attrs.field(factory=dict, hash=False)

    def found_at(self, addresses: Sequence[PeerAddress]) -> Sequence[int]:
        """Return how many tokens of the prompt each of these ports holds, 0 for one that does not report it."""
        found = self.found_tokens
        return found.at(addresses) if isinstance(found, TokensByPort) else [found.get(each, 0) for each in addresses]


@attrs.frozen(kw_only=True)
class Choice(Value):
    """The pair that a policy chose, with every part of the score that led to it (lower is better)."""

    prefill: PeerAddress = attrs.field(validator=instance_of(PeerAddress))
    decode: PeerAddress = attrs.field(validator=instance_of(PeerAddress))
    score: Annotated[tuple[tuple[Name, Score], ...], FEW] = ()
