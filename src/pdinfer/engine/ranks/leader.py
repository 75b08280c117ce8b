"""The leader of an attention group: its engine acts through these, and its followers are told to do the same.

An engine acts through a channel and a runner. Only the leader's engine decides; what it does travels as orders with the
next agreement (`lockstep`), and what followers report is added to what its own channel says. Page ids in orders are the
leader's, whose pool accounts for the pages of all ranks of the group.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from pdinfer.engine.ranks import messages as say
from pdinfer.engine.ranks.lockstep import Agreement, Lockstep
from pdinfer.errors import PDInferError, TransferError
from pdinfer.execution.drafting import MAX_NEWEST, Draft, num_passes
from pdinfer.execution.runner import ModelRunner, Ready
from pdinfer.execution.sampling import Draw, Drawn
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.wire import PackedGrant, pack_ints
from pdinfer.kv.transports.base import Transfer
from pdinfer.model.batch import Row
from pdinfer.parallel.slices import even_slices
from pdinfer.types import Handoff, HandoffStatus, NamedState, PageGrant, PeerAddress, PeerKey, peer_key

RunEmpty = Callable[[ModelRunner, Agreement], None]
"""A role's step of the model without rows: as many collectives as with some."""


def empty_prefill(runner: ModelRunner, _: Agreement) -> None:
    """Prefill's."""
    for _layer in runner.prefill([]):
        pass


def empty_decode(runner: ModelRunner, agreement: Agreement) -> None:
    """Decode's."""
    runner.decode([], [], [], num_passes=agreement.num_passes)


class RankRunner:
    """Runs every step of a model together with all ranks, and tells followers, if there are any, what to run. What
    they report goes to `channel`."""

    def __init__(
        self,
        runner: ModelRunner,
        lockstep: Lockstep,
        run_empty: RunEmpty,
        channel: RankChannel,
    ) -> None:
        self._runner = runner
        self._lockstep = lockstep
        self._run_empty = run_empty
        self._channel = channel
        self._has_followers = lockstep.groups.attention.size > 1
        self._numbers: weakref.WeakKeyDictionary[Draft, int] = weakref.WeakKeyDictionary()
        self._num_drafts = 0

    def idle(self, *, is_closing: bool = False) -> None:
        """Takes part in what others run."""
        agreement = self._agree(is_closing=is_closing)
        if agreement is not None and agreement.runs:
            with self._lockstep.together():
                self._run_empty(self._runner, agreement)

    def announce(self, rows: Sequence[Row], grants: Sequence[PageGrant], tokens: Sequence[range]) -> None:
        """The next prefill runs `rows`, and behind each layer `tokens` of each are pushed into its grant."""
        if self._has_followers:
            packed = [say.PackedRow.of(row) for row in rows]
            self._lockstep.tell(say.Prefill(packed, [grant.room for grant in grants], list(tokens)))

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
        if self._has_followers and draft.state is not None:
            number = self._numbers[draft] = self._num_drafts
            self._num_drafts += 1
            self._lockstep.tell(say.KeepDraft(number, list(states)))
            weakref.finalize(draft, self._lockstep.tell, say.DropDraft(number)).atexit = False
        return draft

    def decode(self, rows: Sequence[Row], draws: Sequence[Draw], drafts: Sequence[Draft]) -> list[list[Drawn]]:
        if self._has_followers:
            order = say.Decode([say.PackedRow.of(row) for row in rows])
            if self._runner.drafts:
                order.drafts = [self._numbers.get(draft) for draft in drafts]
                order.counts = [draft.num_tokens for draft in drafts]
                order.newest = [pack_ints(draw.output[-MAX_NEWEST:]) for draw in draws]
            self._lockstep.tell(order)
        agreement = self._agree(num_rows=len(rows), num_passes=num_passes(drafts))
        assert agreement is not None
        with self._lockstep.together():
            return self._runner.decode(rows, draws, drafts, num_passes=agreement.num_passes)

    def _agree(self, *, num_rows: int = 0, num_passes: int = 0, is_closing: bool = False) -> Agreement | None:
        agreement = self._lockstep.agree(num_rows=num_rows, num_passes=num_passes, is_closing=is_closing)
        if agreement is not None:
            for rank, message in agreement.heard:
                self._channel.hear(rank, message)
        return agreement


