"""Who has not come, while the ranks of a world wait for each other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdinfer.log import log

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

MISSING_S = 10.0
"""How long ranks wait for each other before the log says for whom."""
SHOWN_RANKS = 16


class RollCall:
    """The ranks of a world that have said in a store that they are here. It has a client of its own, since another one
    may be waiting in a call of it."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # which torch's stub lacks
        self._rank, self._world_size = rank, world_size
        self._store.set(_key(rank), "here")

    def missing(self) -> str:
        """Return a sentence that names the ranks which have not come, or an empty text when all have, or nobody can
        tell."""
        try:
            ranks = [rank for rank in range(self._world_size) if not self._store.check([_key(rank)])]
        except RuntimeError:  # the store is gone
            return ""
        if not ranks:
            return ""
        more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
        names = ", ".join(map(str, ranks[:SHOWN_RANKS])) + more
        return f"of {self._world_size} ranks {len(ranks)} have not come: {names}"

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Log once who is missing, when the block has waited for MISSING_S."""
        met = threading.Event()

        def watch() -> None:
            if not met.wait(MISSING_S) and (missing := self.missing()):
                log.warning("rank %d still waits after %g s: %s", self._rank, MISSING_S, missing)

        threading.Thread(target=watch, name="pdinfer-roll-call", daemon=True).start()
        try:
            yield
        finally:
            met.set()  # the thread may be waiting for a store that is gone


def _key(rank: int) -> str:
    return f"pdinfer.here/{rank}"
