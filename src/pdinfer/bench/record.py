"""One record per request, with the time of every stage, and the recorder that makes them from events.

The recorder needs only what a host does anyway, so it works inside a service as it does in `run`:

    recorder = Recorder()
    recorder.sent(pairing.submit(request), prompt_tokens=len(request.prompt))
    recorder.read(pairing.step())
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import attrs
import numpy as np

from pdinfer.stats import name_of
from pdinfer.types import COMPLETE, Choice, Timeline, TokenEvent
from pdinfer.values import Value

STAGES = ("slip", "queue", "grant", "prefill_queue", "prefill", "transfer", "commit", "decode", "delivery")
"""The parts of TTFT, in order. `slip`: intended until sent. `queue`: until a pair was chosen. `grant`: until decode
granted pages. `prefill_queue`, `prefill`: until prefill began, and ended. `transfer`: until the last byte, as far as
compute did not hide it. `commit`: until the pages were adopted. `decode`: until the first token was made. `delivery`:
until the host read it."""

MARKS = ("granted_s", "prefill_began_s", "prefill_ended_s", "first_byte_s", "last_byte_s", "committed_s")
COUNTS = ("cached_tokens", "num_draft_tokens", "num_accepted_tokens", "num_retries")
"""What a record has under the names of a `Timeline` and of a `Usage`."""
COMPLETED = frozenset(reason.value for reason in COMPLETE)
REFUSED, UNFINISHED = "refused", "unfinished"


@attrs.frozen(kw_only=True)
class Record(Value):
    """One request. Times are seconds since the run began; None is a stage that it did not reach, or an unknown time.

    `token_s` is when decode made each token, `read_s` when the host read it. `outcome` is a FinishReason's value,
    "refused" (never accepted) or "unfinished". `is_first_of_shape` says that no request of its size (prompt tokens,
    rounded up to a power of two) came before it, so that it may have paid for a cold shape."""

    request_id: str
    intended_s: float
    sent_s: float
    prompt_tokens: int
    outcome: str = UNFINISHED
    error: str | None = None
    chosen_s: float | None = None
    granted_s: float | None = None
    prefill_began_s: float | None = None
    prefill_ended_s: float | None = None
    first_byte_s: float | None = None
    last_byte_s: float | None = None
    committed_s: float | None = None
    token_s: tuple[float, ...] = ()
    read_s: tuple[float, ...] = ()
    ended_s: float | None = None
    prefill: str | None = None
    decode: str | None = None
    score: tuple[tuple[str, float], ...] = ()
    cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_retries: int = 0
    is_first_of_shape: bool = False

    @property
    def is_completed(self) -> bool:
        """True if it got all of its tokens."""
        return self.outcome in COMPLETED and bool(self.read_s)

    @property
    def output_tokens(self) -> int:
        """The number of tokens that the host read."""
        return len(self.read_s)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the intended send until the host read the first token."""
        return self.read_s[0] - self.intended_s if self.read_s else None

    @property
    def e2e_s(self) -> float | None:
        """Seconds from the intended send until the host read the last token, of a completed request."""
        return self.read_s[-1] - self.intended_s if self.is_completed else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None for fewer than two tokens."""
        count = len(self.read_s)
        return (self.read_s[-1] - self.read_s[0]) / (count - 1) if count > 1 else None

    @property
    def step_s(self) -> float | None:
        """The same by decode's own clock, whenever the host read the tokens."""
        count = len(self.token_s)
        return (self.token_s[-1] - self.token_s[0]) / (count - 1) if count > 1 else None

    def itl_s(self) -> list[float]:
        """Return the gaps between tokens as the host read them, in seconds."""
        return [after - before for before, after in pairwise(self.read_s)]

    @property
    def itl_p99_s(self) -> float | None:
        """The 99th percentile of these gaps; None for fewer than two tokens."""
        gaps = self.itl_s()
        return float(np.percentile(gaps, 99)) if gaps else None

    def stages(self) -> dict[str, float]:
        """Return the seconds of each of STAGES, which sum to TTFT; nothing without a token. A stage of unknown time
        takes no time, and the next one has it. Times of an attempt after the first token are left out."""
        if not self.read_s:
            return {}
        made_s, end_s = min(self.token_s[0], self.read_s[0]), self.read_s[0]
        marks = (
            self.sent_s,
            self.chosen_s,
            self.granted_s,
            self.prefill_began_s,
            self.prefill_ended_s,
            self.last_byte_s,
            self.committed_s,
            made_s,
            end_s,
        )
        took, at_s = {}, self.intended_s
        for name, mark in zip(STAGES, marks, strict=True):
            # a later mark is that of another attempt, after the first token
            known = mark is not None and (mark <= made_s or mark == end_s)
            next_s = max(at_s, mark) if known and mark is not None else at_s
            took[name], at_s = next_s - at_s, next_s
        return took


