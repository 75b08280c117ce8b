"""One prompt inside a prefill engine: what it holds and how far it has got."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import attrs

from pdinfer.engine.schedule import due_at
from pdinfer.execution.sampling import LogitsProcessor
from pdinfer.types import PageGrant, Request


class Sending(Protocol):
    """Bytes on their way out of our pages, such as a Transfer."""

    @property
    def done(self) -> bool: ...


@attrs.define(eq=False)
class Prompt:
    """One accepted grant.

    `pages` is its page table: known pages of its beginning, then new ones. In a pool that both ends share, the new
    ones are the grant's own. All other pages are `held` until everything is sent. The pages contain `num_computed`
    tokens, the first `num_cached` of them from earlier requests. Tokens up to `num_pushed` are at decode or on the way.
    `keys` are the keys of its full pages.
    """

    request: Request
    grant: PageGrant
    arrival: int
    submitted_at: float
    num_pushed: int
    processor: LogitsProcessor | None = None
    keys: list[bytes] = attrs.field(factory=list)
    pages: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    started_at: float = 0.0
    num_cached: int = 0
    num_computed: int = 0
    sent: Sending | None = None
    landed: bool = False

    @property
    def num_remaining(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the prompt and the output so far, all of which have to be in the pages."""
        return len(self.request.prompt) + len(self.request.output)

    @cached_property
    def deadline_at(self) -> float | None:
        """The deadline by this engine's clock."""
        return None if self.request.deadline_s is None else self.submitted_at + self.request.deadline_s

    @cached_property
    def order(self) -> tuple[int, bool, float, int]:
        """The sort key of waiting and of active prompts: priority first, then requests that have given tokens already,
        whose readers wait for the next, then deadline and age."""
        is_new = not self.request.output
        return -self.request.priority, is_new, due_at(self.submitted_at, self.deadline_at), self.arrival
