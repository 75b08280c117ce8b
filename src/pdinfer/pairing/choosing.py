"""How a policy is asked for a pair, and what it is shown.

Loads are taken once for all requests that are sent on in one step of the Pairing. What was chosen since, and what a
prefill will get once decode has granted pages for it, is added to them: a policy that saw only what the engines know
would send a whole burst to one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Protocol

from pdinfer.checks import clip
from pdinfer.errors import ConfigError
from pdinfer.kv.prefix import KeyScheme
from pdinfer.pairing.policy import Policy
from pdinfer.pairing.port import CachingPort
from pdinfer.pairing.ports import CachingPorts, Ports
from pdinfer.pairing.request import PromptKeys, TrackedRequest
from pdinfer.stats import DecodeLoad, Links, PrefillLoad, changed
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
        sizes: dict[PeerAddress, list[TrackedRequest]] = {}
        backlog: dict[tuple[PeerAddress, PeerAddress], int] = {}
        for tracked in coming:
            attempt = tracked.attempt
            if attempt.prefill is None or attempt.decode is None:
                continue
            if not attempt.forwarded:
                sizes.setdefault(attempt.prefill, []).append(tracked)
            pair = attempt.prefill, attempt.decode
            backlog[pair] = backlog.get(pair, 0) + attempt.link_bytes
        for prefill, pending in sizes.items():
            self._queue(
                prefill,
                num_tokens=sum(tracked.num_prompt_tokens for tracked in pending),
                sizes=[tracked.attempt.prefill_tokens for tracked in pending],
            )
        for pair, num_bytes in backlog.items():
            self._links = self._links.loaded(*pair, num_bytes)

    def fitting(self, total: int) -> tuple[list[PeerAddress], list[PeerAddress]]:
        """Return the ports of each side that may be chosen for a request of `total` tokens, full or not. One that
        joins meanwhile, in another thread, is on the next board."""
        if total not in self._fitting:
            prefills, decodes = self._ports.fitting(total)
            self._fitting[total] = (
                [address for address in prefills if address in self._prefills],
                [address for address in decodes if address in self._decodes],
            )
        return self._fitting[total]

    def prefill_loads(self, addresses: Collection[PeerAddress]) -> dict[PeerAddress, PrefillLoad]:
        """Return the loads of these prefills."""
        prefills = self._prefills
        return {address: prefills[address] for address in addresses} if len(addresses) < len(prefills) else prefills

    def decode_loads(self, addresses: Collection[PeerAddress]) -> dict[PeerAddress, DecodeLoad]:
        """Return the loads of those decodes that are not full."""
        decodes, full = self._decodes, self._full
        if not full and len(addresses) == len(decodes):
            return decodes
        return {address: decodes[address] for address in addresses if address not in full}

    def decode_load(self, address: PeerAddress) -> dict[PeerAddress, DecodeLoad]:
        """Return the load of this decode, full or not."""
        return {address: self._decodes[address]}

    def links(self, prefills: Collection[PeerAddress], decodes: Collection[PeerAddress]) -> Links:
        """Return the links between these ports."""
        if len(prefills) == len(self._prefills) and len(decodes) == len(self._decodes):
            return self._links
        return self._links.among(set(prefills), set(decodes))

    def linked(self, prefill: PeerAddress, decode: PeerAddress) -> bool:
        """Return whether two ports reach each other."""
        return self._ports.linked(prefill, decode)

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
            self._decodes[decode] = load = changed(
                load,
                num_waiting_requests=load.num_waiting_requests + 1,
                num_waiting_tokens=load.num_waiting_tokens + num_tokens,
            )
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
            self._prefills[prefill] = changed(
                load,
                num_queued_requests=load.num_queued_requests + len(sizes),
                num_queued_tokens=load.num_queued_tokens + num_tokens,
                queued=load.queued.plus(sizes),
            )


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

    def pair(self, tracked: TrackedRequest, board: Board) -> Choice | None:
        """Return a prefill and a decode for a request, and add it to the board; None lets the request wait. Raises
        OfPolicy, as does `prefill`."""
        shape = self._shape(tracked)
        choice = self._choose(board, shape)
        if choice is not None:
            self._num_choices += 1
            self._note(tracked, board.chosen(shape, choice.prefill, choice.decode, joins=True))
        return choice

    def prefill(self, tracked: TrackedRequest, decode: PeerAddress, board: Board) -> PeerAddress | None:
        """Return another prefill for a request that `decode` holds, and add it to the board; None when there is
        none."""
        shape = self._shape(tracked)
        choice = self._choose(board, shape, decode)
        if choice is None:
            return None
        self._note(tracked, board.chosen(shape, choice.prefill, decode, joins=False))
        return choice.prefill

    def _choose(self, board: Board, shape: RequestShape, decode: PeerAddress | None = None) -> Choice | None:
        try:
            return choose(board, self._policy, shape, decode=decode)
        except Exception as error:
            raise OfPolicy(error) from error

    def _shape(self, tracked: TrackedRequest) -> RequestShape:
        return RequestShape(
            ordinal=self._num_choices,
            num_prompt_tokens=len(tracked.request.prompt),
            num_output_tokens=tracked.num_tokens,
            max_new_tokens=tracked.request.sampling.max_new_tokens,
            priority=tracked.request.priority,
            found_tokens=FoundTokens(tracked.keys, *self._ports.caching),
        )

    def _note(self, tracked: TrackedRequest, work: tuple[int, int]) -> None:
        tracked.attempt.prefill_tokens, tracked.attempt.link_bytes = work
        self.follow(tracked)


class Shown(Protocol):
    """The ports that a policy may be shown: those of a `Board`, or simulated ones."""

    def fitting(self, total: int) -> tuple[Collection[PeerAddress], Collection[PeerAddress]]:
        """Return the ports of each side that may be chosen for a request of `total` tokens, full or not."""

    def prefill_loads(self, addresses: Collection[PeerAddress]) -> dict[PeerAddress, PrefillLoad]:
        """Return the loads of these prefills."""

    def decode_loads(self, addresses: Collection[PeerAddress]) -> dict[PeerAddress, DecodeLoad]:
        """Return the loads of those decodes that are not full."""

    def decode_load(self, address: PeerAddress) -> dict[PeerAddress, DecodeLoad]:
        """Return the load of this decode, full or not."""

    def links(self, prefills: Collection[PeerAddress], decodes: Collection[PeerAddress]) -> Links:
        """Return the links between these ports."""

    def linked(self, prefill: PeerAddress, decode: PeerAddress) -> bool:
        """Return whether two ports reach each other."""


def choose(board: Shown, policy: Policy, shape: RequestShape, *, decode: PeerAddress | None = None) -> Choice | None:
    """Return the pair that `policy` chooses for a request, or None to let it wait.

    The policy is shown the ports that can hold the request and are not full, with every link between them. With
    `decode`, it is shown that decode alone, full or not. A policy that names a link of `shape.links` is asked once. One
    that looks at loads alone may name two ports without a link: it is asked again with only the prefills that reach
    that decode, or without a decode that no prefill reaches. Raises ConfigError when it names a port it was not shown.
    """
    fitting, decode_ports = board.fitting(shape.num_prompt_tokens + shape.max_new_tokens)
    prefills = board.prefill_loads(fitting)
    decodes = board.decode_loads(decode_ports) if decode is None else board.decode_load(decode)
    near = prefills
    while (choice := _ask(policy, shape, board, near, decodes)) is not None:
        if choice.prefill not in near or choice.decode not in decodes:
            raise ConfigError(
                "the policy chose a port that is not part of this pairing, is full or out of the other's reach; "
                "it must take one it was shown"
            )
        if board.linked(choice.prefill, choice.decode):
            break
        near = {at: load for at, load in prefills.items() if board.linked(at, choice.decode)}
        decodes = {at: load for at, load in decodes.items() if (at == choice.decode) == bool(near)}
        near = near or prefills
    return choice


def _ask(
    policy: Policy,
    shape: RequestShape,
    board: Shown,
    prefills: Mapping[PeerAddress, PrefillLoad],
    decodes: Mapping[PeerAddress, DecodeLoad],
) -> Choice | None:
    shown = RequestShape(
        ordinal=shape.ordinal,
        num_prompt_tokens=shape.num_prompt_tokens,
        num_output_tokens=shape.num_output_tokens,
        max_new_tokens=shape.max_new_tokens,
        priority=shape.priority,
        links=board.links(prefills.keys(), decodes.keys()),
        found_tokens=shape.found_tokens,
    )
    choice: object = policy(shown, list(prefills.values()), list(decodes.values()))
    if choice is None or isinstance(choice, Choice):
        return choice
    raise ConfigError(f"a policy returns a Choice or None, {clip(policy)} returned {clip(choice)}")
