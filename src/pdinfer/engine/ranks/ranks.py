"""An engine among the ranks of its world: which rank leads, which follow, and how all step and close together.

The first rank of an attention group *leads*. Its engine decides, and acts through a channel and a runner that make the
followers do the same. A single rank is the smallest world: it leads, and nobody follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pdinfer.engine.ranks.follower import Follower, SharedSampler
from pdinfer.engine.ranks.leader import RankChannel, RankRunner, RunEmpty
from pdinfer.engine.ranks.lockstep import Lockstep, compare, gather_bytes
from pdinfer.engine.ranks.messages import VERSION
from pdinfer.errors import RankLost, RequestError
from pdinfer.execution.runner import ModelRunner
from pdinfer.inbox import Inbox
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.log import log
from pdinfer.moe.migration.rebalancing import Rebalancing
from pdinfer.parallel.groups import Groups
from pdinfer.types import PeerAddress


class Ranks:
    """The place of one engine among its ranks: here the only one. What it says is agreed at once, and nobody else has
    to know.

    The engine acts through `channel` and `runner`. `addresses` are those of all ranks of its attention group, the
    leader's first, and `leaders` those of the leaders of all groups. `follower` does the work of a rank that takes no
    requests; it is None on a leader."""

    channel: KVChannel | RankChannel
    runner: ModelRunner | RankRunner
    addresses: tuple[PeerAddress, ...]
    leaders: tuple[PeerAddress, ...]
    follower: Follower | None = None

    def __init__(self, channel: KVChannel, runner: ModelRunner, rebalancing: Rebalancing) -> None:
        self.channel = channel
        self.runner = runner
        self.addresses = self.leaders = (channel.address,)
        self._rebalancing = rebalancing

    @property
    def are_closing(self) -> bool:
        """Whether it was agreed that all close."""
        return False

    @property
    def are_changing(self) -> bool:
        """Whether it was agreed that all change their role. No rank steps then: each makes its next engine."""
        return False

    def may_close(self) -> bool:
        """Note on a leader that it has nothing to do any more, and return whether to close it at once. Otherwise all
        close in the steps to come, as soon as that is true of all leaders."""
        return True

    def may_change(self, *, asked: bool) -> bool:
        """Note on a leader whether it was asked to change its role, and return whether it may at once. Otherwise the
        other ranks learn of it in the steps to come, and change as soon as all have agreed: see `are_changing`."""
        return asked

    def vacate(self) -> None:
        """Let go of the other ranks, since all change their role."""

    def check_leads(self) -> None:
        """Raise RequestError on a rank that takes no requests."""

    def step(self, lead: Callable[[], None]) -> None:
        """Run one step: `lead` on a leader, and on a follower what its leader does. Raise RankLost."""
        lead()
        if not self._rebalancing.is_calm and self._rebalancing.has_news:
            self._rebalancing.agreed([self._rebalancing.status()], runs=False)  # no rebalance is ever due on one rank

    def due_in_s(self) -> float:
        """Return in how many seconds to step because of other ranks or experts that move; infinity for never."""
        return 0.0 if self._rebalancing.has_news else float("inf")

    def propagate(self, error: Exception) -> None:
        """Raise again the `error` that ended a step, if there are other ranks, because they cannot know about it."""

    def leave(self, reason: str) -> None:
        """Let this rank drop what it has. If there are other ranks, raise RankLost, now and in every later step."""

    def close(self, *, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Close together with the other ranks. `begin` recovers from a step that did not end, which only a single rank
        can, and `end` closes what a leader has."""
        begin()
        end()


class SeveralRanks(Ranks):
    """One of several ranks. All of them make it together. `limits` must be the same on all ranks, or each raises
    ConfigError. The `inbox` is woken, from any thread, when a step would do something."""

    def __init__(
        self,
        groups: Groups,
        channel: KVChannel,
        runner: ModelRunner,
        *,
        rebalancing: Rebalancing,
        run_empty: RunEmpty,
        limits: Mapping[str, object],
        inbox: Inbox[Any],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(channel, runner, rebalancing)
        compare(groups.world, {**limits, "the version of rank messages": VERSION})
        attention = groups.attention
        encoded = gather_bytes(groups.world, msgspec.msgpack.encode(channel.address))
        addresses = tuple(msgspec.msgpack.decode(address, type=PeerAddress) for address in encoded)
        self.addresses = tuple(addresses[rank] for rank in attention.ranks)
        self.leaders = addresses[:: attention.size]
        self._groups = groups
        self._inbox = inbox
        self._own_channel = channel
        self._closed = False
        self._lockstep = Lockstep(groups, rebalancing, inbox.wake, clock=clock)
        leader = RankChannel(channel, self._lockstep)
        if attention.size > 1:
            self.channel = leader
            if runner.drafts:
                runner.sample_with(SharedSampler(attention, runner.sample))
        if attention.rank:
            self.follower = Follower(runner, channel, self._lockstep, run_empty)
        self._runner = self.runner = RankRunner(runner, self._lockstep, run_empty, leader)

    @property
    def are_closing(self) -> bool:
        return self._lockstep.closing

    @property
    def are_changing(self) -> bool:
        return self._lockstep.changing

    def may_close(self) -> bool:
        self._lockstep.may_close = True
        return False

    def may_change(self, *, asked: bool) -> bool:
        self._lockstep.may_change = asked
        return False

    def vacate(self) -> None:
        self._lockstep.close()

    def check_leads(self) -> None:
        if self.follower is not None:
            group = self._groups.attention
            ours, leader = group.ranks[group.rank], group.ranks[0]
            raise RequestError(
                f"rank {ours} does what rank {leader} does: give requests to the engine of rank {leader}"
            )

    def step(self, lead: Callable[[], None]) -> None:
        if self._closed:
            if self.follower is None:
                lead()  # what came since is refused
            return
        if self._lockstep.changing:
            self.leave("a rank stepped its old engine once all had agreed to change their role")
        if self.follower is None:
            lead()
        else:
            self._inbox.take()
            self.follower.step()
        if self._lockstep.lost is not None:
            raise self._lockstep.lost

    def due_in_s(self) -> float:
        return self._lockstep.due_in_s()

    def propagate(self, error: Exception) -> None:
        raise error

    def leave(self, reason: str) -> None:
        self._lockstep.lost = self._lockstep.lost or RankLost(f"{reason}; start all ranks anew")
        raise self._lockstep.lost

    def close(self, *, begin: Callable[[], None], end: Callable[[], None]) -> None:
        try:
            self._agree_to_close()
        except RankLost as error:
            log.warning("an engine is closed without its other ranks: %s", error)
        finally:
            self._lockstep.close()
        if self.follower is None:
            end()
        else:
            self._own_channel.close()
        self._closed = True

    def _agree_to_close(self) -> None:
        """Make the others close in their next step, unless that was agreed already, they are lost, or they change their
        role and step no more. An agreement that was begun before comes first."""
        while not (self._lockstep.closing or self._lockstep.changing) and self._lockstep.lost is None:
            if self.follower is not None:
                self.follower.step(is_closing=True)
            else:
                self._runner.idle(is_closing=True)
