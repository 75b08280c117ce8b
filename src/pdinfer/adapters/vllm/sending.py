"""Prefill's side of the worker: blocks that peers get.

    save, with a grant ──► pushed layer by layer, finished when the prompt is whole
    save, no grant yet ──► kept when the prompt is whole: sent at once when the grant comes, or dropped after a lease
    request ended ──► held by vLLM until no transfer reads its blocks: `take_finished`

A prompt whose first token travels with it is finished a step later: vLLM draws it after the last hook of a step.

A decode of several workers grants a room for each, and a request has its grant when all of them have come: from then on
each worker is sent every layer, and one that gives up costs the others nothing here.

A grant is accepted when its request is computed and not when it comes: until then its decode may take it back at any
moment, and the channel answers without a step of this engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import attrs

from pdinfer.adapters.vllm.messages import ABORTED, Save, Terms, TransferCounts, room_of
from pdinfer.errors import PDInferError, TransferError
from pdinfer.kv.channel.channel import KVChannel, turn_away
from pdinfer.kv.transports.base import Transfer
from pdinfer.types import Handoff, HandoffStatus, PageGrant

DRAIN_S = 0.1
"""Seconds that a step waits for the reads of preempted blocks, before the links that do them are closed."""

_log = logging.getLogger("vllm.pdinfer")


@attrs.define(eq=False)
class Outgoing:
    """A grant of a request, of one worker of its decode. Its tokens up to `sent` have left in every layer, and those of
    the step that is being computed in the layers before `next_layer`. `awaits_token` is set when nothing but its first
    token is missing, and `transfer` when it is finished, well or not."""

    grant: PageGrant
    sent: int
    next_layer: int = 0
    awaits_token: bool = False
    transfer: Transfer | None = None


@attrs.define(eq=False, repr=False, slots=False)
class VLLMSending:
    """The saves of one worker. Everything is called from vLLM's thread. Nothing waits, but `preempted` may for
    DRAIN_S."""

    _channel: KVChannel
    _counts: TransferCounts
    _hold_s: float
    _lease_s: float
    _clock: Callable[[], float] = time.monotonic
    _layers: range = attrs.field(default=attrs.Factory(lambda self: self._channel.pool.layout.layers, takes_self=True))
    _grants: dict[str, tuple[PageGrant, float]] = attrs.field(factory=dict)
    _news: set[str] = attrs.field(factory=set)
    _most_workers: int = 1
    _out: dict[str, list[Outgoing]] = attrs.field(factory=dict)
    _kept: dict[str, Save] = attrs.field(factory=dict)
    _drawn: dict[str, int] = attrs.field(factory=dict)
    _ended: dict[str, float] = attrs.field(factory=dict)
    _finished: set[str] = attrs.field(factory=set)

    def __len__(self) -> int:
        return len(self._ended)

    # -- what vLLM computes -----------------------------------------------------------------------------------------

    def layer(self, saves: Iterable[Save], layer: int) -> None:
        """Push what this step has computed of a layer."""
        for save in saves:
            for out in self._opened(save):
                self._push(out, save, range(out.next_layer, layer + 1))

    def step_done(self, saves: Iterable[Save]) -> None:
        """Push the layers that no hook was called for, and finish the prompts that are whole."""
        for save in saves:
            outs = self._opened(save)
            if save.whole and save.req_id not in self._out:
                self._kept[save.req_id] = save
            for out in outs:
                self._push(out, save, range(out.next_layer, self._layers.stop))
                out.sent, out.next_layer = max(out.sent, self._reach(save)), 0
                if save.whole:
                    self._finish(out, save)

    def drawn(self, first_tokens: Iterable[tuple[str, int]]) -> None:
        """Note the first tokens of requests that ended, and finish those that have waited for them."""
        for req_id, token in first_tokens:
            self._drawn[req_id] = token
            for out in self._open_of(req_id):
                if out.awaits_token:
                    self._land(out, token)

    def preempted(self, requests: Iterable[str]) -> None:
        """Wait until nothing reads the blocks of these requests, which vLLM is about to use again. A peer that takes
        longer than DRAIN_S loses its link, and with it its rooms."""
        for req_id in requests:
            self._kept.pop(req_id, None)
            if (outs := self._out.get(req_id)) is not None and not self._channel.drain(DRAIN_S):
                _log.warning(
                    "a peer read the blocks of preempted request %s for %g s: its link is closed", req_id, DRAIN_S
                )
                for destination in (each for out in outs for each in out.grant.destinations):
                    self._channel.drop_peer(destination)

    def ended(self, requests: Iterable[str]) -> None:
        """Note that vLLM has finished requests and holds their blocks."""
        self._ended |= dict.fromkeys(requests, self._clock())

    def unwanted(self, rooms: Iterable[str]) -> None:
        """Turn away the grants of requests that ended before their prompt was whole, those that come later too."""
        for room in rooms:
            self._decline(room, "the request ended before its prefill")

    def make_way(self) -> None:
        """Let go of the prompt that has been kept longest without a grant: others lack its blocks."""
        if (req_id := next((each for each in self._ended if each in self._kept), None)) is not None:
            self._let_go_of(req_id, "blocks", "others needed its blocks before decode asked for it")

    # -- what peers say ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Take the grants that have come, abort what decodes gave up, and let go of what has left or is too old."""
        for grant in self._channel.poll_offers():
            self._grants[grant.room.hex()] = grant, self._clock()
            terms = Terms.of(grant.request_id)
            # a request that is declined before its grant came says nothing of its decode's workers
            self._most_workers = max(self._most_workers, terms.num_workers)
            if self._rooms_of(room := room_of(grant.room.hex(), terms.rank)):
                self._news.add(room)
        for req_id, save in list(self._kept.items()):
            for out in self._opened(save):
                self._push(out, save, self._layers)
                self._finish(out, save)
            if req_id in self._out:
                del self._kept[req_id]
        stopped = dict(self._channel.poll_stops())
        for out in (out for req_id in self._out for out in self._open_of(req_id)):
            if out.grant.room in stopped:
                self._abort(out, "stopped", stopped[out.grant.room])
        for room, (grant, since) in list(self._grants.items()):
            if self._clock() - since > (grant_s := self._hold_s + self._lease_s):
                del self._grants[room]
                self._turn_away(grant, f"no request came for it within {grant_s:g} s")
        self._let_go()

    @property
    def has_news(self) -> bool:
        """True if `take_news` would return anything."""
        return bool(self._news)

    def take_news(self) -> frozenset[str]:
        """Return the rooms whose grants have come since the last call."""
        taken, self._news = self._news, set()
        return frozenset(taken)

    def take_finished(self) -> set[str]:
        """Return the ended requests whose blocks nothing reads any more, since the last call."""
        taken, self._finished = self._finished, set()
        return taken

    # -- inside -----------------------------------------------------------------------------------------------------

    def _rooms_of(self, room: str) -> list[str]:
        """Return the rooms of a request, one for each worker of its decode, when the grants of all are here; else
        none."""
        first = self._grants.get(room)
        num_workers = 0 if first is None else Terms.of(first[0].request_id).num_workers
        rooms = [room_of(room, rank) for rank in range(num_workers)]
        return rooms if all(each in self._grants for each in rooms) else []

    def _open_of(self, req_id: str) -> list[Outgoing]:
        """Return what of a request is not finished."""
        return [out for out in self._out.get(req_id, ()) if out.transfer is None]

    def _opened(self, save: Save) -> list[Outgoing]:
        """Return what of a request is not finished. Its grants are accepted when all of them are here."""
        if save.req_id not in self._out and (rooms := self._rooms_of(save.room)):
            self._out[save.req_id] = [self._open(save, self._grants.pop(room)[0]) for room in rooms]
        return self._open_of(save.req_id)

    def _open(self, save: Save, grant: PageGrant) -> Outgoing:
        out = Outgoing(grant, grant.tokens.start)
        try:
            self._channel.accept(grant)
        except TransferError as error:  # decode gave it up, and has its answer
            _log.info("the grant of request %s is void: %s", save.req_id, error)
            self._counts.add(ABORTED + "stopped")
            # nothing was pushed, so nothing reads the blocks
            out.transfer = Transfer(0, done=True)
        else:
            if Terms.of(grant.request_id).proof not in save.proofs:
                self._abort(out, "prompt", TransferError("decode's prompt has other tokens than this one"))
        return out

    def _reach(self, save: Save) -> int:
        """Return up to which token the blocks of a save may leave: packed ones leave whole."""
        return self._channel.pool.layout.border(save.stop, up=save.whole)

    def _push(self, out: Outgoing, save: Save, layers: range) -> None:
        tokens = range(out.sent, min(self._reach(save), out.grant.tokens.stop))
        if not tokens or not layers:
            return
        try:
            self._channel.push(out.grant, layers=layers, tokens=tokens, pages=save.blocks)
            out.next_layer = layers.stop
        except PDInferError as error:
            self._abort(out, "push", error)

    def _finish(self, out: Outgoing, save: Save) -> None:
        token = self._drawn.get(save.req_id)
        if out.transfer is not None:  # the push before it failed
            return
        if save.first_token and token is None:
            out.awaits_token = True
        else:
            self._land(out, token)

    def _land(self, out: Outgoing, token: int | None) -> None:
        """Finish a room. vLLM gives no connector the token's log-probability, so the hand-off has none."""
        landed = Handoff(room=out.grant.room, writer=self._channel.address, status=HandoffStatus.LANDED, token=token)
        out.transfer = self._channel.finish(out.grant, landed)
        self._counts.add("sent")

    def _abort(self, out: Outgoing, reason: str, error: PDInferError) -> None:
        aborted = Handoff(room=out.grant.room, writer=self._channel.address, status=HandoffStatus.ABORTED, error=error)
        out.transfer = self._channel.finish(out.grant, aborted)
        self._counts.add(ABORTED + reason)

    def _decline(self, room: str, why: str) -> None:
        """Turn away the grants of a request, those that come later too. How many workers its decode has, only a grant
        would say: it counts as one with the most seen so far."""
        for each in (room_of(room, rank) for rank in range(self._most_workers)):
            if (waiting := self._grants.pop(each, None)) is not None:
                self._turn_away(waiting[0], why)
            else:
                self._channel.sender.decline(bytes.fromhex(each))

    def _turn_away(self, grant: PageGrant, why: str) -> None:
        if turn_away(self._channel, grant, TransferError(why)):
            self._counts.add(ABORTED + "turned_away")

    def _let_go_of(self, req_id: str, reason: str, why: str) -> None:
        """Keep a prompt no longer. Its blocks are free at the next look."""
        self._decline(self._kept.pop(req_id).room, why)
        self._counts.add(ABORTED + reason)

    def _let_go(self) -> None:
        for req_id, since in list(self._ended.items()):
            outs = self._out.get(req_id)
            if outs is None and req_id in self._kept:
                if self._clock() - since <= self._lease_s:
                    continue
                self._let_go_of(req_id, "lease", "not all workers of the decode have asked for it")
            elif outs is not None:
                for out in self._open_of(req_id):
                    self._abort(out, "ended", TransferError("the request ended before its prompt was whole"))
                if any(out.transfer is None or not out.transfer.done for out in outs):
                    continue
                del self._out[req_id]
            del self._ended[req_id]
            self._drawn.pop(req_id, None)
            self._finished.add(req_id)
