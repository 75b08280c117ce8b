"""The frames of a link are one sequence: any change on the way is found at the next frame, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.channel.wire import MAX_TAG_BYTES, MIN_KEY_BYTES, FrameMac, check_key

SESSION = b"dialler's nonce." + b"acceptor's nonce"
KEY = b"k" * 32
keys = st.sampled_from([None, KEY])
frames = st.lists(st.binary(max_size=40), min_size=1, max_size=6)
directions = st.booleans()


def tagged(
    frames: list[bytes], key: bytes | None, *, from_dialler: bool = True, session: bytes = SESSION
) -> list[bytes]:
    ours = FrameMac(session, from_dialler, key)
    return [ours.sign(frame) for frame in frames]


def taken(tagged_frames: list[bytes], key: bytes | None, *, from_dialler: bool = True) -> list[bytes]:
    """Return the frames that a receiver takes before it closes the link."""
    theirs = FrameMac(SESSION, from_dialler, key)
    frames = []
    for frame in tagged_frames:
        try:
            frames.append(theirs.verify(frame))
        except TransferError:
            break
    return frames


@given(frames, keys, directions)
def test_an_untouched_sequence_is_taken_whole(frames: list[bytes], key: bytes | None, from_dialler: bool) -> None:
    assert taken(tagged(frames, key, from_dialler=from_dialler), key, from_dialler=from_dialler) == frames


@given(st.data(), frames, keys)
def test_a_lost_frame_ends_the_link_at_the_next_one(
    data: st.DataObject, frames: list[bytes], key: bytes | None
) -> None:
    lost = data.draw(st.integers(0, len(frames) - 1))
    sent = tagged(frames, key)
    assert taken(sent[:lost] + sent[lost + 1 :], key) == frames[:lost]


@given(st.data(), frames, keys)
def test_a_doubled_frame_is_taken_once(data: st.DataObject, frames: list[bytes], key: bytes | None) -> None:
    first = data.draw(st.integers(0, len(frames) - 1))
    again = data.draw(st.integers(first + 1, len(frames)))
    sent = tagged(frames, key)
    assert taken([*sent[:again], sent[first], *sent[again:]], key) == frames[:again]


@given(st.data(), st.lists(st.binary(max_size=40), min_size=2, max_size=6), keys)
def test_swapped_frames_end_the_link_also_when_they_say_the_same(
    data: st.DataObject, frames: list[bytes], key: bytes | None
) -> None:
    one = data.draw(st.integers(0, len(frames) - 2))
    other = data.draw(st.integers(one + 1, len(frames) - 1))
    sent = tagged(frames, key)
    sent[one], sent[other] = sent[other], sent[one]
    assert taken(sent, key) == frames[:one]


@given(st.data(), frames, keys)
def test_a_flipped_bit_is_found_wherever_it_is(data: st.DataObject, frames: list[bytes], key: bytes | None) -> None:
    hit = data.draw(st.integers(0, len(frames) - 1))
    sent = tagged(frames, key)
    bit = data.draw(st.integers(0, 8 * len(sent[hit]) - 1))
    altered = bytearray(sent[hit])
    altered[bit // 8] ^= 1 << bit % 8
    sent[hit] = bytes(altered)
    assert taken(sent, key) == frames[:hit]


@given(st.data(), frames, keys, st.binary(min_size=1, max_size=4))
def test_a_cut_or_longer_frame_is_found(
    data: st.DataObject, frames: list[bytes], key: bytes | None, more: bytes
) -> None:
    hit = data.draw(st.integers(0, len(frames) - 1))
    sent = tagged(frames, key)
    cut = data.draw(st.integers(0, len(sent[hit]) - 1))
    for changed in (sent[hit][:cut], sent[hit][cut + 1 :], sent[hit] + more, more + sent[hit]):
        assert taken([*sent[:hit], changed], key) == frames[:hit]


@given(frames, keys)
def test_our_own_frames_sent_back_are_not_the_peers(frames: list[bytes], key: bytes | None) -> None:
    assert taken(tagged(frames, key, from_dialler=False), key) == []


@given(frames, keys, st.integers(0, len(SESSION) - 1), st.integers(1, 255))
def test_another_sessions_frames_are_refused(frames: list[bytes], key: bytes | None, place: int, change: int) -> None:
    """The sessions of two links differ in either end's nonce."""
    other = bytearray(SESSION)
    other[place] ^= change
    assert taken(tagged(frames, key, session=bytes(other)), key) == []


@pytest.mark.parametrize(("ours", "theirs"), [(KEY, b"l" * 32), (KEY, None), (None, KEY), (KEY, KEY + b"\1")])
def test_another_key_opens_nothing(ours: bytes | None, theirs: bytes | None) -> None:
    assert taken(tagged([b"hello"], ours), theirs) == []


def test_the_reason_says_which_frame_and_that_it_may_be_the_key() -> None:
    for key, reason in (
        (None, "frame 1 of a link did not verify: it was lost"),
        (KEY, "the peer's key differs, or it"),
    ):
        sent, theirs = tagged([b"one", b"two"], key), FrameMac(SESSION, True, key)
        theirs.verify(sent[0])
        with pytest.raises(TransferError, match=reason):
            theirs.verify(sent[0])


def test_a_mac_does_not_show_its_key() -> None:
    assert "kkkk" not in repr(FrameMac(SESSION, True, KEY))


@pytest.mark.parametrize("key", [b"", b"k" * (MIN_KEY_BYTES - 1), "k" * 32, 5, bytearray(32)])
def test_a_key_that_is_none_is_refused(key: object) -> None:
    with pytest.raises(ConfigError, match="at least 16 random bytes"):
        check_key(key)  # type: ignore[arg-type]


def test_a_key_of_any_sufficient_length_is_taken() -> None:
    for key in (None, b"k" * MIN_KEY_BYTES, b"k" * 1000):
        check_key(key)
    assert FrameMac(SESSION, True, KEY).tag_bytes == MAX_TAG_BYTES
