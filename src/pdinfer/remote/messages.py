"""The messages between a served engine and its client. Each is one MessagePack frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_type_hints

import attrs
import msgspec
import xxhash
from msgspec import UNSET, Meta, UnsetType

from pdinfer.bounds import FEW, MANY, Count, Differences, Index, Name, Packed, Seconds, broken_bound
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import PDInferError, RequestError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.wire import PackedGrant
from pdinfer.kv.prefix import KeyScheme
from pdinfer.stats import DecodeLoad, PrefillLoad
from pdinfer.types import Event, Granted, PeerAddress, Refused, Request, RequestLimits, SamplingParams, TokenEvent
from pdinfer.values import changed_fields, fields_of

VERSION, MINOR = 7, 2
"""The version of these messages. An engine tells its own in Ready, and a client refuses another VERSION. Within one,
unknown fields are ignored and missing ones have their defaults, so a new field with a default raises neither number.
MINOR counts what else is new: an end makes use of it when the other one is of that MINOR."""
BECOMING_MINOR = 1
"""The MINOR that brought Become."""
FEATURES: frozenset[str] = frozenset()
"""What an engine may require of its client. A client refuses an engine that requires anything else."""
AnyLoad = TypeVar("AnyLoad", PrefillLoad, DecodeLoad)
M = TypeVar("M")
Addresses = Annotated[tuple[PeerAddress, ...], FEW]
MAX_EVENTS = 1 << 20
"""The most events of one step: a token for each of its sequences, and the drafted ones."""


PAIRING_FIELDS = ("stop",)
"""The fields of a request that do not travel: a Pairing alone looks at them."""
TOKEN_FIELDS = ("prompt", "output")
"""Those that travel packed."""
KNOWN = {field.name for field in attrs.fields(Request)} | {f"sampling.{f.name}" for f in attrs.fields(SamplingParams)}
"""What this end knows of requests."""


def _travelling(kind: Any, **replaced: tuple[Any, object]) -> Any:
    """Make a struct of the fields of a class that travel, those `replaced` with another type and default. It is encoded
    without those that were left at their defaults."""
    hints = get_type_hints(kind, include_extras=True)
    fields = [
        (field.name, *replaced.get(field.name, (hints[field.name], default)))
        for field, default in fields_of(kind)
        if field.name not in PAIRING_FIELDS
    ]
    return msgspec.defstruct(f"Travelling{kind.__name__}", fields, frozen=True, omit_defaults=True, module=__name__)


_Sampling = _travelling(SamplingParams)
if TYPE_CHECKING:
    TravellingRequest: TypeAlias = Any
else:
    _replaced = {**dict.fromkeys(TOKEN_FIELDS, (Packed, b"")), "sampling": (_Sampling, _Sampling())}
    TravellingRequest = _travelling(Request, **_replaced)


class PackedRequest(msgspec.Struct):
    """A request without the fields at their defaults. Whoever does not know one of the `required` cannot serve it."""

    request: TravellingRequest
    required: Annotated[tuple[Name, ...], FEW] = ()

    def __post_init__(self) -> None:
        """Raise ValueError, which refuses the message, for bytes that are not packed tokens, which a `Request` cannot
        hold. All else is checked by `admission.check_request`."""
        for name in TOKEN_FIELDS:
            wire.check_ids(name, getattr(self.request, name))

    @classmethod
    def of(cls, request: Request) -> PackedRequest:
        fields, sampling = changed_fields(request), changed_fields(request.sampling)
        travelling = {name: field for name, field in fields.items() if name not in PAIRING_FIELDS}
        required = *travelling, *(f"sampling.{name}" for name in sampling)
        packed = {name: wire.pack_ints(fields[name]) for name in TOKEN_FIELDS if name in fields}
        return cls(TravellingRequest(**{**travelling, **packed, "sampling": _Sampling(**sampling)}), required)

    @property
    def unknown(self) -> str:
        """The fields that it requires and this end does not know."""
        return ", ".join(name for name in self.required if name not in KNOWN)

    def unpack(self) -> Request:
        """Return the request. Raises RequestError when it requires fields that are not known here, and names them."""
        if unknown := self.unknown:
            raise RequestError(f"the request sets {unknown}, which this engine does not know: update pdinfer there")
        fields = msgspec.structs.asdict(self.request)
        fields |= {name: wire.unpack_ints(fields[name]) for name in TOKEN_FIELDS}
        return Request(**{**fields, "sampling": SamplingParams(**msgspec.structs.asdict(fields["sampling"]))})


class LoadMessage(msgspec.Struct):
    """The load of an engine: one of the two."""

    prefill: PrefillLoad | None = None
    decode: DecodeLoad | None = None

    @classmethod
    def of(cls, engine: PrefillEngine | DecodeEngine) -> LoadMessage:
        if isinstance(engine, PrefillEngine):
            return cls(prefill=engine.load())
        return cls(decode=engine.load())

    def of_role(self, role: str) -> PrefillLoad | DecodeLoad | None:
        """Return the load of a "prefill" or a "decode" engine, or None when it is that of the other role."""
        return self.prefill if role == "prefill" else self.decode


KEY_BYTES = 16
"""How much of a page's key travels: enough to tell pages apart for a choice of ports, which is all it is used for."""


