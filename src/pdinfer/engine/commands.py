"""What a host asks of an engine from any thread. A command waits in the engine's inbox for the next step."""

from __future__ import annotations

import attrs

from pdinfer.types import PageGrant, PeerAddress, Request


@attrs.frozen
class SubmitPrefill:
    """Run a prompt into the pages that decode has granted."""

    request: Request
    grant: PageGrant


@attrs.frozen
class SubmitDecode:
    """Serve a request that `writers` will prefill."""

    request: Request
    writers: tuple[PeerAddress, ...]


@attrs.frozen
class ChangeWriters:
    """Let other prefills write the next attempt of a request."""

    request_id: str
    writers: tuple[PeerAddress, ...]


@attrs.frozen
class Cancel:
    """Stop a request."""

    request_id: str


DecodeCommand = SubmitDecode | ChangeWriters | Cancel
PrefillCommand = SubmitPrefill | Cancel
