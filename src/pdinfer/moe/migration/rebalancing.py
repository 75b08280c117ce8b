"""Placements of experts that change while engines run.

    staged on every rank ─► all say the same digest ─► a part travels per step ─► all are ready ─► all apply it

What a rank does follows from what all ranks said in the same agreement (see `lockstep`), so all begin, send, apply and
drop at the same step. A single rank agrees with itself. Until a placement is applied, the old one is used and nothing
of it is touched. A placement comes from the host, or from a solver that was given the load of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch

from pdinfer.config import EngineConfig
from pdinfer.errors import ConfigError
from pdinfer.log import log
from pdinfer.moe.balance.process import SolverProcess, unpack_placement
from pdinfer.moe.layer import MoE
from pdinfer.moe.migration.migration import (
    ExpertRequests,
    ExpertStatus,
    Migration,
    MigrationState,
    Verdict,
    checked_epoch,
    digest_of,
)
from pdinfer.moe.migration.transfer import ExpertTransfer
from pdinfer.moe.parallel import ExpertParallel
from pdinfer.moe.placement.placement import ExpertPlacement, Ints
from pdinfer.moe.placement.recorder import ExpertLoadRecorder
from pdinfer.parallel.groups import Group, Groups
from pdinfer.process.locks import new_lock


class Solving:
    """One rank's part. `report` is called on rank 0 with the reason why there will be no placement.

    `load` is what all ranks recorded when they last added it up, int64 [layers, experts]; None before."""

    def __init__(self, world: Group, solver: SolverProcess, report: Callable[[str], None]) -> None:
        self.is_awaited = False
        self.load: Ints | None = None
        self.answer_bytes: int | None = None
        self._world = world
        self._solver = solver
        self._report = report
        self._answer = b""

    def sum_load(self, recorder: ExpertLoadRecorder) -> Ints:
        """Add up, on all ranks together, what each of them recorded."""
        self.load = self._world.all_reduce(recorder.device_counts()).cpu().numpy().astype(np.int64)
        return self.load

    def begin(self, recorder: ExpertLoadRecorder, previous: ExpertPlacement, *, max_moves: int | None) -> None:
        """Have a placement solved for the load of all ranks, and begin to record anew. All ranks call it together."""
        load = self.sum_load(recorder)
        if recorder.mode == "stat":
            recorder.reset()
        self.is_awaited = True
        if self._world.rank:
            return
        try:
            self._solver.ask(load, previous, max_moves=max_moves)
        except OSError as error:
            self._fail(f"the solver cannot be started: {error}")

    def listen(self) -> None:
        """Look for the solver's answer, without waiting. `answer_bytes` then says its size, 0 for no placement."""
        if not self.is_awaited or self._world.rank or self.answer_bytes is not None:
            return
        try:
            answer = self._solver.poll()
        except (OSError, ConfigError) as error:
            self._fail(str(error))
            return
        if answer:
            self._answer, self.answer_bytes = answer, len(answer)

    def _fail(self, reason: str) -> None:
        self.answer_bytes = 0
        self._report(reason)

    def take(self, num_bytes: int) -> ExpertPlacement | None:
        """Return what rank 0's solver found, on all ranks together; None when it has no placement."""
        answer, self._answer = self._answer, b""
        self.answer_bytes, self.is_awaited = None, False
        if not num_bytes:
            return None
        packed = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        if self._world.rank == 0:
            packed.copy_(torch.frombuffer(bytearray(answer), dtype=torch.uint8))
        return unpack_placement(self._world.broadcast(packed).numpy().tobytes())

    def close(self) -> None:
        """End the solver. A second call does nothing."""
        self._solver.close()


