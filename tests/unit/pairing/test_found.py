"""What a prompt finds in the pages of each port, with the keys that each port would use itself."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.kv.prefix import KeyScheme, PrefixChain, count_known
from pdinfer.pairing.choosing import FoundTokens
from pdinfer.pairing.ports import ByScheme, by_scheme
from pdinfer.pairing.request import PromptKeys
from pdinfer.types import PeerAddress

PROMPT = tuple(range(100, 150))
PREFILLS = [PeerAddress(b"p", 1, rank) for rank in range(3)]
DECODES = [PeerAddress(b"d", 1, rank) for rank in range(2)]


@attrs.define(eq=False)
class Cache:
    """A port that holds the beginnings of prompts that a test puts there."""

    address: PeerAddress
    scheme: KeyScheme | None
    known: set[bytes] = attrs.field(factory=set)
    num_asked: int = 0

    @property
    def addresses(self) -> tuple[PeerAddress, ...]:
        return (self.address,)

    @property
    def key_scheme(self) -> KeyScheme | None:
        return self.scheme

    def count_known(self, keys: Sequence[bytes]) -> int:
        self.num_asked += 1
        return count_known(keys, self.known)

    def hold(self, tokens: Sequence[int], *, salt: bytes = b"", writer: PeerAddress | None = None) -> Cache:
        assert self.scheme is not None
        chain = self.scheme.chain(salt, () if writer is None else (writer,))
        chain.extend(tokens)
        self.known.update(chain.keys)
        return self


def scheme(page_size: int = 4, *, by_writer: bool = False, lookahead: int = 0) -> KeyScheme:
    return KeyScheme(layout_id=b"layout", page_size=page_size, lookahead=lookahead, by_writer=by_writer)


def side(*ports: Cache) -> ByScheme:
    return by_scheme(ports)  # type: ignore[arg-type]


def request(**more: object) -> pd.Request:
    return attrs.evolve(pd.Request(prompt=PROMPT), **more)


def found(prefills: ByScheme, decodes: ByScheme | None = None, **more: object) -> FoundTokens:
    return FoundTokens(PromptKeys(request(**more)), prefills, decodes or {})


def test_each_page_size_has_its_own_keys() -> None:
    ports = [Cache(PREFILLS[0], scheme(4)), Cache(PREFILLS[1], scheme(16)), Cache(PREFILLS[2], None)]
    for port in ports[:2]:
        port.hold(PROMPT[:41])
    told = found(side(*ports))
    assert dict(told) == {PREFILLS[0]: 40, PREFILLS[1]: 32}
    assert told.get(PREFILLS[2], 0) == 0
    assert told.get(DECODES[0], 7) == 7


def test_the_page_of_the_last_token_runs_in_any_case() -> None:
    port = Cache(PREFILLS[0], scheme(5)).hold(PROMPT)
    assert found(side(port))[PREFILLS[0]] == 45
    longer = Cache(PREFILLS[0], scheme(5)).hold((*PROMPT, 1))
    assert found(side(longer), output=(1,))[PREFILLS[0]] == 50
    drafting = Cache(PREFILLS[0], scheme(5, lookahead=1)).hold(PROMPT)
    assert found(side(drafting))[PREFILLS[0]] == 45


def test_another_salt_finds_nothing() -> None:
    port = Cache(PREFILLS[0], scheme()).hold(PROMPT, salt=b"a")
    assert [found(side(port), cache_salt=salt)[PREFILLS[0]] for salt in (b"a", b"b")] == [48, 0]


def test_a_decode_that_keeps_writers_apart_is_asked_for_the_one_that_holds_most() -> None:
    prefills = [Cache(PREFILLS[0], scheme()).hold(PROMPT[:8]), Cache(PREFILLS[1], scheme()).hold(PROMPT[:24])]
    decode = Cache(DECODES[0], scheme(by_writer=True))
    decode.hold(PROMPT[:12], writer=PREFILLS[0]).hold(PROMPT[:20], writer=PREFILLS[1])
    alike = Cache(DECODES[1], scheme()).hold(PROMPT[:16])
    told = found(side(*prefills), side(decode, alike))
    assert [told[port] for port in DECODES] == [20, 16]
    assert told.at_pair(PREFILLS[0], DECODES[0]) == (8, 12)
    assert told.at_pair(PREFILLS[1], DECODES[1]) == (24, 16)
    nobody = found(side(Cache(PREFILLS[0], scheme())), side(decode))
    assert nobody.get(DECODES[0], 0) == 0


def test_nothing_is_looked_up_before_it_is_asked_for_and_then_once() -> None:
    port = Cache(PREFILLS[0], scheme()).hold(PROMPT)
    told = found(side(port))
    assert port.num_asked == 0
    for _ in range(3):
        assert (told.get(PREFILLS[0], 0), len(told)) == (48, 1)
    assert port.num_asked == 1


def test_keys_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = PromptKeys(request())
    for size in (4, 16):
        keys.of(scheme(size))
    monkeypatch.setattr(PrefixChain, "extend", None)
    assert (len(keys.of(scheme(4))), len(keys.of(scheme(16)))) == (12, 3)


@given(st.integers(0, 70), st.integers(0, 70))
def test_bisection_finds_what_a_walk_finds(num_known: int, num_keys: int) -> None:
    keys = [bytes([number]) for number in range(70)]
    assert count_known(keys[:num_keys], set(keys[:num_known])) == min(num_known, num_keys)


def test_many_ports_are_told_at_once_whatever_their_order() -> None:
    ports = [Cache(address, scheme(size)) for address, size in zip(PREFILLS, (4, 16, 4), strict=True)]
    for port, length in zip(ports, (9, 33, 41), strict=True):
        port.hold(PROMPT[:length])
    decodes = [
        Cache(address, scheme()).hold(PROMPT[:length]) for address, length in zip(DECODES, (13, 21), strict=True)
    ]
    stranger = PeerAddress(b"x", 1, 0)
    equal = [attrs.evolve(address) for address in PREFILLS]  # as they come from another process
    for asked in (PREFILLS, PREFILLS[::-1], PREFILLS[:2], DECODES, DECODES[::-1], [*DECODES, stranger], equal, []):
        told = found(side(*ports), side(*decodes))
        assert list(told.at(asked)) == [told.get(address, 0) for address in asked]
    assert found(side(*ports)).at(PREFILLS) == [8, 32, 40]
