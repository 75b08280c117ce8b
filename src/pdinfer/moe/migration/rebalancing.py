"""Placements of experts that change while engines run.

    staged on every rank ─► all say the same digest ─► a part travels per step ─► all are ready ─► all apply it

What a rank does with the others follows from what all said in the same agreement (see `lockstep`), so all begin, send,
apply and drop at the same step; a rank alone is its own agreement. Until then the old placement is used, and nothing of
it is touched. A placement may be the host's, or the answer of a solver to the load that all ranks recorded.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch

from pdinfer.checks import clip, is_int
from pdinfer.config import EngineConfig
from pdinfer.errors import ConfigError
from pdinfer.moe.balance.process import SolverProcess, unpack_placement
from pdinfer.moe.layer import MoE
from pdinfer.moe.migration.transfer import ExpertTransfer
from pdinfer.moe.parallel import ExpertParallel
from pdinfer.moe.placement.placement import ExpertPlacement, Ints
from pdinfer.moe.placement.recorder import ExpertLoadRecorder
from pdinfer.parallel.groups import Groups
from pdinfer.process.locks import new_lock

CANCEL, SUM, REBALANCE = 1, 2, 4
"""What a rank may ask of all."""
NO_ANSWER = -1

_log = logging.getLogger("pdinfer")


@attrs.frozen(kw_only=True)
class ExpertStanding:
    """What a rank says of its experts in an agreement: digests of the placement that is staged and of one that it
    cannot go on with, 0 for none; how many parts of the staged one it has packed, one more than there are when it has
    all; what it asks for; the size of the solver's answer."""

    staged: int = 0
    packed: int = 0
    failed: int = 0
    asks: int = 0
    answer_bytes: int = 0


@attrs.frozen
class _Staged:
    placement: ExpertPlacement
    epoch: int
    digest: int

    @classmethod
    def of(cls, placement: ExpertPlacement, epoch: int) -> _Staged:
        shares = b"" if placement.slot_shares is None else placement.slot_shares.tobytes()
        told = hashlib.sha256(f"{epoch}/".encode() + placement.physical_to_logical_map.tobytes() + shares).digest()
        return cls(placement, epoch, int.from_bytes(told[:7], "little") or 1)


