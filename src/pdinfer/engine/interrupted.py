"""How an engine goes on after a step that did not end: a host's Ctrl-C may hit any line of it.

No line is made safe by itself. A step that begins finds that the one before did not end, and makes everything anew, so
that whatever was half done is dropped as a whole: links, rooms, requests, page accounts, in this order.
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
    """The part of an engine that does so. `_arrived` are commands of the inbox that are not dealt with yet."""

    role: str
    channel: KVChannel
    pool: PagePool
    _unfinished_call = False
    _inbox: Inbox[Command | Cancel]
    _arrived: deque[Command | Cancel]
    ranks: Ranks

    def _begin_call(self) -> None:
        """A call begins that changes what this engine has; it ends by taking `_unfinished_call` back. One before it
        that did not end has left everything in doubt."""
        if self._unfinished_call or self.channel.in_doubt:
            let_go()
            self._recover(PDInferError(f"a step of the {self.role} engine was interrupted"))
        self._unfinished_call = True

    def _recover(self, error: PDInferError) -> None:
        """Ends all requests with `error`. When the links are closed nobody writes our pages any more, so these are
        free. RankLost when there are other ranks, which cannot know of it."""
        self.ranks.leave(str(error))
        self.channel.recover()
        self._drop(error)
        self._arrived.clear()
        self.pool.rebuild()
        self._unfinished_call = False

    @abstractmethod
    def _drop(self, error: PDInferError) -> None:
        """Ends every request, without a look at what it holds."""

    def _arrivals_in_order(self) -> Iterator[Command | Cancel]:
        """What the inbox has, each command remembered until it has been dealt with."""
        self._arrived.extend(self._inbox.take())
        while self._arrived:
            yield self._arrived[0]
            self._arrived.popleft()
