"""Every parser of bytes from a file or a peer, as a function that may only return or raise a PDInferError.

`run.py` feeds them coverage-guided input for as long as you like; `test_fuzz.py` feeds them a few thousand mutated
seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import attrs
import xxhash

from pdinfer.checkpoint.header import HeaderSource, header_bytes, parse_header
from pdinfer.config import ModelConfig
from pdinfer.config.hf import ending_ids, sampling_defaults
from pdinfer.errors import ConfigError, PDInferError, TransferError
from pdinfer.files import parse_json
from pdinfer.identity import TensorDigest
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.wire import NONCE_BYTES
from pdinfer.kv.layout import Spans
from pdinfer.kv.shapes import PageShape
from pdinfer.kv.transports.base import MAX_FRAME_BYTES
from pdinfer.kv.transports.one_sided.ring import Credit, Landed, Signal
from pdinfer.kv.transports.shm.sender import COUNT, SPAN_BYTES, packed_spans
from pdinfer.kv.transports.stream.framing import DIGEST_BYTES, HEADER, Header, MessageKind, digest_bytes
from pdinfer.remote import messages
from pdinfer.testing import tiny_config_dict
from pdinfer.types import Handoff, HandoffStatus, PageGrant, PeerAddress, Request
from tests.fuzz import ends
from tests.fuzz.peers import Stranger
from tests.unit.kv.channel.heads import pool_of

TINY = Path(__file__).parents[2] / "examples" / "tiny"


@attrs.frozen
class Target:
    """A parser, valid inputs to start from, and the bytes that an input may cost beyond twice its length."""

    run: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    slack_bytes: int = 1 << 20


def frame(data: bytes) -> None:
    """Parse a control frame of the channel, and read its fields as the channel does."""
    message = wire.decode(data)
    if isinstance(message, wire.Hello | wire.Welcome):
        layout = message.layout
        _ = layout.layout_id, layout.token_bytes
    elif isinstance(message, wire.Offer):
        message.grant.unpack()
    wire.encode(message)


def packed(data: bytes) -> None:
    wire.unpack_ints(data)


def command(data: bytes) -> None:
    message = messages.decode_command(messages.digested(data))
    if isinstance(message, messages.SubmitPrefillMessage):
        message.grant.unpack(), message.request.unpack()
    elif isinstance(message, messages.SubmitDecodeMessage):
        message.request.unpack()


def report(data: bytes) -> None:
    message = messages.decode_report(messages.digested(data))
    if isinstance(message, messages.Stepped):
        for grant, request in message.granted:
            grant.unpack(), request.unpack()


def stream_header(data: bytes) -> None:
    Header.parse(data[: HEADER.size].ljust(HEADER.size, b"\0"))


def config(data: bytes) -> None:
    ModelConfig.from_dict(parse_json(data, "config.json", ConfigError))


def generation(data: bytes) -> None:
    raw = parse_json(data, "generation_config.json", ConfigError)
    sampling_defaults(raw)
    ending_ids({}, raw)


def tensors(data: bytes) -> None:
    length = header_bytes(data[:8], len(data), "model.safetensors")
    source = HeaderSource(
        file="model.safetensors", path="model.safetensors", data_start=8 + length, data_bytes=len(data) - 8 - length
    )
    parse_header(data[8 : 8 + length], source)


@cache
def _stranger() -> Stranger:
    return Stranger()


@cache
def _strangers_with_heads() -> tuple[Stranger, Stranger]:
    return Stranger(pool_of(heads=range(2, 6))), Stranger(pool_of(packed=True))


def session(data: bytes) -> None:
    """Any sequence of frames, each with its tag, on a link that is open: each is u16 length, u8 write?, frame."""
    with ends.no_logged_bugs():
        _stranger().talk(data)


def heads(data: bytes) -> None:
    """The same to ends whose pages have heads, and packed ones."""
    with ends.no_logged_bugs():
        for stranger in _strangers_with_heads():
            stranger.talk(data)


def _grant(address: PeerAddress) -> PageGrant:
    return PageGrant(
        room=b"r" * 16,
        request_id="a",
        writers=(address,),
        destinations=(address,),
        tokens=range(8),
        pages=(1, 2),
        generations=(0, 0),
        layout_id=b"l" * 32,
    )


def _wire_seeds() -> tuple[bytes, ...]:
    address = PeerAddress(b"e" * 16, 7, 0, ("tcp://127.0.0.1:1",))
    layout = _stranger().layout
    shape = PageShape(heads=range(2), num_heads=4)
    with_heads = attrs.evolve(layout, components=(attrs.evolve(layout.components[0], shape=shape),))
    word = Handoff(room=b"r" * 16, writer=address, status=HandoffStatus.LANDED, token=3)
    return tuple(
        wire.encode(message)
        for message in (
            wire.Open((wire.MAJOR, wire.MINOR), b"n" * NONCE_BYTES, keyed=False),
            wire.Hello(address, layout),
            wire.Welcome(address, layout),
            wire.Reject(TransferError("no"), (("page_size", "1", "2"),)),
            wire.Compare("0", (b"d" * 16,) * 16),
            wire.Compare("0f", (), (TensorDigest("a", "float32 [2]", b"d" * 16),)),
            wire.Hello(address, with_heads),
            wire.Data(b"r" * 16, range(3), range(8)),
            wire.Data(b"r" * 16, range(3), range(8), range(2)),
            wire.Finish(word),
            wire.Abort(b"r" * 16, TransferError("no")),
            wire.Beat(0.5),
            wire.Offer(wire.PackedGrant.of(_grant(address))),
        )
    )


def _message_seeds() -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    address = PeerAddress(b"e" * 16, 7, 0, ("tcp://127.0.0.1:1",))
    request = messages.PackedRequest.of(Request(request_id="a", prompt=(1, 2, 3)))
    packed_grant = messages.PackedGrant.of(_grant(address))
    commands = (
        messages.ConnectMessage(address, 1.0),
        messages.SubmitPrefillMessage(request, packed_grant),
        messages.SubmitDecodeMessage(request, (address,)),
        messages.ChangeWritersMessage("a", (address,)),
        messages.CancelMessage("a"),
        messages.Close(),
    )
    reports = (
        messages.Connected(address, TransferError("no"), (("a", "b", "c"),)),
        messages.Stepped(1, messages.LoadMessage(), [(packed_grant, request)]),
    )
    bodies = [[messages.encode(one)[: -messages.DIGEST_BYTES] for one in some] for some in (commands, reports)]
    return tuple(bodies[0]), tuple(bodies[1])


def _tensor_seeds() -> tuple[bytes, ...]:
    header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    text = json.dumps(header).encode()
    return (len(text).to_bytes(8, "little") + text + bytes(24),)


def _data_seeds() -> tuple[tuple[wire.Data, ...], ...]:
    """Return payloads that ends with heads, and with packed pages, take."""
    room, layers, half, rest = b"r" * 16, range(4), range(8), range(8, 16)
    return (
        (wire.Data(room, layers, half, range(2, 4)), wire.Data(room, layers, range(16), range(4, 6))),
        (wire.Data(room, layers, half, range(8)), wire.Data(room, layers, rest, range(8))),
        (wire.Data(room, layers, range(6), range(2, 6)), wire.Data(room, range(2), rest)),
    )


def _written(message: wire.Data) -> bytes:
    frame = wire.encode(message)
    return len(frame).to_bytes(2, "little") + b"\1" + frame


def _frame(body: bytes) -> bytes:
    return Header(MessageKind.FRAME, len(body)).packed() + body


def _stream_seeds() -> tuple[bytes, ...]:
    """Return seeds; see `ends.stream` for the first byte."""

    def write(frame: bytes, payload: bytes, *, digest: bool = True) -> bytes:
        head = Header(MessageKind.WRITE, len(frame), len(payload), digest).packed() + frame + payload
        return head + (digest_bytes(xxhash.xxh3_64(head)) if digest else b"")

    payload = bytes(range(200))
    return (
        b"\x03" + _frame(b"hello") + write(b"w\2", payload) + _frame(b"again") + write(b"w\0", payload[:9]),
        b"\x09" + write(b"w\xff", payload, digest=False) + write(b"w", b"", digest=False) + _frame(b"!"),
        b"\x00" + _frame(b"t") + write(b"0", payload) + write(b"w\1", b"") + write(b"?", payload),
        b"\xfd" + write(b"-w", payload),
        b"\x01" + write(b"!", payload) + _frame(b"a"),
        b"\x02" + write(b"w", payload),
    )


def _mapped_seeds() -> tuple[bytes, ...]:
    """Return seeds; see `ends.mapped` for the first two bytes."""
    source = ends.source_bytes()
    share = Header(MessageKind.SHARE, COUNT.size).packed() + COUNT.pack(len(source))
    copied = Header(MessageKind.COPIED, COUNT.size).packed() + COUNT.pack(150)

    def write(frame: bytes, *sections: Spans, digest: bool = True, between: bytes = b"") -> bytes:
        pieces = [span for section in sections for span in section]
        head = Header(MessageKind.MAPPED, len(frame), sum(length for _, length in pieces), digest).packed() + frame
        said = xxhash.xxh3_64(head + b"".join(source[offset : offset + length] for offset, length in pieces))
        named = [
            Header(MessageKind.SPANS, len(spans) * SPAN_BYTES).packed() + packed_spans(spans) for spans in sections
        ]
        tail = [Header(MessageKind.DIGEST, DIGEST_BYTES).packed(), digest_bytes(said)] if digest else []
        return b"".join([head, between, *named, *tail])

    pages: Spans = [(0, 100), (3000, 64), (100, 1)]
    return (
        b"\x03\x00" + share + write(b"w\2", pages) + _frame(b"a") + write(b"w\xff", pages, [(0, 3900)]),
        b"\x01\x00" + share + write(b"w\0", pages, digest=False) + write(b"w", digest=False) + write(b"0", pages),
        b"\x01\x08" + copied + share + write(b"w\1", pages) + copied,
        b"\x01\x18" + share + write(b"w\1", pages, between=copied) + _frame(b"!"),
        b"\x01\x20" + share + write(b"w\1", pages),
        b"\x05\x40" + _frame(b"some words") + share + write(b"-w", pages),
        b"\x03\x00" + share + write(b"w\2", [(0, 17), (100, 5), (200, 17)]),
        b"\x01\x00" + share + write(b"!", pages),
        b"\x00\x00" + _frame(b"t") + share + write(b"?", pages),
        *(bytes((1, choice)) + share for choice in range(1, 8)),
        b"\x05\x80" + share,
    )


def _ring_seeds() -> tuple[bytes, ...]:
    """Return seeds; see `ends.ring` for their format."""

    def said(kind: int, body: bytes = b"\0") -> bytes:
        return len(body).to_bytes(2, "little") + bytes((kind,)) + body

    def landed(total: int, num_bytes: int, slot: int, *, digest: bool = True) -> bytes:
        # A slot is empty until an engine writes there.
        found = xxhash.xxh3_64(bytes(num_bytes)).intdigest() if digest else None
        return said(Signal.LANDED, Landed(total, num_bytes, slot, found).packed())

    ask, offer = said(Signal.ASK), said(Signal.OFFER, ends.RING.packed())
    write = said(Signal.BEGIN, b"w\1") + landed(100, 64, 0) + landed(100, 36, 1)
    back = b"".join(said(Signal.CREDIT, Credit(slot).packed()) for slot in (0, 1))
    return (
        b"\1" + ask + write + said(0, b"a") + said(Signal.BEGIN, b"w") + landed(0, 0, 0) + write,
        b"\0" + ask + said(Signal.BEGIN, b"w\0") + landed(30, 30, 1, digest=False) + said(Signal.ALIVE) + write,
        b"\1" + ask + said(Signal.BEGIN, b"0") + landed(64, 64, 1) + said(Signal.BEGIN, b"!") + landed(1, 1, 0),
        b"\1" + ask + said(Signal.BEGIN, b"-") + landed(64, 64, 1),
        b"\1" + ask + said(Signal.BEGIN, b"?") + landed(64, 64, 1),
        b"\2" + offer + back,
        b"\5" + back + ask + write,
        b"\4" + offer,
        b"\4" + said(Signal.CREDIT, b"\xff" * 2000),
    )


@cache
def targets() -> dict[str, Target]:
    commands, reports = _message_seeds()
    frames = _wire_seeds()
    talk = b"".join(len(one).to_bytes(2, "little") + b"\0" + one for one in frames)
    return {
        "frame": Target(frame, frames),
        "packed": Target(packed, (wire.pack_ints((1, 2, 3)),)),
        "command": Target(command, commands),
        "report": Target(report, reports),
        "stream_header": Target(
            stream_header, (Header(MessageKind.FRAME, 3).packed(), Header(MessageKind.WRITE, 3, 64).packed())
        ),
        "config": Target(config, (json.dumps(tiny_config_dict("v3-yarn")).encode(),)),
        "generation": Target(generation, (TINY.joinpath("generation_config.json").read_bytes(),)),
        "tensors": Target(tensors, _tensor_seeds()),
        "session": Target(session, (talk, *(len(f).to_bytes(2, "little") + b"\0" + f for f in frames))),
        "heads": Target(heads, tuple(b"".join(map(_written, each)) for each in _data_seeds())),
        # A link that is trusted may announce a frame of MAX_FRAME_BYTES.
        "stream": Target(ends.stream, _stream_seeds(), slack_bytes=2 * MAX_FRAME_BYTES),
        "mapped": Target(ends.mapped, _mapped_seeds(), slack_bytes=2 * MAX_FRAME_BYTES),
        "ring": Target(ends.ring, _ring_seeds()),
    }


def survives(target: Target, data: bytes) -> None:
    """Run a parser; let every exception except a PDInferError out."""
    try:
        target.run(data)
    except PDInferError:
        pass
