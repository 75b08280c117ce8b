"""What a served engine and its client say to each other: one message, one MessagePack frame."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, TypeVar

import attrs
import msgspec
import xxhash
from msgspec import Meta

from pdinfer.bounds import FEW, MANY, Count, Differences, Index, Name, Packed, Seconds, broken_bound
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import PDInferError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.wire import PackedGrant
from pdinfer.stats import DecodeLoad, PrefillLoad
from pdinfer.types import PeerAddress, Refused, Request, RequestLimits, TokenEvent

VERSION = 2
"""Of what is said here; an engine tells its own in Ready."""
AnyLoad = TypeVar("AnyLoad", PrefillLoad, DecodeLoad)
Addresses = Annotated[tuple[PeerAddress, ...], FEW]
MAX_EVENTS = 1 << 20
"""Of one step: a token for each of its sequences, and those that were drafted."""


class PackedRequest(msgspec.Struct):
    """A request with its token lists packed."""

    request: Request
    prompt: Packed
    output: Packed

    def __post_init__(self) -> None:
        """ValueError, which refuses the message, for lists that are none; the rest `admission.check_request` judges."""
        wire.check_packed("prompt", self.prompt)
        wire.check_packed("output", self.output)

    @classmethod
    def of(cls, request: Request) -> PackedRequest:
        bare = attrs.evolve(request, prompt=(), output=())
        return cls(bare, wire.pack_ints(request.prompt), wire.pack_ints(request.output))

    def unpack(self) -> Request:
        return attrs.evolve(self.request, prompt=wire.unpack_ints(self.prompt), output=wire.unpack_ints(self.output))


class Load(msgspec.Struct):
    """One of the two."""

    prefill: PrefillLoad | None = None
    decode: DecodeLoad | None = None

    @classmethod
    def of(cls, engine: PrefillEngine | DecodeEngine) -> Load:
        if isinstance(engine, PrefillEngine):
            return cls(prefill=engine.load())
        return cls(decode=engine.load())

    def of_role(self, role: str) -> PrefillLoad | DecodeLoad | None:
        """Return the load of a "prefill" or a "decode" engine, None when it is of the other."""
        return self.prefill if role == "prefill" else self.decode

    def ageless(self) -> Load:
        """Without what changes by itself as time passes: two that are equal tell no news."""
        return Load(self.prefill and _ageless(self.prefill), self.decode and _ageless(self.decode))


def _ageless(load: AnyLoad) -> AnyLoad:
    peers = tuple(attrs.evolve(peer, step_age_s=None) for peer in load.kv.peers)
    return attrs.evolve(load, kv=attrs.evolve(load.kv, peers=peers))


class Beat(msgspec.Struct, tag="beat"):
    """A sign of life of a process, in both directions; an engine's tells how many seconds ago its last step ended."""

    step_age_s: Seconds | None = None


class Connect(msgspec.Struct, tag="connect"):
    """Open the channel to a peer; Connected answers, other messages may come before."""

    peer: PeerAddress
    timeout_s: Seconds


class SubmitPrefill(msgspec.Struct, tag="submit_prefill"):
    """A prompt and the pages granted for it."""

    request: PackedRequest
    grant: PackedGrant


class SubmitDecode(msgspec.Struct, tag="submit_decode"):
    """A request and who will prefill it."""

    request: PackedRequest
    writers: Addresses


class ChangeWriters(msgspec.Struct, tag="change_writers"):
    """Another prefill for a request that decode holds."""

    request_id: Name
    writers: Addresses


class Cancel(msgspec.Struct, tag="cancel"):
    """The request is not wanted any more."""

    request_id: Name


class Disconnect(msgspec.Struct, tag="disconnect"):
    """Close the channel's link to a peer that is not to be trusted any more."""

    peer: PeerAddress


class Renew(msgspec.Struct, tag="renew"):
    """End what runs for this client, then say Ready anew; `session` counts the renewals of this session."""

    session: Count


class Close(msgspec.Struct, tag="close"):
    """The engine is not wanted any more."""


