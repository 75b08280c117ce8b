"""One simulated request, wherever it is, and the record that a bench makes of a real one."""

from __future__ import annotations

import attrs

from pdinfer.bench.record import Record
from pdinfer.bench.traces import Arrival
from pdinfer.planning.simulation.deployment import Cluster
from pdinfer.planning.simulation.pages import Held, Keys
from pdinfer.scheduling.decode import ScheduledSequence, SequenceState


@attrs.define(eq=False, kw_only=True)
class Job(ScheduledSequence):
    """A request and what became of it. Times are seconds since the run began.

    `room` counts its attempts over all decodes, so that what belongs to an earlier one is recognised; `attempts` counts
    those at its decode. It has `offset` tokens more than its decode has ended steps while it runs there, of which
    `ends` has the times, and `offset` tokens otherwise. `token_s` and `read_s` have its tokens but for the steps from
    `since` on. `found` is what decode's pages had of it when they were last
    asked, `held` what it holds of them. They had the first `num_found` tokens when they were granted, prefill's the
    first `num_cached`. In the step under way `num_drafts` tokens are drafted for it; of the `num_drafted` so far, those
    that were right came at `accepted_s`.
    """

    number: int
    asked: Arrival
    intended_s: float
    sent_s: float
    block_tokens: int
    prefill: int = -1
    decode: int = -1
    room: int = 0
    num_retries: int = 0
    num_computing_lost: int = 0
    offset: int
    ends: list[float] = attrs.field(factory=list)
    since: int = 0
    token_s: list[float] = attrs.field(factory=list)
    read_s: list[float] = attrs.field(factory=list)
    found: Held = attrs.field(factory=Held)
    held: Held = attrs.field(factory=Held)
    num_found: int = 0
    link_bytes: int = 0
    num_cached: int = 0
    chosen_s: float | None = None
    granted_s: float | None = None
    began_s: float | None = None
    prefilled_s: float | None = None
    last_byte_s: float | None = None
    committed_s: float | None = None
    ended_s: float | None = None
    outcome: str = "unfinished"
    error: str | None = None
    score: tuple[tuple[str, float], ...] = ()
    num_drafts: int = 0
    num_drafted: int = 0
    accepted_s: list[float] = attrs.field(factory=list)
    _keys: dict[int, Keys] = attrs.field(factory=dict)

    @classmethod
    def of(
        cls,
        number: int,
        asked: Arrival,
        intended_s: float,
        sent_s: float,
        block_tokens: int,
        default_deadline_s: float | None = None,
    ) -> Job:
        """Return a request that is sent now."""
        most = asked.prompt_tokens + asked.output_tokens
        deadline_s = default_deadline_s if asked.deadline_s is None else asked.deadline_s
        return cls(
            arrival=number,
            submitted_at=sent_s,
            deadline_at=None if deadline_s is None else sent_s + deadline_s,
            priority=asked.priority,
            max_tokens=most,
            expected_tokens=most,
            number=number,
            asked=asked,
            intended_s=intended_s,
            sent_s=sent_s,
            block_tokens=block_tokens,
            offset=asked.prompt_tokens,
        )

    @property
    def num_tokens(self) -> int:
        """The tokens of its prompt and those given so far."""
        return self.offset + len(self.ends)

    @property
    def num_output(self) -> int:
        """The tokens given so far."""
        return self.num_tokens - self.asked.prompt_tokens

    @property
    def end_step(self) -> int:
        """How many steps its decode has ended when it gets its last token, while it runs."""
        return self.max_tokens - self.offset

    @property
    def is_whole(self) -> bool:
        """Whether it has all its tokens."""
        return self.num_tokens >= self.max_tokens

    @property
    def runs(self) -> bool:
        """Whether it has all its KV at decode."""
        return self.state is SequenceState.RUNNING

    def begin(self, arrival: int, now_s: float) -> None:
        """Come to a decode, as the request number `arrival` there."""
        self.arrival, self.submitted_at, self.is_resumed = arrival, now_s, self.num_output > 0
        self.attempts, self.num_taken_over = 0, 0

    def grant(self, now_s: float) -> None:
        """Get pages at its decode."""
        self.num_retries += self.attempts > 1
        self.room += 1
        self.granted_s = now_s

    def run(self, ends: list[float], now_s: float) -> None:
        """Get the token that came with its KV, and begin to run in the steps that come after `ends`."""
        self.token_s.append(now_s)
        self.read_s.append(now_s)
        self.committed_s = now_s
        self.offset, self.ends, self.since = self.num_tokens + 1 - len(ends), ends, len(ends)

    def rest(self) -> None:
        """Run no more."""
        self.note_steps()
        self.offset, self.ends = self.num_tokens, []

    def note_steps(self) -> None:
        """Note the tokens of the steps that have ended."""
        steps = self.ends[self.since :]
        self.token_s += steps
        self.read_s += steps
        self.since = len(self.ends)

    def keys(self, page_size: int, num_tokens: int) -> Keys:
        """Return the keys of the pages that its first `num_tokens` tokens fill.

        A prompt without hashes is a block that no other prompt has. A block that the prompt does not fill is another
        one than those that are full. What was generated between two calls is a block, too.
        """
        keys = self._keys.get(page_size)
        if keys is None:
            keys = self._keys[page_size] = self._prompt_keys(page_size)
        full = num_tokens // page_size
        if full > keys.num_pages:
            keys = self._keys[page_size] = keys.and_block(("output", self.number, full), full)
        return keys if full == keys.num_pages else keys.up_to(full)

    def _prompt_keys(self, page_size: int) -> Keys:
        prompt, hashes, block = self.asked.prompt_tokens, self.asked.hash_ids, self.block_tokens
        if not hashes:
            full = prompt // page_size
            return Keys((("prompt", self.number),), (full,)) if full else Keys()
        names, ends, known = [], [], 0
        for at, name in enumerate(hashes):
            end = min((at + 1) * block, prompt) // page_size
            if end > known:
                names.append(name if (at + 1) * block <= prompt else (name, prompt))
                ends.append(end)
                known = end
        return Keys(tuple(names), tuple(ends))

    def record(self, cluster: Cluster) -> Record:
        """Return its record. What is made while the host stalls is read when it goes on."""
        self.note_steps()
        made, read = self.token_s, self.read_s
        if self.accepted_s:
            made, read = sorted([*made, *self.accepted_s]), sorted([*read, *self.accepted_s])
        for stall in cluster.stalls:
            until_s = stall.at_s + stall.for_s
            read = [until_s if stall.at_s <= at_s < until_s else at_s for at_s in read]
        return Record(
            request_id=f"simulated-{self.number}",
            intended_s=self.intended_s,
            sent_s=self.sent_s,
            prompt_tokens=self.asked.prompt_tokens,
            outcome=self.outcome,
            error=self.error,
            chosen_s=self.chosen_s,
            granted_s=self.granted_s,
            prefill_began_s=self.began_s,
            prefill_ended_s=self.prefilled_s,
            last_byte_s=self.last_byte_s,
            committed_s=self.committed_s,
            token_s=tuple(made),
            read_s=tuple(read),
            ended_s=self.ended_s,
            prefill=None if self.prefill < 0 else cluster.prefill.name_of("P", self.prefill),
            decode=None if self.decode < 0 else cluster.decode.name_of("D", self.decode),
            score=self.score,
            cached_tokens=self.num_cached,
            num_draft_tokens=self.num_drafted,
            num_accepted_tokens=len(self.accepted_s),
            num_retries=self.num_retries,
        )
