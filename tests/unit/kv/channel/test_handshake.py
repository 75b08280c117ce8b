"""The handshake, message by message: which peers may link to an end, and which are refused and why."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pdinfer.bounds import escaped
from pdinfer.config import CacheConfig, ModelConfig
from pdinfer.errors import ConfigError, LayoutMismatch, PDInferError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.links import HANDSHAKE_S
from pdinfer.kv.channel.peer import Peer
from pdinfer.kv.channel.wire import FrameMac
from pdinfer.kv.layout import WEIGHTS_IDS, KVLayout
from pdinfer.kv.pool import PagePool
from pdinfer.kv.transports.base import MAX_UNTRUSTED_FRAME_BYTES
from pdinfer.model.model import kv_layout_of
from pdinfer.types import Handoff, PeerAddress, peer_key
from tests.unit.config import published_configs
from tests.unit.engine.by_hand import HandNet
from tests.unit.kv.channel.by_hand import Stranger, are_linked, linked
from tests.unit.kv.channel.channels import (
    ABORTED,
    LANDED,
    LAYERS,
    Case,
    SmallModel,
    links,
    pool_of,
    refusal,
    say,
    settled,
)
from tests.waiting import wait_until

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
MEANT = {"model_id": " (a digest of the model's config)", "weights_id": " (a digest of all weights)"}
FAR = PeerAddress(b"e" * 16, 2**63, 2**31 - 1, ("tcp://" + "a" * 200,) * 8)


@pytest.mark.parametrize(
    ("difference", "fields"),
    [
        ({"dtype": "bfloat16"}, [("components.latent.dtype", "float16", "bfloat16")]),
        ({"model_id": b"other"}, [("model_id", b"model".hex(), b"other".hex())]),
        ({"weights_id": b"others"}, [("weights_id", b"weights".hex(), b"others".hex())]),
        (
            {"dtype": "bfloat16", "weights_id": b"others"},
            [
                ("weights_id", b"weights".hex(), b"others".hex()),
                ("components.latent.dtype", "float16", "bfloat16"),
            ],
        ),
    ],
)
def test_the_connecting_end_learns_every_difference(
    two_pools: Case, difference: dict[str, object], fields: list[tuple[str, str, str]]
) -> None:
    ours, theirs = two_pools.end(), two_pools.end(pool_of(**difference))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(LayoutMismatch) as info:
            ours.connect(theirs.address)
        assert list(info.value.fields) == fields
        listed = str(info.value).partition("cannot exchange pages: ")[2].split("; ")
        assert listed == [f"{name}{MEANT.get(name, '')}: ours {ours}, theirs {theirs}" for name, ours, theirs in fields]
    grant = two_pools.grant(theirs, ours)
    assert settled(theirs)[0].status is ABORTED
    with pytest.raises(TransferError, match="not connected"):
        ours.accept(grant)


def test_a_refused_link_is_closed_at_both_ends(two_pools: Case) -> None:
    ours, theirs = two_pools.end(), two_pools.end(pool_of(weights_id=b"others"))
    with pytest.raises(LayoutMismatch):
        ours.connect(theirs.address)
    with pytest.raises(TransferError, match="was restarted"):
        ours.connect(attrs.evolve(two_pools.end().address, epoch=1))
    wait_until(lambda: not any(end.snapshot().links for end in two_pools.open))


EARLY = (
    wire.Abort(b"r" * 16, PDInferError("x")),
    wire.Beat(0.0),
    wire.Data(b"r" * 16, LAYERS, LAYERS),
    wire.Finish(Handoff(room=b"r" * 16, writer=PeerAddress(b"e", 1, 0), status=LANDED)),
)


@pytest.mark.parametrize(
    ("message", "tagged"),
    [*itertools.product(EARLY, [False, True]), (wire.Open((wire.MAJOR, 0), b"n" * 16, keyed=False), True)],
    ids=lambda value: type(value).__name__ if isinstance(value, msgspec.Struct) else f"tagged_{value}",
)
def test_what_comes_before_the_handshake_closes_the_link(
    two_pools: Case, monkeypatch: pytest.MonkeyPatch, message: wire.Message, tagged: bool
) -> None:
    stranger, decode = two_pools.end(), two_pools.end()
    if tagged:
        monkeypatch.setattr(links(stranger).handshake, "introduce", lambda peer: peer.post(wire.encode(message)))
    else:
        monkeypatch.setattr(links(stranger).handshake, "open", lambda peer: peer.open(wire.encode(message)))
    with pytest.raises(TransferError):
        stranger.connect(decode.address)
    wait_until(lambda: not decode.snapshot().links)
    assert decode.stats.frames_dropped == 0
    assert not decode.has_news


def test_connecting_twice_makes_one_link(case: Case) -> None:
    prefill, decode = case.pair()
    prefill.connect(decode.address)
    decode.connect(prefill.address)
    assert len(prefill.snapshot().links) == len(decode.snapshot().links) == 1


def test_a_restarted_peer_at_the_same_endpoint_is_refused(case: Case) -> None:
    prefill, decode = case.end(), case.end()
    for restarted in (attrs.evolve(decode.address, epoch=1), attrs.evolve(decode.address, engine_id=b"x" * 16)):
        with pytest.raises(TransferError, match="was restarted"):
            prefill.connect(restarted)
        assert not prefill.connected(restarted)
    prefill.connect(decode.address)


def test_a_second_link_of_the_same_peer_is_refused_and_the_first_stays(case: Case) -> None:
    """If it were welcome, closing it would settle rooms that are still being written over the first link."""
    prefill, decode, grant, pages = case.room()
    with pytest.raises(TransferError):
        # what it was before a restart, at the same endpoint
        prefill.connect(attrs.evolve(decode.address, epoch=1), timeout_s=0.2)
    impostor = case.end()
    links(impostor).book.us = prefill.address
    assert "open link already" in refusal(partial(impostor.connect, decode.address))
    impostor.close()
    wait_until(lambda: len(decode.snapshot().links) == 1)
    assert prefill.connected(decode.address)
    assert decode.connected(prefill.address)
    assert decode.poll() == []
    case.hand_over(prefill, decode, grant, pages)


def test_every_channel_is_a_new_peer(case: Case) -> None:
    pool = pool_of()
    first, second = case.end(pool), case.end(pool)
    assert peer_key(first.address) != peer_key(second.address)


def test_nobody_there(case: Case) -> None:
    prefill, decode = case.end(), case.end()
    decode.close()
    with pytest.raises(TransferError):
        prefill.connect(decode.address, timeout_s=1.0)


def test_a_silent_peer_is_given_up(monkeypatch: pytest.MonkeyPatch, two_pools: Case) -> None:
    prefill, decode = two_pools.end(), two_pools.end()
    monkeypatch.setattr(links(decode).handshake, "read", lambda *_: None)
    with pytest.raises(TransferError, match=r"did not answer the handshake within 0\.05 s"):
        prefill.connect(decode.address, timeout_s=0.05)
    assert not prefill.snapshot().links


@attrs.frozen(kw_only=True)
class DeepModel(SmallModel):
    num_layers: int

    def kv_layout(self, cache: CacheConfig) -> KVLayout:
        layout = super().kv_layout(cache)
        (part,) = layout.components
        layers = tuple(range(self.num_layers))
        parts = tuple(attrs.evolve(part, name=name, layers=layers) for name in ("latent", "index"))
        return attrs.evolve(layout, components=parts)


def test_a_refusal_with_many_long_differences_still_arrives_as_one(two_pools: Case) -> None:
    ours = two_pools.end(PagePool(DeepModel(num_layers=61), CacheConfig(page_size=1)))
    other = DeepModel(num_layers=59, model_id=b"m" * 32, weights_id=b"w" * 32, dtype="bfloat16")
    theirs = two_pools.end(PagePool(other, CacheConfig(page_size=1)))
    with pytest.raises(LayoutMismatch) as info:
        ours.connect(theirs.address)
    assert [name for name, _, _ in info.value.fields][:2] == ["model_id", "weights_id"]
    listed = str(info.value).partition("cannot exchange pages: ")[2].split("; ")
    assert listed == [
        f"{name}{MEANT.get(name, '')}: ours {ours}, theirs {theirs}" for name, ours, theirs in info.value.fields
    ]
    layers = next((ours, theirs) for name, ours, theirs in info.value.fields if name.endswith(".layers"))
    whole = ",".join(map(str, range(61)))
    for value in layers:
        assert value.endswith(" …")
        assert whole.startswith(f"{value.removesuffix(' …')},"), "cut between numbers"


def opens_with(version: tuple[int, int]) -> Callable[[Peer], None]:
    """Return a handshake that begins with another version."""
    return lambda peer: peer.open(wire.encode(wire.Open(version, peer.nonce, keyed=False)))


def test_another_major_version_is_refused_and_another_minor_is_not(
    two_pools: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = two_pools.end(), two_pools.end()
    monkeypatch.setattr(links(decode).handshake, "open", opens_with((wire.MAJOR + 1, 0)))
    with pytest.raises(TransferError, match=f"speaks protocol {wire.MAJOR + 1}, this end speaks {wire.MAJOR}"):
        prefill.connect(decode.address)
    monkeypatch.setattr(links(decode).handshake, "open", opens_with((wire.MAJOR, wire.MINOR + 1)))
    prefill.connect(decode.address)


def test_a_feature_that_is_required_and_unknown_is_refused(two_pools: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = two_pools.end(), two_pools.end()
    hello = wire.Hello(prefill.address, prefill.pool.layout, required=("telepathy",))
    monkeypatch.setattr(links(prefill).handshake, "introduce", lambda peer: peer.post(wire.encode(hello)))
    with pytest.raises(TransferError, match="requires features this end does not have: telepathy"):
        prefill.connect(decode.address)


@pytest.mark.parametrize(
    ("ours", "theirs", "at_ours", "at_theirs"),
    [
        (KEY, None, "this end has a key and the peer has none", "the peer has a key and this end has none"),
        (None, KEY, "the peer has a key and this end has none", "this end has a key and the peer has none"),
        (KEY, OTHER_KEY, "did not verify: the peer's key differs", "did not verify: the peer's key differs"),
    ],
)
def test_ends_that_do_not_share_a_key_both_say_so(
    two_pools: Case,
    caplog: pytest.LogCaptureFixture,
    ours: bytes | None,
    theirs: bytes | None,
    at_ours: str,
    at_theirs: str,
) -> None:
    prefill, decode = two_pools.end(key=ours), two_pools.end(key=theirs)
    with caplog.at_level(logging.WARNING, "pdinfer"), pytest.raises(TransferError, match=at_ours):
        prefill.connect(decode.address)
    wait_until(lambda: not decode.snapshot().links)
    there = next(iter(decode.address.endpoints))
    said = [text.getMessage() for text in caplog.records if there not in text.getMessage()]
    assert [text for text in said if at_theirs in text], said
    assert all(repr(key)[2:-1] not in caplog.text for key in (ours, theirs) if key)


def test_ends_that_share_a_key_hand_rooms_over(two_pools: Case) -> None:
    prefill, decode = two_pools.end(key=KEY), two_pools.end(key=KEY)
    assert prefill.arrivals.authenticates
    prefill.connect(decode.address)
    grant = two_pools.grant(decode, prefill)
    pages = two_pools.accept(prefill, grant)
    two_pools.hand_over(prefill, decode, grant, pages)
    assert two_pools.arrived(decode, grant) == two_pools.sent(prefill, grant.tokens, pages)


def test_a_short_key_is_refused_before_anything_listens(net: HandNet) -> None:
    with pytest.raises(ConfigError, match=r"os\.urandom\(32\) makes one"):
        net.end(key=b"secret")
    assert not net.transports


@pytest.mark.parametrize("key", [None, KEY])
def test_yesterdays_session_cannot_be_replayed(net: HandNet, key: bytes | None) -> None:
    """H29: the accepting end's nonce is new, so no recorded tag fits."""
    prefill, decode = linked(net, key=key)
    recorded = list(net.side(prefill).sent)
    assert len(recorded) == 2, "Open and Hello"
    prefill.drop_peer(decode.address)
    net.settle()
    stranger = Stranger(net, decode)
    stranger.send(*recorded)
    assert not decode.connected(prefill.address)
    stranger.send(recorded[1])
    assert not stranger.side.open, "who goes on after a refusal loses the link"
    assert not decode.snapshot().links


