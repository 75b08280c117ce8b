"""Every field of every message is set to what a hostile peer may say: the message is refused by name, or what comes out
is sane. The samples are those of the golden bytes, which have every field of every message."""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import msgspec
import pytest

from pdinfer.bounds import PRINTABLE, broken_bound, escaped
from pdinfer.engine.ranks import messages as rank_messages
from pdinfer.errors import PDInferError, RequestError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.remote import messages
from pdinfer.scheduling.admission import check_request
from pdinfer.stats import EngineLoad
from pdinfer.types import Request, RequestLimits
from tests.golden import samples

NAN, INF = math.nan, math.inf
ESCAPE, TURNED = "\x1b[31mred", "a\u202eb"
HOSTILE: tuple[Any, ...] = (
    *(-1, -5, 2**31, 2**53 + 1, 2**62, 2**64 - 1, True, None),
    *(NAN, INF, -INF, -0.5, 0.5, 1e10, 1e300, -1e300),
    *(ESCAPE, TURNED, "two\nlines", "\u2028", "\x9b2J", "\ufeff", "long" * 1100, ""),
    *(b"", b"abc", b"\xff" * 4, b"long" * 30, [], [1], {}, [["TRANSFER", ESCAPE]]),
)
LIMITS = [RequestLimits(name="engine", vocab_size=129280, max_tokens=1 << 20)]
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def undigested(message: Any) -> bytes:
    return messages.encode(message)[: -messages.DIGEST_BYTES]


CASES: dict[str, tuple[Callable[[bytes], object], Callable[[Any], bytes], dict[str, Any]]] = {
    "channel": (wire.decode, wire.encode, dict(samples.CHANNEL)),
    "commands": (lambda data: messages.decode_command(messages.digested(data)), undigested, dict(samples.COMMANDS)),
    "reports": (lambda data: messages.decode_report(messages.digested(data)), undigested, dict(samples.REPORTS)),
    "ranks": (rank_messages.decode, lambda message: rank_messages.encode([message]), dict(samples.RANKS)),
}


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of everything in a message but its type: lists, and their items."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        if key != "type":
            yield (*path, key)
            yield from leaves(child, (*path, key))


def put(tree: Any, path: Sequence[Any], value: object) -> Any:
    """Return a tree with another value there. What stands beside the path is not copied."""
    if not path:
        return value
    copied = copy.copy(tree)
    copied[path[0]] = put(tree[path[0]], path[1:], value)
    return copied


def check_sane(value: Any, name: str = "") -> None:
    """Check a value that may reach a user, a policy or a log."""
    if isinstance(value, messages.PackedRequest):
        check_sane_request(value.unpack())
    elif isinstance(value, messages.PackedGrant):
        check_sane(value.unpack(), name)
    elif isinstance(value, rank_messages.PackedRow):
        check_sane((value.start, value.next_token, *value.unpack().tokens, *value.unpack().pages))
    elif isinstance(value, PDInferError):
        check_sane(str(value))
    elif isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            check_sane(getattr(value, field), field)
    elif attrs.has(type(value)):
        unknown_is_0 = isinstance(value, EngineLoad)
        for attribute in attrs.fields(type(value)):
            name = "" if unknown_is_0 and attribute.name == "token_bytes" else attribute.name
            check_sane(getattr(value, attribute.name), name)
    elif isinstance(value, list | tuple):
        assert len(value) <= 1 << 16
        for item in value:
            check_sane(item, name)
    elif isinstance(value, str):
        assert len(value) <= 4096
        assert not CONTROLS.search(value)
    elif isinstance(value, bytes):
        assert len(value) <= 1 << 26
    elif isinstance(value, int):
        assert 0 <= value < 2 ** (64 if name == "epoch" else 54)
        assert name not in ("token", "index", "rank", "num_cached_tokens") or value < 2**31
        assert name not in ("page_size", "num_total_pages", "vocab_size", "token_bytes") or value > 0
    elif isinstance(value, float):
        assert math.isfinite(value)
        assert "logprob" in name or value >= 0
        assert "logprob" not in name or value <= 1e-6
        assert not name.endswith("_s") or value <= (1e15 if name == "mb_per_s" else 1e9)


def check_sane_request(request: Request) -> None:
    """Check that a request is refused with RequestError or not at all, as engines do."""
    with contextlib.suppress(RequestError):
        check_request(request, LIMITS)


@pytest.mark.parametrize("protocol", CASES)
def test_a_hostile_value_in_any_field_is_refused_by_name_or_sane(protocol: str) -> None:
    decode, encode, messages_of = CASES[protocol]
    num_refused = 0
    for what, sample in messages_of.items():
        tree = msgspec.msgpack.decode(encode(sample))
        for path in leaves(tree):
            names = [key for key in path if isinstance(key, str)]
            for value in HOSTILE:
                data = msgspec.msgpack.encode(put(tree, path, value))
                try:
                    decoded = decode(data)
                except TransferError as error:
                    num_refused += 1
                    text = str(error)
                    assert not names or any(name in text for name in names), (what, path, value, text)
                    assert len(text) < 300
                    assert not CONTROLS.search(text)
                else:
                    try:
                        check_sane(decoded)
                    except AssertionError as error:
                        raise AssertionError(f"{what}: {path} = {value!r} came through") from error
    assert num_refused


