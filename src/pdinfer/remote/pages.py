"""Which pages an engine in another process can find: told by its end of a session, and mirrored at the other."""

from __future__ import annotations

from collections.abc import Sequence

from pdinfer.errors import TransferError
from pdinfer.kv.pool import PagePool
from pdinfer.kv.prefix import count_known
from pdinfer.remote.messages import KEY_BYTES, PageChanges


class PageNews:
    """What a client has not been told yet about the pages of its engine's pool. The pool calls it as a watcher."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._is_there: dict[bytes, bool] = {}
        self._forgotten = False
        pool.watch(self)

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


class MirroredPages:
    """The pages of an engine in another process, as its last report tells."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key[:KEY_BYTES] in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def count_known(self, keys: Sequence[bytes]) -> int:
        return count_known(keys, self)

    def take(self, changes: PageChanges | None, *, num_pages: int) -> None:
        """Follow the engine, which has `num_pages`. Raises TransferError when it tells of more."""
        if changes is None:
            return
        if changes.forgotten:
            self._keys = set()
        self._keys.update(_split(changes.added))
        self._keys.difference_update(_split(changes.dropped))
        if len(self._keys) > num_pages:
            raise TransferError(f"it tells of {len(self._keys)} pages and has {num_pages}")


def _split(packed: bytes) -> list[bytes]:
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
