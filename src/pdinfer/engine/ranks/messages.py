"""What the leader of an attention group and its followers tell each other, as bytes in a collective.

Orders say what the leader did; a follower does the same with its own channel and pages. Reports say what only a
follower can know. Neither is answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from pdinfer.bounds import FEW, MANY, Count, Index, Packed, Room, broken_bound
from pdinfer.errors import PDInferError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.model.batch import Row
from pdinfer.types import NamedState, PeerAddress

VERSION = 5
"""The version of these messages. All ranks of an engine must have the same, which is checked when it is made."""


class DialMessage(msgspec.Struct, tag="connect"):
    """Order: dial this peer until it answers."""

    peer: PeerAddress


class DropPeerMessage(msgspec.Struct, tag="drop_peer"):
    """Order: close the link to this peer for good."""

    peer: PeerAddress


class Expect(msgspec.Struct, tag="expect"):
    """Order (decode): let the writers of the grant write it."""

    grant: wire.PackedGrant


class AbortMessage(msgspec.Struct, tag="abort"):
    """Order (decode): ask the writers of the room to stop."""

    room: Room
    error: PDInferError


class Accept(msgspec.Struct, tag="accept"):
    """Order (prefill): accept the grant."""

    grant: wire.PackedGrant


class FinishMessage(msgspec.Struct, tag="finish"):
    """Order (prefill): hand the room off, LANDED unless there is an `error`."""

    room: Room
    error: PDInferError | None


class PackedRow(msgspec.Struct):
    """A `Row` of a step."""

    tokens: Packed
    start: Index
    pages: Packed
    next_token: Index | None

    def __post_init__(self) -> None:
        wire.check_ids("tokens", self.tokens)
        wire.check_ids("pages", self.pages)

    @classmethod
    def of(cls, row: Row) -> PackedRow:
        return cls(wire.pack_ints(row.tokens), row.start, wire.pack_ints(row.pages), row.next_token)

    def unpack(self) -> Row:
        return Row(wire.unpack_ints(self.tokens), self.start, wire.unpack_ints(self.pages), self.next_token)


class PrefillMessage(msgspec.Struct, tag="prefill"):
    """Order: run these rows, and after every layer push `tokens` of each into its room."""

    rows: Annotated[list[PackedRow], MANY]
    rooms: list[Room]
    tokens: list[range]

    def __post_init__(self) -> None:
        if not len(self.rows) == len(self.rooms) == len(self.tokens):
            raise ValueError(f"{len(self.rows)} rows, {len(self.rooms)} rooms and {len(self.tokens)} ranges of tokens")


class DecodeMessage(msgspec.Struct, tag="decode"):
    """Order: run these rows. Where tokens are drafted, each row also has the number of its draft (None if it has none),
    how many tokens may be drafted, and the newest tokens of its output; `on_host` says that the leader's host draws."""

    rows: Annotated[list[PackedRow], MANY]
    drafts: list[Count | None] = []
    counts: list[Index] = []
    newest: list[Packed] = []
    on_host: bool = False

    def __post_init__(self) -> None:
        for newest in self.newest:
            wire.check_ids("newest", newest)
        if not len(self.drafts) == len(self.counts) == len(self.newest) or len(self.drafts) not in (0, len(self.rows)):
            raise ValueError(
                f"{len(self.rows)} rows, {len(self.drafts)} drafts, {len(self.counts)} counts and {len(self.newest)} "
                "lists of newest tokens"
            )


class KeepDraft(msgspec.Struct, tag="keep_draft"):
    """Order: keep the draft that begins with these states as `number`."""

    number: Count
    states: Annotated[list[NamedState], FEW]


class DropDraft(msgspec.Struct, tag="drop_draft"):
    """Order: forget a draft that is no longer needed."""

    number: Count


class Expecting(msgspec.Struct, tag="expecting"):
    """Report (decode): this rank expects the room too."""

    room: Room


class Settled(msgspec.Struct, tag="settled"):
    """Report (decode): every writer of the room has stopped here. Without an `error` its pages are complete."""

    room: Room
    error: PDInferError | None


class Stopped(msgspec.Struct, tag="stopped"):
    """Report (prefill): a decode no longer wants the room, or cannot be reached from here."""

    room: Room
    error: PDInferError


class SentMessage(msgspec.Struct, tag="sent"):
    """Report (prefill): nothing here reads the pages of a finished room any more."""

    room: Room


class Linked(msgspec.Struct, tag="linked"):
    """Report: the peers to which this rank has open links, sent whenever they change."""

    peers: Annotated[list[PeerAddress], MANY]


Order = (
    DialMessage
    | DropPeerMessage
    | Expect
    | AbortMessage
    | Accept
    | FinishMessage
    | PrefillMessage
    | DecodeMessage
    | KeepDraft
    | DropDraft
)
Report = Expecting | Settled | Stopped | SentMessage | Linked
Message = Order | Report

_encoder = msgspec.msgpack.Encoder(enc_hook=wire.to_builtin)
_decoder: msgspec.msgpack.Decoder[list[Message]] = msgspec.msgpack.Decoder(list[Message], dec_hook=wire.from_builtin)


def encode(messages: Sequence[Message]) -> bytes:
    """Encode several messages in order."""
    return _encoder.encode(messages)


def decode(data: bytes) -> list[Message]:
    """Decode messages. Raise TransferError for other bytes, although a rank of the same program sent them."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TransferError(f"a rank sent something that is not a message: {broken_bound(error)}") from error