FIELDS: list[tuple[str, str, tuple[Any, ...], Any]] = [
    ("channel", "finish", ("handoff", "num_cached_tokens"), -5),
    ("channel", "finish", ("handoff", "num_cached_tokens"), 2**62),
    ("channel", "finish", ("handoff", "queue_s"), NAN),
    ("channel", "finish", ("handoff", "logprob"), NAN),
    ("channel", "finish", ("handoff", "logprob"), -INF),
    ("channel", "finish", ("handoff", "logprob"), 1.0),
    ("channel", "finish", ("handoff", "top_logprobs"), [[1, -0.5]] * 50_000),
    ("channel", "finish", ("handoff", "top_logprobs"), [[1, NAN]]),
    ("channel", "finish", ("handoff", "token"), -1),
    ("channel", "finish", ("handoff", "room"), b"r" * 17),
    ("channel", "hello", ("layout", "page_size"), 0),
    ("channel", "hello", ("layout", "components"), []),
    ("channel", "hello", ("address", "endpoints"), ["tcp://a:1\n"]),
    ("channel", "beat", ("step_age_s",), -1.0),
    ("channel", "data", ("tokens",), [5, 4]),
    ("reports", "stepped decode", ("load", "decode", "num_running_tokens"), -1),
    ("reports", "stepped decode", ("load", "decode", "busy_s"), NAN),
    ("reports", "stepped decode", ("load", "decode", "num_total_pages"), 0),
    ("reports", "stepped decode", ("load", "decode", "accept_length"), INF),
    ("reports", "stepped decode", ("tokens", 0, "usage", "cached_tokens"), -5),
    ("reports", "stepped decode", ("tokens", 0, "usage", "timeline", "granted_s"), NAN),
    ("reports", "stepped decode", ("tokens", 0, "top_logprobs"), [[1, -0.5]] * 21),
    ("reports", "stepped decode", ("tokens", 0, "request_id"), ESCAPE),
    ("reports", "stepped decode", ("granted", 0, 0, "grant", "writers"), []),
    ("reports", "stepped decode", ("granted", 0, 0, "pages"), b"\xff" * 12),
    ("reports", "stepped decode", ("granted", 0, 0, "pages"), b"\0" * 4),
    ("reports", "stepped decode", ("granted", 0, 0, "generations"), b"\0" * 4),
    ("commands", "submit_prefill", ("grant", "generations"), b"\xff" * 12),
    ("reports", "stepped decode", ("granted", 0, 0, "grant", "request_id"), "another"),
    ("reports", "stepped decode", ("granted", 0, 1, "request", "prompt"), b"abc"),
    ("reports", "stepped decode", ("num_seen",), -1),
    ("reports", "ready prefill", ("load", "prefill", "num_queued_tokens"), -1),
    ("reports", "ready prefill", ("limits", "vocab_size"), 0),
    ("commands", "connect", ("timeout_s",), NAN),
    ("ranks", "prefill", ("rooms",), []),
    ("ranks", "decode", ("counts",), []),
    ("ranks", "decode", ("rows", 0, "pages"), b"\xff" * 4),
]


@pytest.mark.parametrize(
    ("protocol", "what", "path", "value"),
    FIELDS,
    ids=[f"{what}-{path[-1]}-{number}" for number, (_, what, path, _) in enumerate(FIELDS)],
)
def test_what_is_refused(protocol: str, what: str, path: tuple[Any, ...], value: Any) -> None:
    decode, encode, messages_of = CASES[protocol]
    tree = msgspec.msgpack.decode(encode(messages_of[what]))
    path = (0, *path) if protocol == "ranks" else path
    with pytest.raises(TransferError, match=r"^(a peer|a client|an engine|a rank) sent .*"):
        decode(msgspec.msgpack.encode(put(tree, path, value)))


def test_text_of_a_peers_error_is_escaped_and_bounded() -> None:
    hostile = TransferError(f"{ESCAPE}\r\n{TURNED}\u2028\x9b2J\x00" + "x" * 10_000)
    decoded = wire.decode(wire.encode(wire.Abort(samples.ROOM, hostile)))
    assert isinstance(decoded, wire.Abort)
    text = str(decoded.error)
    assert text.startswith(r"\x1b[31mred\r\na\u202eb\u2028\x9b2J\x00xxx")
    assert text.isprintable()
    assert len(text) == 4096


def test_escaping_leaves_what_can_be_read_as_it_is() -> None:
    for text in ("", "what – and why: 7 · C:\\path", "日本語"):
        assert escaped(text) == text
        assert re.search(PRINTABLE, text)


def test_names_are_printable_wherever_python_says_so_of_what_moves_a_cursor_or_turns_text() -> None:
    for code in (*range(0x20), *range(0x7F, 0xA0), 0xAD, 0x61C, *range(0x200B, 0x2010), *range(0x2028, 0x202F), 0xFEFF):
        assert not re.search(PRINTABLE, f"a{chr(code)}b")
        assert escaped(chr(code)) != chr(code)


def test_a_refusal_is_short_and_names_the_field_at_its_end() -> None:
    said = broken_bound(ValueError("Invalid value '" + "\x1b" * 5000 + "' - at `$.field`"))
    assert said.startswith("Invalid value '")
    assert said.endswith("- at `$.field`")
    assert len(said) < 210
    assert said.isprintable()
