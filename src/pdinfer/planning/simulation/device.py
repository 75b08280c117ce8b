"""One device on which a prefill and a decode take turns."""

from __future__ import annotations

import attrs

from pdinfer.planning.simulation.decode import Decode
from pdinfer.planning.simulation.prefill import Prefill
from pdinfer.planning.simulation.world import SimEngine


@attrs.define(eq=False)
class Device:
    """`busy` is the engine whose step is under way. The other one is next if it has work, as in a Pairing that steps
    both."""

    prefill: Prefill
    decode: Decode
    busy: SimEngine | None = None
    last: SimEngine | None = None

    def release(self, engine: SimEngine) -> None:
        """End the engine's step."""
        self.busy, self.last = None, engine

    def may_begin(self, engine: SimEngine, now_s: float) -> bool:
        """Return whether the engine may begin a step now. If not, it may at the end of the step under way."""
        if self.busy is self.decode and engine is self.prefill:
            self.decode.cut(now_s)
        if self.busy is None and self.last is engine:
            self.last = None
            other = self.decode if engine is self.prefill else self.prefill
            other.begin(now_s)
        return self.busy is None

    def is_alone(self) -> bool:
        """Return whether only decode has work."""
        return not self.prefill.scheduler.unfinished
