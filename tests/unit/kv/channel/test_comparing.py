"""Two ends that have read other weights: they are refused, and both learn of a tensor in which they differ."""

from __future__ import annotations

import logging

import attrs
import msgspec
import pytest

from pdinfer.config import CacheConfig
from pdinfer.errors import LayoutMismatch, TransferError
from pdinfer.identity import NO_TENSORS, TensorDigest, TensorDigests
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.links import MAX_COMPARES
from pdinfer.kv.channel.wire import FrameMac
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.pool import PagePool
from pdinfer.kv.transports.base import MAX_UNTRUSTED_FRAME_BYTES
from tests.unit.engine.by_hand import HandNet, HandTransport
from tests.unit.kv.channel.by_hand import Stranger
from tests.unit.kv.channel.channels import Case, SmallModel
from tests.waiting import wait_until

NAMES = [f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight" for layer in range(61) for expert in range(64)]
WEIGHTS = {name: TensorDigest(name, "bfloat16 [7168, 2048]", str(place).encode()) for place, name in enumerate(NAMES)}
KEY = b"k" * 32


@attrs.frozen(kw_only=True)
class ReadModel(SmallModel):
    """A model whose weights were read."""

    tensors: TensorDigests

    def kv_layout(self, cache: CacheConfig) -> KVLayout:
        layout = super().kv_layout(cache)
        return attrs.evolve(layout, weights_id=self.tensors.digest(), sampled_weights_id=b"s")


def pool(tensors: TensorDigests) -> PagePool:
    return PagePool(ReadModel(tensors=tensors), CacheConfig(page_size=4))


def without(*names: str) -> TensorDigests:
    return TensorDigests(tensor for name, tensor in WEIGHTS.items() if name not in names)


def with_others(*names: str) -> TensorDigests:
    others = {name: attrs.evolve(WEIGHTS[name], digest=b"other") for name in names}
    return TensorDigests((WEIGHTS | others).values())


ALL = TensorDigests(WEIGHTS.values())


def refused(case: Case, ours: TensorDigests, theirs: TensorDigests, key: bytes | None = None) -> LayoutMismatch:
    """Return why one end refuses the other."""
    dialling, dialled = case.end(pool(ours), key=key), case.end(pool(theirs), key=key)
    with pytest.raises(LayoutMismatch) as caught:
        dialling.connect(dialled.address)
    wait_until(lambda: not dialling.snapshot().links and not dialled.snapshot().links)
    return caught.value


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
@pytest.mark.parametrize("name", [NAMES[0], NAMES[2000], NAMES[-1]])
def test_one_tensor_of_thousands_is_named_at_both_ends(
    two_pools: Case, key: bytes | None, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pdinfer"):
        error = refused(two_pools, with_others(name), ALL, key)
    assert [field for field, _, _ in error.fields] == ["weights_id", f"weights.{name}"]
    ours, theirs = error.fields[1][1:]
    assert (ours, theirs) == ("bfloat16 [7168, 2048] " + b"other".hex(), str(WEIGHTS[name]))
    said = [text.getMessage() for text in caplog.records if f"weights.{name}" in text.getMessage()]
    assert len(said) == 2
    assert f"ours {theirs}, theirs {ours}" in said[0], "the end that was dialled has it the other way round"


@pytest.mark.parametrize("ours_lacks", [True, False])
@pytest.mark.parametrize("tensors", [WEIGHTS, dict(list(WEIGHTS.items())[:3])], ids=["thousands", "three"])
def test_a_tensor_that_one_end_lacks_is_named(
    two_pools: Case, ours_lacks: bool, tensors: dict[str, TensorDigest]
) -> None:
    whole = TensorDigests(tensors.values())
    fewer = TensorDigests(tensor for name, tensor in tensors.items() if name != NAMES[2])
    error = refused(two_pools, fewer, whole) if ours_lacks else refused(two_pools, whole, fewer)
    there = str(WEIGHTS[NAMES[2]])
    pair = ("absent", there) if ours_lacks else (there, "absent")
    assert error.fields[1:] == ((f"weights.{NAMES[2]}", *pair),)


def test_of_many_that_differ_some_are_named(two_pools: Case) -> None:
    error = refused(two_pools, with_others(*NAMES), ALL)
    _, *found = [name.removeprefix("weights.") for name, _, _ in error.fields]
    assert 1 <= len(found) <= 4
    assert set(found) <= set(NAMES)


def test_few_against_thousands(two_pools: Case, caplog: pytest.LogCaptureFixture) -> None:
    few = TensorDigests([WEIGHTS[NAMES[5]]])
    for pair in ((few, ALL), (ALL, few), (NO_TENSORS, ALL), (ALL, NO_TENSORS)):
        error = refused(two_pools, *pair)
        assert all(ours != theirs for _, ours, theirs in error.fields)
        assert "weights.model.layers." in str(error)
    assert all(text.getMessage().count("weights.model.layers.") <= 8 for text in caplog.records)


def hand_end(net: HandNet, tensors: TensorDigests, key: bytes | None = None) -> KVChannel:
    return KVChannel(pool(tensors), HandTransport(net), key=key, clock=net.clock, random_bytes=net.random.randbytes)


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
def test_it_takes_few_frames_and_none_is_larger_than_others(net: HandNet, key: bytes | None) -> None:
    ours, theirs = hand_end(net, with_others(NAMES[2000]), key), hand_end(net, ALL, key)
    ours.connect(theirs.address, timeout_s=0)
    net.settle()
    frames = [frame for side in net.sides for frame in side.sent]
    assert all(len(frame) <= MAX_UNTRUSTED_FRAME_BYTES for frame in frames)
    tag = FrameMac(b"", True, key).tag_bytes
    messages = [wire.decode(frame if b"open" in frame[:12] else frame[:-tag]) for frame in frames]
    compared = [message for message in messages if isinstance(message, wire.Compare)]
    assert 3 <= len(compared) <= 6, "3904 tensors are three levels of sixteen"


def test_nothing_is_told_to_who_has_not_the_key(net: HandNet) -> None:
    ours, theirs = hand_end(net, with_others(NAMES[0]), b"o" * 32), hand_end(net, ALL, KEY)
    ours.connect(theirs.address, timeout_s=0)
    net.settle()
    assert not any(b"compare" in frame for side in net.sides for frame in side.sent)


def hello(stranger: Stranger, **layout: object) -> wire.Hello:
    return wire.Hello(stranger.channel.address, attrs.evolve(stranger.peer.pool.layout, **layout))  # type: ignore[arg-type]


DIFFERENT = wire.Compare("", (b"x" * 16,) * 16)


@pytest.mark.parametrize(
    "message", [DIFFERENT, wire.Compare("", (), (TensorDigest("a", "b", b"c"),)), wire.Compare("f" * 16, (b"",) * 16)]
)
def test_who_tells_of_weights_without_being_asked_loses_the_link(net: HandNet, message: wire.Compare) -> None:
    for first in (True, False):
        stranger = Stranger(net, hand_end(net, ALL))
        stranger.send(stranger.open)
        if not first:
            stranger.say(hello(stranger))
            assert stranger.is_welcome
        stranger.say(message)
        assert not stranger.side.open


@pytest.mark.parametrize("dials", [True, False])
@pytest.mark.parametrize("part", ["", "f" * 16])
def test_who_tells_of_weights_for_ever_loses_the_link(net: HandNet, dials: bool, part: str) -> None:
    stranger = Stranger(net, hand_end(net, ALL), dials=dials)
    stranger.send(stranger.open)
    if dials:
        stranger.say(hello(stranger, weights_id=b"other"))
    for _ in range(MAX_COMPARES):
        assert stranger.side.open
        stranger.say(wire.Compare(part, (b"x" * 16,) * 16))
    assert not stranger.is_welcome
    stranger.say(DIFFERENT)
    assert not stranger.side.open


def test_who_says_that_weights_differ_and_tells_of_the_same_is_not_welcome(net: HandNet) -> None:
    stranger = Stranger(net, hand_end(net, ALL))
    stranger.send(stranger.open)
    stranger.say(hello(stranger, weights_id=b"other"))
    for _ in range(MAX_COMPARES + 1):
        stranger.say(wire.Compare("", ALL.digests("")))
        assert not stranger.is_welcome
    assert not stranger.side.open


@pytest.mark.parametrize(
    "layout",
    [
        {"weights_id": b"", "sampled_weights_id": b"other"},
        {"weights_id": b"other", "model_id": b"other"},
        {"weights_id": b"other", "sampled_weights_id": b""},
    ],
    ids=str,
)
def test_ends_that_have_not_both_read_the_weights_of_one_model_are_refused_at_once(
    net: HandNet, layout: dict[str, object]
) -> None:
    stranger = Stranger(net, hand_end(net, ALL))
    stranger.send(stranger.open)
    stranger.say(hello(stranger, **layout))
    answer = wire.decode(stranger.side.other.sent[-1][:-8])
    assert isinstance(answer, wire.Reject)
    assert isinstance(answer.error, LayoutMismatch)


@pytest.mark.parametrize("says", ["hello", "beat"])
def test_who_says_anything_else_during_the_search_loses_the_link(net: HandNet, says: str) -> None:
    stranger = Stranger(net, hand_end(net, ALL))
    stranger.send(stranger.open)
    stranger.say(hello(stranger, weights_id=b"other"))
    stranger.say(hello(stranger) if says == "hello" else wire.Beat(0.0))
    assert not stranger.is_welcome
    assert not stranger.side.open


@pytest.mark.parametrize(
    "message",
    [
        {"type": "compare", "part": "g"},
        {"type": "compare", "part": "0" * 17},
        {"type": "compare", "part": "", "digests": [b"x"] * 15},
        {"type": "compare", "part": "", "digests": [b"x"] * 17},
        {"type": "compare", "part": "", "digests": [b"x" * 65] * 16},
        {"type": "compare", "part": "", "tensors": [{"name": "a\n", "form": "b", "digest": b"c"}]},
        {"type": "compare", "part": "", "tensors": [{"name": "a", "form": "b", "digest": b"c"}] * 5},
    ],
    ids=lambda message: next(iter(message)) + str(len(str(message))),
)
def test_what_is_told_is_bounded(message: dict[str, object]) -> None:
    with pytest.raises(TransferError, match="not a message"):
        wire.decode(msgspec.msgpack.encode(message))
