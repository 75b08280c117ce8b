"""The messages between two ends of a channel, and how their values become bytes (MessagePack through msgspec).

Unknown fields are ignored within a major version, so fields may be added at the end. A feature that a peer must
understand goes into `Hello.required`. Long lists of ints travel as packed little-endian int32.

The tag after each frame makes a link's frames one sequence that cannot be broken unnoticed. It covers the session (the
nonces of both ends), the direction, and the frame's number, which is counted and never sent. So the check fails at the
next frame, and the link is closed, when a frame was lost, doubled, reordered, altered, replayed from another session or
reflected. Without a key the tag is xxh3_64 and finds accidents. With a key it is HMAC-SHA256, which only an end that
has the key can compute."""

from __future__ import annotations

import hmac
from array import array
from collections.abc import Sequence
from typing import Annotated, Any

import attrs
import msgspec
import numpy as np
import xxhash

from pdinfer.bounds import (
    FEW,
    MAX_SECONDS,
    MAX_TEXT_CHARACTERS,
    Differences,
    Digest,
    Index,
    Name,
    Packed,
    Room,
    Seconds,
    broken_bound,
    escaped,
)
from pdinfer.checks import clip
from pdinfer.errors import (
    ConfigError,
    LayoutMismatch,
    Overloaded,
    PDInferError,
    RequestError,
    TransferError,
    error_from_code,
)
from pdinfer.identity import DIGITS, FEW_TENSORS, MAX_PART_DIGITS, TensorDigest
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.transports.base import MAX_FRAME_BYTES
from pdinfer.types import Handoff, PageGrant, PeerAddress

NONCE_BYTES = 16
MIN_KEY_BYTES = 16
MAX_TAG_BYTES = 32
MAJOR, MINOR = 3, 0
FEATURES: frozenset[str] = frozenset()
"""Optional behaviours that this version understands. A peer that requires another one is refused."""
MAX_REJECT_BYTES = 1 << 10
"""What ends of any version take on a link that is not open, so that all can read why it was refused."""
MAX_REASON_BYTES = 320
"""How much of the reason for a refusal travels as text. Differences travel one by one, and the other end lists them."""
MAX_DIFFERENCE_CHARACTERS = 120
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


def pack_ints(values: Sequence[int]) -> bytes:
    """Return token or page ids as little-endian int32. Raises RequestError for an id that does not fit 32 bits."""
    try:
        return array("i", values).tobytes()  # numpy before 2.0 would keep the low bits of what does not fit
    except (OverflowError, TypeError) as error:
        raise RequestError(f"ids must be ints of 32 bits to travel: {error}") from error


def unpack_ints(data: bytes) -> tuple[int, ...]:
    """Invert `pack_ints`. Raises TransferError when `data` is not a whole number of ints."""
    if len(data) % 4:
        raise TransferError(f"a packed list of ints has {len(data)} bytes, not a multiple of 4")
    return tuple(np.frombuffer(data, dtype="<i4").tolist())


def check_ids(name: str, data: bytes) -> None:
    """Raise ValueError, which refuses the message, unless `data` is a packed list of ints that are not negative."""
    if len(data) % 4:
        raise ValueError(f"{name} has {len(data)} bytes, not a multiple of 4")
    if data and np.frombuffer(data, dtype="<i4").min() < 0:
        raise ValueError(f"{name} holds an id below 0")


class PackedGrant(msgspec.Struct):
    """A grant with its page lists packed."""

    grant: PageGrant
    pages: Packed
    generations: Packed

    def __post_init__(self) -> None:
        """Raise ValueError, which refuses the message, unless there is a generation for every page."""
        check_ids("pages", self.pages)
        check_ids("generations", self.generations)
        if len(self.pages) != len(self.generations):
            raise ValueError(f"{len(self.pages) // 4} pages have {len(self.generations) // 4} generations")

    @classmethod
    def of(cls, grant: PageGrant) -> PackedGrant:
        bare = attrs.evolve(grant, pages=(), generations=())
        return cls(bare, pack_ints(grant.pages), pack_ints(grant.generations))

    def unpack(self) -> PageGrant:
        return attrs.evolve(self.grant, pages=unpack_ints(self.pages), generations=unpack_ints(self.generations))


class Open(msgspec.Struct, tag="open"):
    """The first frame of either end, the only one without a tag. The tags of the session are made with its nonce."""

    version: tuple[Index, Index]
    nonce: Nonce
    keyed: bool


class Hello(msgspec.Struct, tag="hello"):
    """The identity of the end that dialled, and what its pages mean."""

    address: PeerAddress
    layout: KVLayout
    required: Annotated[tuple[Name, ...], FEW] = ()


class Welcome(msgspec.Struct, tag="welcome"):
    """The answer that opens a link."""

    address: PeerAddress
    layout: KVLayout


class Reject(msgspec.Struct, tag="reject"):
    """The answer that refuses a link. `fields` are those of LayoutMismatch. `again` is set when the reason will pass
    soon. `refuser` is who refuses a second link, without endpoints: the end that dialled may know it by another one."""

    error: PDInferError
    fields: Differences = ()
    again: bool = False
    refuser: PeerAddress | None = None


