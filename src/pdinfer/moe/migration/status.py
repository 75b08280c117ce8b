"""What ranks tell each other of their experts in every agreement: frozen values, and the five ints that carry them."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs

from pdinfer.values import Value

_NO_PLACEMENT = -1


class ExpertRequests(enum.Flag):
    """What a rank asks of all ranks."""

    NONE = 0
    CANCEL = enum.auto()
    SUM_LOAD = enum.auto()
    REBALANCE = enum.auto()


@attrs.frozen(kw_only=True)
class ExpertStatus(Value):
    """One rank's part of an agreement.

    `staged` is the digest of the placement that is staged here, `failed` that of a placement which this rank cannot go
    on with; a digest is positive. `num_advances` counts how often the staged placement has advanced. `answer_bytes` is
    the size of the solver's answer: None while there is none, 0 for an answer without a placement.
    """

    staged: int | None = None
    failed: int | None = None
    num_advances: int = 0
    requests: ExpertRequests = ExpertRequests.NONE
    answer_bytes: int | None = None

    def to_ints(self) -> tuple[int, ...]:
        """Return the five ints that travel in the collective."""
        answer = 0 if self.answer_bytes is None else self.answer_bytes or _NO_PLACEMENT
        return self.staged or 0, self.num_advances, self.failed or 0, self.requests.value, answer

    @classmethod
    def from_ints(cls, ints: Sequence[int]) -> ExpertStatus:
        """Return the status that `to_ints` made these ints of."""
        staged, num_advances, failed, asked, answer = ints
        return cls(
            staged=staged or None,
            failed=failed or None,
            num_advances=num_advances,
            requests=ExpertRequests(asked),
            answer_bytes=max(answer, 0) if answer else None,
        )
