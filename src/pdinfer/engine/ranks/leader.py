"""The channel and the runner of a leader: its engine acts through them, and its followers do the same.

Only the engine of the leader decides. What it does travels as orders with the next agreement (`lockstep`), and what
followers report is added to what its own channel says. Page ids in orders are the leader's, whose pool accounts for the
pages of all ranks of the group."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from pdinfer.engine.ranks import messages as say
from pdinfer.engine.ranks.lockstep import Agreement, Lockstep
from pdinfer.errors import PDInferError, TransferError
from pdinfer.execution.drafting import Draft, num_passes
from pdinfer.execution.runner import ModelRunner, Ready
from pdinfer.execution.sampling import Draw, Drawn, change_logits
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.wire import PackedGrant, pack_ints
from pdinfer.kv.transports.base import Transfer
from pdinfer.model.batch import Row
from pdinfer.model.decode_rows import MAX_NEWEST
from pdinfer.parallel.slices import even_slices
from pdinfer.types import Handoff, HandoffStatus, NamedState, PageGrant, PeerAddress, PeerKey, peer_key

RunEmpty = Callable[[ModelRunner, Agreement], None]
"""Runs a role's step of the model without rows. It has as many collectives as a step with rows."""


def empty_prefill(runner: ModelRunner, _: Agreement) -> None:
    """Run prefill's step without rows."""
    for _layer in runner.prefill([]):
        pass


def empty_decode(runner: ModelRunner, agreement: Agreement) -> None:
    """Run decode's step without rows."""
    runner.decode([], [], [], num_passes=agreement.num_passes)


class RankRunner:
    """Runs every step of a model together with all ranks. Followers, if there are any, are ordered to run it. Their
    reports go to `channel`."""

    def __init__(self, runner: ModelRunner, lockstep: Lockstep, run_empty: RunEmpty, channel: RankChannel) -> None:
        self._runner = runner
        self._lockstep = lockstep
        self._run_empty = run_empty
        self._channel = channel
        self._has_followers = lockstep.groups.attention.size > 1
        self._numbers: weakref.WeakKeyDictionary[Draft, int] = weakref.WeakKeyDictionary()
        self._num_drafts = 0
        self._num_next: int | None = None
        if not self._has_followers:
            runner.do_while_waiting(self._begin_next)

    def idle(self, *, is_closing: bool = False) -> None:
        """Take part in what other ranks run."""
        agreement = self._agree(is_closing=is_closing)
        if agreement is not None and agreement.runs:
            with self._step(num_next=0):
                self._run_empty(self._runner, agreement)

    @contextlib.contextmanager
    def _step(self, num_next: int) -> Iterator[None]:
        """Enclose a step that all ranks run. Behind it `num_next` rows go on here, unless a stop token ends them."""
        self._num_next = num_next
        with self._lockstep.together():
            yield
        self._num_next = None

    def _begin_next(self) -> None:
        """Begin the next agreement while a device computes the step. How often the layer that drafts will run is known
        by then where it runs equally often in every step."""
        passes = self._runner.captured_passes
        if self._num_next is not None and (passes or not self._runner.drafts):
            self._lockstep.begin(num_rows=self._num_next, num_passes=passes)

    def announce(self, rows: Sequence[Row], grants: Sequence[PageGrant], tokens: Sequence[range]) -> None:
        """Tell followers to run `rows` in the next prefill, and to push `tokens` of each into its grant by layer."""
        if self._has_followers:
            packed = [say.PackedRow.of(row) for row in rows]
            self._lockstep.tell(say.PrefillMessage(packed, [grant.room for grant in grants], list(tokens)))

    def prefill(self, rows: Sequence[Row]) -> Iterator[tuple[int, Ready]]:
        self._agree(num_rows=len(rows))
        with self._lockstep.together():
            yield from self._runner.prefill(rows)

    def first_tokens(self, rows: Sequence[int], draws: Sequence[Draw]) -> list[Drawn]:
        return self._runner.first_tokens(rows, draws)

    def states(self, rows: Sequence[int]) -> list[tuple[NamedState, ...]]:
        return self._runner.states(rows)

    def draft(self, states: Sequence[NamedState]) -> Draft:
        draft = self._runner.draft(states)
        if self._has_followers and draft.num_newest:
            number = self._numbers[draft] = self._num_drafts
            self._num_drafts += 1
            self._lockstep.tell(say.KeepDraft(number, list(states)))
            weakref.finalize(draft, self._lockstep.tell, say.DropDraft(number)).atexit = False
        return draft

    def decode(self, rows: Sequence[Row], draws: Sequence[Draw], drafts: Sequence[Draft]) -> list[list[Drawn]]:
        if self._has_followers:
            in_order = self._runner.order(rows)  # sums over ranks go row by row
            order = say.DecodeMessage([say.PackedRow.of(rows[index]) for index in in_order])
            if self._runner.drafts:
                order.drafts = [self._numbers.get(drafts[index]) for index in in_order]
                order.counts = [drafts[index].num_tokens for index in in_order]
                order.newest = [pack_ints(draws[index].output[-MAX_NEWEST:]) for index in in_order]
                order.on_host = change_logits(draws)
            self._lockstep.tell(order)
        agreement = self._agree(num_rows=len(rows), num_passes=num_passes(drafts))
        assert agreement is not None
        with self._step(num_next=sum(len(draw.output) + 1 < draw.sampling.max_new_tokens for draw in draws)):
            return self._runner.decode(rows, draws, drafts, num_passes=agreement.num_passes)

    def _agree(self, *, num_rows: int = 0, num_passes: int = 0, is_closing: bool = False) -> Agreement | None:
        num_passes = max(num_passes, self._runner.captured_passes)  # a rank without rows replays them, too
        agreement = self._lockstep.agree(num_rows=num_rows, num_passes=num_passes, is_closing=is_closing)
        if agreement is not None:
            for rank, message in agreement.heard:
                self._channel.hear(rank, message)
        return agreement


