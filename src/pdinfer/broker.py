"""What becomes of the requests of a Pairing: the line, the pair each is sent to, what the ports answer, and what is
done when a port, or the link between two, is lost.

    line ─► policy ─► decode.submit ─► Granted ─► prefill.submit ─► (the channel) ─► TokenEvent
      ▲                     │
      └── Refused: no room ─┘

Everything here happens in the thread that steps the Pairing.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence

from pdinfer.config import PairingConfig
from pdinfer.decode import WRITER_GRACE_S
from pdinfer.errors import Overloaded, PDInferError, TransferError
from pdinfer.policy import Policy
from pdinfer.ports import Port, Promised, Roster
from pdinfer.schedule import queueing_s
from pdinfer.ticket import Ticket
from pdinfer.types import Event, FinishReason, Granted, PairingStats, PeerAddress, Refused, TokenEvent

LOOK_S = 0.1
"""How often loads are searched for links that were lost or are back."""
PARTING_S = 1.0
"""How long the id of a request that an interrupt ended is kept from its decode, whose answer may have been lost."""
LINK_WAIT_S = WRITER_GRACE_S
"""How long a request waits for a link that is down: as long as decode waits for the prefill of one that it has."""

_log = logging.getLogger("pdinfer")


class Broker:
    """The requests under way and the decisions about them. `tickets` holds all that have not ended; the host's threads
    add to it. `emit` takes every event for the host. A request that we ended while its decode did not answer is
    *parting*: its id goes to that decode again only when the decode has let go of it."""

    def __init__(
        self,
        roster: Roster,
        config: PairingConfig,
        policy: Policy,
        clock: Callable[[], float],
        emit: Callable[[TokenEvent], None],
    ) -> None:
        self.tickets: dict[str, Ticket] = {}
        self.line: deque[Ticket] = deque()
        self._roster = roster
        self._config = config
        self._policy = policy
        self._clock = clock
        self._emit = emit
        self._parting: dict[str, PeerAddress] = {}
        self._look_at = float("-inf")
        self._num_changes = 0
        self._stranded = False
        self._num_choices = 0
        self._num_retries = 0
        self._num_reroutes = 0
        self._num_ports_lost = 0
        self._ended: Counter[FinishReason] = Counter()
        self._came: deque[tuple[PeerAddress, Event]] = deque()
        self._forget_at: dict[str, float] = {}

    def advance(self) -> None:
        """One step: sends on what can be sent, steps every port, and ends what has to end."""
        now = self._clock()
        if self.tickets and now >= self._look_at:
            self._roster.look()
            self._look_at = now + LOOK_S
        if self._stranded or self._roster.num_changes != self._num_changes:
            self._relink(now)
        self._dispatch(now)
        for address, decode in list(self._roster.decodes.items()):
            self.step_port(address, decode)
        for address, prefill in list(self._roster.prefills.items()):
            self.step_port(address, prefill)
        self._end_overdue()

    def wakes_at(self) -> float:
        """When, by our clock, a step would do something though nothing happens; infinity when never."""
        now = self._clock()
        wakes = [ticket.wakes_at(now) for ticket in list(self.tickets.values())]
        if wakes and self._roster.has_links:
            wakes.append(self._look_at)
        return min(wakes, default=float("inf"))

    @property
    def stats(self) -> PairingStats:
        """What is and what was."""
        return PairingStats(
            num_queued_requests=len(self.line),
            num_unfinished_requests=len(self.tickets),
            ended=tuple(sorted(self._ended.items(), key=lambda item: item[0].value)),
            num_retries=self._num_retries,
            num_reroutes=self._num_reroutes,
            num_ports_lost=self._num_ports_lost,
            links_down=tuple(sorted(self._roster.links_down, key=str)),
        )

    def queueing_s(self, priority: float = float("-inf")) -> float | None:
        """Estimate of how many seconds pass before a request of this priority that comes now has its turn: prefills
        first compute what they have and what the requests ahead of it bring, and, when every decode has some waiting
        for pages, decodes what those may generate. None when no speed has been measured. Any thread."""
        prefills = [port.load() for port in list(self._roster.prefills.values())]
        decodes = [port.load() for port in list(self._roster.decodes.values())]
        tickets = [ticket for ticket in list(self.tickets.values()) if not ticket.num_grants]
        ahead = [ticket for ticket in tickets if ticket.request.priority >= priority]
        to_compute = sum(ticket.num_prompt_tokens for ticket in ahead) + sum(
            load.num_queued_tokens for load in prefills
        )
        full = all(load.num_waiting_requests for load in decodes)
        to_generate = sum(ticket.max_tokens - ticket.num_prompt_tokens for ticket in ahead) if full else 0
        return queueing_s(
            (to_compute, sum(load.tokens_per_s for load in prefills)),
            (to_generate, sum(load.tokens_per_s for load in decodes)),
        )

    def recover(self, unseen: Collection[Ticket], told: Sequence[TokenEvent]) -> None:
        """After a step that did not end: who waits in line, but for those `unseen` by us, waits on; of all others
        nobody knows what was lost on the way, so they end. `told` are the last events that were emitted."""
        self._reconcile(told)
        lost = TransferError("its pairing was interrupted while the request was under way")
        tickets = list(self.tickets.values())
        for ticket in tickets:
            if ticket.decode is not None:
                self._parting[ticket.request_id] = ticket.decode
                self._forget_at[ticket.request_id] = self._clock() + PARTING_S
                if ticket.decode in self._roster.decodes:
                    self._roster.decodes[ticket.decode].cancel(ticket.request_id)
                self.end(ticket, FinishReason.FAILED, lost)
        self.line = deque(ticket for ticket in tickets if ticket.decode is None and ticket not in unseen)
        while self._came:
            decode, event = self._came.popleft()
            self._handle(event, decode)

    def _reconcile(self, told: Sequence[TokenEvent]) -> None:
        """The interrupt may have hit between telling an event and noting that it was told."""
        _, event = self._came[0] if self._came else (None, None)
        ticket = self.tickets.get(event.request_id) if isinstance(event, TokenEvent) else None
        if isinstance(event, TokenEvent) and ticket is not None:
            known = [each for each in told if each.request_id == event.request_id]
            ticket.num_tokens = max([event.index, *(each.index + (each.token is not None) for each in known)])
            if known and known[-1].finish_reason is not None:
                del self.tickets[event.request_id]

    # -- the line ---------------------------------------------------------------------------------------------------

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request that waits in the line; has the decode of another one end it."""
        if self.tickets.get(ticket.request_id) is not ticket:
            return
        if ticket.decode is None:
            self.line = deque(waiting for waiting in self.line if waiting is not ticket)
            self.end(ticket, FinishReason.CANCELLED)
        else:
            ticket.unwanted(self._clock())
            self._roster.decodes[ticket.decode].cancel(ticket.request_id)

    def _dispatch(self, now: float) -> None:
        """Sends requests of the line to the pair the policy chooses, by priority, deadline and age, until it says
        wait."""
        most = self._roster.most_tokens
        for ticket in list(self.line):
            if (end := self._end_in_line(ticket, now, most)) is not None:
                self.line.remove(ticket)
                self.end(ticket, *end)
        for request_id in [name for name, at in self._forget_at.items() if now >= at]:
            del self._forget_at[request_id]
            self._parting.pop(request_id, None)
        promised = self._promised() if self.line else Promised()
        for ticket in sorted(self.line, key=lambda ticket: ticket.order):
            if ticket.request_id not in self._parting and not self._assign(ticket, now, promised):
                break

    def _end_in_line(
        self, ticket: Ticket, now: float, most_tokens: Mapping[str, int]
    ) -> tuple[FinishReason, PDInferError | None] | None:
        """Why it need not wait any longer, if so; `most_tokens` is what the ports of each side can hold."""
        if ticket.expired(now):
            return FinishReason.DEADLINE, None
        side = next((side for side, tokens in most_tokens.items() if ticket.max_tokens > tokens), None)
        if side is not None:
            reason = f"no {side} port is left that holds its {ticket.max_tokens} tokens"
            grace_s = self._config.port_wait_s
        elif self._roster.links_down and not self._has_linked_pair(ticket):
            reason = f"no prefill and decode that hold it have been connected for {LINK_WAIT_S:g} s"
            grace_s = LINK_WAIT_S
        else:
            ticket.hopeless_until = None
            return None
        return (FinishReason.FAILED, TransferError(reason)) if ticket.gives_up(now, grace_s) else None

    def _has_linked_pair(self, ticket: Ticket) -> bool:
        prefills, decodes = self._roster.fitting(ticket.max_tokens)
        return any(self._roster.linked(prefill, decode) for prefill in prefills for decode in decodes)

    def _assign(self, ticket: Ticket, now: float, promised: Promised) -> bool:
        limit = self._config.max_queued_per_decode
        shape = ticket.shape(self._num_choices)
        choice = self._roster.choose(self._policy, shape, promised, max_queued_per_decode=limit)
        if choice is None:
            return False
        promised.add(choice.prefill, shape)
        self._num_choices += 1
        self.line.remove(ticket)
        ticket.prefill, ticket.decode, ticket.line_s = choice.prefill, choice.decode, now - ticket.submitted_at
        self._roster.decodes[choice.decode].submit(ticket.request_at(now), writers=self._roster.writers(choice.prefill))
        return True

    # -- what ports say ---------------------------------------------------------------------------------------------

    def step_port(self, address: PeerAddress, port: Port) -> None:
        """Steps one port and acts on what it says; one that raises, or says what cannot be, is lost, and the others
        go on."""
        try:
            events = port.step()
        except MemoryError:  # this process has none left, whatever port it was for
            raise
        except Exception as error:  # noqa: BLE001 - whatever a port raises
            self._lose(address, port, error)
            return
        self._came.extend((address, event) for event in events)
        while self._came:
            try:
                self._handle(self._came[0][1], address)
            except TransferError as error:
                self._came.clear()
                self._lose(address, port, error)
                return
            self._came.popleft()

    def _handle(self, event: Event, decode: PeerAddress) -> None:
        request_id = event.grant.request_id if isinstance(event, Granted) else event.request_id
        ticket = self.tickets.get(request_id)
        if ticket is None or ticket.decode != decode:
            self._ignore(event, request_id, decode)
        elif isinstance(event, Granted):
            self._forward(ticket, event)
        elif isinstance(event, Refused):
            self._refused(ticket, event.error)
        else:
            event = ticket.passed_on(event, self._clock())
            if event.finish_reason is not None:
                self._finish(ticket, event)
            else:
                self._emit(event)

    def _ignore(self, event: Event, request_id: str, decode: PeerAddress) -> None:
        """Nobody waits for it any more."""
        if isinstance(event, Granted):
            if decode in self._roster.decodes:
                self._roster.decodes[decode].cancel(request_id)
        elif (isinstance(event, Refused) or event.finish_reason) and self._parting.get(request_id) == decode:
            del self._parting[request_id]

    def _forward(self, ticket: Ticket, granted: Granted) -> None:
        """Tells prefill to start; its port may have left since the choice."""
        if ticket.failure is not None or ticket.cancelled:
            return  # decode has been asked to end it
        self._num_retries += ticket.num_grants > 0
        ticket.granted(self._clock())
        port = self._roster.prefills.get(granted.grant.writers[0])
        ticket.forwarded = port is not None
        if port is not None:
            port.submit(granted.request, granted.grant)
        else:
            self._relink(self._clock())

    def _refused(self, ticket: Ticket, error: PDInferError) -> None:
        """Decode has no place: back to the front of the line. Any other reason is final."""
        if not isinstance(error, Overloaded) or ticket.failure is not None:
            self.end(ticket, FinishReason.FAILED, ticket.failure or error)
        elif ticket.cancelled:  # decode did not know it any more when the cancellation came
            self.end(ticket, FinishReason.CANCELLED)
        else:
            ticket.prefill = ticket.decode = None
            self.line.appendleft(ticket)

    # -- ports and links that are lost ------------------------------------------------------------------------------

    def assigned(self, address: PeerAddress) -> list[Ticket]:
        """Unfinished requests that still need this port."""
        return [ticket for ticket in list(self.tickets.values()) if ticket.needs(address)]

    def _lose(self, address: PeerAddress, port: Port, error: Exception) -> None:
        """A port failed: its process is gone or it broke. Closing it is what proves to the others that it stopped."""
        _log.error("a port was lost: %s: %s", address, error)
        self._num_ports_lost += 1
        try:
            port.close()
        except Exception:  # noqa: BLE001 - it is broken already
            _log.exception("closing the lost port failed")
        self.part_with(address, error)

    def part_with(self, address: PeerAddress, error: Exception) -> None:
        """Takes a port off the list. Requests of a decode end FAILED, those of a prefill go to another one."""
        self._roster.drop(address)
        self._parting = {request_id: decode for request_id, decode in self._parting.items() if decode != address}
        lost = TransferError(f"its decode is lost: {address}: {error}")
        for ticket in list(self.tickets.values()):
            if ticket.decode == address:
                self.end(ticket, FinishReason.FAILED, lost)
        self._relink(self._clock())

    def _relink(self, now: float) -> None:
        """Another prefill for every request that decode holds and whose own is gone or out of its reach; for a running
        one too, which will need it if it is retracted. One that finds none is stranded."""
        self._num_changes, self._stranded = self._roster.num_changes, False
        promised = self._promised()
        for ticket in list(self.tickets.values()):
            decode = ticket.decode
            if decode is None or ticket.failure is not None:
                continue
            if self._roster.linked(ticket.prefill, decode):
                ticket.hopeless_until = None
                continue
            shape = ticket.shape(self._num_choices)
            choice = self._roster.choose(self._policy, shape, promised, decode=decode)
            if choice is None:
                self._stranded = True
                self._strand(ticket, decode, now)
                continue
            promised.add(choice.prefill, shape)
            self._num_reroutes += 1
            ticket.prefill, ticket.forwarded, ticket.hopeless_until = choice.prefill, ticket.landed, None
            self._roster.decodes[decode].change_writers(ticket.request_id, writers=self._roster.writers(choice.prefill))

    def _strand(self, ticket: Ticket, decode: PeerAddress, now: float) -> None:
        """No prefill can be named now. A link may come back: decode itself waits for that, and ends the request after
        WRITER_GRACE_S. When there is no prefill at all, only a port that joins could help."""
        prefills, _ = self._roster.fitting(ticket.max_tokens)
        if ticket.landed or prefills:
            ticket.hopeless_until = None
        elif ticket.gives_up(now, self._config.port_wait_s):
            ticket.unwanted(now, TransferError(f"no prefill port is left for it; it was sent to {ticket.prefill}"))
            self._roster.decodes[decode].cancel(ticket.request_id)  # its answer ends the request

    def _promised(self) -> Promised:
        coming = [ticket for ticket in list(self.tickets.values()) if not ticket.forwarded]
        return Promised((ticket.prefill, ticket.shape(self._num_choices)) for ticket in coming)

    # -- ends -------------------------------------------------------------------------------------------------------

    def end(self, ticket: Ticket, reason: FinishReason, error: PDInferError | None = None) -> None:
        """Ends a request that no decode will."""
        self._finish(ticket, ticket.final_event(reason, error, self._clock()))

    def _end_overdue(self) -> None:
        """What a decode was to end and has not: it may be frozen, or in a long step."""
        now = self._clock()
        for ticket in list(self.tickets.values()):
            if (end := ticket.overdue(now)) is not None:
                assert ticket.decode is not None
                self._parting[ticket.request_id] = ticket.decode
                self._roster.decodes[ticket.decode].cancel(ticket.request_id)
                self.end(ticket, *end)

    def _finish(self, ticket: Ticket, event: TokenEvent) -> None:
        assert event.finish_reason is not None
        self._emit(event)
        del self.tickets[ticket.request_id]
        self._ended[event.finish_reason] += 1
