"""How long somebody has been silent, as far as this process was awake to hear it.

A process that was stopped itself has heard nothing either. So silence is not read off a clock: it is added up from one
look to the next, and a look that comes late adds no more than `max_look_s`."""

from __future__ import annotations

import attrs


@attrs.frozen
class Times:
    """Seconds: how often to look, how much one look may add to a silence, and when a silence is a loss."""

    look_s: float
    max_look_s: float
    silent_s: float


LINKS = Times(look_s=0.4, max_look_s=1.1, silent_s=2.2)
"""Links between two ends of a channel. With the look that finds it, a loss is known within 3 s."""
SESSIONS = Times(look_s=0.2, max_look_s=0.4, silent_s=2.4)
"""Connections between a served engine and its client; `RemoteConfig.silent_s` may set another limit."""
RANKS = Times(look_s=0.3, max_look_s=0.6, silent_s=2.2)
"""Ranks of one engine. With the look that finds it, and another one in the collective that waits, within 3 s. A rank
that dies needs no row: it breaks the collective in which the others wait for it."""


class SilenceWatch:
    """Adds up one silence. `silent_s` is its length in seconds, as of the last look."""

    def __init__(self, times: Times, now: float) -> None:
        self._max_look_s = times.max_look_s
        self._looked_at = now
        self.silent_s = 0.0

    def look(self, now: float, *, heard_ago_s: float = float("inf")) -> float:
        """Return how long the silence is at `now`. By the clock the peer was last heard `heard_ago_s` ago: the silence
        is no longer than that."""
        elapsed_s, self._looked_at = min(now - self._looked_at, self._max_look_s), now
        self.silent_s = min(self.silent_s + elapsed_s, heard_ago_s)
        return self.silent_s
