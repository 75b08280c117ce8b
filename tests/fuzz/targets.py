"""Every parser of bytes from a file or a peer, as a function that may only return or raise a PDInferError.

`run.py` throws coverage-guided input at them for as long as one likes; `test_fuzz.py` a few thousand mutated seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import attrs

from pdinfer import messages
from pdinfer.config import ModelConfig
from pdinfer.errors import ConfigError, PDInferError, TransferError
from pdinfer.files import parse_json
from pdinfer.hf_config import check_generation
from pdinfer.kv import wire
from pdinfer.kv.framing import HEADER, Header, Kind
from pdinfer.kv.seal import NONCE_BYTES
from pdinfer.tensor_header import HeaderSource, header_bytes, parse_header
from pdinfer.testing import tiny_config_dict
from pdinfer.types import Handoff, HandoffStatus, PageGrant, PeerAddress, Request
from tests.fuzz.peers import Stranger

TINY = Path(__file__).parents[2] / "examples" / "tiny"


@attrs.frozen
class Target:
    """A parser, and valid inputs to start from."""

    run: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


def frame(data: bytes) -> None:
    """A control frame of the channel, and what its fields are asked for."""
    message = wire.decode(data)
    if isinstance(message, wire.Hello | wire.Welcome):
        layout = message.layout
        _ = layout.layout_id, layout.token_bytes
    wire.encode(message)


def packed(data: bytes) -> None:
    wire.unpack_ints(data)


def command(data: bytes) -> None:
    message = messages.decode_command(messages.digested(data))
    if isinstance(message, messages.SubmitPrefill):
        message.grant.unpack(), message.request.unpack()
    elif isinstance(message, messages.SubmitDecode):
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
    check_generation(parse_json(data, "generation_config.json", ConfigError))


def tensors(data: bytes) -> None:
    length = header_bytes(data[:8], len(data), "model.safetensors")
    source = HeaderSource(
        file="model.safetensors", path="model.safetensors", data_start=8 + length, data_bytes=len(data) - 8 - length
    )
    parse_header(data[8 : 8 + length], source)


@cache
def _stranger() -> Stranger:
    return Stranger()


def session(data: bytes) -> None:
    """Any sequence of frames, sealed as they must be, on a link that is open: each is u16 length, u8 write?, frame."""
    _stranger().talk(data)


def _wire_seeds() -> tuple[bytes, ...]:
    address = PeerAddress(b"e" * 16, 7, 0, ("tcp://127.0.0.1:1",))
    layout = _stranger().layout
    word = Handoff(room=b"r" * 16, writer=address, status=HandoffStatus.LANDED, token=3)
    return tuple(
        wire.encode(message)
        for message in (
            wire.Open((wire.MAJOR, wire.MINOR), b"n" * NONCE_BYTES, keyed=False),
            wire.Hello(address, layout),
            wire.Welcome(address, layout),
            wire.Reject(TransferError("no"), (("page_size", "1", "2"),)),
            wire.Data(b"r" * 16, range(3), range(8)),
            wire.Finish(word),
            wire.Abort(b"r" * 16, TransferError("no")),
            wire.Beat(0.5),
        )
    )


def _message_seeds() -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    address = PeerAddress(b"e" * 16, 7, 0, ("tcp://127.0.0.1:1",))
    request = messages.PackedRequest.of(Request(request_id="a", prompt=(1, 2, 3)))
    grant = PageGrant(
        room=b"r" * 16,
        request_id="a",
        writers=(address,),
        destinations=(address,),
        tokens=range(8),
        pages=(1, 2),
        generations=(0, 0),
        layout_id=b"l" * 32,
    )
    packed_grant = messages.PackedGrant.of(grant)
    commands = (
        messages.Connect(address, 1.0),
        messages.SubmitPrefill(request, packed_grant),
        messages.SubmitDecode(request, (address,)),
        messages.ChangeWriters("a", (address,)),
        messages.Cancel("a"),
        messages.Close(),
    )
    reports = (
        messages.Connected(address, TransferError("no"), (("a", "b", "c"),)),
        messages.Stepped(1, messages.Load(), [(packed_grant, request)]),
    )
    bodies = [[messages.encode(one)[: -messages.DIGEST_BYTES] for one in some] for some in (commands, reports)]
    return tuple(bodies[0]), tuple(bodies[1])


def _tensor_seeds() -> tuple[bytes, ...]:
    header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    text = json.dumps(header).encode()
    return (len(text).to_bytes(8, "little") + text + bytes(24),)


@cache
def targets() -> dict[str, Target]:
    """All of them by name."""
    commands, reports = _message_seeds()
    frames = _wire_seeds()
    talk = b"".join(len(one).to_bytes(2, "little") + b"\0" + one for one in frames)
    return {
        "frame": Target(frame, frames),
        "packed": Target(packed, (wire.pack_ints((1, 2, 3)),)),
        "command": Target(command, commands),
        "report": Target(report, reports),
        "stream_header": Target(stream_header, (Header(Kind.FRAME, 3, 0).packed(), Header(Kind.WRITE, 3, 64).packed())),
        "config": Target(config, (json.dumps(tiny_config_dict("v3-yarn")).encode(),)),
        "generation": Target(generation, (TINY.joinpath("generation_config.json").read_bytes(),)),
        "tensors": Target(tensors, _tensor_seeds()),
        "session": Target(session, (talk, *(len(f).to_bytes(2, "little") + b"\0" + f for f in frames))),
    }


def survives(target: Target, data: bytes) -> None:
    """Runs a parser; whatever it raises but a PDInferError comes out."""
    try:
        target.run(data)
    except PDInferError:
        pass
