"""One staged placement of experts on one rank, until it runs or is dropped.

    STAGED ──► MOVING ──► READY ──► APPLIED
       └─────────┴──► FAILED          any of them ──► DROPPED, but for APPLIED

Every rank takes the same step, because it follows from what all ranks said of the placement in one agreement:

| state | all ranks said | this rank | next state |
|---|---|---|---|
| STAGED, MOVING, READY | DIFFERENT | waits | the same |
| STAGED | ALIKE | cuts the placement into parts and packs the first | MOVING, or READY without parts |
| MOVING | ALIKE | sends the part and packs the next | MOVING, or READY after the last |
| STAGED, MOVING | ALIKE, and packing raises | keeps the error for the next agreement | FAILED |
| READY | ALIKE | writes every slot in place | APPLIED |
| any but APPLIED | CANCELLED, BROKEN | forgets what has come | DROPPED |

`docs/protocol.md` names the test of every row. A rank whose state is FAILED says so, and all ranks hear BROKEN next."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Sequence

import attrs

from pdinfer.bounds import cause
from pdinfer.checks import clip, is_int
from pdinfer.errors import ConfigError
from pdinfer.log import log
from pdinfer.moe.migration.transfer import ExpertTransfer
from pdinfer.moe.parallel import ExpertParallel
from pdinfer.moe.placement.placement import ExpertPlacement, check_sizes
from pdinfer.values import Value


class MigrationState(enum.Enum):
    """How far a migration is; see the table above."""

    STAGED = enum.auto()
    MOVING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()
    APPLIED = enum.auto()
    DROPPED = enum.auto()


class Verdict(enum.Enum):
    """What all ranks together said of one placement in an agreement."""

    CANCELLED = enum.auto()
    """A rank asks to cancel."""
    BROKEN = enum.auto()
    """A rank cannot go on with this placement."""
    ALIKE = enum.auto()
    """Every rank has staged this placement, and none failed."""
    DIFFERENT = enum.auto()
    """A rank has staged another placement or none, or failed with another one."""

    @classmethod
    def of(cls, digest: int, statuses: Sequence[ExpertStatus]) -> Verdict:
        """Return what `statuses`, one per rank, say of the placement with this digest."""
        failed = {status.failed for status in statuses if status.failed is not None}
        if any(ExpertRequests.CANCEL in status.requests for status in statuses):
            return cls.CANCELLED
        if digest in failed:
            return cls.BROKEN
        if not failed and all(status.staged == digest for status in statuses):
            return cls.ALIKE
        return cls.DIFFERENT


class Migration:
    """One placement on its way into use. Any thread may make it; everything else is for the thread that steps.

    `prepare` plans the transfer and may raise. `digest` stands for the placement and its epoch. `error` says why the
    state is FAILED."""

    def __init__(
        self, placement: ExpertPlacement, epoch: int, prepare: Callable[[ExpertPlacement], ExpertTransfer]
    ) -> None:
        self.placement = placement
        self.epoch = epoch
        self.digest = digest_of(placement, epoch)
        self.state = MigrationState.STAGED
        self.num_advances = 0
        self.error = ""
        self._prepare = prepare
        self._transfer: ExpertTransfer | None = None

    @property
    def has_begun(self) -> bool:
        """Whether all ranks go on with it in their next agreement."""
        return self.state is not MigrationState.STAGED

    @property
    def num_moves(self) -> int:
        """How many experts are copied, on all ranks; 0 before it has begun."""
        return 0 if self._transfer is None else self._transfer.num_moves

    def is_of(self, placement: ExpertPlacement, epoch: int) -> bool:
        """Return whether this migration is to that placement, under that epoch."""
        return (self.placement, self.epoch) == (placement, epoch)

    def follow(self, verdict: Verdict, statuses: Sequence[ExpertStatus]) -> None:
        """Take the step that follows from what all ranks said. Raises RankLost.

        Raises RuntimeError when ranks have taken different numbers of steps, which no legal sequence brings about."""
        if verdict is Verdict.DIFFERENT:
            return
        if verdict is not Verdict.ALIKE:
            self.state, self._transfer = MigrationState.DROPPED, None
            return
        if len({status.num_advances for status in statuses}) > 1:
            raise RuntimeError(f"ranks have packed different parts: {[status.num_advances for status in statuses]}")
        self._advance()

    def _advance(self) -> None:
        if self._transfer is not None and self.state is MigrationState.READY:
            self._transfer.apply()
            self.state = MigrationState.APPLIED
            return
        if self._transfer is not None:
            self._transfer.send()
        try:
            self.state = self._pack()
            self.num_advances += 1
        except Exception as error:  # noqa: BLE001 - the old placement works, whatever it was
            log.exception("a placement of experts cannot be prepared")
            self.error = cause(error)
            self.state = MigrationState.FAILED

    def _pack(self) -> MigrationState:
        """Get the next part ready, and return the state in which this leaves the migration."""
        if self._transfer is None:
            self._transfer = self._prepare(self.placement)
        if self.num_advances == self._transfer.num_parts:
            return MigrationState.READY
        self._transfer.pack(self.num_advances)
        return MigrationState.MOVING


def checked_epoch(experts: ExpertParallel, placement: ExpertPlacement, epoch: int | None) -> int:
    """Return the epoch under which `placement` may follow the one in use: `epoch`, or by default one more than now.

    Raises ConfigError, with the values, for a placement of other sizes, one that runs already, and a stale epoch."""
    running = experts.placement
    if running is None:
        raise ConfigError("a placement was given and the model has no experts")
    check_sizes("the placement", placement, "the model runs with", running)
    new = experts.epoch + 1 if epoch is None else epoch
    if not is_int(new) or new <= experts.epoch:
        raise ConfigError(f"the placement is stale: its epoch is {clip(new)}, and epoch {experts.epoch} runs already")
    if placement == running:
        raise ConfigError(f"the placement is the one that runs already, as epoch {experts.epoch}")
    return new


def digest_of(placement: ExpertPlacement, epoch: int) -> int:
    """Return what stands for a placement under an epoch: a positive int of 56 bits, which an int64 can carry."""
    shares = b"" if placement.slot_shares is None else placement.slot_shares.tobytes()
    digest = hashlib.sha256(f"{epoch}/".encode() + placement.physical_to_logical_map.tobytes() + shares).digest()
    return int.from_bytes(digest[:7], "little") or 1


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
    the size of the solver's answer: None while there is none, 0 for an answer without a placement."""

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
