"""What ranks tell each other of their experts in every agreement: frozen values, and the five ints that carry them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from pdinfer.values import Value

_CANCEL, _SUM_LOAD, _REBALANCE = 1, 2, 4
_NO_PLACEMENT = -1


@attrs.frozen(kw_only=True)
class ExpertRequests:
    """What a rank asks of all ranks."""

    cancel: bool = False
    sum_load: bool = False
    rebalance: bool = False

    def __or__(self, other: ExpertRequests) -> ExpertRequests:
        return ExpertRequests(
            cancel=self.cancel or other.cancel,
            sum_load=self.sum_load or other.sum_load,
            rebalance=self.rebalance or other.rebalance,
        )


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
    requests: ExpertRequests = ExpertRequests()
    answer_bytes: int | None = None

    def to_ints(self) -> tuple[int, ...]:
        """Return the five ints that travel in the collective."""
        requests = self.requests
        asked = _CANCEL * requests.cancel | _SUM_LOAD * requests.sum_load | _REBALANCE * requests.rebalance
        answer = 0 if self.answer_bytes is None else self.answer_bytes or _NO_PLACEMENT
        return self.staged or 0, self.num_advances, self.failed or 0, asked, answer

    @classmethod
    def from_ints(cls, ints: Sequence[int]) -> ExpertStatus:
        """Return the status that `to_ints` made these ints of."""
        staged, num_advances, failed, asked, answer = ints
        return cls(
            staged=staged or None,
            failed=failed or None,
            num_advances=num_advances,
            requests=ExpertRequests(
                cancel=bool(asked & _CANCEL), sum_load=bool(asked & _SUM_LOAD), rebalance=bool(asked & _REBALANCE)
            ),
            answer_bytes=max(answer, 0) if answer else None,
        )
