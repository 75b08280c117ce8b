"""Bugs of rooms with several writers and several destinations, and of ranks that follow a leader; part of `BUGS`."""

from __future__ import annotations

from typing import Any

import pytest

from pdinfer.engine.ranks import follower as followers
from pdinfer.engine.ranks import leader as leaders
from pdinfer.engine.ranks import messages as say
from pdinfer.engine.ranks.follower import Follower
from pdinfer.engine.ranks.leader import RankChannel
from pdinfer.kv.channel import receiver
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.rooms import Coverage, ReceiverRooms
from pdinfer.kv.channel.sender import HandoffSender
from pdinfer.parallel.slices import even_slices
from pdinfer.types import HandoffStatus
from tests.sim.bugs import IN_PLACE, SLOW, TROUBLED, bug

RANKS: dict[str, Any] = {"ports": ("piped",), "ranked": 1.0, "num_ranks": (2, 3)}


def _settle_early(patch: pytest.MonkeyPatch, status: HandoffStatus) -> None:
    """The first word of this status speaks for all writers."""
    finished = ReceiverRooms.finished

    def finish_for_all(self: ReceiverRooms, peer: Any, handoff: Any) -> Any:
        state = self._rooms.get(handoff.room)
        told = finished(self, peer, handoff)
        if state is not None and handoff.room in self._rooms and handoff.status is status:
            state.handoffs |= dict.fromkeys(state.owing(), handoff)
            self._settle(state)
        return told

    patch.setattr(ReceiverRooms, "finished", finish_for_all)


@bug(**RANKS)
def the_first_of_two_hand_offs_is_enough(patch: pytest.MonkeyPatch) -> None:
    """Decode admits a room when one of its writers has landed."""
    _settle_early(patch, HandoffStatus.LANDED)
    patch.setattr(Coverage, "complete", True)


@bug(rare=True, **RANKS, armed={**TROUBLED, **SLOW, "late_landing": 0.0}, placements=IN_PLACE, cancel_share=0.6)
def one_of_two_answers_frees_the_pages(patch: pytest.MonkeyPatch) -> None:
    """Pages return when one writer has stopped, while another one writes."""
    _settle_early(patch, HandoffStatus.ABORTED)


@bug(**RANKS)
def the_share_of_a_writer_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    """A writer that sends nothing and says LANDED is believed."""
    patch.setattr(Coverage, "complete", True)
    patch.setattr(followers, "even_slices", lambda tokens, size: ((),) * size)


@bug(rare=True, **RANKS, armed={"slow": 1.0, "stall": 0.9}, cancel_share=0.8)
def an_abort_reaches_one_writer_only(patch: pytest.MonkeyPatch) -> None:
    """The others, which may never have heard of the room, are not asked to stop."""
    stop = ReceiverRooms.stop
    patch.setattr(ReceiverRooms, "stop", lambda self, room: stop(self, room)[:1])
    patch.setattr(receiver, "ANSWER_S", 1e9)


@bug(**RANKS)
def followers_send_the_share_of_another(patch: pytest.MonkeyPatch) -> None:
    """Some tokens are sent twice, and others not at all."""
    patch.setattr(followers, "even_slices", lambda tokens, size: even_slices(tokens, size)[-1:] * size)


@bug(**RANKS)
def decode_admits_before_its_followers(patch: pytest.MonkeyPatch) -> None:
    """A room that landed on the leader runs, whatever has arrived at the other ranks."""
    hear = RankChannel.hear

    def whole(self: RankChannel, rank: int, message: Any) -> None:
        if not isinstance(message, say.Settled):
            hear(self, rank, message)

    def poll(self: RankChannel) -> Any:
        return self._channel.poll()

    patch.setattr(RankChannel, "hear", whole)
    patch.setattr(RankChannel, "poll", poll)


@bug(rare=True, **RANKS, armed=TROUBLED)
def what_a_follower_lost_is_not_heard(patch: pytest.MonkeyPatch) -> None:
    """A room that was aborted on another rank runs."""
    patch.setattr(RankChannel, "_whole", lambda self, words, errors: words)


@bug(rare=True, **RANKS, armed=SLOW, tight=1.0)
def pages_return_before_followers_have_sent(patch: pytest.MonkeyPatch) -> None:
    """Prefill's pages go to the next prompt when the leader's share has left."""
    patch.setattr(leaders.Sent, "done", property(lambda self: self.own.done))


@bug(rare=True, **RANKS, armed={"slow": 1.0, "stall": 0.9}, cancel_share=0.8)
def a_follower_ignores_aborts(patch: pytest.MonkeyPatch) -> None:
    """The follower's room waits for writers that were not asked to stop there."""
    obey = Follower._obey
    patch.setattr(Follower, "_obey", lambda self, order: isinstance(order, say.AbortMessage) or obey(self, order))


@bug(rare=True, **RANKS, armed={**TROUBLED, "slow": 1.0})
def a_follower_writes_into_rooms_it_refused(patch: pytest.MonkeyPatch) -> None:
    """The follower forgets that it could not take these rooms."""
    accept = Follower._accept

    def forget(self: Follower, grant: Any) -> None:
        accept(self, grant)
        self._refused.clear()

    patch.setattr(Follower, "_accept", forget)


@bug(rare=True, **RANKS, armed={"cut": 1.0, "slow": 1.0})
def a_refused_request_is_answered_to_no_link_that_is_there(patch: pytest.MonkeyPatch) -> None:
    """Prefill cannot reach one rank of decode, and the others wait."""
    accept = KVChannel.accept

    def mute(self: KVChannel, grant: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(HandoffSender, "answer_turned_away", lambda self, peer: None)
            accept(self, grant)

    patch.setattr(KVChannel, "accept", mute)


@bug(rare=True, **RANKS, armed={"stall": 1.0, "cut": 1.0, "crash": 1.0}, cancel_share=0.5)
def a_leader_that_closes_waits_for_its_followers(patch: pytest.MonkeyPatch) -> None:
    """Pages stay in use although followers never reported them as sent."""

    def close(self: RankChannel) -> None:
        self._channel.close()
        self._num_followers = 0

    patch.setattr(RankChannel, "close", close)


@bug(rare=True, **RANKS, drafts=(1, 2, 3))
def followers_keep_every_draft(patch: pytest.MonkeyPatch) -> None:
    """Drafting state that is dropped on the leader stays on the other ranks."""
    obey = Follower._obey
    patch.setattr(Follower, "_obey", lambda self, order: isinstance(order, say.DropDraft) or obey(self, order))


@bug(**RANKS, drafts=(1, 2, 3))
def followers_draft_another_number_of_tokens(patch: pytest.MonkeyPatch) -> None:
    """Followers run other steps than their leader."""
    decode = Follower._decode

    def fewer(self: Follower, order: Any, num_passes: int) -> None:
        order.counts = [max(0, count - 1) for count in order.counts]
        decode(self, order, num_passes)

    patch.setattr(Follower, "_decode", fewer)