@attrs.define(eq=False)
class _Open:
    """A request that was sent. Token times are kept as decode and the clock reported them, and are converted at the
    end."""

    intended_s: float
    sent_s: float
    prompt_tokens: int
    is_first_of_shape: bool
    made: list[float | None] = attrs.field(factory=list)
    read: list[float] = attrs.field(factory=list)
    last: TokenEvent | None = None
    refused: str | None = None


class Recorder:
    """Turns events into records. Reading costs an append or two per event."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.began = clock()
        self._requests: dict[str, _Open] = {}
        self._shapes: set[int] = set()

    def __repr__(self) -> str:
        return f"Recorder({len(self._requests)} requests)"

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self.began

    def sent(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        sent_s: float | None = None,
        intended_s: float | None = None,
        refused: str | None = None,
    ) -> None:
        """Note a request: when `submit` was called, and when it should have been. `refused` is why it was not taken.
        Seconds since the run began; by default, now."""
        sent_s = self.now_s if sent_s is None else sent_s
        shape = max(0, prompt_tokens - 1).bit_length()
        self._requests[request_id] = _Open(
            intended_s=sent_s if intended_s is None else intended_s,
            sent_s=sent_s,
            prompt_tokens=prompt_tokens,
            is_first_of_shape=shape not in self._shapes,
            refused=refused,
        )
        self._shapes.add(shape)

    def read(self, events: Iterable[TokenEvent]) -> list[str]:
        """Note events that were just read, and return the ids of requests that ended. Events of requests that were not
        `sent` are left out."""
        now_s, requests, ended = self._clock() - self.began, self._requests, []
        for event in events:
            request = requests.get(event.request_id)
            if request is None:
                continue
            if event.token is not None:
                request.made.append(event.at_s)
                request.read.append(now_s)
            if event.finish_reason is not None:
                request.last = event
                ended.append(event.request_id)
        return ended

    def records(self) -> tuple[Record, ...]:
        """Return a record of every request sent so far, in the order of their intended sends."""
        records = [_record(request_id, request, self.began) for request_id, request in self._requests.items()]
        return tuple(sorted(records, key=lambda record: record.intended_s))


def _record(request_id: str, request: _Open, began: float) -> Record:
    base_s, last = request.sent_s, request.last
    usage = None if last is None else last.usage
    timeline, choice = (None, None) if usage is None else (usage.timeline, usage.choice)
    reached = {name: at for name, at in attrs.asdict(timeline or Timeline()).items() if at is not None}
    since = {name: base_s + at for name, at in reached.items()}
    marks: dict[str, Any] = {name: since.get(name) for name in MARKS}
    outcome, error, ended_s = UNFINISHED, None, None
    if request.refused is not None:
        outcome, error, ended_s = REFUSED, request.refused, base_s
    elif last is not None and last.finish_reason is not None:
        outcome, ended_s = last.finish_reason.value, request.read[-1] if request.read else None
        error = None if last.error is None else f"{last.error.code}: {last.error}"
    return Record(
        request_id=request_id,
        intended_s=request.intended_s,
        sent_s=base_s,
        prompt_tokens=request.prompt_tokens,
        outcome=outcome,
        error=error,
        chosen_s=since.get("queued_s"),
        **marks,
        token_s=tuple(
            # no token is read before it was made, whatever the two clocks say
            read_s if made is None else min(read_s, base_s + made)
            for made, read_s in zip(request.made, request.read, strict=True)
        ),
        read_s=tuple(request.read),
        ended_s=ended_s,
        prefill=None if choice is None else name_of(choice.prefill),
        decode=None if choice is None else name_of(choice.decode),
        score=_finite(choice),
        **{name: getattr(usage, name, 0) for name in COUNTS},
        is_first_of_shape=request.is_first_of_shape,
    )


def _finite(choice: Choice | None) -> tuple[tuple[str, float], ...]:
    """Return the score of a choice without what JSON cannot say."""
    return () if choice is None else tuple((name, value) for name, value in choice.score if math.isfinite(value))
