"""One simulated request, wherever it is."""

from __future__ import annotations

import attrs

from pdinfer.bench.traces import Arrival
from pdinfer.planning.simulation.pages import Held, Keys
from pdinfer.scheduling.rules import due_at


@attrs.define(eq=False)
class Spell:
    """Steps that a request ran one after the other at one decode: from step `start` up to `stop`, None while it runs.
    `ends` has when each step of that decode ended. A spell that began with a token of prefill has it from `landed_s`
    on, and the host gets it at `told_s`."""

    ends: list[float]
    start: int
    stop: int | None = None
    landed_s: float | None = None
    told_s: float = 0.0


@attrs.define(eq=False)
class Job:
    """A request and what became of it. Times are seconds since the run began.

    `room` counts its attempts over all decodes, so that what belongs to an earlier one is recognised; `attempts` counts
    those at its decode, of which other prefills took over `num_taken_over`. While it runs at decode, it has `offset`
    tokens more than the decode has ended steps. Otherwise it has `num_tokens`. Decode's pages had the first `num_found`
    tokens when they were granted, prefill's the first `num_cached`. `waiting_since` is when it joined the queue of its
    decode.
    """

    number: int
    arrival: Arrival
    intended_s: float
    sent_s: float
    block_tokens: int
    prefill: int = -1
    decode: int = -1
    room: int = 0
    attempts: int = 0
    num_retries: int = 0
    num_decodes_lost: int = 0
    num_computing_lost: int = 0
    num_taken_over: int = 0
    landed: bool = False
    protected: bool = False
    num_tokens: int = 0
    offset: int = 0
    end_step: int = 0
    submitted_at: float = 0.0
    waiting_since: float = 0.0
    arrival_number: int = 0
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
    spells: list[Spell] = attrs.field(factory=list)
    _keys: dict[int, Keys] = attrs.field(factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return self.arrival.prompt_tokens

    @property
    def max_tokens(self) -> int:
        """The number of tokens in prompt and output once it has run to its full length."""
        return self.arrival.prompt_tokens + self.arrival.output_tokens

    @property
    def num_output(self) -> int:
        """The tokens given so far, of a request that does not run at decode."""
        return self.num_tokens - self.arrival.prompt_tokens

    @property
    def order(self) -> tuple[int, bool, float, int]:
        """The sort key of waiting requests: those that come back first, then by age."""
        return 0, not (self.attempts or self.num_output), due_at(self.submitted_at, None), self.arrival_number

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
        prompt, hashes, block = self.arrival.prompt_tokens, self.arrival.hash_ids, self.block_tokens
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

    def close_spell(self, stop: int) -> None:
        """Note that it does not run in step `stop` of its decode."""
        if self.spells and self.spells[-1].stop is None:
            self.spells[-1].stop = stop
