"""What becomes of the requests of a Pairing: the pair each is sent to, what the ports answer, and what is done when a
port, or the link between two, is lost.

    line ─► policy ─► decode.submit ─► Granted ─► prefill.submit ─► (the channel) ─► TokenEvent
      ▲                     │                                                          │
      └── Refused: no room ─┴──────────────────── its decode is lost ──────────────────┘

Everything here happens in the thread that steps the Pairing.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from operator import le

import attrs

from pdinfer.bounds import escaped
from pdinfer.config import PairingConfig
from pdinfer.engine.schedule import queueing_s
from pdinfer.engine.sequence import WRITER_GRACE_S
from pdinfer.errors import ConfigError, Overloaded, PDInferError, TransferError
from pdinfer.pairing.policy import Policy
from pdinfer.pairing.ports import Port, Promised, ReturningPort, Roster
from pdinfer.pairing.progress import PARTING_S, Parting, Progress
from pdinfer.pairing.queue import Line
from pdinfer.pairing.tracked_request import Ticket
from pdinfer.stats import LostPort, PairingStats
from pdinfer.types import Event, FinishReason, Granted, PeerAddress, Refused, TokenEvent

LOOK_S = 0.1
"""How often loads are searched for links that were lost or are back."""
LINK_WAIT_S = WRITER_GRACE_S
"""How long a request waits for a link that is down: as long as decode waits for the prefill of one that it has."""
MAX_PORTS_LOST = 64
"""How many losses `stats` tells of."""

_log = logging.getLogger("pdinfer")


class Broker:
    """The requests under way and the decisions about them. `tickets` holds all that have not ended; the host's threads
    add to it. `emit` takes every event for the host. `away` are ports that were lost and may come back."""

    def __init__(
        self,
        roster: Roster,
        config: PairingConfig,
        policy: Policy,
        clock: Callable[[], float],
        emit: Callable[[TokenEvent], None],
    ) -> None:
        self.tickets: dict[str, Ticket] = {}
        self.line = Line(fair_share=config.fair_share)
        self.away: dict[PeerAddress, ReturningPort] = {}
        self._roster = roster
        self._config = config
        self._policy = policy
        self._clock = clock
        self._emit = emit
        self._parting = Parting()
        self._progress = Progress()
        self._look_at = float("-inf")
        self._num_changes = 0
        self._stranded = False
        self._num_choices = 0
        self._num_retries = 0
        self._num_reroutes = 0
        self._num_moved = 0
        self._num_ports_lost = 0
        self._ports_lost: deque[tuple[float, LostPort]] = deque(maxlen=MAX_PORTS_LOST)
        self._ended: Counter[FinishReason] = Counter()

    def advance(self) -> None:
        """One step: sends on what can be sent, steps every port, and ends what has to end."""
        now = self._clock()
        self._use_again()
        if (self.tickets or self._roster.links_down) and now >= self._look_at:
            self._roster.look()
            self._look_at = now + LOOK_S
        if self._stranded or self._roster.num_changes != self._num_changes:
            self._relink(now)
        self._dispatch(now)
        num_moved = self._num_moved
        for address, decode in list(self._roster.decodes.items()):
            self.step_port(address, decode)
        for address, prefill in list(self._roster.prefills.items()):
            self.step_port(address, prefill)
        if num_moved != self._num_moved:  # nothing else would wake the host for those
            self._dispatch(now)
        self._end_overdue()

    def wakes_at(self) -> float:
        """When, by our clock, a step would do something though nothing happens; infinity when never."""
        now = self._clock()
        wakes = [ticket.wakes_at(now) for ticket in list(self.tickets.values())]
        if self._roster.links_down or (wakes and self._roster.has_links):
            wakes.append(self._look_at)
        if wakes:
            wakes += self._parting.ends_at()
        return min(wakes, default=float("inf"))

    @property
    def stats(self) -> PairingStats:
        """What is and what was."""
        now = self._clock()
        return PairingStats(
            num_queued_requests=len(self.line),
            num_unfinished_requests=len(self.tickets),
            ended=tuple(sorted(self._ended.items(), key=lambda item: item[0].value)),
            num_retries=self._num_retries,
            num_reroutes=self._num_reroutes,
            num_moved=self._num_moved,
            num_ports_lost=self._num_ports_lost,
            links_down=tuple(sorted(self._roster.links_down, key=str)),
            ports_lost=tuple(attrs.evolve(lost, age_s=now - at) for at, lost in list(self._ports_lost)),
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

    def recover(self, told: Sequence[TokenEvent]) -> None:
        """After a step that did not end: who waits in line waits on, and ports that are away stay away; of all other
        requests nobody knows what was lost on the way, so they end. `told` are the events that the host has not got."""
        if (ended := self._progress.settle(told)) is not None and self.tickets.get(ended.request_id) is ended:
            del self.tickets[ended.request_id]
        if (losing := self._progress.losing) is not None and losing[0] in self._roster.all:
            self._give_up(*losing)
        now = self._clock()
        lost = TransferError("its pairing was interrupted while the request was under way")
        waiting = []
        for ticket in list(self.tickets.values()):
            if ticket.decode is not None:
                self._parting.add(ticket.request_id, ticket.decode, forget_at=now + PARTING_S)
                if ticket.decode in self._roster.decodes:
                    self._roster.decodes[ticket.decode].cancel(ticket.request_id)
                self.end(ticket, FinishReason.FAILED, lost)
            elif ticket.displaced is not None:
                self.end(ticket, FinishReason.FAILED, ticket.displaced)
            else:
                waiting.append(ticket)
        self.line.restore(waiting)
        while self._progress.came:
            decode, event = self._progress.came.popleft()
            self._handle(event, decode)

    # -- the line ---------------------------------------------------------------------------------------------------

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request that waits in the line; has the decode of another one end it."""
        if self.tickets.get(ticket.request_id) is not ticket:
            return
        if ticket.decode is None:
            self.line.remove(ticket)
            self.end(ticket, FinishReason.CANCELLED)
        else:
            ticket.unwanted(self._clock())
            self._roster.decodes[ticket.decode].cancel(ticket.request_id)

    def displace(self, ticket: Ticket) -> None:
        """Ends a request that gives its place in the line to one of higher priority, unless it has left it."""
        if ticket in self.line and self.tickets.get(ticket.request_id) is ticket:
            self.line.remove(ticket)
            self.end(ticket, FinishReason.FAILED, ticket.displaced)
        ticket.displaced = None

    def _dispatch(self, now: float) -> None:
        """Sends requests of the line, in turn, to the pair the policy chooses. Where it says wait, only those wait too
        that could go to no other ports: a request never waits behind one that needs what it does not, and gets the
        first place on the ports that it does need."""
        most = self._roster.most_tokens
        for ticket in self.line:
            if (end := self._end_in_line(ticket, now, most)) is not None:
                self.line.remove(ticket)
                self.end(ticket, *end)
        self._parting.expire(now)
        if not self.line:
            return
        promised = self._promised()
        rooms = self._roster.rooms
        held: list[list[int]] = []  # by how many ports of each side hold it: those that hold more hold less too
        decodes = self._roster.decodes
        for ticket in self.line.in_turn(now):
            fitting = [len(room) - bisect_left(room, ticket.max_tokens) for room in rooms]
            if self._parting.waits(ticket.request_id, decodes) or any(all(map(le, fitting, other)) for other in held):
                continue
            if not self._assign(ticket, now, promised):
                if fitting == list(map(len, rooms)):
                    return
                held.append(fitting)

    def _end_in_line(
        self, ticket: Ticket, now: float, most_tokens: Mapping[str, int]
    ) -> tuple[FinishReason, PDInferError | None] | None:
        """Why it need not wait any longer, if so; `most_tokens` is what the ports of each side can hold."""
        if ticket.expired(now):
            return FinishReason.DEADLINE, None
        side = next((side for side, tokens in most_tokens.items() if ticket.max_tokens > tokens), None)
        if side is not None:
            reason = f"no {side} port is left that holds its {ticket.max_tokens} tokens"
            reason += f"; {ticket.lost}" if ticket.lost is not None else ""
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
        self.line.serve(ticket)
        ticket.prefill, ticket.decode, ticket.line_s = choice.prefill, choice.decode, now - ticket.submitted_at
        self._roster.decodes[choice.decode].submit(ticket.request_at(now), writers=self._roster.writers(choice.prefill))
        return True

    # -- what ports say ---------------------------------------------------------------------------------------------

    def step_port(self, address: PeerAddress, port: Port) -> None:
        """Steps one port and acts on what it says; one that raises, or says what cannot be, is lost, and the others
        go on."""
        came = self._progress.came
        try:
            events = port.step()
        except MemoryError:  # this process has none left, whatever port it was for
            raise
        except Exception as error:  # noqa: BLE001 - whatever a port raises
            self._lose(address, port, error)
            return
        came.extend((address, event) for event in events)
        try:
            while came:
                self._handle(came[0][1], address)
                came.popleft()
        except MemoryError:
            raise
        except TransferError as error:
            came.clear()
            self._lose(address, port, error)
        except Exception:  # of a policy
            came.clear()
            raise

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
            self._progress.telling = ticket, ticket.num_tokens, None
            self._tell(ticket, event.index, ticket.passed_on(event, self._clock()))

    def _tell(self, ticket: Ticket, num_tokens: int, event: TokenEvent) -> None:
        """Emits what the host hears of a request that has given `num_tokens` before; the last one ends it."""
        self._progress.telling = ticket, num_tokens, event
        self._emit(event)
        if event.finish_reason is not None:
            self.tickets.pop(ticket.request_id)
            self._ended[event.finish_reason] += 1
        self._progress.telling = None

    def _ignore(self, event: Event, request_id: str, decode: PeerAddress) -> None:
        """Nobody waits for it any more."""
        if isinstance(event, Granted):
            if decode in self._roster.decodes:
                self._roster.decodes[decode].cancel(request_id)
        elif isinstance(event, Refused) or event.finish_reason:
            self._parting.discard(request_id, decode)

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
        """Decode has no place: back to the line. Any other reason is final."""
        if not isinstance(error, Overloaded) or ticket.failure is not None:
            self.end(ticket, FinishReason.FAILED, ticket.failure or error)
        elif ticket.cancelled:  # decode did not know it any more when the cancellation came
            self.end(ticket, FinishReason.CANCELLED)
        else:
            ticket.prefill = ticket.decode = None
            self.line.put(ticket)

    # -- ports and links that are lost ------------------------------------------------------------------------------

    def assigned(self, address: PeerAddress) -> list[Ticket]:
        """Unfinished requests that still need this port."""
        return [ticket for ticket in list(self.tickets.values()) if ticket.needs(address)]

    def _lose(self, address: PeerAddress, port: Port, error: Exception) -> None:
        """A port failed: its process is gone, silent or hangs, or it broke."""
        _log.error("a port was lost: %s: %s", address, error)
        role = "decode" if address in self._roster.decodes else "prefill"
        reason = escaped(str(error) or type(error).__name__)
        lost = LostPort(address=address, role=role, age_s=0.0, reason=reason, is_back=False)
        self._progress.losing = port, lost, error
        self._give_up(port, lost, error)

    def _give_up(self, port: Port, lost: LostPort, error: Exception) -> None:
        """Closing it is what proves to the others that it stopped; one that may come back stays open, and the others
        close their links to it."""
        address = lost.address
        if isinstance(port, ReturningPort):
            self.away[address] = port
            self._roster.part(port)
        else:
            self._close(port)
        self._roster.drop(address)
        self._parting.drop(address)
        self._num_ports_lost += 1
        self._ports_lost.append((self._clock(), lost))
        self._progress.losing = None
        self.part_with(address, error)

    def _use_again(self) -> None:
        """Puts ports that were away to use again, and lets those go that will not come back."""
        for address, port in list(self.away.items()):
            try:
                if not port.recover():
                    continue
                if address in (known.address for known in self._roster.all if known is not port):
                    raise ConfigError("the host has added another port to it")
                self._roster.take_back(port)
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - as of a step
                _log.error("a port that was lost will not come back: %s: %s", address, error)
                self._close(port)
            else:
                _log.warning("a port that was lost is back: %s", address)
                for at, (lost_at, lost) in enumerate(self._ports_lost):
                    if lost.address == address:
                        self._ports_lost[at] = lost_at, attrs.evolve(lost, is_back=True)
            del self.away[address]

    def _close(self, port: Port) -> None:
        try:
            port.close()
        except Exception:  # noqa: BLE001 - it is broken already
            _log.exception("closing the lost port failed")

    def take_back(self, address: PeerAddress, port: Port) -> None:
        """Has a decode that is removed, and may live on, let go of what it has. It may be added again and still say of
        these requests what is then for others to say; of ports that were removed before, nothing is kept."""
        self._parting.keep(self._roster.decodes)
        for ticket in self.assigned(address):
            if ticket.decode == address:
                self._parting.add(ticket.request_id, address)
                port.cancel(ticket.request_id)

    def part_with(self, address: PeerAddress, error: Exception) -> None:
        """Takes a port off the list. What it had goes to others, as far as it may."""
        self._roster.drop(address)
        lost = TransferError(f"its decode is lost: {address}: {error}")
        for ticket in list(self.tickets.values()):
            if ticket.decode == address:
                self._move(ticket, lost)
        self._relink(self._clock())

    def _move(self, ticket: Ticket, lost: TransferError) -> None:
        """Another decode for a request whose own is gone, or its end. What the old one may still say of it is not heard
        any more: it is no port, and this is not its request."""
        if ticket.cancelled:
            self.end(ticket, FinishReason.CANCELLED)
        elif ticket.failure is not None or ticket.stays_lost(may_continue=self._config.continue_elsewhere):
            self.end(ticket, FinishReason.FAILED, ticket.failure or lost)
        else:
            ticket.leave(self._clock(), lost)
            self._num_moved += 1
            self.line.put(ticket)

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
        self._tell(ticket, ticket.num_tokens, ticket.final_event(reason, error, self._clock()))

    def _end_overdue(self) -> None:
        """What a decode was to end and has not: it may be frozen, or in a long step."""
        now = self._clock()
        for ticket in list(self.tickets.values()):
            if (end := ticket.overdue(now)) is not None:
                assert ticket.decode is not None
                self._parting.add(ticket.request_id, ticket.decode)
                self._roster.decodes[ticket.decode].cancel(ticket.request_id)
                self.end(ticket, *end)