class PageChanges(msgspec.Struct):
    """How the pages that an engine can find have changed since the last report: all are `forgotten` first if it says
    so, then some were `added` and others `dropped`. Both are the first KEY_BYTES of keys, one behind the other."""

    forgotten: bool = False
    added: Packed = b""
    dropped: Packed = b""

    def __post_init__(self) -> None:
        """Raise ValueError, which refuses the message, for bytes that are not whole keys."""
        if len(self.added) % KEY_BYTES or len(self.dropped) % KEY_BYTES:
            raise ValueError(f"keys of pages have {KEY_BYTES} bytes each")


class BeatMessage(msgspec.Struct, tag="beat"):
    """A sign of life, in both directions. An engine's beat tells how many seconds ago its last step ended, and
    `is_draining` that its client should let go of it."""

    step_age_s: Seconds | None = None
    is_draining: bool | UnsetType = UNSET


class ConnectMessage(msgspec.Struct, tag="connect"):
    """Connect the channel to a peer. Connected answers, and other messages may come before it."""

    peer: PeerAddress
    timeout_s: Seconds


class SubmitPrefillMessage(msgspec.Struct, tag="submit_prefill"):
    """A prompt and the pages granted for it."""

    request: PackedRequest
    grant: PackedGrant


class SubmitDecodeMessage(msgspec.Struct, tag="submit_decode"):
    """A request and who will prefill it."""

    request: PackedRequest
    writers: Addresses


class ChangeWritersMessage(msgspec.Struct, tag="change_writers"):
    """Another prefill for a request that decode holds."""

    request_id: Name
    writers: Addresses


class CancelMessage(msgspec.Struct, tag="cancel"):
    """End a request."""

    request_id: Name


class Disconnect(msgspec.Struct, tag="disconnect"):
    """Close the channel's link to a peer that must not be trusted any more."""

    peer: PeerAddress


class Renew(msgspec.Struct, tag="renew"):
    """End what runs for this client, then send Ready again. `session` counts them since the client connected."""

    session: Count


class Become(msgspec.Struct, tag="become"):
    """Cancel what is unfinished, change to the role of this name, once all leaders of its ranks were asked, and send
    Ready as an engine of that role. A client that closes it before, or does not come back, takes that back."""

    role: Name


class Close(msgspec.Struct, tag="close"):
    """Close the engine."""


Command = (
    BeatMessage
    | ConnectMessage
    | Disconnect
    | SubmitPrefillMessage
    | SubmitDecodeMessage
    | ChangeWritersMessage
    | CancelMessage
    | Renew
    | Become
    | Close
)


class Ready(msgspec.Struct, tag="ready"):
    """The first message of a session, and the first after each renewal, whose number is `session`. It tells who the
    engine is, with the addresses of all ranks behind this port. `version` is the VERSION it speaks, 1 where it says
    none, with its MINOR and the FEATURES that it requires of its client. `hung_s` is how long its steps may take.
    `roles` are the roles that it can change to, see Become, and `leaders` the addresses of those that change with it:
    all leaders of its ranks, itself alone where there are none.
    `key_scheme` says how the keys of its cached pages are made, and `pages` has all of them; both are None where none
    are cached."""

    address: PeerAddress
    limits: RequestLimits
    load: LoadMessage
    addresses: Addresses = ()
    version: Index = 1
    minor: Index = 0
    required: Annotated[tuple[Name, ...], FEW] = ()
    session: Count = 0
    hung_s: Seconds | None = None
    key_scheme: KeyScheme | None = None
    pages: PageChanges | None = None
    roles: Annotated[tuple[Name, ...], FEW] = ()
    leaders: Addresses = ()


class Connected(msgspec.Struct, tag="connected"):
    """Answers the Connect for this peer."""

    peer: PeerAddress
    error: PDInferError | None = None
    fields: Differences = ()

    def check(self) -> None:
        if self.error is not None and self.fields:
            self.error.fields = self.fields  # type: ignore[attr-defined]
        if self.error is not None:
            raise self.error


