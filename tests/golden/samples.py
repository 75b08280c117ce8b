"""One value of every message that leaves a process, and the functions that encode it to bytes and decode it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import msgspec

from pdinfer.engine.ranks import messages as rank_messages
from pdinfer.errors import LayoutMismatch, Overloaded, RequestError, TransferError
from pdinfer.identity import TensorDigest
from pdinfer.kv.channel import wire
from pdinfer.kv.layout import KVComponent, KVLayout
from pdinfer.kv.prefix import KeyScheme
from pdinfer.kv.shapes import AxisOrder, PageShape
from pdinfer.kv.transports.one_sided import ring
from pdinfer.kv.transports.shm.sender import packed_spans
from pdinfer.kv.transports.stream import framing
from pdinfer.model.batch import Row
from pdinfer.remote import messages
from pdinfer.stats import ChannelStats, DecodeLoad, PeerStats, PrefillLoad
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
    Timeline,
    TokenEvent,
    Usage,
)


@attrs.frozen
class Protocol:
    """A set of messages that change together. `constant` names the constant that holds its version."""

    name: str
    constant: str
    version: str
    samples: Mapping[str, Any]
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]

    def encoded(self) -> dict[str, str]:
        """Return the hexadecimal bytes of every sample by name."""
        return {name: self.encode(sample).hex() for name, sample in self.samples.items()}


ROOM = bytes(range(16))
PREFILL = PeerAddress(b"prefill engine 0", 7, 0, ("tcp://10.0.0.1:4000", "unix:///run/kv.sock"))
DECODE = PeerAddress(b"decode engine 0.", 2**55 + 1, 3, ("tcp://[::1]:65535",))
LAYOUT = KVLayout(
    model_id=b"m" * 32,
    weights_id=b"w" * 32,
    page_size=64,
    components=(
        KVComponent(name="latent", format="mla.512+64", dtype="bfloat16", width=576, token_bytes=1152, layers=(0, 1)),
        KVComponent(name="index", format="dsa", dtype="uint8", width=132, token_bytes=132, layers=(1,)),
    ),
)
HEADS = KVLayout(
    model_id=b"m" * 32,
    weights_id=b"w" * 32,
    page_size=16,
    components=(
        KVComponent(
            name="kv",
            format="k|v.128",
            dtype="bfloat16",
            width=256,
            token_bytes=512,
            layers=(0, 1),
            shape=PageShape(heads=range(4, 8), num_heads=8, order=AxisOrder.LBNHC),
        ),
    ),
)
STATE = NamedState(name="mtp.hidden", version=1, dtype="float32", shape=(2,), data=b"\0\0\x80?\0\0\0@")
TOPS = ((5, -0.5), (6, -1.25))
LANDED = Handoff(
    room=ROOM,
    writer=PREFILL,
    status=HandoffStatus.LANDED,
    token=5,
    logprob=-0.5,
    top_logprobs=TOPS,
    state=(STATE,),
    num_cached_tokens=3,
    queue_s=0.25,
    compute_s=1.5,
    first_byte_s=0.125,
    last_byte_s=2.0,
)
ABORTED = Handoff(room=ROOM, writer=PREFILL, status=HandoffStatus.ABORTED, error=Overloaded("full", retry_after_s=4.0))
REQUEST = Request(
    request_id="a",
    prompt=(1, 2, 129279),
    output=(7,),
    sampling=SamplingParams(
        max_new_tokens=9,
        min_new_tokens=1,
        temperature=0.5,
        top_k=40,
        top_p=0.75,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.25,
        logit_bias=((3, -100.0),),
        seed=2**64 - 1,
        stop_token_ids=(8, 9),
        ignore_eos=True,
        logprobs=2,
        logits_processor="json",
        logits_processor_argument='{\n"type": "object"}',
    ),
    priority=-1,
    deadline_s=30.5,
    cache_salt=b"tenant",
    alone=True,
    expected_new_tokens=5,
)
GRANT = PageGrant(
    room=ROOM,
    request_id="a",
    writers=(PREFILL,),
    destinations=(DECODE,),
    tokens=range(64, 200),
    pages=(9, 2, 4),
    generations=(0, 1, 70000),
    layout_id=b"l" * 32,
)
KV_STATS = ChannelStats(
    bytes_sent=1,
    bytes_received=2,
    writes_sent=3,
    writes_received=4,
    receive_s=0.5,
    frames_dropped=6,
    writes_damaged=7,
    peers=(
        PeerStats(
            address=DECODE,
            connected=True,
            bytes_sent=1,
            bytes_received=2,
            mb_per_s=2.5,
            inflight_bytes=4,
            window_bytes=5,
            retries=6,
            frames_dropped=7,
            step_age_s=0.0625,
        ),
    ),
)
COMMON: dict[str, Any] = {
    "num_free_pages": 10,
    "num_total_pages": 16,
    "page_size": 64,
    "num_tokens": 1000,
    "busy_s": 2.5,
    "transport": "tcp",
    "providers": (("mla_decode", "native"),),
    "kv": KV_STATS,
    "step_age_s": 0.5,
    "num_cached_pages": 3,
    "prefix_query_tokens": 100,
    "prefix_hit_tokens": 40,
    "placement_epoch": 2,
    "is_placement_staged": True,
    "placement_error": "no",
}
PREFILL_LOAD = PrefillLoad(address=PREFILL, num_queued_requests=1, num_queued_tokens=64, unsent_bytes=4096, **COMMON)
DECODE_LOAD = DecodeLoad(
    address=DECODE,
    num_waiting_requests=1,
    num_waiting_tokens=2,
    num_granted_requests=3,
    num_running_requests=4,
    num_running_tokens=5,
    num_draft_tokens=6,
    num_accepted_tokens=3,
    accept_length=1.5,
    **COMMON,
)
TIMELINE = Timeline(
    queued_s=0.0,
    granted_s=0.125,
    prefill_began_s=0.1875,
    prefill_ended_s=0.5,
    first_byte_s=0.25,
    last_byte_s=0.5,
    committed_s=0.75,
    first_token_s=1.0,
)
USAGE = Usage(
    prompt_tokens=3,
    output_tokens=2,
    cached_tokens=1,
    queue_s=0.125,
    ttft_s=1.0,
    timeline=TIMELINE,
    num_draft_tokens=6,
    num_accepted_tokens=3,
    num_retries=1,
)
LAST_TOKEN = TokenEvent(
    request_id="a",
    token=5,
    index=1,
    logprob=-0.5,
    top_logprobs=TOPS,
    finish_reason=FinishReason.STOP,
    usage=USAGE,
    at_s=1.25,
)
FAILED = TokenEvent(request_id="b", token=None, index=0, finish_reason=FinishReason.FAILED, error=RequestError("bad"))
DIFFERENCES = (("page_size", "64", "32"),)

CHANNEL: dict[str, wire.Message] = {
    "open": wire.Open((3, 0), bytes(range(16)), keyed=True),
    "hello": wire.Hello(PREFILL, LAYOUT, ("feature",)),
    "welcome": wire.Welcome(DECODE, LAYOUT),
    "reject": wire.Reject(LayoutMismatch("they differ"), DIFFERENCES, again=True),
    "reject a second link": wire.Reject(
        TransferError("there is one"), again=True, refuser=attrs.evolve(DECODE, endpoints=())
    ),
    "hello with heads": wire.Hello(PREFILL, HEADS),
    "hello with every id": wire.Hello(
        PREFILL, attrs.evolve(LAYOUT, mtp_weights_id=b"d" * 32, sampled_weights_id=b"s" * 32)
    ),
    "compare": wire.Compare("", tuple(bytes([digit]) * 16 for digit in range(16))),
    "compare tensors": wire.Compare("0f", (), (TensorDigest("model.norm.weight", "bfloat16 [64]", b"d" * 16),)),
    "data": wire.Data(ROOM, range(2, 5), range(64, 200)),
    "data of heads": wire.Data(ROOM, range(2, 5), range(64, 200), range(4, 6)),
    "finish": wire.Finish(LANDED),
    "finish aborted": wire.Finish(ABORTED),
    "abort": wire.Abort(ROOM, TransferError("not wanted – any more")),
    "beat": wire.Beat(0.5),
    "offer": wire.Offer(wire.PackedGrant.of(GRANT)),
}

_PACKED = messages.PackedRequest.of(REQUEST), messages.PackedGrant.of(GRANT)
COMMANDS: dict[str, messages.Command] = {
    "beat": messages.BeatMessage(0.5),
    "connect": messages.ConnectMessage(DECODE, 10.0),
    "submit_prefill": messages.SubmitPrefillMessage(*_PACKED),
    "submit_decode": messages.SubmitDecodeMessage(_PACKED[0], (PREFILL,)),
    "change_writers": messages.ChangeWritersMessage("a", (PREFILL, DECODE)),
    "cancel": messages.CancelMessage("a"),
    "close": messages.Close(),
    "disconnect": messages.Disconnect(PREFILL),
    "renew": messages.Renew(3),
    "become": messages.Become("decode"),
}
REPORTS: dict[str, messages.Report] = {
    "beat of an engine": messages.BeatMessage(0.5),
    "computing": messages.Computing(("a", "b")),
    "ready prefill": messages.Ready(
        PREFILL,
        RequestLimits(name="prefill", vocab_size=129280, max_tokens=1024, logits_processors=("json",)),
        messages.LoadMessage(prefill=PREFILL_LOAD),
        (PREFILL,),
        version=7,
        minor=2,
        required=("feature",),
        session=3,
        hung_s=60.0,
        key_scheme=KeyScheme(layout_id=b"l" * 32, page_size=64, lookahead=1, by_writer=True),
        pages=messages.PageChanges(True, b"a" * 16),
        roles=("decode",),
        leaders=(PREFILL, DECODE),
    ),
    "connected": messages.Connected(DECODE, LayoutMismatch("they differ"), DIFFERENCES),
    "stepped decode": messages.Stepped(
        3,
        messages.LoadMessage(decode=DECODE_LOAD),
        granted=[_PACKED[::-1]],
        refused=[Refused(request_id="b", error=Overloaded("full", retry_after_s=4.0))],
        tokens=[LAST_TOKEN, FAILED],
        pages=messages.PageChanges(added=b"b" * 32, dropped=b"c" * 16),
    ),
}
SESSION: dict[str, messages.Command | messages.Report] = {**COMMANDS, **REPORTS}

_ROW = rank_messages.PackedRow.of(Row([1, 2], 62, [4, 9], 3))
RANKS: dict[str, rank_messages.Message] = {
    "connect": rank_messages.DialMessage(DECODE),
    "drop_peer": rank_messages.DropPeerMessage(DECODE),
    "expect": rank_messages.Expect(_PACKED[1]),
    "abort": rank_messages.AbortMessage(ROOM, TransferError("no")),
    "accept": rank_messages.Accept(_PACKED[1]),
    "finish": rank_messages.FinishMessage(ROOM, TransferError("no")),
    "prefill": rank_messages.PrefillMessage([_ROW], [ROOM], [range(62, 64)]),
    "decode": rank_messages.DecodeMessage([_ROW], [4], [1], [wire.pack_ints([7])]),
    "keep_draft": rank_messages.KeepDraft(4, [STATE]),
    "drop_draft": rank_messages.DropDraft(4),
    "expecting": rank_messages.Expecting(ROOM),
    "settled": rank_messages.Settled(ROOM, TransferError("no")),
    "stopped": rank_messages.Stopped(ROOM, TransferError("no")),
    "sent": rank_messages.SentMessage(ROOM),
    "linked": rank_messages.Linked([PREFILL, DECODE]),
}

_WRITES = (framing.MessageKind.WRITE, framing.MessageKind.MAPPED)
STREAM: dict[str, Any] = {
    **{f"header {kind.name}": framing.Header(kind, 300) for kind in framing.MessageKind},
    **{f"header {kind.name} with a payload": framing.Header(kind, 300, 2**33, digested=True) for kind in _WRITES},
    "spans": [(0, 100), (2**40, 64)],
    "ring offer": ring.RingOffer("10.0.0.1:12345", 2**47, 1 << 22, 8),
    "ring landed": ring.Landed(2**33, 1 << 22, 7, 2**64 - 1),
    "ring landed without a digest": ring.Landed(100, 64, 1, None),
    "ring credit": ring.Credit(7),
    **{f"ring {kind.name}": kind for kind in ring.Signal},
}


def _encode_stream(sample: Any) -> bytes:
    if isinstance(sample, list):
        return packed_spans(sample)
    return bytes([sample]) if isinstance(sample, ring.Signal) else bytes(sample.packed())


def _decode_session(data: bytes) -> messages.Command | messages.Report:
    tag = msgspec.msgpack.decode(data[: -messages.DIGEST_BYTES])["type"]
    return (messages.decode_command if tag in COMMANDS else messages.decode_report)(data)


def protocols() -> tuple[Protocol, ...]:
    version = f"{wire.MAJOR}.{wire.MINOR}"
    return (
        Protocol("channel", "kv.wire.MINOR (or MAJOR)", version, CHANNEL, wire.encode, wire.decode),
        Protocol(
            "session",
            "messages.MINOR (or VERSION)",
            f"{messages.VERSION}.{messages.MINOR}",
            SESSION,
            messages.encode,
            _decode_session,
        ),
        Protocol(
            "ranks",
            "rank_messages.VERSION",
            str(rank_messages.VERSION),
            RANKS,
            lambda message: rank_messages.encode([message]),
            lambda data: rank_messages.decode(data)[0],
        ),
        Protocol("stream", "kv.framing.VERSION", str(framing.VERSION), STREAM, _encode_stream, lambda data: data),
    )
