"""An engine among the ranks of its world: who leads and who follows, and how all begin, step and close together.

The first rank of an attention group *leads*: its engine is the one that decides, through a channel and a runner that
have the followers do the same. With one rank none of this exists.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec

from pdinfer.engine.ranks import messages as rank_messages
from pdinfer.engine.ranks.follower import Follower, SharedSampler
from pdinfer.engine.ranks.leader import RankChannel, RankRunner, RunEmpty
from pdinfer.engine.ranks.lockstep import Lockstep, compare, gather_bytes
from pdinfer.errors import ConfigError, RankLost, RequestError
from pdinfer.execution.runner import ModelRunner, Runner
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.moe.migration.rebalancing import Rebalancing
from pdinfer.parallel.groups import Groups
from pdinfer.types import PeerAddress

_log = logging.getLogger("pdinfer")


class Ranks:
    """One engine's place among its ranks; made by all of them together. `limits` must be the same on all, or each
    raises ConfigError. `wake` is called, from any thread, when a step would do something.

    `runner` and `ends` are what a leader acts through, `addresses` those of its group's ranks, its own first.
    """

    def __init__(
        self,
        groups: Groups,
        channel: KVChannel,
        runner: Runner,
        *,
        rebalancing: Rebalancing,
        run_empty: RunEmpty,
        limits: Mapping[str, object],
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        if not isinstance(runner, ModelRunner):
            raise ConfigError(f"ranks run a ModelRunner together, not a {type(runner).__name__}")
        compare(groups.world, {**limits, "the version of rank messages": rank_messages.VERSION})
        attention = groups.attention
        told = gather_bytes(attention, msgspec.msgpack.encode(channel.address))
        self.addresses = tuple(msgspec.msgpack.decode(address, type=PeerAddress) for address in told)
        self.ends: KVChannel | RankChannel = channel
        self._groups = groups
        self._lockstep = Lockstep(groups, rebalancing, wake, clock=clock)
        self.follower: Follower | None = None
        if attention.size > 1:
            self.ends = RankChannel(channel, self._lockstep)
            if runner.drafts:
                runner.sample_with(SharedSampler(attention))
        if attention.rank:
            self.follower = Follower(runner, channel, self._lockstep, run_empty)
        self.runner = RankRunner(runner, self._lockstep, run_empty, self.ends)

    @property
    def are_closing(self) -> bool:
        """Whether it was agreed that all close."""
        return self._lockstep.closing

    def due_in_s(self) -> float:
        """When to step because of the others; 0 for now."""
        return self._lockstep.due_in_s()

    def check(self) -> None:
        """Raises RankLost when this rank cannot go on with the others."""
        if self._lockstep.lost is not None:
            raise self._lockstep.lost

    def leave(self, reason: str) -> None:
        """Raises RankLost, now and in every later step: this rank cannot catch up with the others."""
        self._lockstep.lost = self._lockstep.lost or RankLost(f"{reason}; start all ranks anew")
        raise self._lockstep.lost

    def check_leads(self) -> None:
        """Raises RequestError on a rank that takes no requests."""
        if self.follower is not None:
            group = self._groups.attention
            ours, leader = group.ranks[group.rank], group.ranks[0]
            raise RequestError(
                f"rank {ours} does what rank {leader} does: give requests to the engine of rank {leader}"
            )

    def close(self) -> None:
        """Has the others close too in their next step, unless that is agreed already or they are lost."""
        try:
            if self._lockstep.closing or self._lockstep.lost is not None:
                return
            if self.follower is not None:
                self.follower.step(is_closing=True)
            else:
                self.runner.idle(is_closing=True)
        except RankLost as error:
            _log.warning("an engine is closed without its other ranks: %s", error)
        finally:
            self._lockstep.close()
