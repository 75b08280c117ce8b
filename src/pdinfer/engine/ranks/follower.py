"""A follower: a rank that does with its channel and its pages what the leader of its attention group did.

It decides nothing, so it can never disagree: no request, clock or random number reaches it. It reports what only its
own channel can see."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from pdinfer.engine.ranks import messages as say
from pdinfer.engine.ranks.leader import RunEmpty
from pdinfer.engine.ranks.lockstep import Lockstep
from pdinfer.errors import PDInferError, TransferError
from pdinfer.execution.drafting import Draft, Sampler
from pdinfer.execution.resident import DRAWN_ELSEWHERE
from pdinfer.execution.runner import ModelRunner
from pdinfer.execution.sampling import Draw, Drawn, sample
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.rooms import by_room, first_error
from pdinfer.kv.channel.wire import unpack_ints
from pdinfer.kv.transports.base import Transfer
from pdinfer.parallel.groups import Group
from pdinfer.parallel.slices import even_slices
from pdinfer.types import Handoff, HandoffStatus, PageGrant, PeerAddress

LOOK_S = 0.05
"""The interval at which it looks which links are open."""


class Follower:
    """The part of one follower in the steps of its group."""

    def __init__(self, runner: ModelRunner, channel: KVChannel, lockstep: Lockstep, run_empty: RunEmpty) -> None:
        self._runner = runner
        self._channel = channel
        self._lockstep = lockstep
        self._run_empty = run_empty
        self._rank = lockstep.groups.attention.rank
        self._size = lockstep.groups.attention.size
        self._grants: dict[bytes, PageGrant] = {}
        self._refused: set[bytes] = set()
        self._sending: dict[bytes, Transfer] = {}
        self._drafts: dict[int, Draft] = {}
        self._linked: list[PeerAddress] = []
        self._looked_at = float("-inf")

    def step(self, *, is_closing: bool = False) -> None:
        """Report what is new here, take orders, and run the model with the others."""
        self._report()
        agreement = self._lockstep.agree(num_passes=self._runner.captured_passes, is_closing=is_closing)
        if agreement is None:
            return
        with self._lockstep.together():
            work: say.PrefillMessage | say.DecodeMessage | None = None
            for _, order in agreement.heard:
                match order:
                    case say.PrefillMessage() | say.DecodeMessage():
                        work = order
                    case _:
                        self._obey(order)
            match work:
                case say.PrefillMessage():
                    self._prefill(work)
                case say.DecodeMessage():
                    self._decode(work, agreement.num_passes)
                case None if agreement.runs:
                    self._run_empty(self._runner, agreement)

    # -- reports ----------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        tell = self._lockstep.tell
        for room, handoffs in by_room(self._channel.poll()).items():
            del self._grants[room]
            landed = all(handoff.status is HandoffStatus.LANDED for handoff in handoffs)
            tell(say.Settled(room, None if landed else first_error(handoffs)))
        for room, error in self._channel.poll_stops():
            tell(say.Stopped(room, error))
        for room in [room for room, sent in self._sending.items() if sent.done]:
            del self._sending[room]
            tell(say.SentMessage(room))
        if (now := self._lockstep.clock()) >= self._looked_at + LOOK_S:
            self._looked_at = now
            linked = [peer.address for peer in self._channel.stats.peers if peer.connected]
            if linked != self._linked:
                self._linked = linked
                tell(say.Linked(linked))

    # -- orders -----------------------------------------------------------------------------------------------------

    def _obey(self, order: say.Message) -> None:
        match order:
            case say.DialMessage(peer):
                self._channel.connect(peer, timeout_s=0.0)
            case say.DropPeerMessage(peer):
                self._channel.drop_peer(peer)
            case say.Expect(grant):
                self._expect(grant.unpack())
            case say.AbortMessage(room, error):
                if room in self._grants:  # otherwise it has settled meanwhile
                    self._channel.abort(self._grants[room], error)
            case say.Accept(grant):
                self._accept(grant.unpack())
            case say.FinishMessage(room, cause):
                self._finish(self._grants.pop(room), cause)
            case say.KeepDraft(number, states):
                self._drafts[number] = self._runner.draft(states)
            case say.DropDraft(number):
                self._drafts.pop(number, None)

    def _expect(self, grant: PageGrant) -> None:
        # only the leader's pool lets pages change hands, so ours stay at generation 0
        grant = attrs.evolve(grant, generations=self._channel.pool.generations(grant.pages))
        self._grants[grant.room] = grant
        self._channel.expect(grant)
        self._lockstep.tell(say.Expecting(grant.room))

    def _accept(self, grant: PageGrant) -> None:
        self._grants[grant.room] = grant
        try:
            self._channel.accept(grant)
        except TransferError as error:
            self._refused.add(grant.room)
            self._lockstep.tell(say.Stopped(grant.room, error))

    def _finish(self, grant: PageGrant, error: PDInferError | None) -> None:
        """Hand off the share of this rank: it has left, or with an `error` it will not come."""
        self._refused.discard(grant.room)
        status = HandoffStatus.LANDED if error is None else HandoffStatus.ABORTED
        handoff = Handoff(room=grant.room, writer=self._channel.address, status=status, error=error)
        self._sending[grant.room] = self._channel.finish(grant, handoff)

    # -- the model --------------------------------------------------------------------------------------------------

    def _prefill(self, order: say.PrefillMessage) -> None:
        rows = [row.unpack() for row in order.rows]
        pushes = [
            (self._grants[room], share, row.pages)
            for row, room, tokens in zip(rows, order.rooms, order.tokens, strict=True)
            for share in even_slices(tokens, self._size)[self._rank]
            if room not in self._refused
        ]
        for layer, ready in self._runner.prefill(rows):
            for grant, share, pages in pushes:
                self._channel.push(grant, layers=range(layer, layer + 1), tokens=share, pages=pages, ready=ready)

    def _decode(self, order: say.DecodeMessage, num_passes: int) -> None:
        rows = [row.unpack() for row in order.rows]
        if not self._runner.drafts:
            self._runner.forward(rows)
            return
        draws = [Draw(sampling=DRAWN_ELSEWHERE, prompt=(), output=unpack_ints(newest)) for newest in order.newest]
        drafts = [Draft() if number is None else self._drafts[number] for number in order.drafts]
        for draft, count in zip(drafts, order.counts, strict=True):
            draft.num_tokens = count
        self._runner.decode(rows, draws, drafts, num_passes=num_passes, on_host=order.on_host)


class SharedSampler:
    """Draws on the leader, with its `sampler`, and gives its tokens to the followers: drafts are the input of what all
    ranks run next."""

    def __init__(self, group: Group, sampler: Sampler = sample) -> None:
        self._group = group
        self._sampler = sampler

    def __call__(self, logits_BV: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        if not draws:
            return []
        if self._group.rank == 0:
            drawn = self._sampler(logits_BV, draws)
            self._group.broadcast(
                torch.tensor([-1 if new.error else new.token for new in drawn], dtype=torch.int64, device="cpu")
            )
            return drawn
        tokens = self._group.broadcast(torch.empty(len(draws), dtype=torch.int64, device="cpu")).tolist()
        failed = PDInferError("the leader could not draw a token here")
        return [Drawn(token=token, logprob=0.0, error=failed if token < 0 else None) for token in tokens]
