"""The decode engine: pages granted, hand-offs admitted, one token per step for each running sequence."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from typing import Any

import attrs

from pdinfer.bounds import cause
from pdinfer.checks import typed
from pdinfer.config import EngineConfig
from pdinfer.engine.engine import Engine, brief_fields, full_fields
from pdinfer.engine.page_tables import GrantedRooms, PageTables
from pdinfer.engine.ranks.leader import empty_decode
from pdinfer.engine.sequence import Cancel, ChangeWriters, Sequence, SubmitDecode, ends_of
from pdinfer.engine.shown import DecodeSnapshot, show_landed, show_sequence
from pdinfer.errors import ConfigError, Overloaded, PDInferError, RankLost, RequestError, TransferError
from pdinfer.execution.drafting import DraftCounts
from pdinfer.execution.graphs import DecodeGraphs
from pdinfer.execution.sampling import Drawn, make_processor
from pdinfer.execution.warm_up import WarmUpRun
from pdinfer.kv.channel.rooms import first_error
from pdinfer.kv.pool import Held
from pdinfer.log import log
from pdinfer.model.batch import Row
from pdinfer.model.model import Model
from pdinfer.scheduling.admission import check_request
from pdinfer.scheduling.decode import WRITER_GRACE_S, DecodeScheduler, SequenceState
from pdinfer.scheduling.rules import decode_cost, largest_decode_step
from pdinfer.stats import DecodeLoad
from pdinfer.types import FinishReason, Handoff, HandoffStatus, PeerAddress, Refused, Request

_DESERTED = f"its prefill has not been connected to this decode for {WRITER_GRACE_S:g} s"


def _check_steps(model: Model, config: EngineConfig) -> None:
    num_drafts = config.num_draft_tokens
    if num_drafts and model.mtp is None:
        raise ConfigError(
            f"num_draft_tokens is {num_drafts} and the model was loaded without the MTP layer that drafts: load it "
            "with mtp=True, or leave num_draft_tokens 0"
        )
    model.experts.check_step(*largest_decode_step(config), tp_size=model.topology.tp_size, num_queries=1 + num_drafts)


def _check_submit(request: Request, writers: Seq[PeerAddress], in_use: Container[str]) -> None:
    """Raise RequestError for what a Pairing would not submit."""
    if not request.request_id:
        raise RequestError("request_id is missing; the Pairing gives one, or set it yourself")
    if request.request_id in in_use:
        raise RequestError(f"request_id {request.request_id!r} is in use by a request that has not ended")
    if not writers:  # nobody would ever hand its room off
        raise RequestError("writers is empty; name at least one prefill")
    if request.stop != ():
        raise RequestError("stop is for Pairing.submit; an engine takes sampling.stop_token_ids")


def _counts(scheduler: DecodeScheduler[Sequence], unseen: Seq[Request]) -> dict[str, Any]:
    """Return what a load says of requests: those of the scheduler, and those that no step has seen yet."""
    waiting, granted, running = [*scheduler.waiting], [*scheduler.granted], [*scheduler.running]
    return {
        "num_waiting_requests": len(waiting) + len(unseen),
        "num_waiting_tokens": sum(s.num_tokens for s in waiting) + sum(len(request.tokens) for request in unseen),
        "num_granted_requests": len(granted),
        "num_running_requests": len(running),
        "num_running_tokens": sum(sequence.num_tokens for sequence in (*granted, *running)),
    }


class DecodeEngine(Engine[SubmitDecode | ChangeWriters]):
    """Continuous batching over the pages of its `pool`. Only this engine emits tokens.

    A request waits for pages, is *granted* them (the event tells its host to start prefill), lands, runs, and grows
    page by page. When the pool is exhausted, a running sequence is retracted (`rules.choose_victim`): it returns to the
    front of the queue with its tokens so far. At its last attempt a sequence gets all the pages it may ever need, so
    that it cannot be retracted again. With `num_draft_tokens` a step gives a sequence the drafted tokens that were
    right, and one more. A `DecodeScheduler` decides all of it; the engine obeys with pages, a channel and a runner."""

    role = "decode"
    _check_steps = staticmethod(_check_steps)
    _run_empty = staticmethod(empty_decode)
    _warm_up = staticmethod(WarmUpRun.decode)

    def _prepare(self) -> None:
        self._sequences: dict[str, Sequence] = {}
        self._tables = PageTables(self.pool, self._channel, num_withheld=self._num_withheld)
        self._rooms = GrantedRooms(self._tables, self._channel, self.addresses, self.channel.random_bytes)
        self._scheduler: DecodeScheduler[Sequence] = DecodeScheduler(
            self._tables,
            self.config,
            self._clock,
            num_pages=self.pool.num_pages,
            page_size=self.pool.layout.page_size,
            has_writers=lambda sequence: all(map(self._channel.connected, sequence.writers)),
        )
        self._drafted = DraftCounts()
        if self.model.groups.world.size == 1:
            self._model_runner.do_while_waiting(self._schedule)
        if self.config.graph_batch_sizes is not None:
            self.graphs.asked = frozenset(self.config.graph_batch_sizes)

    @property
    def num_unfinished(self) -> int:
        """How many requests have no final event, and how many aborted rooms have writers that have not stopped yet."""
        return len(self._sequences) + self._tables.num_orphans + len(self._inbox.peek())

    @property
    def request_ids(self) -> list[str]:
        """The ids of the requests without a final event."""
        return list(self._sequences)

    @property
    def graphs(self) -> DecodeGraphs:
        """The captured steps of this engine. As text: their sizes and bytes, and why steps ran otherwise."""
        return self._model_runner.resident.graphs

    @typed
    def submit(self, request: Request, *, writers: Seq[PeerAddress]) -> None:
        """Queue a request that `writers` will prefill. A later `step` returns `Granted` or `Refused` for it."""
        self._put(SubmitDecode(request, tuple(writers)))

    @typed
    def change_writers(self, request_id: str, *, writers: Seq[PeerAddress]) -> None:
        """Name other writers for a request. An attempt under way is aborted and a new one is granted; the old one
        counts as none, nor does one that ended when its writers were gone. A running request keeps its KV and uses the
        new writers if it is retracted. Unknown and finished ids are ignored."""
        self._put(ChangeWriters(request_id, tuple(writers)))

    def _step(self) -> None:
        """Take what came, admit what landed, grant pages, and run one batch."""
        if self.closed:
            self._take_inbox()
            return
        self._schedule()
        self._decode()
        self._events += self._rooms.take_granted()

    def _schedule(self) -> None:
        """Do what needs no token of the step that runs, if one does: its sequences may end here, and others join the
        next one."""
        self._take_inbox()
        for sequence in self._scheduler.overdue():
            self._end(sequence, FinishReason.DEADLINE)
        self._land()
        self._grant()

    def load(self) -> DecodeLoad:
        """Return what this engine holds. That includes requests that no step has seen yet."""
        return attrs.evolve(self._make_brief_load(), **full_fields(self.model, self.channel, self._rebalancing))

    def _make_brief_load(self) -> DecodeLoad:
        unseen = [command.request for command in self._inbox.peek() if isinstance(command, SubmitDecode)]
        return DecodeLoad(
            **brief_fields(self.address, self.pool, self._tables, self._scheduler.costs),
            **_counts(self._scheduler, unseen),
            max_running_requests=self.config.max_running_requests,
            cost=decode_cost(self._scheduler.costs),
            **attrs.asdict(self._drafted),
        )

    def next_step_s(self) -> float | None:
        """Return how many seconds the next step takes, as far as those before it tell (0 when they do not), or None
        when no sequence runs."""
        running = self._scheduler.running
        num_tokens = sum(one.num_tokens for one in running)
        return decode_cost(self._scheduler.costs).seconds(len(running), num_tokens) if running else None

    def snapshot(self) -> DecodeSnapshot:
        """Return what this engine holds at this moment, for finding faults."""
        return DecodeSnapshot.of(self._scheduler, self._tables.orphans)

    @typed
    def wait(self, timeout_s: float) -> bool:
        """Sleep until a step would do something, at most `timeout_s`, and return whether it would."""
        if self._events or self.closed:
            return bool(self._events)
        scheduler = self._scheduler
        if (scheduler.running and not scheduler.stalled) or scheduler.next_turn() is not None:
            return True  # requests that ended in the last step may have left pages for the next turn
        return self._sleep(timeout_s, scheduler.next_end() - self._clock())

    def _close(self) -> None:
        """End what is unfinished with CANCELLED (a last `step` returns the events) and close the channel. After that no
        peer can write, and every page is free."""
        self._take_inbox()
        for sequence in list(self._sequences.values()):
            self._end(sequence, FinishReason.CANCELLED)
        self._channel.close()
        self._land()

    def _held(self) -> Held:
        return self._tables.held([*self._scheduler.running, *self._scheduler.granted])

    def _drop(self, error: PDInferError) -> None:
        self._events = ends_of(self._sequences.values(), self._arrived, self._events, error)
        self._sequences = {}
        self._rooms.clear()
        self._scheduler.clear()

    # -- arrivals ---------------------------------------------------------------------------------------------------

    def _take_inbox(self) -> None:
        for command in self._arrivals_in_order():
            match command:
                case SubmitDecode(request, writers):
                    self._receive(request, writers)
                case ChangeWriters(request_id, writers) if request_id in self._sequences and writers:
                    self._change_writers(self._sequences[request_id], writers)
                case Cancel(request_id) if request_id in self._sequences:
                    self._end(self._sequences[request_id], FinishReason.CANCELLED)

    def _receive(self, request: Request, writers: tuple[PeerAddress, ...]) -> None:
        request_id = request.request_id or ""
        try:
            if self.closed:  # another engine may take it
                raise Overloaded("the decode engine is closed")
            _check_submit(request, writers, self._sequences)
            request = check_request(request, [self.limits])
            processor = make_processor(self._factories, request.sampling)
            self._scheduler.check_room()
        except PDInferError as error:
            self._events.append(Refused(request_id=request_id, error=error))
            return
        chain, now, eos = self.pool.key_scheme.chain(request.cache_salt), self._clock(), self.model.config.eos_token_ids
        sequence = Sequence.of(request, writers, self._arrivals, now, chain, eos_token_ids=eos, processor=processor)
        self._arrivals += 1
        self._sequences[request_id] = sequence
        self._scheduler.wait(sequence)

    def _change_writers(self, sequence: Sequence, writers: tuple[PeerAddress, ...]) -> None:
        sequence.writers = writers
        if self._scheduler.take_over(sequence):
            self._rooms.give_up(sequence, TransferError("another prefill takes over"))

    # -- hand-offs --------------------------------------------------------------------------------------------------

    def _land(self) -> None:
        for room, handoffs in self._rooms.settled():
            sequence = next(one for one in self._scheduler.granted if one.grant is not None and one.grant.room == room)
            if all(handoff.status is HandoffStatus.LANDED for handoff in handoffs):
                self._admit(sequence, handoffs)
            else:
                self._lose(sequence, first_error(handoffs))

    def _admit(self, sequence: Sequence, handoffs: Seq[Handoff]) -> None:
        """Take over the pages of a room whose parts have all landed and were verified, and emit the first token."""
        now = self._clock()
        sequence.committed(handoffs, now)
        if self._trace is not None and sequence.grant is not None:
            show_landed(self._trace, sequence, sequence.grant, now)
        self._tables.adopt(sequence)
        self._scheduler.admit(sequence)
        try:
            first = sequence.first_token(handoffs, self.model.config.vocab_size)
        except TransferError as error:
            self._end(sequence, FinishReason.FAILED, error)
            return
        if self.config.num_draft_tokens:
            sequence.draft = self._runner.draft([state for handoff in handoffs for state in handoff.state])
        self._tables.keep(sequence)
        self._append(sequence, first)

    def _lose(self, sequence: Sequence, error: PDInferError) -> None:
        """End an attempt that brought no KV. Its writers have stopped, so its pages are free."""
        if not isinstance(error, TransferError | RequestError):
            self._tables.forget(sequence)
        self._tables.release(sequence)
        if not self._scheduler.lose(sequence, error):
            self._end(sequence, FinishReason.FAILED, error)

    def _grant(self) -> None:
        """Open a room for every sequence that has its turn, and end those that had too many."""
        for deserted in self._scheduler.deserted():
            self._end(deserted, FinishReason.FAILED, TransferError(_DESERTED))
        while (sequence := self._scheduler.next_turn()) is not None:
            if self._scheduler.has_failed(sequence):
                self._end(sequence, FinishReason.FAILED, sequence.cuts[-1])
            else:
                self._scheduler.grant(sequence)
                self._rooms.open(sequence, self._clock)

    # -- tokens -----------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        batch = self._scheduler.plan()
        for sequence in self._scheduler.retracted:
            log.info("retracting a request with %d tokens: the pool is exhausted", sequence.num_tokens)
            self.computing -= {sequence.request_id}
        if not batch:
            self._runner.idle()
            return
        started, context = self._clock(), sum(sequence.num_tokens for sequence in batch)
        try:
            self._begin(sequence.request_id for sequence in batch)
            drawn = self._forward(batch)
        except (MemoryError, RankLost):  # what it had is not to blame for a lost rank, and goes on elsewhere
            raise
        except Exception as error:  # noqa: BLE001 - a failing batch must not stop the engine
            log.exception("a decode step failed")
            for sequence in batch:
                self._fail(sequence, PDInferError(f"the decode step failed: {cause(error)}"))
            return
        num_tokens = sum(map(len, drawn))
        self._drafted.accept_length = num_tokens / len(batch)
        for sequence, new in zip(batch, drawn, strict=True):
            if self._sequences.get(sequence.request_id) is sequence:  # otherwise it ended while the step ran
                self._take_tokens(sequence, new)
        took_s = self._clock() - started
        self._scheduler.costs.count(num_tokens, took_s)
        self._scheduler.costs.add((1.0, float(len(batch)), float(context)), took_s)

    def _forward(self, batch: Seq[Sequence]) -> list[list[Drawn]]:
        for sequence in batch:
            sequence.draft.num_tokens = self._scheduler.num_drafts(sequence) if sequence.draft.num_newest else 0
        rows = [Row(sequence.output[-1:], sequence.num_tokens - 1, sequence.pages) for sequence in batch]
        return self._runner.decode(rows, [one.next_draw for one in batch], [one.draft for one in batch])

    def _take_tokens(self, sequence: Sequence, drawn: Seq[Drawn]) -> None:
        """Emit what one step gave a sequence, up to the token that ends it."""
        if sequence.draft.num_tokens:
            for counts in (sequence.drafted, self._drafted):
                counts.add(sequence.draft.num_tokens, num_accepted=len(drawn) - 1)
        if drawn[0].error is None and (sequence.draft.num_newest or not self.config.num_draft_tokens):
            self._tables.keep(sequence)
        for new in drawn:
            if not self._append(sequence, new):
                return
        if sequence.draft.num_tokens:
            self._tables.trim(sequence)

    def _append(self, sequence: Sequence, new: Drawn) -> bool:
        """Emit a new token, or fail the sequence if it could not be drawn. Return whether more tokens may follow."""
        if new.error is not None:
            self._fail(sequence, new.error)
            return False
        now = self._clock()
        sequence.append(new.token, now)
        reason = sequence.ends_with(new.token)
        if reason is None:
            self._events.append(sequence.event(new, now=now))
            sequence.num_told += 1
        else:
            self._end(sequence, reason, new=new)
        return reason is None

    def _fail(self, sequence: Sequence, error: PDInferError) -> None:
        """End a request whose computation failed. No other request may use what it leaves behind, unless the request
        itself caused the failure."""
        if not isinstance(error, RequestError):
            self._tables.forget(sequence)
        self._end(sequence, FinishReason.FAILED, error)

    def _end(
        self, sequence: Sequence, reason: FinishReason, error: PDInferError | None = None, *, new: Drawn | None = None
    ) -> None:
        """Emit the one final event, and return everything that the request held."""
        now = self._clock()
        self._events.append(sequence.event(new, now=now, finish_reason=reason, error=error))
        if self._trace is not None:
            show_sequence(self._trace, sequence, reason, now)
        del self._sequences[sequence.request_id]
        self._scheduler.leave(sequence)
        if sequence.state is SequenceState.RUNNING:
            self._tables.release(sequence)
        elif sequence.grant is not None:
            self._rooms.give_up(sequence, error or TransferError(f"the request ended: {reason.value}"))