Command = Beat | Connect | Disconnect | SubmitPrefill | SubmitDecode | ChangeWriters | Cancel | Renew | Close


class Ready(msgspec.Struct, tag="ready"):
    """The first message of a session, and of each renewal of it, whose number is `session`: who the engine is, with the
    addresses of all ranks behind this one port; `version` is the VERSION it speaks, 1 where it says none, `hung_s` how
    long its steps may take."""

    address: PeerAddress
    limits: RequestLimits
    load: Load
    addresses: Addresses = ()
    version: Index = 1
    session: Count = 0
    hung_s: Seconds | None = None


class Connected(msgspec.Struct, tag="connected"):
    """Answers the Connect for this peer."""

    peer: PeerAddress
    error: PDInferError | None = None
    fields: Differences = ()


class Stepped(msgspec.Struct, tag="stepped"):
    """What a step gave. `num_seen` counts the submits taken since the start; loads then include them."""

    num_seen: Count
    load: Load
    granted: Annotated[list[tuple[PackedGrant, PackedRequest]], MANY] = []
    refused: Annotated[list[Refused], MANY] = []
    tokens: Annotated[list[TokenEvent], Meta(max_length=MAX_EVENTS)] = []

    def __post_init__(self) -> None:
        """ValueError, which refuses the message, for pages granted to another request than the one beside them."""
        for grant, request in self.granted:
            if grant.grant.request_id != request.request.request_id:
                raise ValueError(f"a grant for {grant.grant.request_id!r} comes with another request")


Report = Beat | Ready | Connected | Stepped

DIGEST_BYTES = 8

_encoder = msgspec.msgpack.Encoder(enc_hook=wire.to_builtin)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command, dec_hook=wire.from_builtin)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report, dec_hook=wire.from_builtin)


def encode(message: Command | Report) -> bytes:
    """The bytes of a message, and a digest of them: a prompt that was altered on the way would be answered."""
    return digested(_encoder.encode(message))


def decode_command(data: bytes) -> Command:
    """What a client asks; TransferError for bytes that are no command."""
    try:
        return _commands.decode(_verified(data))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TransferError(f"a client sent something that is not a command: {broken_bound(error)}") from error


def decode_report(data: bytes) -> Report:
    """What an engine reports; TransferError for bytes that are no report."""
    try:
        return _reports.decode(_verified(data))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TransferError(f"an engine sent something that is not a report: {broken_bound(error)}") from error


PIECE_BYTES = 1 << 17
"""A longer message travels in pieces, each a sign of life of its own: one piece takes less than any silence even where
a connection carries 60 kB a second."""
MORE, LAST = b"\xc1\x01", b"\xc1\x00"
"""What a piece begins with: no MessagePack begins with 0xc1."""
MAX_BYTES = 256 << 20
"""Of a message in pieces."""


def pieces(data: bytes) -> Iterator[bytes]:
    """What is sent for a message: the message itself, unless it is long."""
    if len(data) <= PIECE_BYTES:
        yield data
        return
    for at in range(0, len(data), PIECE_BYTES):
        end = at + PIECE_BYTES
        yield (MORE if end < len(data) else LAST) + data[at:end]


class Joiner:
    """Joins pieces to the message they are of."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, piece: bytes) -> bytes | None:
        """The message that is whole with this piece, if it is; TransferError when it gets too long."""
        head = piece[: len(MORE)]
        if head not in (MORE, LAST):
            if self._data:
                raise TransferError("a message came in the middle of another one")
            return piece
        self._data += memoryview(piece)[len(head) :]
        if len(self._data) > MAX_BYTES:
            raise TransferError(f"a message of more than {MAX_BYTES} bytes")
        if head == MORE:
            return None
        data, self._data = bytes(self._data), bytearray()
        return data


def digested(body: bytes) -> bytes:
    """`body` with its xxh3_64 behind it."""
    return body + xxhash.xxh3_64_digest(body)


def _verified(data: bytes) -> bytes:
    body = data[:-DIGEST_BYTES]
    if data != digested(body):
        raise ValueError("its digest is another one")
    return body