@pytest.mark.parametrize("key", [None, KEY])
def test_what_an_end_says_cannot_be_sent_back_to_it(net: HandNet, key: bytes | None) -> None:
    decode = net.end(key=key)
    mirror = Stranger(net, decode)
    for _ in range(3):
        mirror.send(*mirror.side.other.sent)
    assert not mirror.side.open
    assert not decode.snapshot().links


@pytest.mark.parametrize("dials", [True, False])
def test_only_who_dialled_says_hello_and_only_the_other_welcome(net: HandNet, dials: bool) -> None:
    for wrong in (True, False):
        stranger = Stranger(net, net.end(), dials=dials)
        stranger.send(stranger.open)
        assert not stranger.is_welcome
        stranger.say(stranger.hello() if dials != wrong else stranger.welcome())
        assert stranger.is_welcome == (not wrong)


def test_a_second_hello_closes_the_link(net: HandNet) -> None:
    stranger = Stranger(net, net.end())
    stranger.send(stranger.open)
    stranger.say(stranger.hello())
    assert stranger.is_welcome
    stranger.say(stranger.hello())
    assert not stranger.is_welcome
    assert not stranger.side.open


def test_who_answers_must_be_who_was_asked_for(net: HandNet) -> None:
    stranger = Stranger(net, net.end(), dials=False)
    stranger.send(stranger.open)
    address = attrs.evolve(stranger.channel.address, epoch=7)
    stranger.say(wire.Welcome(address, pool_of().layout))
    assert not stranger.is_welcome
    assert not stranger.peer.connected(address)


