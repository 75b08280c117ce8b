"""One prompt inside a prefill engine: what it holds, and how far it got."""

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
    """One accepted grant. `pages` is its page table: known pages of its beginning, then new ones, which are the grant's
    own in a pool that both ends share. What is not the grant's is `held` until all is sent. `num_computed` tokens are
    in the pages, the first `num_cached` of them from before; those up to `num_pushed` are at decode or on the way.
    `keys` are those of its full pages."""

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
        """Prompt and output so far: all that has to be in the pages."""
        return len(self.request.prompt) + len(self.request.output)

    @cached_property
    def deadline_at(self) -> float | None:
        """By this engine's clock."""
        return None if self.request.deadline_s is None else self.submitted_at + self.request.deadline_s

    @cached_property
    def order(self) -> tuple[int, bool, float, int]:
        """Both lines are sorted by this: priority first, then who has given tokens already and whose reader waits for
        the next, then deadline and age."""
        is_new = not self.request.output
        return -self.request.priority, is_new, due_at(self.submitted_at, self.deadline_at), self.arrival
