"""How a policy is asked for a pair, and what it is shown.

Loads are taken once for all requests that are sent on in one step of the Pairing. What was chosen since, and what a
prefill will get once decode has granted pages for it, is added to them: a policy that saw only what the engines know
would send a whole burst to one of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import is_
from typing import Protocol

import attrs

from pdinfer.checks import clip
from pdinfer.errors import ConfigError
from pdinfer.pairing.policy import Policy
from pdinfer.pairing.ports import ByScheme, Ports
from pdinfer.pairing.request import PromptKeys, TrackedRequest
from pdinfer.stats import DecodeLoad, Links, PrefillLoad, with_queued, with_waiting
from pdinfer.types import Choice, PeerAddress, RequestShape, TokensByPort


class Board:
    """The loads and links of all ports, and what was chosen while this board was used.

    `coming` are requests whose KV is not at their decode yet. A prefill does not know of those that are not forwarded
    to it; the links of all of them still have bytes to carry."""

    def __init__(self, ports: Ports, coming: Iterable[TrackedRequest] = (), *, max_queued_per_decode: int = 0) -> None:
        self._ports = ports
        self._max_queued_per_decode = max_queued_per_decode
        self._prefills, self._decodes = ports.brief_loads()
        self._links = ports.links()
        self._full = {address for address, load in self._decodes.items() if self._is_full(load)}
        self._fitting: dict[int, tuple[list[PeerAddress], list[PeerAddress]]] = {}
        promised: defaultdict[PeerAddress, list[TrackedRequest]] = defaultdict(list)
        backlog: Counter[tuple[PeerAddress, PeerAddress]] = Counter()
        for tracked in coming:
            attempt = tracked.attempt
            if attempt.prefill is None or attempt.decode is None:
                continue
            if not attempt.forwarded:
                promised[attempt.prefill].append(tracked)
            backlog[attempt.prefill, attempt.decode] += attempt.link_bytes
        for prefill, requests in promised.items():
            self._queue(
                prefill,
                num_tokens=sum(tracked.num_prompt_tokens for tracked in requests),
                sizes=[tracked.attempt.prefill_tokens for tracked in requests],
            )
        for pair, num_bytes in backlog.items():
            self._links = self._links.loaded(*pair, num_bytes)

    def loads(
        self, total: int, decode: PeerAddress | None
    ) -> tuple[dict[PeerAddress, PrefillLoad], dict[PeerAddress, DecodeLoad]]:
        """Return what `Shown` says. A port that joins in another thread meanwhile is on the next board."""
        if total not in self._fitting:
            prefills, decodes = self._ports.fitting(total)
            self._fitting[total] = (
                [address for address in prefills if address in self._prefills],
                [address for address in decodes if address in self._decodes],
            )
        at_prefills, at_decodes = self._fitting[total]
        prefill_loads, decode_loads = self._prefills, self._decodes
        if len(at_prefills) < len(prefill_loads):
            prefill_loads = {address: prefill_loads[address] for address in at_prefills}
        if decode is not None:
            decode_loads = {decode: decode_loads[decode]}
        elif self._full or len(at_decodes) < len(decode_loads):
            decode_loads = {address: decode_loads[address] for address in at_decodes if address not in self._full}
        return prefill_loads, decode_loads

    @property
    def all(self) -> tuple[dict[PeerAddress, PrefillLoad], dict[PeerAddress, DecodeLoad]]:
        """The loads of the ports that are not leaving, full or not."""
        prefills, decodes = self._ports.fitting(0)
        return (
            {address: load for address, load in self._prefills.items() if address in prefills},
            {address: load for address, load in self._decodes.items() if address in decodes},
        )

    def links(self, prefills: Collection[PeerAddress], decodes: Collection[PeerAddress]) -> Links:
        if len(prefills) == len(self._prefills) and len(decodes) == len(self._decodes):
            return self._links
        return self._links.among(set(prefills), set(decodes))

    def chosen(self, shape: RequestShape, prefill: PeerAddress, decode: PeerAddress, *, joins: bool) -> tuple[int, int]:
        """Add a request that this pair serves from now on, and return the tokens that its prefill has to compute and
        the bytes that have to cross the link. It `joins` the line of its decode unless that holds it already."""
        num_tokens = shape.num_prompt_tokens + shape.num_output_tokens
        found = shape.found_tokens
        at_prefill, at_decode = found.at_pair(prefill, decode) if isinstance(found, FoundTokens) else (0, 0)
        to_compute = num_tokens - at_prefill
        self._queue(prefill, num_tokens=num_tokens, sizes=[to_compute])
        load = self._decodes[decode]
        if joins:
            self._decodes[decode] = load = with_waiting(load, [num_tokens])
            if self._is_full(load):
                self._full.add(decode)
        link_bytes = (num_tokens - at_decode) * load.token_bytes
        self._links = self._links.loaded(prefill, decode, link_bytes)
        return to_compute, link_bytes

    def _is_full(self, load: DecodeLoad) -> bool:
        return load.num_waiting_requests >= self._max_queued_per_decode

    def _queue(self, prefill: PeerAddress, *, num_tokens: int, sizes: Sequence[int]) -> None:
        load = self._prefills.get(prefill)
        if load is not None:
            self._prefills[prefill] = with_queued(load, num_tokens, sizes)


class FoundTokens(TokensByPort):
    """How many tokens of a prompt each port holds, looked up when the first of them is asked for and then kept.

    A decode that keeps pages apart by writer is asked for those of the prefill that holds most of the prompt, which is
    the one that wrote most of it in the past."""

    def __init__(self, keys: PromptKeys, prefills: ByScheme, decodes: ByScheme) -> None:
        self._keys = keys
        self._prefills = prefills
        self._decodes = decodes

    def __getitem__(self, address: PeerAddress) -> int:
        return self._all[address]

    def __iter__(self) -> Iterator[PeerAddress]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def at(self, addresses: Sequence[PeerAddress]) -> Sequence[int]:
        """Return what each of these ports holds, 0 for one that does not tell."""
        for side in self._sides:
            if len(side) == len(addresses) and all(map(is_, side, addresses)):  # takes less than hashing them
                return list(side.values())
        return [self._all.get(address, 0) for address in addresses]

    def at_prefill(self, address: PeerAddress) -> int:
        """Return what a prefill holds, without a look at other ports."""
        for scheme, ports in self._prefills.items():
            if (port := ports.get(address)) is not None:
                return port.count_known(self._keys.of(scheme)) * scheme.page_size
        return 0

    def at_pair(self, prefill: PeerAddress, decode: PeerAddress) -> tuple[int, int]:
        """Return the tokens that a prefill finds, and those that a decode finds when this prefill writes for it."""
        writers: tuple[PeerAddress, ...] = ()
        at_prefill = at_decode = 0
        for scheme, ports in self._prefills.items():
            if (port := ports.get(prefill)) is not None:
                writers = port.addresses
                at_prefill = port.count_known(self._keys.of(scheme)) * scheme.page_size
        for scheme, ports in self._decodes.items():
            if (port := ports.get(decode)) is not None and (writers or not scheme.by_writer):
                at_decode = port.count_known(self._keys.of(scheme, writers)) * scheme.page_size
        return at_prefill, at_decode

    @cached_property
    def _all(self) -> dict[PeerAddress, int]:
        prefills, decodes = self._sides
        return prefills | decodes

    @cached_property
    def _sides(self) -> tuple[dict[PeerAddress, int], dict[PeerAddress, int]]:
        prefills: dict[PeerAddress, int] = {}
        decodes: dict[PeerAddress, int] = {}
        most = 0
        writers: tuple[PeerAddress, ...] = ()
        for scheme, ports in self._prefills.items():
            keys = self._keys.of(scheme)
            for address, port in ports.items():
                prefills[address] = num_tokens = port.count_known(keys) * scheme.page_size
                if num_tokens > most:
                    most, writers = num_tokens, port.addresses
        for scheme, ports in self._decodes.items():
            if writers or not scheme.by_writer:
                keys = self._keys.of(scheme, writers)
                decodes |= {address: port.count_known(keys) * scheme.page_size for address, port in ports.items()}
        return prefills, decodes


class OfPolicy(Exception):
    """What a policy has raised, or a ConfigError about its answer. Nothing is half done then."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Chooser:
    """Asks one policy for every request, and counts its choices."""

    def __init__(self, ports: Ports, policy: Policy, max_queued_per_decode: int) -> None:
        self._ports = ports
        self._policy = policy
        self._max_queued_per_decode = max_queued_per_decode
        self._num_choices = 0
        self._coming: dict[TrackedRequest, None] = {}

    def follow(self, tracked: TrackedRequest) -> None:
        """Count a request among those whose KV is not at their decode yet, until it is there or the request ends."""
        self._coming[tracked] = None

    def board(self, requests: Mapping[str, TrackedRequest]) -> Board:
        """Return what a policy is shown now. `requests` have not ended."""
        gone = [
            tracked
            for tracked in self._coming
            if tracked.attempt.landed or requests.get(tracked.request_id) is not tracked
        ]
        for tracked in gone:
            del self._coming[tracked]
        return Board(self._ports, self._coming, max_queued_per_decode=self._max_queued_per_decode)

    def choose(self, tracked: TrackedRequest, board: Board, decode: PeerAddress | None = None) -> Choice | None:
        """Return a prefill and a decode for a request, and add it to the board; None lets the request wait. With
        `decode`, which has the request already, only a prefill is chosen. Raises OfPolicy."""
        shape = RequestShape(
            ordinal=self._num_choices,
            num_prompt_tokens=len(tracked.request.prompt),
            num_output_tokens=tracked.num_tokens,
            max_new_tokens=tracked.request.sampling.max_new_tokens,
            priority=tracked.request.priority,
            found_tokens=FoundTokens(tracked.keys, *self._ports.caching),
        )
        try:
            choice = choose(board, self._policy, shape, decode=decode)
        except Exception as error:
            raise OfPolicy(error) from error
        if choice is not None:
            self._num_choices += decode is None
            work = board.chosen(shape, choice.prefill, choice.decode, joins=decode is None)
            tracked.attempt.prefill_tokens, tracked.attempt.link_bytes = work
            self.follow(tracked)
        return choice