class Rebalancing:
    """One rank's part in changing placements.

    `stage`, `cancel`, `request_sum` and `request_rebalance` may be called from any thread; the rest is for the
    lockstep. `wake` is called when an agreement would bring something forward, which none does while it `is_calm`.
    `error` says why the newest placement did not come into use."""

    def __init__(
        self,
        experts: ExpertParallel,
        layers: Sequence[MoE],
        groups: Groups,
        config: EngineConfig,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        solver: SolverProcess | None = None,
    ) -> None:
        self.recorder = experts.recorder
        self.error = ""
        self.is_calm = True
        self._experts, self._layers, self._config = experts, layers, config
        self._wake = wake
        self._solving = Solving(groups.world, solver or SolverProcess(clock), self._report_unsolved)
        self._lock = new_lock()
        self._migration: Migration | None = None
        self._requests = ExpertRequests.NONE
        self._refused: int | None = None
        self._told = ExpertStatus()
        self._num_steps = 0
        if (every := config.eplb_rebalance_num_iterations) is not None:
            self._check_rebalances(f"eplb_rebalance_num_iterations = {every}")

    @property
    def epoch(self) -> int:
        """The epoch of the placement in use; 0 for the first."""
        return self._experts.epoch

    @property
    def is_staged(self) -> bool:
        """Whether a placement is staged here."""
        return self._migration is not None

    @property
    def load(self) -> Ints | None:
        """What all ranks recorded, int64 [layers, experts], when they last added it up; None before."""
        return self._solving.load

    # -- any thread -------------------------------------------------------------------------------------------------

    def stage(self, placement: ExpertPlacement, *, epoch: int | None = None) -> None:
        """Stage a placement on this rank; see `EngineExperts.stage`."""
        with self._lock:
            new = checked_epoch(self._experts, placement, epoch)
            self.is_calm = False
            if self._migration is None:
                self._migration = Migration(placement, new, self._prepare)
            elif not self._migration.is_of(placement, new):
                raise ConfigError(
                    f"another placement is staged already, as epoch {self._migration.epoch}; wait for it, or drop it "
                    "with experts.cancel()"
                )
        self._wake()

    def cancel(self) -> None:
        """Ask all ranks to drop what is staged."""
        self._request(ExpertRequests.CANCEL)

    def request_sum(self) -> None:
        """Ask all ranks to add up what they recorded, into `load`."""
        self._recorded("the load of experts")
        self._request(ExpertRequests.SUM_LOAD)

    def request_rebalance(self) -> None:
        """Ask all ranks for a placement that a solver finds; see `EngineExperts.rebalance`."""
        self._check_rebalances("rebalance()")
        self._request(ExpertRequests.REBALANCE)

    def _request(self, requests: ExpertRequests) -> None:
        with self._lock:
            self._requests |= requests
            self.is_calm = False
        self._wake()

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
        self._solving.listen()
        with self._lock:
            has_news = self._has_begun or bool(self._requests) or self._current() != self._told
            self.is_calm = not (has_news or self.is_staged or self._solving.is_awaited)
            return has_news

    def status(self) -> ExpertStatus:
        """Return what to say in the agreement that comes now."""
        self._solving.listen()
        with self._lock:
            requests, self._requests = self._requests, ExpertRequests.NONE
            self._told = self._current()
            return attrs.evolve(self._told, requests=requests)

    @property
    def _has_begun(self) -> bool:
        return self._migration is not None and self._migration.has_begun

    def _current(self) -> ExpertStatus:
        migration, answer_bytes = self._migration, self._solving.answer_bytes
        if migration is None:
            return ExpertStatus(failed=self._refused, answer_bytes=answer_bytes)
        return ExpertStatus(
            staged=migration.digest,
            failed=migration.digest if migration.state is MigrationState.FAILED else self._refused,
            num_advances=migration.num_advances,
            answer_bytes=answer_bytes,
        )

    def agreed(self, statuses: Sequence[ExpertStatus], *, runs: bool) -> bool:
        """Do what follows from what all ranks said, in rank order, before a step of the model if one `runs`. Return
        whether the next agreement would bring a migration forward. Raises RankLost."""
        self._follow(statuses)
        self._num_steps += runs
        every = self._config.eplb_rebalance_num_iterations
        is_due = runs and every is not None and self._num_steps % every == 0
        is_free = all(status.staged is None for status in statuses)
        is_wanted = is_due or any(ExpertRequests.REBALANCE in status.requests for status in statuses)
        rebalances = is_wanted and not self._solving.is_awaited and is_free
        if (num_bytes := statuses[0].answer_bytes) is not None:
            self._take_answer(num_bytes, is_free=is_free)
        if rebalances:
            self._begin_to_solve()
        elif any(ExpertRequests.SUM_LOAD in status.requests for status in statuses):
            self._solving.sum_load(self._recorded("the load of experts"))
        return self._has_begun

    def close(self) -> None:
        """End the solver."""
        self._solving.close()

    # -- a staged placement -----------------------------------------------------------------------------------------

    def _prepare(self, placement: ExpertPlacement) -> ExpertTransfer:
        return ExpertTransfer(self._experts, self._layers, placement, self._config.rebalance_bytes_per_step or None)

    def _follow(self, statuses: Sequence[ExpertStatus]) -> None:
        """Go on with the placement that this rank said was staged."""
        if self._told.failed is not None:
            self._refused = None
        migration, digest = self._migration, self._told.staged
        if migration is None or digest is None:  # one that was staged since is for the next agreement
            return
        verdict = Verdict.of(digest, statuses)
        migration.follow(verdict, statuses)
        if migration.state is MigrationState.APPLIED:
            self._experts.epoch = migration.epoch
            self.error = ""
            self._forget()
            log.info("experts are placed anew: epoch %d, %d copied", migration.epoch, migration.num_moves)
        elif migration.state is MigrationState.DROPPED:
            self._report_dropped(verdict, statuses)
            self._forget()
        elif migration.state is MigrationState.FAILED:
            self.error = migration.error

    def _forget(self) -> None:
        with self._lock:
            self._migration = None

    def _report_dropped(self, verdict: Verdict, statuses: Sequence[ExpertStatus]) -> None:
        reason = "it was cancelled"
        if verdict is Verdict.BROKEN:
            ranks = ", ".join(str(rank) for rank, status in enumerate(statuses) if status.failed is not None)
            reason = f"rank {ranks} could not go on with it"
            if self._told.failed is None:
                self.error = f"{reason}; its log says why"
        log.warning("a staged placement of experts is dropped: %s; epoch %d runs on", reason, self.epoch)

    # -- the solver -------------------------------------------------------------------------------------------------

    def _begin_to_solve(self) -> None:
        placement = self._experts.placement
        assert placement is not None
        most, size = self._config.rebalance_max_bytes, self._layers[0].experts.slot_bytes
        self._solving.begin(
            self._recorded("the load of experts"), placement, max_moves=None if most is None else most // size
        )

    def _report_unsolved(self, reason: str) -> None:
        log.warning("experts are not rebalanced: %s; epoch %d runs on", reason, self.epoch)
        self.error = reason

    def _take_answer(self, num_bytes: int, *, is_free: bool) -> None:
        """Stage what rank 0's solver found, on all ranks."""
        placement = self._solving.take(num_bytes)
        if placement is None:
            return
        if not is_free:
            log.info("a solved placement of experts is not used: another one is staged")
        elif placement == self._experts.placement:
            log.info("experts stay where they are: the solver found nothing better")
        else:
            self._stage_answer(placement)

    def _stage_answer(self, placement: ExpertPlacement) -> None:
        try:
            self.stage(placement)
        except ConfigError as error:
            log.warning("a solved placement of experts cannot be staged: %s", error)
            self.error = str(error)
            self._refused = digest_of(placement, self.epoch + 1)
