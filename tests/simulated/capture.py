"""What a CUDA graph does, without one: the ops of a step are recorded with the memory they used, and run again on it.

A value that the host knew while recording is in the recording for good, and so is the place of each input: a replay
that should have depended on another value, or on an input that has moved, shows by its result.
"""

from __future__ import annotations

from typing import Any

import attrs

from tests.simulated.device import ALLOCATIONS, Call, inner, mapped, tensors_in
from tests.simulated.watch import LOCK, Watch, note


@attrs.define(eq=False)
class Capture(Watch):
    """Records what this thread runs on the device while it is entered."""

    _recorded: list[tuple[Call, Any]] = attrs.field(factory=list, init=False)

    def ran(self, call: Call, result: Any) -> None:
        if not call.op.is_view and call.name not in ALLOCATIONS:
            self._recorded.append((call, mapped(inner, result)))

    @property
    def illegal(self) -> list[str]:
        """What a CUDA graph cannot hold: waits of the host, and copies from memory that is not page-locked."""
        return sorted(self.counts["syncs"] + self.counts["pageable"])

    def replay(self) -> None:
        """Run it all again. Every result is written to where it was the first time."""
        with LOCK:
            note("launches", "graph")
            for call, results in self._recorded:
                for before, now in zip(tensors_in(results), tensors_in(call.inside()), strict=True):
                    if before is not now:
                        before.copy_(now)