class Rebalancing:
    """One rank's part. `stage`, `cancel`, `ask_sum` and `ask_rebalance` may be called from any thread; the rest is the
    lockstep's. `wake` is called when an agreement would further something."""

    def __init__(
        self,
        experts: ExpertParallel,
        layers: Sequence[MoE],
        groups: Groups,
        config: EngineConfig,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        every = config.eplb_rebalance_num_iterations
        self._experts, self._layers, self._groups = experts, layers, groups
        self._config = config
        self.recorder = experts.recorder
        self._wake = wake
        self.solver = SolverProcess(clock)
        self._lock = new_lock()
        self._staged: _Staged | None = None
        self._asks = 0
        self._failed = 0
        self._told = ExpertStanding()
        self._transfer: ExpertTransfer | None = None
        self._packed = 0
        self._moves = False
        self._solving = False
        self._answer = b""
        self._no_answer = False
        self._num_steps = 0
        self.error = ""
        self.load: Ints | None = None
        self.num_answers = 0
        if every is not None:
            self._check_rebalances(f"eplb_rebalance_num_iterations = {every}")

    @property
    def epoch(self) -> int:
        """How many placements were applied, or what the newest one said."""
        return self._experts.epoch

    @property
    def is_staged(self) -> bool:
        """Whether a placement waits here to be applied."""
        return self._staged is not None

    # -- any thread -------------------------------------------------------------------------------------------------

    def stage(self, placement: ExpertPlacement, *, epoch: int | None = None) -> None:
        """See `Engine.stage_placement`."""
        with self._lock:
            staged = self._checked(placement, epoch)
            if self._staged is not None and self._staged != staged:
                raise ConfigError(
                    f"another placement is staged already, as epoch {self._staged.epoch}; wait for it, or drop it with "
                    "cancel_placement()"
                )
            self._staged = staged
        self._wake()

    def cancel(self) -> None:
        """See `Engine.cancel_placement`."""
        self._ask(CANCEL)

    def ask_sum(self) -> None:
        """Has all ranks add up what they recorded, into `load`."""
        self._recorded("the load of experts")
        self._ask(SUM)

    def ask_rebalance(self) -> None:
        """See `Engine.rebalance`."""
        self._check_rebalances("rebalance()")
        self._ask(REBALANCE)

    def _ask(self, what: int) -> None:
        with self._lock:
            self._asks |= what
        self._wake()

    def _checked(self, placement: ExpertPlacement, epoch: int | None) -> _Staged:
        running = self._experts.placement
        if running is None:
            raise ConfigError("a placement was given and the model has no experts")
        for name, what in (
            ("num_layers", "mixture-of-experts layers"),
            ("num_logical_experts", "experts"),
            ("num_ranks", "expert-parallel ranks"),
            ("num_slots", "slots"),
        ):
            said, wanted = getattr(placement, name), getattr(running, name)
            if said != wanted:
                raise ConfigError(f"the placement has {said} {what} ({name}), the model runs with {wanted}")
        new = self.epoch + 1 if epoch is None else epoch
        if not is_int(new) or new <= self.epoch:
            raise ConfigError(f"the placement is stale: its epoch is {clip(new)}, and epoch {self.epoch} runs already")
        if placement == running:
            raise ConfigError(f"the placement is the one that runs already, as epoch {self.epoch}")
        return _Staged.of(placement, new)

    def _recorded(self, what: str) -> ExpertLoadRecorder:
        if self.recorder is None:
            raise ConfigError(f'{what} needs expert_distribution_recorder_mode "stat" or "window", it is "off"')
        return self.recorder

    def _check_rebalances(self, what: str) -> None:
        self._recorded(what)
        if self._experts.group.size == 1:
            raise ConfigError(f"{what}: all experts are on one rank (ep_size is 1), there is nothing to rebalance")

    # -- what the lockstep calls ------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether to agree now, rows or not."""
        self._hear_solver()
        with self._lock:
            return self._moves or bool(self._asks) or self._current() != self._told

    def standing(self) -> ExpertStanding:
        """What to say in the agreement that comes now."""
        self._hear_solver()
        with self._lock:
            asks, self._asks = self._asks, 0
            self._told = self._current()
            return attrs.evolve(self._told, asks=asks)

    def _current(self) -> ExpertStanding:
        return ExpertStanding(
            staged=0 if self._staged is None else self._staged.digest,
            packed=self._packed,
            failed=self._failed,
            answer_bytes=NO_ANSWER if self._no_answer else len(self._answer),
        )

    def agreed(self, standings: Sequence[ExpertStanding], *, runs: bool) -> bool:
        """Does what follows from what all ranks said, in rank order, before a step of the model if one `runs`; whether
        the next agreement would further a migration. Raises RankLost."""
        asks = {ask for ask in (CANCEL, SUM, REBALANCE) if any(standing.asks & ask for standing in standings)}
        digests = {standing.staged for standing in standings}
        failed = {standing.failed for standing in standings} - {0}
        self._moves = False
        if CANCEL in asks or failed:
            self._drop(standings, cancelled=CANCEL in asks)
        elif len(digests) == 1 and digests != {0}:
            self._moves = self._further(standings)
        self._num_steps += runs
        every = self._config.eplb_rebalance_num_iterations
        is_due = runs and every is not None and self._num_steps % every == 0
        rebalances = (is_due or REBALANCE in asks) and not self._solving and digests == {0}
        if standings[0].answer_bytes:
            self._take_answer(standings[0].answer_bytes, is_free=digests == {0})
        if rebalances or SUM in asks:
            self._sum(rebalances=rebalances)
        return self._moves

    def close(self) -> None:
        """Ends the solver."""
        self.solver.close()

    # -- a staged placement -----------------------------------------------------------------------------------------

    def _further(self, standings: Sequence[ExpertStanding]) -> bool:
        """The next piece of a migration that all ranks have staged; whether there is more to do."""
        staged = self._staged
        assert staged is not None
        if len({standing.packed for standing in standings}) > 1:
            raise RuntimeError(f"ranks have packed different parts: {[standing.packed for standing in standings]}")
        transfer = self._transfer
        if transfer is not None and self._told.packed > transfer.num_parts:
            transfer.apply()
            self._experts.epoch = staged.epoch
            self.error = ""
            self._forget(staged.digest)
            _log.info("experts are placed anew: epoch %d, %d copied", staged.epoch, transfer.num_moves)
            return False
        if transfer is not None:
            transfer.send()
        try:
            if transfer is None:
                transfer = self._transfer = ExpertTransfer(
                    self._experts, self._layers, staged.placement, self._config.rebalance_bytes_per_step or None
                )
            if self._packed < transfer.num_parts:
                transfer.pack(self._packed)
            self._packed += 1
        except Exception as error:  # noqa: BLE001 - the old placement works, whatever it was
            _log.exception("a placement of experts cannot be prepared")
            self.error = f"{type(error).__name__}: {str(error)[:200]}"
            self._failed = staged.digest
        return True

    def _drop(self, standings: Sequence[ExpertStanding], *, cancelled: bool) -> None:
        """All ranks drop what they said was staged, or what one of them cannot do."""
        failed = {standing.failed for standing in standings}
        if self._told.staged and (cancelled or self._told.staged in failed):
            whose = ", ".join(str(rank) for rank, standing in enumerate(standings) if standing.failed)
            if not cancelled and not self._told.failed:
                self.error = f"rank {whose} could not go on with it; its log tells why"
            told = "it was cancelled" if cancelled else f"rank {whose} could not go on with it"
            _log.warning("a staged placement of experts is dropped: %s; epoch %d runs on", told, self.epoch)
            self._forget(self._told.staged)
        if self._told.failed:
            self._failed = 0

    def _forget(self, digest: int) -> None:
        self._transfer, self._packed = None, 0
        with self._lock:
            if self._staged is not None and self._staged.digest == digest:
                self._staged = None

    # -- the solver -------------------------------------------------------------------------------------------------

    def _sum(self, *, rebalances: bool) -> None:
        """Adds up what all ranks recorded; for a rebalance rank 0 has it solved, and what is recorded begins anew."""
        recorder = self._recorded("the load of experts")
        self.load = self._groups.world.all_reduce(recorder.device_counts()).cpu().numpy().astype(np.int64)
        if not rebalances:
            return
        if recorder.mode == "stat":
            recorder.reset()
        self._solving = True
        if self._groups.world.rank == 0:
            self._ask_solver(self.load)

    def _ask_solver(self, load: Ints) -> None:
        placement = self._experts.placement
        assert placement is not None
        most, size = self._config.rebalance_max_bytes, self._layers[0].experts.slot_bytes
        try:
            self.solver.ask(load, placement, max_moves=None if most is None else most // size)
        except OSError as error:
            self._lack_answer(f"the solver cannot be started: {error}")

    def _hear_solver(self) -> None:
        if not self.solver.is_asked:
            return
        try:
            self._answer = self.solver.poll()
        except (OSError, ConfigError) as error:
            self._lack_answer(str(error))

    def _lack_answer(self, reason: str) -> None:
        _log.warning("experts are not rebalanced: %s; epoch %d runs on", reason, self.epoch)
        self.error = reason
        self._no_answer = True

    def _take_answer(self, num_bytes: int, *, is_free: bool) -> None:
        """What rank 0's solver found, on all ranks."""
        answer, self._answer, self._no_answer, self._solving = self._answer, b"", False, False
        self.num_answers += 1
        if num_bytes < 0:
            return
        world = self._groups.world
        sent = torch.empty(num_bytes, dtype=torch.uint8)
        if world.rank == 0:
            sent.copy_(torch.frombuffer(bytearray(answer), dtype=torch.uint8))
        placement = unpack_placement(world.broadcast(sent).numpy().tobytes())
        if not is_free:
            _log.info("a solved placement of experts is not used: another one is staged")
        elif placement == self._experts.placement:
            _log.info("experts stay where they are: the solver found nothing better")
        else:
            self._stage_answer(_Staged.of(placement, self.epoch + 1))

    def _stage_answer(self, staged: _Staged) -> None:
        try:
            self.stage(staged.placement, epoch=staged.epoch)
        except ConfigError as error:
            _log.warning("a solved placement of experts cannot be staged: %s", error)
            self.error = str(error)
            self._failed = staged.digest
