"""What the client of a served engine has not been told yet about pages that can be found."""

from __future__ import annotations

from collections.abc import Sequence

from pdinfer.kv.pool import PagePool
from pdinfer.remote.messages import KEY_BYTES, PageChanges


class PageNews:
    """What a client has not been told yet about the pages of its engine's pool. The pool calls it as a watcher."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._is_there: dict[bytes, bool] = {}
        self._forgotten = False
        pool.watch(self)

    def close(self) -> None:
        """Hear of no more changes."""
        self._pool.watchers.all.remove(self)

    def all(self) -> PageChanges:
        """Return all pages that can be found now. What changed before is told by it."""
        self.take()
        return PageChanges(True, b"".join(key[:KEY_BYTES] for key in self._pool.keys))

    def take(self) -> PageChanges | None:
        """Return what has changed since the last call, or None."""
        is_there, self._is_there = self._is_there, {}
        forgotten, self._forgotten = self._forgotten, False
        if not is_there and not forgotten:
            return None
        return PageChanges(
            forgotten,
            b"".join(key for key, there in is_there.items() if there),
            b"".join(key for key, there in is_there.items() if not there),
        )

    def stored(self, keys: Sequence[bytes], parent: bytes | None, tokens: Sequence[int], page_size: int) -> None:
        for key in keys:
            self._is_there[key[:KEY_BYTES]] = True

    def removed(self, key: bytes) -> None:
        self._is_there[key[:KEY_BYTES]] = False

    def cleared(self) -> None:
        self._is_there, self._forgotten = {}, True