class Compare(msgspec.Struct, tag="compare", omit_defaults=True):
    """What an end has read of a part of the weights (see `identity.TensorDigests`), when the other one has read others:
    digests of its sixteen parts, or the tensors themselves."""

    part: Annotated[str, msgspec.Meta(max_length=MAX_PART_DIGITS, pattern=r"\A[0-9a-f]*\Z")]
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=len(DIGITS))] = ()
    tensors: Annotated[tuple[TensorDigest, ...], msgspec.Meta(max_length=FEW_TENSORS)] = ()

    def __post_init__(self) -> None:
        """Raise ValueError, which refuses the message, unless there is a digest for each part or for none."""
        if len(self.digests) not in (0, len(DIGITS)):
            raise ValueError(f"digests are {len(self.digests)} of {len(DIGITS)} parts")


class Data(msgspec.Struct, tag="data", omit_defaults=True):
    """The announcement of a payload: these tokens of these layers, in the order of `KVLayout.spans`, with `by_token` as
    the writer's layout has it. `heads` are named where the pages of both ends have heads."""

    room: Room
    layers: range
    tokens: range
    heads: range | None = None


class Finish(msgspec.Struct, tag="finish"):
    """A writer's hand-off of a room, after all of its payloads."""

    handoff: Handoff


class Abort(msgspec.Struct, tag="abort"):
    """Decode's request to stop writing a room. The Finish that follows is the proof that the writer has stopped."""

    room: Room
    error: PDInferError


class Offer(msgspec.Struct, tag="offer"):
    """Decode's grant, for a writer that does not get it from its host."""

    grant: PackedGrant


class Beat(msgspec.Struct, tag="beat"):
    """A heartbeat, sent by both ends all the time: a link without heartbeats is dead. `step_age_s` is how long ago the
    engine of the sending end looked at its channel, which tells a host that hangs from one that is gone."""

    step_age_s: Seconds


Message = Open | Hello | Welcome | Reject | Compare | Data | Finish | Abort | Beat | Offer


def to_builtin(value: object) -> object:
    """Convert what msgspec cannot encode itself: ranges and errors (its enc_hook)."""
    if isinstance(value, range):
        return (value.start, value.stop)
    if isinstance(value, PDInferError):
        described = (value.code, str(value)[:MAX_TEXT_CHARACTERS])
        retry_after_s = value.retry_after_s if isinstance(value, Overloaded) else None
        return described if retry_after_s is None else (*described, retry_after_s)
    raise NotImplementedError(f"cannot encode a {type(value).__name__}")


def from_builtin(kind: type, value: Any) -> object:
    """Invert `to_builtin` (msgspec's dec_hook). Every shape is checked, and the text of an error is escaped."""
    if kind is range:
        match value:
            case [int(start), int(stop)] if 0 <= start <= stop < 2**31 and bool not in (type(start), type(stop)):
                return range(start, stop)
        raise ValueError(f"{clip(value)} is not a range of tokens or layers")
    if issubclass(kind, PDInferError):
        match value:
            case [str(code), str(message)]:
                return error_from_code(code, escaped(message))
            case [Overloaded.code, str(message), float(retry_after_s)] if 0 <= retry_after_s <= MAX_SECONDS:
                return error_from_code(Overloaded.code, escaped(message), retry_after_s)
        raise ValueError(f"{clip(value)} is not an error")
    raise NotImplementedError(f"cannot decode a {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=to_builtin)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, dec_hook=from_builtin)


def encode(message: Message) -> bytes:
    """Return the frame of a message, without its tag. Raises ConfigError when it is too long to travel."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES - MAX_TAG_BYTES:
        raise ConfigError(
            f"a {type(message).__name__} frame of {len(frame)} bytes is too long to travel: "
            f"{MAX_FRAME_BYTES - MAX_TAG_BYTES} fit"
        )
    return frame


def rejection(error: PDInferError, *, again: bool, refuser: PeerAddress | None = None) -> bytes:
    """Return a Reject frame that fits an untrusted link. Long texts are cut between words, of many differences the last
    ones are left out, and of the refuser all endpoints."""
    fields: tuple[tuple[str, str, str], ...] = ()
    text = str(error)
    if isinstance(error, LayoutMismatch):
        text = "the two ends' KV layouts differ"
        fields = tuple(
            (name, _cut(ours, MAX_DIFFERENCE_CHARACTERS), _cut(theirs, MAX_DIFFERENCE_CHARACTERS))
            for name, ours, theirs in error.fields
        )
    short = error_from_code(error.code, _cut(text, MAX_REASON_BYTES))
    bare = None if refuser is None else attrs.evolve(refuser, endpoints=())
    while True:
        frame = encode(Reject(short, fields, again, bare))
        if len(frame) <= MAX_REJECT_BYTES - MAX_TAG_BYTES or not fields:
            return frame
        fields = fields[:-1]


def _cut(text: str, num_bytes: int) -> str:
    """Cut a text to `num_bytes` of UTF-8, between words (or numbers of a list), with a mark where some are left out."""
    if len(text.encode()) <= num_bytes:
        return text
    mark = " …"
    short = text.encode()[: num_bytes - len(mark.encode())].decode(errors="ignore")
    end = max(short.rfind(" "), short.rfind(","))
    return (short[:end] if end > 0 else short) + mark


def decode(frame: bytes) -> Message:
    """Return the message in `frame`. Raises TransferError for anything that is not a message, whatever the bytes."""
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError, attrs.exceptions.FrozenInstanceError) as error:
        raise TransferError(f"a peer sent a frame that is not a message: {broken_bound(error)}") from error


# -- tags -----------------------------------------------------------------------------------------------------------


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
        return frame + self._next_tag(frame)

    def verify(self, tagged: bytes) -> bytes:
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
