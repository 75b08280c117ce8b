"""What tells the weights that one engine computes with from those of another, and finds the tensors that differ.

A tensor's digest depends on every byte of it as the files hold it (`checkpoint.reader`). It is made for accidents, a
wrong folder or a damaged copy, and not against who forges weights: a peer with the key is believed what it says of its
own."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable

import attrs
from msgspec import UNSET, UnsetType

from pdinfer.bounds import Digest, Name
from pdinfer.values import Value

FEW_TENSORS = 4
"""As many as one frame of a handshake holds by name."""
DIGITS = "0123456789abcdef"
MAX_PART_DIGITS = 16
_DIGEST_BYTES = 16


@attrs.frozen
class TensorDigest:
    """A tensor of a checkpoint: its name, its dtype and shape there as text, and a digest of its bytes."""

    name: Name
    form: Name
    digest: Digest

    def __str__(self) -> str:
        return f"{self.form} {self.digest.hex()}"

    @property
    def key(self) -> str:
        """Hex digits made of its name, which say of what parts it is."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:MAX_PART_DIGITS]

    @property
    def entry(self) -> bytes:
        """SHA-256 of all of it."""
        return hashlib.sha256(f"{self.name}\n{self.form}\n".encode() + self.digest).digest()


class TensorDigests:
    """Tensors in parts. A part holds those whose keys begin with some hex digits, "" all of them, so two ends mean the
    same by a part whichever tensors either has."""

    def __init__(self, tensors: Iterable[TensorDigest] = ()) -> None:
        keyed = sorted(((tensor.key, tensor) for tensor in tensors), key=lambda pair: pair[0])
        self._keys = [key for key, _ in keyed]
        self._tensors = [tensor for _, tensor in keyed]
        self._entries = [tensor.entry for tensor in self._tensors]

    def of(self, part: str) -> list[TensorDigest]:
        """Return the tensors of a part."""
        return self._tensors[self._span(part)]

    def digest(self, part: str = "") -> bytes:
        """Return SHA-256 over names, forms and digests of a part."""
        return hashlib.sha256(b"pdinfer weights 2\n" + b"".join(self._entries[self._span(part)])).digest()

    def digests(self, part: str) -> tuple[bytes, ...]:
        """Return 16 bytes for each of the sixteen parts of a part, which differ where the parts do."""
        return tuple(self.digest(part + digit)[:_DIGEST_BYTES] for digit in DIGITS)

    def _span(self, part: str) -> slice:
        return slice(bisect_left(self._keys, part), bisect_left(self._keys, f"{part}g"))


NO_TENSORS = TensorDigests()


@attrs.frozen(kw_only=True)
class WeightsIdentity(Value):
    """Which weights a model has: digests as `KVLayout` tells them, and the `tensors` that they are made of, none where
    no files were read."""

    weights_id: bytes = b""
    mtp_weights_id: bytes | UnsetType = UNSET
    sampled_weights_id: bytes | UnsetType = UNSET
    tensors: TensorDigests = NO_TENSORS