@pytest.mark.parametrize("dials", [True, False])
def test_who_says_that_he_is_this_very_end_is_refused(net: HandNet, dials: bool) -> None:
    victim, friend = linked(net)
    stranger = Stranger(net, victim, dials=dials)
    stranger.send(stranger.open)
    said = wire.Hello if dials else wire.Welcome
    stranger.say(said(victim.address, victim.pool.layout))
    assert not victim.connected(victim.address)
    assert [peer.address for peer in victim.stats.peers] == [friend.address]
    assert are_linked(victim, friend)
    if dials:
        answer = wire.decode(stranger.side.other.sent[-1][:-8])
        assert isinstance(answer, wire.Reject)
        assert "this very end" in str(answer.error)


def test_a_stranger_gets_no_further_than_one_frame_beyond_the_limit(net: HandNet) -> None:
    stranger = Stranger(net, net.end())
    stranger.send(b"x" * (MAX_UNTRUSTED_FRAME_BYTES + 1))
    assert not stranger.side.open
    assert not stranger.peer.snapshot().links


@pytest.mark.parametrize("cache", [{}, {"kv_format": "fp8"}, {"rope_apart": True, "index_format": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["V3", "V32"])
def test_a_greeting_of_a_large_model_fits_an_untrusted_link(name: str, cache: dict[str, Any]) -> None:
    """With its MTP layer, all digests, two long endpoints and a tag."""
    config = ModelConfig.from_dict(getattr(published_configs, name))
    layout = kv_layout_of(config, torch.bfloat16, CacheConfig(**cache), mtp=True)
    ids = {name: bytes(range(128, 160)) for name in WEIGHTS_IDS}
    us = PeerAddress(b"e" * 16, 2**63, 2**31 - 1, ("tcp://" + "a" * 80, "unix://" + "b" * 80))
    greeting = wire.encode(wire.Hello(us, attrs.evolve(layout, **ids)))
    assert len(greeting) <= MAX_UNTRUSTED_FRAME_BYTES - wire.MAX_TAG_BYTES


@example(layers=1, names=1, reason="𝄞" * 500)
@given(layers=st.integers(1, 80), names=st.integers(1, 6), reason=st.text(max_size=2000))
def test_a_refusal_fits_an_untrusted_link_whatever_it_says(layers: int, names: int, reason: str) -> None:
    fields = tuple((f"components.{'n' * name}.layers", "1," * layers, "2," * layers) for name in range(names))
    plain = escaped("the two ends' KV layouts differ")
    for error in (LayoutMismatch(reason, fields=fields), TransferError(reason)):
        for key in (None, KEY):
            tagged = FrameMac(bytes(32), False, key).sign(wire.rejection(error, again=False, refuser=FAR))
            assert len(tagged) <= wire.MAX_REJECT_BYTES < MAX_UNTRUSTED_FRAME_BYTES
            decoded = wire.decode(wire.rejection(error, again=True))
            assert isinstance(decoded, wire.Reject)
            assert type(decoded.error) is type(error)
            said = str(decoded.error).removesuffix(" …")
            assert (plain if decoded.fields or isinstance(error, LayoutMismatch) else escaped(reason)).startswith(said)


def test_nothing_that_another_thread_says_overtakes_the_welcome(net: HandNet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a peer is admitted, the stepping thread may push to it. A frame before Welcome would close the link."""
    prefill, decode = net.end(), net.end()
    book = links(decode).book
    admit = book.admit

    def admit_and_push(peer: Peer, address: PeerAddress, layout_id: bytes) -> None:
        admit(peer, address, layout_id)
        say(decode, prefill, wire.Beat(0.0))

    monkeypatch.setattr(book, "admit", admit_and_push)
    prefill.connect(decode.address, timeout_s=0)
    net.settle()
    assert are_linked(prefill, decode)


def test_an_end_does_not_dial_itself(net: HandNet) -> None:
    end = net.end()
    with pytest.raises(TransferError, match="the end's own address"):
        end.connect(end.address, timeout_s=0)
    assert not net.dials


def test_a_handshake_that_stands_still_is_given_up(net: HandNet) -> None:
    stranger = Stranger(net, net.end())
    net.pass_time(HANDSHAKE_S - 1.0, stranger.peer)
    assert stranger.side.open
    net.pass_time(2.0, stranger.peer)
    net.settle()
    assert not stranger.side.open
    assert not stranger.peer.snapshot().links
