"""How much of a prompt the pages of each port hold already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Protocol, runtime_checkable

import attrs

from pdinfer.kv.prefix import KeyScheme
from pdinfer.types import PeerAddress, Request, TokensByPort


@runtime_checkable
class CachingPort(Protocol):
    """A port that tells which pages it holds. A port need not."""

    @property
    def addresses(self) -> tuple[PeerAddress, ...]: ...

    @property
    def key_scheme(self) -> KeyScheme | None:
        """How the keys of its pages are made; None when it keeps none for later requests."""

    def count_known(self, keys: Sequence[bytes]) -> int:
        """Return how many of these keys, from the first, belong to its pages. It may be a little out of date."""


@attrs.define(eq=False)
class PromptKeys:
    """The keys of the full pages of one prompt, and of the output so far. They are made once for each scheme, and for
    each set of writers where these matter."""

    request: Request
    _made: dict[tuple[KeyScheme, tuple[PeerAddress, ...]], list[bytes]] = attrs.field(factory=dict, init=False)

    def of(self, scheme: KeyScheme, writers: tuple[PeerAddress, ...] = ()) -> list[bytes]:
        """Return the keys that a pool would find, which leaves out the page of the last token: that one runs."""
        keys = self._made.get((scheme, writers))
        if keys is None:
            chain = scheme.chain(self.request.cache_salt, writers)
            tokens = self.request.tokens
            chain.extend(tokens)
            keys = self._made[scheme, writers] = chain.keys[: (len(tokens) - 1) // scheme.page_size]
        return keys

    def prepare(self, schemes: Iterable[KeyScheme]) -> None:
        """Make the keys of pages that an engine fills itself."""
        for scheme in schemes:
            self.of(scheme)


@attrs.frozen
class CachingPorts:
    """The ports of one side that tell which pages they hold, by how they make the keys of their pages."""

    by_scheme: Mapping[KeyScheme, Mapping[PeerAddress, CachingPort]] = attrs.field(factory=dict)

    def plus(self, address: PeerAddress, port: CachingPort) -> CachingPorts:
        """Return these ports and another one, if that caches pages."""
        scheme = port.key_scheme
        if scheme is None:
            return self
        return CachingPorts({**self.by_scheme, scheme: {**self.by_scheme.get(scheme, {}), address: port}})

    def minus(self, address: PeerAddress) -> CachingPorts:
        """Return these ports without one."""
        left = {
            scheme: {known: port for known, port in ports.items() if known != address}
            for scheme, ports in self.by_scheme.items()
        }
        return CachingPorts({scheme: ports for scheme, ports in left.items() if ports})


_Side = tuple[list[PeerAddress], list[int]]
"""The ports of a side, in their order, and how many tokens each of them holds."""


class FoundTokens(TokensByPort):
    """How many tokens of a prompt each port holds, looked up when the first of them is asked for and then kept.

    A decode that keeps pages apart by writer is asked for those of the prefill that holds most of the prompt, which is
    the one that wrote most of it in the past."""

    def __init__(self, keys: PromptKeys, prefills: CachingPorts, decodes: CachingPorts) -> None:
        self._keys = keys
        self._prefills = prefills
        self._decodes = decodes
        self._sides: tuple[_Side, _Side] | None = None
        self._found: dict[PeerAddress, int] = {}

    def __getitem__(self, address: PeerAddress) -> int:
        return self._all()[address]

    def __iter__(self) -> Iterator[PeerAddress]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def at(self, addresses: Sequence[PeerAddress]) -> Sequence[int]:
        """Return what each of these ports holds, 0 for one that does not tell."""
        for known, counts in self._looked_up():
            if len(known) == len(addresses) and all(map(is_, known, addresses)):  # takes less than hashing them
                return counts
        return [self._found.get(address, 0) for address in addresses]

    def at_pair(self, prefill: PeerAddress, decode: PeerAddress) -> tuple[int, int]:
        """Return the tokens that a prefill finds, and those that a decode finds when this prefill writes for it."""
        writers: tuple[PeerAddress, ...] = ()
        at_prefill = at_decode = 0
        for scheme, ports in self._prefills.by_scheme.items():
            if (port := ports.get(prefill)) is not None:
                writers = port.addresses
                at_prefill = self._at(prefill, port, scheme, ())
        for scheme, ports in self._decodes.by_scheme.items():
            if (port := ports.get(decode)) is not None and (writers or not scheme.by_writer):
                at_decode = self._at(decode, port, scheme, writers if scheme.by_writer else ())
        return at_prefill, at_decode

    def _at(self, address: PeerAddress, port: CachingPort, scheme: KeyScheme, writers: tuple[PeerAddress, ...]) -> int:
        if self._sides is not None and not writers:
            return self._found[address]
        return port.count_known(self._keys.of(scheme, writers)) * scheme.page_size

    def _all(self) -> dict[PeerAddress, int]:
        self._looked_up()
        return self._found

    def _looked_up(self) -> tuple[_Side, _Side]:
        if self._sides is not None:
            return self._sides
        prefills: _Side = [], []
        decodes: _Side = [], []
        most, writers = 0, None
        for scheme, ports in self._prefills.by_scheme.items():
            keys = self._keys.of(scheme)
            for address, port in ports.items():
                num_tokens = port.count_known(keys) * scheme.page_size
                prefills[0].append(address)
                prefills[1].append(num_tokens)
                if num_tokens > most:
                    most, writers = num_tokens, port.addresses
        for scheme, ports in self._decodes.by_scheme.items():
            if scheme.by_writer and writers is None:
                continue
            keys = self._keys.of(scheme, (writers or ()) if scheme.by_writer else ())
            decodes[0].extend(ports)
            decodes[1].extend([port.count_known(keys) * scheme.page_size for port in ports.values()])
        self._sides = prefills, decodes
        for addresses, counts in self._sides:
            self._found.update(zip(addresses, counts, strict=True))
        return self._sides
