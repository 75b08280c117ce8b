"""The bytes of every message are those that were committed for its version; a failure says what to do about a
change."""

from __future__ import annotations

import json
import typing
from typing import Any

import msgspec
import pytest

from pdinfer.engine.ranks import messages as rank_messages
from pdinfer.kv.channel import wire
from pdinfer.kv.transports.one_sided import ring
from pdinfer.kv.transports.stream import framing
from pdinfer.remote import messages
from tests.golden import files, samples
from tests.golden.samples import Protocol

PROTOCOLS = {protocol.name: protocol for protocol in samples.protocols()}
CURRENT = files.current()
UNIONS = [
    (wire.Message, "channel"),
    (messages.Command, "session"),
    (messages.Report, "session"),
    (rank_messages.Message, "ranks"),
]
"""Whatever is sent, and the protocol that it belongs to."""
ENUMS = {
    "channel-3.0": {
        "AxisOrder": ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"),
        "HandoffStatus": ("landed", "aborted"),
    },
    "session-7.2": {"FinishReason": ("stop", "length", "cancelled", "deadline", "failed")},
    "ranks-5": {},
}
"""The values of the enums in the messages of each version. A peer that does not know one refuses the whole message, and
gives up the link or the port that sent it. Golden bytes have only some of them."""


@pytest.mark.parametrize("name", CURRENT)
def test_bytes_are_those_of_their_version(name: str) -> None:
    problem = files.problem(name, CURRENT[name])
    assert problem is None, problem


@pytest.mark.parametrize("protocol", [p for p in PROTOCOLS.values() if p.name != "stream"], ids=lambda p: p.name)
def test_golden_bytes_are_read_as_the_values_they_were_made_of(protocol: Protocol) -> None:
    golden = files.committed(f"{protocol.name}-{protocol.version}.json")
    assert golden is not None
    for what, sample in protocol.samples.items():
        assert repr(protocol.decode(bytes.fromhex(str(golden[what])))) == repr(sample), what


def test_golden_bytes_of_a_stream_are_read() -> None:
    for sample in samples.STREAM.values():
        if isinstance(sample, framing.Header | ring.RingOffer | ring.Landed | ring.Credit):
            assert type(sample).parse(sample.packed()) == sample


@pytest.mark.parametrize("name", ["channel", "session"])
def test_earlier_minor_versions_are_still_read(name: str) -> None:
    major = PROTOCOLS[name].version.split(".")[0]
    paths = sorted(files.FOLDER.glob(f"{name}-{major}.*.json"))
    assert paths
    for path in paths:
        for data in json.loads(path.read_text("utf-8")).values():
            PROTOCOLS[name].decode(bytes.fromhex(data))


def test_an_older_session_is_told_both_versions() -> None:
    """What it reads of a Ready has the place and the type that it had in every version before."""
    ready = PROTOCOLS["session"].samples["ready prefill"]
    told = msgspec.msgpack.decode(messages.encode(ready)[: -messages.DIGEST_BYTES])
    assert (told["type"], told["version"]) == ("ready", messages.VERSION)


@pytest.mark.parametrize(("union", "name"), UNIONS)
def test_every_message_has_golden_bytes(union: Any, name: str) -> None:
    missing = set(typing.get_args(union)) - {type(sample) for sample in PROTOCOLS[name].samples.values()}
    assert not missing, f"give {missing} a sample in tests/golden/samples.py"


@pytest.mark.parametrize("name", ["channel", "session", "ranks"])
def test_values_of_enums_are_those_of_their_version(name: str) -> None:
    protocol = PROTOCOLS[name]
    found: dict[str, tuple[object, ...]] = {}
    seen: set[type] = set()
    for union, of in UNIONS:
        if of == name:
            for message in typing.get_args(union):
                found |= enums_of(msgspec.inspect.type_info(message), seen)
    told = f"a peer of {name}-{protocol.version} that gets a value which is not in ENUMS refuses the message: raise "
    told += f"{protocol.constant}, send none to peers that do not know it, and write the values beside that version"
    assert found == ENUMS.get(f"{name}-{protocol.version}"), told


def enums_of(kind: Any, seen: set[type]) -> dict[str, tuple[object, ...]]:
    """Return the enums in a type as msgspec describes it, by name, with their values. `seen` are classes to pass by."""
    if isinstance(kind, msgspec.inspect.EnumType):
        return {kind.cls.__name__: tuple(member.value for member in kind.cls)}
    if getattr(kind, "cls", None) in seen:
        return {}
    seen |= {kind.cls} if hasattr(kind, "cls") else set()
    parts = [getattr(kind, field) for field in kind.__struct_fields__]
    inner = [part for each in parts for part in (each if isinstance(each, tuple) else [each])]
    found: dict[str, tuple[object, ...]] = {}
    for part in inner:
        if isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field):
            found |= enums_of(part, seen)
    return found


def test_every_kind_of_a_stream_has_golden_bytes() -> None:
    assert {sample.kind for sample in samples.STREAM.values() if isinstance(sample, framing.Header)} == set(
        framing.MessageKind
    )
    assert {sample for sample in samples.STREAM.values() if isinstance(sample, ring.Signal)} == set(ring.Signal)


def test_a_field_that_a_session_got_later_needs_no_version() -> None:
    """One that is at its default in the sample: golden bytes, which lack it, are read as the sample."""
    name = f"session-{messages.VERSION}.{messages.MINOR}.json"
    now = CURRENT[name]
    body = msgspec.msgpack.decode(bytes.fromhex(str(now["stepped decode"]))[: -messages.DIGEST_BYTES])

    def with_load(**fields: object) -> dict[str, object]:
        load = {**body["load"], "decode": {**body["load"]["decode"], **fields}}
        return {**now, "stepped decode": messages.digested(msgspec.msgpack.encode({**body, "load": load})).hex()}

    assert files.problem(name, with_load(colour="green")) is None
    assert "stepped decode" in str(files.problem(name, with_load(num_tokens=7)))
    assert "beat" in str(files.problem(name, {what: data for what, data in now.items() if what != "beat"}))


def test_who_changes_bytes_is_told_what_to_do(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"channel-{wire.MAJOR}.{wire.MINOR}.json"
    problem = files.problem(name, {**CURRENT[name], "beat": "00"})
    assert problem is not None
    assert "beat" in problem
    assert "raise the version" in problem
    assert "kv.wire.MINOR" in problem
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    assert "is missing" in str(files.problem(name, CURRENT[name]))
    assert files.write_missing() == []
    assert files.problem(name, CURRENT[name]) is None
    (tmp_path / name).write_text("{}", "utf-8")
    (said,) = files.write_missing()
    assert "raise the version" in said
    assert (tmp_path / name).read_text("utf-8") == "{}"
