"""Any bytes from a peer decode to a message or raise a TransferError, and never do anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdinfer import bounds
from pdinfer.errors import BY_CODE, LayoutMismatch, Overloaded, PDInferError, RequestError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.layout import KVComponent, KVLayout
from pdinfer.kv.shapes import AxisOrder, PageShape
from pdinfer.remote import messages
from pdinfer.stats import ChannelStats, DecodeLoad, PrefillLoad
from pdinfer.types import (
    FinishReason,
    Handoff,
    HandoffStatus,
    NamedState,
    PageGrant,
    PeerAddress,
    Refused,
    Request,
    RequestLimits,
    SamplingParams,
    TokenEvent,
    Usage,
)
from tests.slices import examples

texts = st.text(st.just(" ") | st.characters(exclude_categories=("C", "Z")), max_size=12)
blobs = st.binary(min_size=1, max_size=16)
ints = st.integers(-(2**63), 2**64 - 1)
counts = st.integers(0, bounds.MAX_COUNT)
ids = st.integers(0, bounds.MAX_INDEX)
positives = st.integers(1, 1 << 20)
floats = st.floats(allow_nan=False)
seconds = st.floats(0.0, bounds.MAX_SECONDS)
logprobs = st.floats(-3e38, 0.0)
errors = st.one_of(
    st.builds(lambda code, text: BY_CODE[code](text), st.sampled_from(sorted(BY_CODE)), texts),
    st.builds(lambda text, seconds: Overloaded(text, retry_after_s=seconds), texts, st.floats(0, 1e9)),
)
maybe_errors = st.none() | errors


def tuples(of: st.SearchStrategy[Any], *, least: int = 0) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, min_size=least, max_size=3).map(tuple)


@st.composite
def spans(draw: st.DrawFn) -> range:
    start = draw(ids)
    return range(start, draw(st.integers(start, 2**31 - 1)))


def values(kind: type, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **fields)


addresses = values(PeerAddress, engine_id=blobs, epoch=st.integers(0, 2**64 - 1), rank=ids, endpoints=tuples(texts))
shapes = st.just(msgspec.UNSET) | values(
    PageShape,
    heads=st.integers(0, 8).map(lambda start: range(start, start + 2)),
    num_heads=st.integers(10, bounds.MAX_INDEX),
    order=st.sampled_from([order for order in AxisOrder if order.keeps_pages_whole]),
    packed=st.booleans(),
)
components = values(
    KVComponent, name=texts, format=texts, dtype=texts, width=ids, token_bytes=positives, layers=tuples(ids)
)
layouts = st.builds(
    lambda layout, shape: attrs.evolve(
        layout, components=tuple(attrs.evolve(part, shape=shape) for part in layout.components)
    ),
    values(KVLayout, model_id=blobs, weights_id=blobs, page_size=positives, components=tuples(components, least=1)),
    shapes,
)
states = values(NamedState, name=texts, version=ids, dtype=texts, shape=tuples(ids), data=blobs)
tops = tuples(st.tuples(ids, logprobs))
biases = tuples(st.tuples(ints, floats))
handoffs = values(
    Handoff,
    room=blobs,
    writer=addresses,
    status=st.sampled_from(HandoffStatus),
    error=maybe_errors,
    token=st.none() | ids,
    logprob=st.none() | logprobs,
    top_logprobs=tops,
    state=tuples(states),
    num_cached_tokens=ids,
    queue_s=seconds,
    compute_s=seconds,
    first_byte_s=st.none() | seconds,
    last_byte_s=st.none() | seconds,
)
fields = tuples(st.tuples(texts, texts, texts))
versions = st.tuples(ids, ids)
grants = values(
    PageGrant,
    room=blobs,
    request_id=texts,
    writers=tuples(addresses, least=1),
    destinations=tuples(addresses, least=1),
    tokens=spans(),
    pages=st.tuples(ids, ids),
    generations=st.tuples(ids, ids),
    layout_id=blobs,
)
packed_grants = grants.map(wire.PackedGrant.of)
wire_messages = st.one_of(
    values(wire.Open, version=versions, nonce=st.binary(min_size=16, max_size=16), keyed=st.booleans()),
    values(wire.Hello, address=addresses, layout=layouts, required=tuples(texts)),
    values(wire.Welcome, address=addresses, layout=layouts),
    values(wire.Reject, error=errors, fields=fields, refuser=st.none() | addresses),
    values(wire.Data, room=blobs, layers=spans(), tokens=spans(), heads=st.none() | spans()),
    values(wire.Finish, handoff=handoffs),
    values(wire.Abort, room=blobs, error=errors),
    values(wire.Beat, step_age_s=seconds),
    values(wire.Offer, grant=packed_grants),
)

samplings = values(
    SamplingParams,
    max_new_tokens=ints,
    min_new_tokens=ints,
    temperature=floats,
    repetition_penalty=floats,
    logit_bias=biases,
    seed=st.none() | ints,
    stop_token_ids=tuples(ints),
    ignore_eos=st.booleans(),
    logprobs=st.none() | ints,
    logits_processor=st.none() | texts,
    logits_processor_argument=texts,
)
requests = values(
    Request,
    request_id=st.none() | texts,
    prompt=tuples(ids),
    output=tuples(ids),
    sampling=samplings,
    priority=ints,
    deadline_s=st.none() | floats,
    cache_salt=blobs,
)
usages = values(
    Usage, prompt_tokens=counts, output_tokens=counts, cached_tokens=counts, queue_s=seconds, ttft_s=st.none() | seconds
)
token_events = values(
    TokenEvent,
    request_id=texts,
    token=st.none() | ids,
    index=ids,
    logprob=st.none() | logprobs,
    top_logprobs=tops,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    error=maybe_errors,
    usage=st.none() | usages,
)
shared = {
    "address": addresses,
    "num_free_pages": counts,
    "num_total_pages": positives,
    "page_size": positives,
    "num_tokens": counts,
    "busy_s": seconds,
    "transport": texts,
    "providers": tuples(st.tuples(texts, texts)),
    "kv": values(ChannelStats, bytes_sent=counts, receive_s=seconds),
}
loads = values(
    messages.LoadMessage,
    prefill=st.none()
    | values(PrefillLoad, num_queued_requests=counts, num_queued_tokens=counts, unsent_bytes=counts, **shared),
    decode=st.none()
    | values(
        DecodeLoad,
        num_waiting_requests=counts,
        num_waiting_tokens=counts,
        num_granted_requests=counts,
        num_running_requests=counts,
        num_running_tokens=counts,
        **shared,
    ),
)
packed_requests = requests.map(messages.PackedRequest.of)
commands = st.one_of(
    values(messages.ConnectMessage, peer=addresses, timeout_s=seconds),
    values(messages.SubmitPrefillMessage, request=packed_requests, grant=packed_grants),
    values(messages.ChangeWritersMessage, request_id=texts, writers=tuples(addresses)),
    values(messages.SubmitDecodeMessage, request=packed_requests, writers=tuples(addresses)),
    values(messages.CancelMessage, request_id=texts),
    st.just(messages.Close()),
)
granted = st.builds(
    lambda grant, request: (
        messages.PackedGrant.of(grant),
        messages.PackedRequest.of(attrs.evolve(request, request_id=grant.request_id)),
    ),
    grants,
    requests,
)
reports = st.one_of(
    values(
        messages.Ready,
        address=addresses,
        limits=values(RequestLimits, name=texts, vocab_size=positives, max_tokens=counts),
        load=loads,
    ),
    values(messages.Connected, peer=addresses, error=maybe_errors, fields=fields),
    values(
        messages.Stepped,
        num_seen=counts,
        load=loads,
        granted=st.lists(granted, max_size=2),
        refused=st.lists(values(Refused, request_id=texts, error=errors), max_size=2),
        tokens=st.lists(token_events, max_size=2),
    ),
)


def plain(value: object) -> object:
    """Convert a message to builtins, so that messages that hold errors can be compared."""
    if isinstance(value, PDInferError):
        return type(value), str(value)
    if isinstance(value, msgspec.Struct):
        return type(value), *(plain(getattr(value, name)) for name in value.__struct_fields__)
    if attrs.has(type(value)):
        return type(value), *(plain(getattr(value, field.name)) for field in attrs.fields(type(value)))
    if isinstance(value, list | tuple):
        return type(value), *map(plain, value)
    return value


@examples(60)
@given(wire_messages)
def test_wire_messages_survive_the_trip(message: wire.Message) -> None:
    assert plain(wire.decode(wire.encode(message))) == plain(message)


@settings(max_examples=40)
@given(commands)
def test_commands_survive_the_trip(message: messages.Command) -> None:
    assert plain(messages.decode_command(messages.encode(message))) == plain(message)


@settings(max_examples=40)
@given(reports)
def test_reports_survive_the_trip(message: messages.Report) -> None:
    assert plain(messages.decode_report(messages.encode(message))) == plain(message)


@settings(max_examples=40)
@given(commands, st.data())
def test_a_message_that_was_altered_is_refused(message: messages.Command, data: st.DataObject) -> None:
    whole = bytearray(messages.encode(message))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(TransferError, match="digest"):
        messages.decode_command(bytes(whole))


@settings(max_examples=40)
@given(requests, grants)
def test_packed_values_unpack_to_themselves(request: Request, grant: PageGrant) -> None:
    assert messages.PackedRequest.of(request).unpack() == request
    assert messages.PackedGrant.of(grant).unpack() == grant


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_errors_keep_their_class_and_text(code: str) -> None:
    decoded = wire.decode(wire.encode(wire.Abort(b"r", BY_CODE[code]("what – and why"))))
    assert isinstance(decoded, wire.Abort)
    assert type(decoded.error) is BY_CODE[code]
    assert str(decoded.error) == "what – and why"


def test_errors_of_a_later_version_become_the_base_class() -> None:
    frame = msgspec.msgpack.encode({"type": "abort", "room": b"r", "error": ("QUANTUM", "later")})
    decoded = wire.decode(frame)
    assert isinstance(decoded, wire.Abort)
    assert type(decoded.error) is PDInferError


def test_fields_of_a_later_version_are_ignored() -> None:
    frame = msgspec.msgpack.encode({"type": "data", "room": b"r", "layers": (0, 3), "tokens": (4, 9), "new": [1]})
    decoded = wire.decode(frame)
    assert isinstance(decoded, wire.Data)
    assert (decoded.layers, decoded.tokens) == (range(3), range(4, 9))


@pytest.mark.parametrize("nonce", [b"", b"n" * 15, b"n" * 17, "n" * 16, None])
def test_a_nonce_of_another_size_is_refused(nonce: object) -> None:
    with pytest.raises(TransferError):
        wire.decode(msgspec.msgpack.encode({"type": "open", "version": (2, 0), "nonce": nonce, "keyed": False}))


def test_what_errors_carry_beside_their_text_has_defaults() -> None:
    for error in (Overloaded("full"), LayoutMismatch("no", fields=(("a", "b", "c"),))):
        decoded = wire.decode(wire.encode(wire.Abort(b"r", error)))
        assert isinstance(decoded, wire.Abort)
        assert str(decoded.error) == str(error)


def test_when_to_try_again_travels_and_is_said_once() -> None:
    refused = Refused(request_id="a", error=Overloaded("full", retry_after_s=9.0))
    for _ in range(3):
        report = messages.Stepped(0, messages.LoadMessage(), refused=[refused])
        decoded = messages.decode_report(messages.encode(report))
        assert isinstance(decoded, messages.Stepped)
        (refused,) = decoded.refused
        assert isinstance(refused.error, Overloaded)
        assert refused.error.retry_after_s == 9.0
        assert str(refused.error) == "full; try again in 9 s"


@pytest.mark.parametrize(
    "error",
    [
        *(("OVERLOADED", "full", seconds) for seconds in (-1.0, float("nan"), float("inf"), "soon", None, True)),
        ("OVERLOADED", "full", 1.0, 1.0),
        ("TRANSFER", "no", 1.0),
        ("OVERLOADED",),
        (1, "text"),
        "OVERLOADED",
        {},
    ],
)
def test_what_is_no_error_is_refused(error: object) -> None:
    with pytest.raises(TransferError):
        wire.decode(msgspec.msgpack.encode({"type": "abort", "room": b"r", "error": error}))


def undigested(message: messages.Command | messages.Report) -> bytes:
    """Return what the parser behind the digest gets."""
    return messages.encode(message)[: -messages.DIGEST_BYTES]


DECODERS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes], st.SearchStrategy[Any]]] = {
    "wire": (wire.decode, wire.encode, wire_messages),
    "command": (lambda data: messages.decode_command(messages.digested(data)), undigested, commands),
    "report": (lambda data: messages.decode_report(messages.digested(data)), undigested, reports),
}


def check_answer(data: bytes, which: str) -> None:
    """Check for a TransferError with a short text, or a message that survives another round trip."""
    decode, encode, _ = DECODERS[which]
    try:
        message = decode(data)
    except TransferError as error:
        assert len(str(error)) < 300  # noqa: PT017  # either outcome is right
        return
    frame = encode(message)
    assert encode(decode(frame)) == frame


DEEP = b"\x91" * 10_000
"""Ten thousand nested lists; the frames after it declare 2**32 - 1 elements, or hold an extension type."""
HOSTILE = [
    b"",
    b"\x00",
    b"\xc1",
    DEEP,
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xd4\x01\x00",
]


@pytest.mark.parametrize("which", DECODERS)
@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: data[:6].hex() or "empty")
def test_hostile_frames(which: str, data: bytes) -> None:
    with pytest.raises(TransferError):
        DECODERS[which][0](data)


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: data[:6].hex() or "empty")
def test_hostile_values_inside_a_message(data: bytes) -> None:
    whole = wire.encode(wire.Abort(b"r", PDInferError("x")))
    for last in (b"\xa4room", b"\xa5error"):
        with pytest.raises(TransferError):
            wire.decode(b"\x84" + whole[1:] + last + data)
    check_answer(b"\x84" + whole[1:] + b"\xa3new" + data, "wire")


@pytest.mark.parametrize("which", DECODERS)
@examples(150)
@given(data=st.binary(max_size=80))
def test_random_bytes(which: str, data: bytes) -> None:
    check_answer(data, which)


@pytest.mark.parametrize("which", DECODERS)
@examples(120)
@given(data=st.data())
def test_mutated_messages(which: str, data: st.DataObject) -> None:
    _, encode, strategy = DECODERS[which]
    frame = bytearray(encode(data.draw(strategy)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(frame) - 1))
        if data.draw(st.booleans()):
            frame[place] = data.draw(st.integers(0, 255))
        else:
            frame[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(min_size=1, max_size=5))
    check_answer(bytes(frame), which)


builtins = st.recursive(
    st.none() | st.booleans() | ints | st.floats() | texts | blobs,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("which", DECODERS)
@examples(100)
@given(data=st.data())
def test_fields_of_the_wrong_type(which: str, data: st.DataObject) -> None:
    _, encode, strategy = DECODERS[which]
    message = msgspec.msgpack.decode(encode(data.draw(strategy)))
    node = message
    while True:
        key = data.draw(st.sampled_from(sorted(node)) if isinstance(node, dict) else st.integers(0, len(node) - 1))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(builtins)
    check_answer(msgspec.msgpack.encode(message), which)


@pytest.mark.parametrize("which", DECODERS)
@settings(max_examples=30)
@given(data=st.data())
def test_cut_messages_are_refused(which: str, data: st.DataObject) -> None:
    decode, encode, strategy = DECODERS[which]
    frame = encode(data.draw(strategy))
    with pytest.raises(TransferError):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))])
    with pytest.raises(TransferError):
        decode(frame + b"\x00")


@pytest.mark.parametrize(
    "span",
    [
        (-1, 3),
        (5, 4),
        (0, 2**31),
        (2**63, 2**63),
        (0, 1, 2),
        (0,),
        (),
        (0.0, 1.0),
        (True, False),
        "01",
        None,
        5,
        {0: 1},
    ],
)
def test_ranges_out_of_bounds_are_refused(span: object) -> None:
    for layers, tokens in ((span, (0, 1)), ((0, 1), span)):
        frame = msgspec.msgpack.encode({"type": "data", "room": b"r", "layers": layers, "tokens": tokens})
        with pytest.raises(TransferError):
            wire.decode(frame)


@pytest.mark.parametrize("error", [None, (), ("TRANSFER",), ("TRANSFER", 5), (5, "x"), ("A", "b", "c"), "TRANSFER", {}])
def test_malformed_errors_are_refused(error: object) -> None:
    with pytest.raises(TransferError):
        wire.decode(msgspec.msgpack.encode({"type": "abort", "room": b"r", "error": error}))


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_ints_unpack_to_themselves(values: list[int]) -> None:
    data = wire.pack_ints(values)
    assert data == b"".join(value.to_bytes(4, "little", signed=True) for value in values)
    assert wire.unpack_ints(data) == tuple(values)
    assert all(type(value) is int for value in wire.unpack_ints(data))


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**200, 1.5, "token", None], ids=str)
def test_ids_without_a_place_in_32_bits_are_refused(value: object) -> None:
    with pytest.raises(RequestError, match="ids must be ints of 32 bits"):
        wire.pack_ints([1, value])  # type: ignore[list-item]


@given(st.binary().filter(lambda data: len(data) % 4))
@example(b"abc")
def test_a_piece_of_an_int_is_refused(data: bytes) -> None:
    with pytest.raises(TransferError, match="not a multiple of 4"):
        wire.unpack_ints(data)


def test_what_has_no_encoding_says_so() -> None:
    with pytest.raises(NotImplementedError, match="cannot encode a object"):
        wire.to_builtin(object())
    with pytest.raises(NotImplementedError, match="cannot decode a object"):
        wire.from_builtin(object, 5)
