"""How an engine continues after a step that did not end: a host's Ctrl-C may interrupt it at any line.

No single line is made safe. A step that finds the previous one unfinished rebuilds everything, and so drops as a whole
whatever was half done: links, rooms, requests and page accounts, in this order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from pdinfer.engine.commands import Cancel
from pdinfer.engine.ranks.ranks import Ranks
from pdinfer.errors import PDInferError
from pdinfer.inbox import Inbox
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.pool import PagePool
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.locks import let_go

Command = TypeVar("Command")


class Interruptible(OfOneProcess, Generic[Command]):
    """The part of an engine that recovers. `_arrived` holds the commands from the inbox that are not dealt with yet."""

    role: str
    channel: KVChannel
    pool: PagePool
    _unfinished_call = False
    _inbox: Inbox[Command | Cancel]
    _arrived: deque[Command | Cancel]
    ranks: Ranks

    def _begin_call(self) -> None:
        """Begin a call that changes what this engine has. The call ends by clearing `_unfinished_call`; when an earlier
        one did not, everything is in doubt and the engine recovers first."""
        if self._unfinished_call or self.channel.in_doubt:
            let_go()
            self._recover(PDInferError(f"a step of the {self.role} engine was interrupted"))
        self._unfinished_call = True

    def _recover(self, error: PDInferError) -> None:
        """End all requests with `error`. Once the links are closed no peer writes our pages any more, so the pages are
        free. Raise RankLost when there are other ranks, because they cannot know about it."""
        self.ranks.leave(str(error))
        self.channel.recover()
        self._drop(error)
        self._arrived.clear()
        self.pool.rebuild()
        self._unfinished_call = False

    @abstractmethod
    def _drop(self, error: PDInferError) -> None:
        """End every request, whatever it holds."""

    def _arrivals_in_order(self) -> Iterator[Command | Cancel]:
        """Yield the commands in the inbox. Each is remembered until it has been dealt with."""
        self._arrived.extend(self._inbox.take())
        while self._arrived:
            yield self._arrived[0]
            self._arrived.popleft()
