"""What waits to leave on a link: a frame, and for a write also its payload."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from pdinfer.kv.layout import Spans
from pdinfer.kv.transports.base import Transfer

MESSAGE_BYTES = 256
"""The size of the objects around a frame that waits."""
SPAN_BYTES = 128
"""The size of one span of a write that waits: a tuple and two ints."""


@attrs.frozen(eq=False)
class Message:
    """A frame on its way out. A write also has a `transfer`, the `source` of its payload, and perhaps a `ready` to call
    before the source is read."""

    frame: bytes
    transfer: Transfer | None = None
    source: Spans = attrs.field(factory=list)
    ready: Callable[[], None] | None = None

    @property
    def cost_bytes(self) -> int:
        """Memory that the message takes while it waits. The payload does not count: it waits in its pages."""
        return MESSAGE_BYTES + len(self.frame) + SPAN_BYTES * len(self.source)