class Shown(Protocol):
    """The ports that a policy may be shown: those of a `Board`, or simulated ones."""

    def loads(
        self, total: int, decode: PeerAddress | None
    ) -> tuple[Mapping[PeerAddress, PrefillLoad], Mapping[PeerAddress, DecodeLoad]]:
        """Return the loads of the ports that hold `total` tokens, without the decodes that are full. With `decode`,
        return the load of that decode alone, full or not."""

    def links(self, prefills: Collection[PeerAddress], decodes: Collection[PeerAddress]) -> Links:
        """Return the links between these ports."""


def choose(shown: Shown, policy: Policy, shape: RequestShape, *, decode: PeerAddress | None = None) -> Choice | None:
    """Return the pair that `policy` chooses for a request, or None to let it wait.

    The policy is shown the ports that can hold the request and are not full, with every link between them. With
    `decode`, it is shown that decode alone, full or not. A policy that names a link of `shape.links` is asked once. One
    that looks at loads alone may name two ports without a link: it is asked again with only the prefills that reach
    that decode, or without a decode that no prefill reaches. Raises ConfigError when it names a port it was not shown.
    """
    prefills, decodes = shown.loads(shape.num_prompt_tokens + shape.max_new_tokens, decode)
    near = prefills
    while True:
        links = shown.links(near.keys(), decodes.keys())
        choice: object = policy(attrs.evolve(shape, links=links), list(near.values()), list(decodes.values()))
        if choice is None:
            return None
        if not isinstance(choice, Choice):
            raise ConfigError(f"a policy returns a Choice or None, {clip(policy)} returned {clip(choice)}")
        if choice.prefill not in near or choice.decode not in decodes:
            raise ConfigError(
                "the policy chose a port that is not part of this pairing, is full or out of the other's reach; "
                "it must take one it was shown"
            )
        if links.between(choice.prefill, choice.decode) is not None:
            return choice
        near = {at: load for at, load in prefills.items() if links.between(at, choice.decode) is not None}
        decodes = {at: load for at, load in decodes.items() if (at == choice.decode) == bool(near)}
        near = near or prefills
