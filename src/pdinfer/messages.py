"""What a served engine and its client say to each other: one message, one MessagePack frame."""

from __future__ import annotations

from typing import TypeVar

import attrs
import msgspec
import xxhash

from pdinfer.decode import DecodeEngine
from pdinfer.errors import PDInferError, TransferError
from pdinfer.kv import wire
from pdinfer.kv.wire import PackedGrant
from pdinfer.prefill import PrefillEngine
from pdinfer.schedule import RequestLimits
from pdinfer.types import DecodeLoad, PeerAddress, PrefillLoad, Refused, Request, TokenEvent

AnyLoad = TypeVar("AnyLoad", PrefillLoad, DecodeLoad)


class PackedRequest(msgspec.Struct):
    """A request with its token lists packed."""

    request: Request
    prompt: bytes
    output: bytes

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

    def ageless(self) -> Load:
        """Without what changes by itself as time passes: two that are equal tell no news."""
        return Load(self.prefill and _ageless(self.prefill), self.decode and _ageless(self.decode))


def _ageless(load: AnyLoad) -> AnyLoad:
    peers = tuple(attrs.evolve(peer, step_age_s=None) for peer in load.kv.peers)
    return attrs.evolve(load, kv=attrs.evolve(load.kv, peers=peers))


class Beat(msgspec.Struct, tag="beat"):
    """A sign of life of a process, in both directions; an engine's tells how many seconds ago its last step ended."""

    step_age_s: float | None = None


class Connect(msgspec.Struct, tag="connect"):
    """Open the channel to a peer; Connected answers, other messages may come before."""

    peer: PeerAddress
    timeout_s: float


class SubmitPrefill(msgspec.Struct, tag="submit_prefill"):
    """A prompt and the pages granted for it."""

    request: PackedRequest
    grant: PackedGrant


class SubmitDecode(msgspec.Struct, tag="submit_decode"):
    """A request and who will prefill it."""

    request: PackedRequest
    writers: tuple[PeerAddress, ...]


class ChangeWriters(msgspec.Struct, tag="change_writers"):
    """Another prefill for a request that decode holds."""

    request_id: str
    writers: tuple[PeerAddress, ...]


class Cancel(msgspec.Struct, tag="cancel"):
    """The request is not wanted any more."""

    request_id: str


class Close(msgspec.Struct, tag="close"):
    """The engine is not wanted any more."""


Command = Beat | Connect | SubmitPrefill | SubmitDecode | ChangeWriters | Cancel | Close


class Ready(msgspec.Struct, tag="ready"):
    """The first message: who the engine is, with the addresses of all ranks behind this one port."""

    address: PeerAddress
    limits: RequestLimits
    load: Load
    addresses: tuple[PeerAddress, ...] = ()


class Connected(msgspec.Struct, tag="connected"):
    """Answers the Connect for this peer."""

    peer: PeerAddress
    error: PDInferError | None = None
    fields: tuple[tuple[str, str, str], ...] = ()


class Stepped(msgspec.Struct, tag="stepped"):
    """What a step gave. `num_seen` counts the submits taken since the start; loads then include them."""

    num_seen: int
    load: Load
    granted: list[tuple[PackedGrant, PackedRequest]] = []
    refused: list[Refused] = []
    tokens: list[TokenEvent] = []


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
        raise TransferError(f"a client sent something that is not a command: {str(error)[:200]}") from error


def decode_report(data: bytes) -> Report:
    """What an engine reports; TransferError for bytes that are no report."""
    try:
        return _reports.decode(_verified(data))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TransferError(f"an engine sent something that is not a report: {str(error)[:200]}") from error


def digested(body: bytes) -> bytes:
    """`body` with its xxh3_64 behind it."""
    return body + xxhash.xxh3_64_digest(body)


def _verified(data: bytes) -> bytes:
    body = data[:-DIGEST_BYTES]
    if data != digested(body):
        raise ValueError("its digest is another one")
    return body