@attrs.define
class _Sent:
    """A hand-off on its way: `done` when neither this rank nor a follower reads its pages any more."""

    own: Transfer
    waits_for: int

    @property
    def done(self) -> bool:
        return self.own.done and not self.waits_for


class RankChannel:
    """The ends of an attention group's ranks as one: every rank is linked to every peer, and each writes an equal share
    of the tokens. A room has landed when it has on all ranks."""

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
        self._sent: dict[bytes, _Sent] = {}

    def hear(self, rank: int, message: say.Message) -> None:
        """Takes a follower's report."""
        match message:
            case say.Linked(peers):
                self._links[rank] = frozenset(map(peer_key, peers))
            case say.Expecting(room):
                self._num_expecting[room] += 1
            case say.Settled(room, error):
                self._settled.setdefault(room, []).append(error)
            case say.Stopped(room, cause):
                self._stops.append((room, TransferError(str(cause))))
            case say.Sent(room):
                sent = self._sent[room]
                sent.waits_for -= 1
                if not sent.waits_for:
                    del self._sent[room]

    # -- links ------------------------------------------------------------------------------------------------------

    def connect(self, peer: PeerAddress, *, timeout_s: float = 10.0) -> None:
        """As of a KVChannel. Followers go on dialling until they are through; `connected` tells."""
        self._channel.connect(peer, timeout_s=timeout_s)
        self._lockstep.tell(say.Connect(peer))

    def connected(self, peer: PeerAddress) -> bool:
        key = peer_key(peer)
        linked = [links for links in self._links.values() if key in links]
        return len(linked) == self._num_followers and self._channel.connected(peer)

    def close(self) -> None:
        """As of a KVChannel; followers close theirs, so neither rooms nor pages wait for them any more."""
        self._channel.close()
        self._num_followers = 0
        for sent in self._sent.values():
            sent.waits_for = 0
        self._sent.clear()

    def shares_pool(self, peers: Iterable[PeerAddress]) -> bool:
        """Never: decode's pages are on other ranks too."""
        return False

    # -- decode's side ----------------------------------------------------------------------------------------------

    def expect(self, grant: PageGrant) -> None:
        self._channel.expect(grant)
        self._lockstep.tell(say.Expect(PackedGrant.of(grant)))

    def expects(self, room: bytes) -> bool:
        """Whether all ranks expect the room. A writer that hears of it before may be done, and its link lost, before a
        follower that was held up listens for its word: that room would never settle."""
        return self._num_expecting[room] >= self._num_followers

    def abort(self, grant: PageGrant, error: PDInferError) -> None:
        self._channel.abort(grant, error)
        self._lockstep.tell(say.Abort(grant.room, error))

    def poll(self) -> list[Handoff]:
        """The hand-offs of rooms that are settled on every rank; ABORTED when they are on one."""
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
        """Sends this rank's share; followers send theirs, as the order to run these tokens told them."""
        for share in even_slices(tokens, self._size)[0]:
            self._channel.push(grant, layers=layers, tokens=share, pages=pages, ready=ready)

    def finish(self, grant: PageGrant, handoff: Handoff) -> _Sent:
        sent = self._sent[grant.room] = _Sent(self._channel.finish(grant, handoff), self._num_followers)
        self._lockstep.tell(say.Finish(grant.room, handoff.error))
        return sent

    def poll_stops(self) -> list[tuple[bytes, TransferError]]:
        stops, self._stops = self._stops, []
        return [*self._channel.poll_stops(), *stops]

    def is_full(self, grant: PageGrant) -> bool:
        return self._channel.is_full(grant)

    def drain(self, timeout_s: float) -> bool:
        return self._channel.drain(timeout_s)