class Computing(msgspec.Struct, tag="computing"):
    """All requests of which the engine computes rows. It comes before the step that computes the first of one."""

    request_ids: Annotated[tuple[Name, ...], MANY]


class Stepped(msgspec.Struct, tag="stepped"):
    """The events of a step, and changes of the pages that can be found. The load includes `num_seen` submits since
    Ready."""

    num_seen: Count
    load: LoadMessage
    granted: Annotated[list[tuple[PackedGrant, PackedRequest]], MANY] = []
    refused: Annotated[list[Refused], MANY] = []
    tokens: Annotated[list[TokenEvent], Meta(max_length=MAX_EVENTS)] = []
    pages: PageChanges | None = None

    @classmethod
    def of(cls, load: LoadMessage, events: Sequence[Event], num_seen: int) -> Stepped:
        report = cls(num_seen, load)
        for event in events:
            if isinstance(event, Granted):
                report.granted.append((PackedGrant.of(event.grant), PackedRequest.of(event.request)))
            elif isinstance(event, Refused):
                report.refused.append(event)
            else:
                report.tokens.append(event)
        return report

    def __post_init__(self) -> None:
        """Raise ValueError, which refuses the message, when a grant and the request next to it do not match, or for a
        request that nobody can have sent from here."""
        for grant, request in self.granted:
            if request.unknown:
                raise ValueError(f"a granted request sets {request.unknown}, which is unknown here")
            if grant.grant.request_id != request.request.request_id:
                raise ValueError(f"a grant for {grant.grant.request_id!r} comes with another request")

    @property
    def events(self) -> list[Event]:
        """The events, as the engine's own `step` returns them."""
        granted = [Granted(grant=grant.unpack(), request=request.unpack()) for grant, request in self.granted]
        return [*granted, *self.refused, *self.tokens]


Report = BeatMessage | Ready | Connected | Computing | Stepped

DIGEST_BYTES = 8

_encoder = msgspec.msgpack.Encoder(enc_hook=wire.to_builtin)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command, dec_hook=wire.from_builtin)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report, dec_hook=wire.from_builtin)


def encode(message: Command | Report) -> bytes:
    """Return the bytes of a message and their digest. Without it, a prompt altered on the way would be answered."""
    return digested(_encoder.encode(message))


def decode_command(data: bytes) -> Command:
    """Return a client's command. Raises TransferError for bytes that are not one."""
    return _decoded(_commands, data, "a client sent something that is not a command")


def decode_report(data: bytes) -> Report:
    """Return an engine's report. Raises TransferError for bytes that are not one."""
    return _decoded(_reports, data, "an engine sent something that is not a report")


def _decoded(decoder: msgspec.msgpack.Decoder[M], data: bytes, complaint: str) -> M:
    try:
        return decoder.decode(_verified(data))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TransferError(f"{complaint}: {broken_bound(error)}") from error


PIECE_BYTES = 1 << 17
"""A longer message travels in pieces, each of which is a sign of life. A piece takes less time than any silence limit
even over a connection that carries 60 kB a second."""
MORE, LAST = b"\xc1\x01", b"\xc1\x00"
"""The first bytes of a piece. No MessagePack begins with 0xc1."""
MAX_BYTES = 256 << 20
"""The most bytes of a message in pieces."""


def pieces(data: bytes) -> Iterator[bytes]:
    """Yield what is sent for a message: the message itself unless it is long."""
    if len(data) <= PIECE_BYTES:
        yield data
        return
    for at in range(0, len(data), PIECE_BYTES):
        end = at + PIECE_BYTES
        yield (MORE if end < len(data) else LAST) + data[at:end]


class Joiner:
    """Joins pieces to whole messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, piece: bytes) -> bytes | None:
        """Return the message that this piece completes, or None. Raises TransferError when a message gets too long."""
        head = piece[: len(MORE)]
        if head not in (MORE, LAST):
            if self._data:
                raise TransferError("a message came in the middle of another one")
            return piece
        self._data += memoryview(piece)[len(head) :]
        if len(self._data) > MAX_BYTES:
            raise TransferError(f"a message has more than {MAX_BYTES} bytes")
        if head == MORE:
            return None
        data, self._data = bytes(self._data), bytearray()
        return data


def digested(body: bytes) -> bytes:
    """Return `body` followed by its xxh3_64 digest."""
    return body + xxhash.xxh3_64_digest(body)


def _verified(data: bytes) -> bytes:
    body = data[:-DIGEST_BYTES]
    if data != digested(body):
        raise ValueError("its digest does not match its bytes")
    return body