@attrs.define
class Sent:
    """A hand-off on its way. It is `done` when neither this rank nor a follower reads its pages any more."""

    own: Transfer
    waits_for: int

    @property
    def done(self) -> bool:
        return self.own.done and not self.waits_for


class RankChannel:
    """The channel ends of all ranks in an attention group, used as one. Every rank is linked to every peer, and each
    writes an equal share of the tokens. A room has landed once it has landed on all ranks."""

    def __init__(self, channel: KVChannel, lockstep: Lockstep) -> None:
        self._channel = channel
        self._lockstep = lockstep
        self._size = lockstep.groups.attention.size
        self._num_followers = self._size - 1
        self._links: dict[int, frozenset[PeerKey]] = {}
        self._num_expecting: Counter[bytes] = Counter()
        self._handoffs: dict[bytes, list[Handoff]] = {}
        self._settled: dict[bytes, list[PDInferError | None]] = {}
        self._stops: list[tuple[bytes, TransferError]] = []
        self._sent: dict[bytes, Sent] = {}

    def hear(self, rank: int, message: say.Message) -> None:
        """Take a follower's report."""
        match message:
            case say.Linked(peers):
                self._links[rank] = frozenset(map(peer_key, peers))
            case say.Expecting(room):
                self._num_expecting[room] += 1
            case say.Settled(room, error):
                self._settled.setdefault(room, []).append(error)
            case say.Stopped(room, cause):
                self._stops.append((room, TransferError(str(cause))))
            case say.SentMessage(room):
                sent = self._sent[room]
                sent.waits_for -= 1
                if not sent.waits_for:
                    del self._sent[room]

    # -- links ------------------------------------------------------------------------------------------------------

    def connect(self, peer: PeerAddress, *, timeout_s: float = 10.0) -> None:
        """Connect as a KVChannel does. Followers go on dialling until they are connected, which `connected` tells."""
        self._channel.connect(peer, timeout_s=timeout_s)
        self._lockstep.tell(say.DialMessage(peer))

    def drop_peer(self, peer: PeerAddress) -> None:
        """Close the links of all ranks to a peer for good, those of followers with the next agreement."""
        self._channel.drop_peer(peer)
        self._lockstep.tell(say.DropPeerMessage(peer))

    def connected(self, peer: PeerAddress) -> bool:
        key = peer_key(peer)
        linked = [links for links in self._links.values() if key in links]
        return len(linked) == self._num_followers and self._channel.connected(peer)

    def close(self) -> None:
        """Close as a KVChannel does. Followers close their own channels, so no room or page waits for them any more."""
        self._channel.close()
        self._num_followers = 0
        for sent in self._sent.values():
            sent.waits_for = 0
        self._sent.clear()

    def shares_pool(self, peers: Iterable[PeerAddress]) -> bool:
        """Return False: the pages of decode are on other ranks too."""
        return False

    # -- decode's side ----------------------------------------------------------------------------------------------

    def expect(self, grant: PageGrant) -> None:
        self._channel.expect(grant)
        self._lockstep.tell(say.Expect(PackedGrant.of(grant)))

    def expects(self, room: bytes) -> bool:
        """Return whether all ranks expect the room. If a writer heard of the room earlier, it might finish and lose its
        link before a slow follower listens for its hand-off, and the room would never settle."""
        return self._num_expecting[room] >= self._num_followers

    def abort(self, grant: PageGrant, error: PDInferError) -> None:
        self._channel.abort(grant, error)
        self._lockstep.tell(say.AbortMessage(grant.room, error))

    def poll(self) -> list[Handoff]:
        """Return the hand-offs of rooms that are settled on every rank. A room is ABORTED if it is so on one rank."""
        for handoff in self._channel.poll():
            self._handoffs.setdefault(handoff.room, []).append(handoff)
        settled = [room for room in self._handoffs if len(self._settled.get(room, ())) >= self._num_followers]
        for room in settled:
            del self._num_expecting[room]
        return [one for room in settled for one in self._whole(self._handoffs.pop(room), self._settled.pop(room, []))]

    def _whole(self, handoffs: list[Handoff], errors: Sequence[PDInferError | None]) -> list[Handoff]:
        error = next((error for error in errors if error is not None), None)
        if error is None or any(one.status is HandoffStatus.ABORTED for one in handoffs):
            return handoffs
        return [attrs.evolve(one, status=HandoffStatus.ABORTED, error=error) for one in handoffs]

    # -- prefill's side ---------------------------------------------------------------------------------------------

    def accept(self, grant: PageGrant) -> None:
        self._channel.accept(grant)
        self._lockstep.tell(say.Accept(PackedGrant.of(grant)))

    def push(
        self,
        grant: PageGrant,
        *,
        layers: range,
        tokens: range,
        pages: Sequence[int],
        ready: Callable[[], None] | None = None,
    ) -> None:
        """Push this rank's share. Followers push theirs, by the order to run these tokens."""
        for share in even_slices(tokens, self._size)[0]:
            self._channel.push(grant, layers=layers, tokens=share, pages=pages, ready=ready)

    def finish(self, grant: PageGrant, handoff: Handoff) -> Sent:
        sent = self._sent[grant.room] = Sent(self._channel.finish(grant, handoff), self._num_followers)
        self._lockstep.tell(say.FinishMessage(grant.room, handoff.error))
        return sent

    def poll_stops(self) -> list[tuple[bytes, TransferError]]:
        stops, self._stops = self._stops, []
        return [*self._channel.poll_stops(), *stops]

    def is_full(self, grant: PageGrant) -> bool:
        return self._channel.is_full(grant)

    def drain(self, timeout_s: float) -> bool:
        return self._channel.drain(timeout_s)
