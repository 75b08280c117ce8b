"""The bytes of every message are those that were committed for its version; a failure says what to do about a
change."""

from __future__ import annotations

import json
import typing
from typing import Any

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
        if isinstance(sample, framing.Header | ring.Offer | ring.Landed | ring.Credit):
            assert type(sample).parse(sample.packed()) == sample


def test_earlier_minor_versions_of_the_channel_are_still_read() -> None:
    paths = sorted(files.FOLDER.glob(f"channel-{wire.MAJOR}.*.json"))
    assert paths
    for path in paths:
        for frame in json.loads(path.read_text("utf-8")).values():
            wire.decode(bytes.fromhex(frame))


@pytest.mark.parametrize(
    ("union", "name"),
    [
        (wire.Message, "channel"),
        (messages.Command, "session"),
        (messages.Report, "session"),
        (rank_messages.Message, "ranks"),
    ],
)
def test_every_message_has_golden_bytes(union: Any, name: str) -> None:
    missing = set(typing.get_args(union)) - {type(sample) for sample in PROTOCOLS[name].samples.values()}
    assert not missing, f"give {missing} a sample in tests/golden/samples.py"


def test_every_kind_of_a_stream_has_golden_bytes() -> None:
    assert {sample.kind for sample in samples.STREAM.values() if isinstance(sample, framing.Header)} == set(
        framing.MessageKind
    )
    assert {sample for sample in samples.STREAM.values() if isinstance(sample, ring.Signal)} == set(ring.Signal)


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
