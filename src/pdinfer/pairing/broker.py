"""Takes the requests of a Pairing to their end: sends each to a pair of ports, acts on what the ports answer, and finds
other ports when one, or a link between two, is lost.

    queue ─► policy ─► decode.submit ─► Granted ─► prefill.submit ─► (the channel) ─► TokenEvent
      ▲                      │                                                          │
      └── Refused: no room ──┴──────────────────── its decode is lost ──────────────────┘

Everything here runs in the thread that steps the Pairing."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import le

import attrs

from pdinfer.bounds import escaped
from pdinfer.config import PairingConfig
from pdinfer.errors import Overloaded, PDInferError, TransferError
from pdinfer.log import log
from pdinfer.pairing.choosing import Board, Chooser, OfPolicy
from pdinfer.pairing.policy import Policy
from pdinfer.pairing.port import Port, TellingPort
from pdinfer.pairing.ports import LinkWatch, LostPorts, Ports
from pdinfer.pairing.promise import Class, Coming, Door
from pdinfer.pairing.queue import AwaitingRelease, Queue, WaitLimits
from pdinfer.pairing.relinking import Relinking
from pdinfer.pairing.request import End, TrackedRequest
from pdinfer.process.locks import EXHAUSTED
from pdinfer.stats import PairingStats
from pdinfer.types import COMPLETE, Event, FinishReason, Granted, PeerAddress, Refused, TokenEvent

RELEASE_S = 1.0
"""How long ids are withheld from decodes after an interrupt: the events that would have released them may be lost."""


@attrs.define(eq=False)
class Counts:
    """What has become of requests so far. Of those that were not taken, `refused` counts the reasons."""

    num_retries: int = 0
    num_moved: int = 0
    num_switches: int = 0
    ended: Counter[FinishReason] = attrs.field(factory=Counter)
    refused: Counter[str] = attrs.field(factory=Counter)

    def stats(
        self, queued: int, unfinished: int, rerouted: int, ports: Ports, lost_ports: LostPorts, now: float
    ) -> PairingStats:
        """Return it with how requests and ports are now."""
        prefills, decodes = ports.brief_loads()
        return PairingStats(
            num_queued_requests=queued,
            num_unfinished_requests=unfinished,
            ended=tuple(sorted(self.ended.items(), key=lambda item: item[0].value)),
            num_retries=self.num_retries,
            num_reroutes=rerouted,
            num_moved=self.num_moved,
            num_switches=self.num_switches,
            together=ports.together,
            num_ports_lost=lost_ports.num_lost,
            links_down=tuple(sorted(ports.links_down, key=str)),
            ports_lost=lost_ports.told(now),
            ports_away=tuple(lost_ports.away),
            loads=(*prefills.values(), *decodes.values()),
            refused=tuple(self.refused.items()),
        )


class Dispatching:
    """Sends the requests of a queue to pairs of ports."""

    def __init__(
        self, queue: Queue, ports: Ports, lost_ports: LostPorts, chooser: Chooser, awaiting_release: AwaitingRelease
    ) -> None:
        self._queue = queue
        self._ports = ports
        self._chooser = chooser
        self._awaiting_release = awaiting_release
        self._wait_limits = WaitLimits(ports, lost_ports)

    def expired(self, now: float) -> Iterator[tuple[TrackedRequest, End]]:
        """Take the requests out of the queue that have to end, and yield them and how they end."""
        for tracked, end in self._wait_limits.ends(self._queue, now):
            self._queue.remove(tracked)
            yield tracked, end

    def send(self, requests: Mapping[str, TrackedRequest], now: float) -> None:
        """Send queued requests, in turn, to the pairs that the policy chooses. When the policy lets one wait, only
        requests wait behind it that could go to no other ports. So no request waits for ports it does not need, and
        none is overtaken on the ports it does need."""
        self._awaiting_release.expire(now)
        if not self._queue:
            return
        board = self._chooser.board(requests)
        rooms = self._ports.rooms
        held: list[list[int]] = []  # how many ports of each side fit a held request; they are nested
        decodes = self._ports.decodes
        for tracked in self._queue.in_turn(now):
            fitting = [len(room) - bisect_left(room, tracked.max_tokens) for room in rooms]
            overtakes = any(all(map(le, fitting, other)) for other in held)
            if overtakes or self._awaiting_release.waits(tracked.request_id, decodes):
                continue
            if not self._assign(tracked, now, board):
                if fitting == list(map(len, rooms)):
                    return
                held.append(fitting)

    def _assign(self, tracked: TrackedRequest, now: float, board: Board) -> bool:
        choice = self._chooser.choose(tracked, board)
        if choice is None:
            return False
        self._queue.serve(tracked)
        tracked.chosen(choice, now)
        self._ports.decodes[choice.decode].submit(
            tracked.request_at(now), writers=self._ports.prefills[choice.prefill].addresses
        )
        return True


class Broker:
    """The requests under way and the decisions about them. `requests` holds all that have not ended, and the host's
    threads add to it. `emit` takes every event for the host.
    `door` is there if a promise has to be kept."""

    def __init__(
        self,
        ports: Ports,
        config: PairingConfig,
        policy: Policy,
        clock: Callable[[], float],
        emit: Callable[[TokenEvent], None],
    ) -> None:
        self.requests: dict[str, TrackedRequest] = {}
        self.queue = Queue(fair_share=config.fair_share)
        self.door = None if config.slo is None else Door(config.slo)
        self.counts = Counts()
        self.lost_ports = LostPorts(ports, config.port_wait_s)
        self._ports = ports
        self._config = config
        self._chooser = Chooser(ports, policy, config.max_queued_per_decode)
        self._clock = clock
        self._emit = emit
        self._awaiting_release = AwaitingRelease()
        self._dispatching = Dispatching(self.queue, ports, self.lost_ports, self._chooser, self._awaiting_release)
        self._relinking = Relinking(
            ports, self.lost_ports, self._chooser, take_away=self._take_away, ask_to_end=self._ask_to_end
        )
        self._link_watch = LinkWatch(ports)
        self._emitting: tuple[TrackedRequest, TokenEvent] | None = None

    def advance(self) -> None:
        """Take one step: send what can be sent, step every port, and end what has to end."""
        now = self._clock()
        self.lost_ports.recover(now)
        if self.requests or self._ports.links_down:
            self._link_watch.act(now)
        relinking = self._relinking
        if relinking.some_are_stranded or relinking.num_changes_seen != self._ports.num_changes:
            relinking.act(self.requests, now)
        self._dispatch(now)
        num_moved = self.counts.num_moved
        for port in self._ports.all:
            self.step_port(port)
        if num_moved != self.counts.num_moved:  # nothing else would wake the host for moved requests
            self._dispatch(now)
        self._end_overdue()

    def wakes_at(self) -> float:
        """Return when, by our clock, a step is due even if nothing happens, or infinity."""
        now = self._clock()
        wakes = [tracked.wakes_at(now) for tracked in list(self.requests.values())]
        if self._ports.links_down or (wakes and self._ports.has_links):
            wakes.append(self._link_watch.looks_at)
        if wakes:
            wakes += self._awaiting_release.ends_at()
        return min([*wakes, self.lost_ports.returns_at(now)])

    @property
    def stats(self) -> PairingStats:
        sizes = len(self.queue), len(self.requests), self._relinking.num_reroutes
        return self.counts.stats(*sizes, self._ports, self.lost_ports, self._clock())

    def recover(self, unread: Sequence[TokenEvent]) -> None:
        """Make everything consistent after an interrupted step. Queued requests keep waiting. All others end, since
        nobody knows which events were lost on the way, and ids are withheld from their decodes for RELEASE_S. A port
        that was being given up raises again in its next step. `unread` are the events that the host has not fetched."""
        if self._emitting is not None and any(event is self._emitting[1] for event in unread):
            self._emitted(*self._emitting)
        lost = TransferError("its pairing was interrupted while the request was under way")
        requests = list(self.requests.values())
        for tracked in requests:
            if tracked.attempt.decode is not None:
                self._recall(tracked)
                self.end(tracked, FinishReason.FAILED, lost)
        self._awaiting_release.forget_at(self._clock() + RELEASE_S)
        self.queue.clear()
        for tracked in requests:
            self.heed(tracked)

    # -- the door ----------------------------------------------------------------------------------------------------

    def show(self, door: Door) -> None:
        """Let the door see how things are after a step."""
        board = self._chooser.board(self.requests)
        prefills, decodes = board.all
        links = board.links(prefills.keys(), decodes.keys())
        door.look(prefills, decodes, links, _coming(list(self.requests.values())), self._clock())

    def class_of(self, tracked: TrackedRequest) -> Class:
        """Return the class whose answers tell how long that of a request will be."""
        return tracked.request.priority, tracked.request.cache_salt if self._config.fair_share else b""

    # -- the queue ---------------------------------------------------------------------------------------------------

    def heed(self, tracked: TrackedRequest) -> None:
        """Do what a host's thread wants done with a request: queue it or, when it was cancelled or gives its place to
        another one, end it. A request that has left the queue loses no place, and its decode ends it."""
        if self.requests.get(tracked.request_id) is not tracked:
            return
        if tracked.attempt.decode is None:
            self.queue.put(tracked)
            if tracked.displaced is not None or tracked.cancel_wanted:
                self.queue.remove(tracked)
                reason = FinishReason.FAILED if tracked.displaced is not None else FinishReason.CANCELLED
                self.end(tracked, reason, tracked.displaced)
            return
        tracked.displaced = None
        if tracked.cancel_wanted:
            self._ask_to_end(tracked)

    def _dispatch(self, now: float) -> None:
        for tracked, end in self._dispatching.expired(now):
            self.end(tracked, *end)
        self._dispatching.send(self.requests, now)

    # -- what ports say ---------------------------------------------------------------------------------------------

    def step_port(self, port: Port) -> None:
        """Step one port and act on its events. A port that raises or sends an impossible event is lost; the other ports
        go on. Raises OfPolicy when all of that is done."""
        failed = None
        try:
            events = port.step()
        except EXHAUSTED:  # whichever port asked last
            raise
        except Exception as error:  # noqa: BLE001 - whatever a port raises
            self._lose(port, error)
            return
        try:
            for event in events:
                try:
                    self._handle(event, port.address)
                except OfPolicy as error:
                    failed = error
        except TransferError as error:
            self._lose(port, error)
            return
        if failed is not None:
            raise failed
        if getattr(port, "closed", False):  # by its host
            self._lose(port, TransferError(f"its {port.role} engine was closed, and not by its pairing"))

    def _handle(self, event: Event, decode: PeerAddress) -> None:
        request_id = event.grant.request_id if isinstance(event, Granted) else event.request_id
        tracked = self.requests.get(request_id)
        if tracked is None or tracked.attempt.decode != decode:
            self._ignore(event, request_id, decode)
        elif isinstance(event, Granted):
            self._forward(tracked, event)
        elif isinstance(event, Refused):
            self._refused(tracked, event.error)
        else:
            self._hear(tracked, event)

    def _hear(self, tracked: TrackedRequest, event: TokenEvent) -> None:
        """Pass on what decode says of a request. When its `stop` ends it here, ask decode to end it there too."""
        has_stopped = tracked.ending is not None
        passed_on = tracked.passed_on(event, self._clock())
        if passed_on is not None:
            self._tell(tracked, passed_on)
        elif not has_stopped:
            self._ask_to_end(tracked)

    def _tell(self, tracked: TrackedRequest, event: TokenEvent) -> None:
        """Emit an event of a request. A final event ends the request."""
        self._emitting = tracked, event  # after an interrupt, the host's events show whether it was emitted
        self._emit(event)
        self._emitted(tracked, event)

    def _emitted(self, tracked: TrackedRequest, event: TokenEvent) -> None:
        tracked.num_tokens = event.index + (event.token is not None)
        if event.finish_reason is not None and self.requests.get(tracked.request_id) is tracked:
            del self.requests[tracked.request_id]
            self.counts.ended[event.finish_reason] += 1
            if self.door is not None and event.finish_reason in COMPLETE:
                self.door.answers.note(self.class_of(tracked), tracked.num_tokens)
        self._emitting = None

    def _ignore(self, event: Event, request_id: str, decode: PeerAddress) -> None:
        """Drop an event that nobody waits for any more."""
        if isinstance(event, Granted):
            if decode in self._ports.decodes:
                self._ports.decodes[decode].cancel(request_id)
        elif isinstance(event, Refused) or event.finish_reason:
            self._awaiting_release.discard(request_id, decode)

    def _forward(self, tracked: TrackedRequest, granted: Granted) -> None:
        """Make prefill start. Its port may have left since it was chosen."""
        if tracked.failure is not None or tracked.cancelled:
            return  # decode has been asked to end it
        self.counts.num_retries += tracked.attempt.num_grants > 0
        tracked.granted(self._clock())
        port = self._ports.prefills.get(granted.grant.writers[0])
        tracked.attempt.forwarded = port is not None
        if port is not None:
            self._chooser.follow(tracked)
            port.submit(granted.request, granted.grant)
        else:
            self._relinking.act(self.requests, self._clock())

    def _refused(self, tracked: TrackedRequest, error: PDInferError) -> None:
        """Queue a request again for which its decode has no room. Any other refusal is final."""
        if not isinstance(error, Overloaded) or tracked.failure is not None:
            self.end(tracked, FinishReason.FAILED, tracked.failure or error)
        elif tracked.cancelled:  # decode did not know it any more when the cancellation came
            self.end(tracked, FinishReason.CANCELLED)
        else:
            tracked.try_again(self._clock(), waiting_since=tracked.attempt.waiting_since)
            self.queue.put(tracked)

    # -- ports and links that are lost ------------------------------------------------------------------------------

    def assigned(self, address: PeerAddress) -> list[TrackedRequest]:
        """Return the unfinished requests that still need this port."""
        return [tracked for tracked in list(self.requests.values()) if tracked.attempt.needs(address)]

    def _lose(self, port: Port, error: Exception) -> None:
        """Give up a port that failed: its process is gone, silent or hangs, or the port broke."""
        address, computing = port.address, port.computing if isinstance(port, TellingPort) else None
        for tracked in self.assigned(address):
            tracked.losses.add(address, was_computing=tracked.was_computed(computing))
        reason = escaped(str(error) or type(error).__name__)
        self.lost_ports.add(port, reason, self._clock())
        self._awaiting_release.drop(address)
        self._part_with(address, error)
        log.error("a port was lost: %s: %s", address, error)

    def remove(self, port: Port) -> None:
        """Let go of a port that may live on, be added again, and still send events of requests that other decodes serve
        by then. Nothing is kept about ports that were removed before."""
        self._awaiting_release.keep(self._ports.decodes)
        for tracked in self.assigned(port.address):
            if tracked.attempt.decode == port.address:
                self._recall(tracked)
        self._part_with(port.address, TransferError("its port was removed from the pairing"))

    def switch(self, port: Port) -> None:
        """Note that a port which was removed lets go of everything, and have the others close their links to it."""
        self._awaiting_release.drop(port.address)
        self._ports.part(port)

    def _part_with(self, address: PeerAddress, error: Exception) -> None:
        """Remove a port, and move what it had to other ports as far as possible. What runs at a decode needs no
        prefill. The rest gets another one there, but a request that has to run alone starts anew at another pair."""
        had = self.assigned(address)
        self._ports.drop(address)
        for tracked in had:
            if tracked.attempt.decode == address:
                self._move(tracked, TransferError(f"its decode is lost: {address}: {error}{tracked.losses}"))
                continue
            tracked.attempt.prefill = None
            if tracked.losses.is_suspect:
                self._take_away(tracked, TransferError(f"its prefill is lost: {address}: {error}{tracked.losses}"))
        self._relinking.act(self.requests, self._clock())

    def _take_away(self, tracked: TrackedRequest, lost: TransferError) -> None:
        """Take a request from a decode that lives, as if it were lost. It may go there again once that has let go."""
        self._recall(tracked)
        self._move(tracked, lost)

    def _recall(self, tracked: TrackedRequest) -> None:
        """Make the decode of a request let go of it, and keep the id reserved there until it has."""
        decode = tracked.attempt.decode
        assert decode is not None
        self._awaiting_release.add(tracked.request_id, decode)
        if decode in self._ports.decodes:  # or else an interrupt hit its removal
            self._ports.decodes[decode].cancel(tracked.request_id)

    def _move(self, tracked: TrackedRequest, lost: TransferError) -> None:
        """Queue a request for another decode after its own is gone, or end it. Events of the old decode are dropped
        from now on, since the request is no longer assigned to it."""
        if tracked.cancelled:
            self.end(tracked, FinishReason.CANCELLED)
        elif tracked.failure is not None or tracked.stays_lost(may_continue=self._config.continue_elsewhere):
            self.end(tracked, FinishReason.FAILED, tracked.failure or lost)
        else:
            tracked.leave(self._clock(), lost)
            self.counts.num_moved += 1
            self.queue.put(tracked)

    # -- ends -------------------------------------------------------------------------------------------------------

    def end(self, tracked: TrackedRequest, reason: FinishReason, error: PDInferError | None = None) -> None:
        """End a request that no decode ends."""
        self._tell(tracked, tracked.final_event(reason, error, self._clock()))

    def _ask_to_end(self, tracked: TrackedRequest, failure: PDInferError | None = None) -> None:
        """Ask the decode of a request to end it. Its answer ends the request here."""
        assert tracked.attempt.decode is not None
        tracked.end_requested(self._clock(), failure)
        self._ports.decodes[tracked.attempt.decode].cancel(tracked.request_id)

    def _end_overdue(self) -> None:
        """End requests that their decode should have ended by now. It may be frozen, or in a long step."""
        now = self._clock()
        for tracked in [one for one in list(self.requests.values()) if one.ends_by <= now]:
            if tracked.attempt.decode is not None:
                self._recall(tracked)
                self.end(tracked, *tracked.overdue_end)


def _coming(requests: Iterable[TrackedRequest]) -> list[Coming]:
    """Return the requests whose KV is not at their decode yet, as the door sees them."""
    return [
        Coming(
            tracked.request.priority,
            attempt.prefill_tokens or tracked.num_prompt_tokens,
            0 if attempt.num_grants else tracked.num_prompt_tokens,
            attempt.prefill,
            attempt.decode,
        )
        for tracked in requests
        if not (attempt := tracked.attempt).landed
    ]
