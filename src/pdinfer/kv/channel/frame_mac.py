"""The tag behind each frame, which makes a link's frames one sequence that cannot be broken unnoticed.

The tag covers the session (the nonces of both ends), the direction, and the frame's number, which is counted and never
sent. So the check fails at the next frame, and the link is closed, when a frame was lost, doubled, reordered, altered,
replayed from another session or reflected. Without a key the tag is xxh3_64 and finds accidents. With a key it is
HMAC-SHA256, which only an end that has the key can compute.
"""

from __future__ import annotations

import hmac

import attrs
import xxhash

from pdinfer.errors import ConfigError, TransferError

NONCE_BYTES = 16
MIN_KEY_BYTES = 16
MAX_TAG_BYTES = 32


def check_key(key: bytes | None) -> None:
    """Raise ConfigError unless `key` is None or at least MIN_KEY_BYTES bytes."""
    if key is not None and (not isinstance(key, bytes) or len(key) < MIN_KEY_BYTES):
        raise ConfigError(f"a key must be at least {MIN_KEY_BYTES} random bytes; os.urandom(32) makes one")


@attrs.define
class FrameMac:
    """The tags of one direction of one session, for sending or for receiving, used by one thread at a time."""

    session: bytes
    from_dialler: bool
    key: bytes | None = attrs.field(repr=False)
    _number: int = 0

    @property
    def tag_bytes(self) -> int:
        return 8 if self.key is None else MAX_TAG_BYTES

    def sign(self, frame: bytes) -> bytes:
        """Return the frame with its tag behind it."""
        return frame + self._next_tag(frame)

    def verify(self, tagged: bytes) -> bytes:
        """Return the frame without its tag. Raises TransferError when it is not the next frame of this session."""
        frame, tag = tagged[: -self.tag_bytes], tagged[-self.tag_bytes :]
        if not hmac.compare_digest(tag, self._next_tag(frame)):
            what = "the peer's key differs, or " if self.key is not None else ""
            raise TransferError(f"frame {self._number - 1} of a link did not verify: {what}it was lost or altered")
        return frame

    def _next_tag(self, frame: bytes) -> bytes:
        head = self.session + bytes([self.from_dialler]) + self._number.to_bytes(8, "little")
        self._number += 1
        if self.key is None:
            return xxhash.xxh3_64_digest(head + frame)
        return hmac.digest(self.key, head + frame, "sha256")
