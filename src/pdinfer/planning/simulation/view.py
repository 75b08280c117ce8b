"""What a policy is shown of a simulated cluster, and how it is asked: by `pairing.choosing.choose`, as in a Pairing."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence

from pdinfer.pairing.choosing import choose
from pdinfer.pairing.policy import Policy
from pdinfer.planning.simulation.decode import Decode
from pdinfer.planning.simulation.deployment import Cluster
from pdinfer.planning.simulation.job import Job
from pdinfer.planning.simulation.links import SimLinks
from pdinfer.planning.simulation.prefill import Prefill
from pdinfer.stats import DecodeLoad, Links, PrefillLoad, QueuedSizes
from pdinfer.types import Choice, Link, PeerAddress, RequestShape

Chosen = tuple[int, int, tuple[tuple[str, float], ...]]
"""The numbers of a prefill and a decode, and the score."""


class View:
    """The ports of a cluster as a policy sees them, and what was promised to prefills: requests that decode has not
    granted yet. Loads are made when they are looked at."""

    def __init__(
        self,
        cluster: Cluster,
        prefills: Sequence[Prefill],
        decodes: Sequence[Decode],
        transfers: SimLinks | None,
        policy: Policy,
    ) -> None:
        self._cluster, self._policy, self._transfers = cluster, policy, transfers
        self._prefills = {_address(f"P{each.number}"): each for each in prefills}
        self._decodes = {_address(f"D{each.number}"): each for each in decodes}
        self._promised: dict[int, dict[Job, int]] = {each.number: {} for each in prefills}
        self._num_choices = 0
        self._now_s = 0.0
        self._limits: dict[str, int] = {"prefill": prefills[0].max_tokens, "decode": decodes[0].max_tokens}
        self._links = self._make_links()
        self._prefill_loads: dict[PeerAddress, tuple[int, int, PrefillLoad]] = {}
        self._num_promises = [0] * len(prefills)

    # -- what the host asks ------------------------------------------------------------------------------------------

    @property
    def has_ports(self) -> bool:
        """Whether both sides have a port."""
        return bool(self._prefills and self._decodes)

    def refusal(self, job: Job, *, num_queued: int) -> str | None:
        """Return why a Pairing would not take a request, if it would not."""
        for side, held in self._limits.items():
            if job.max_tokens > held:
                return f"prompt and output make {job.max_tokens} tokens, and {side} holds {held}"
        most = self._cluster.pairing.max_queued_requests
        return f"the queue already holds {most} requests" if num_queued >= most else None

    def choose(self, job: Job, now_s: float) -> Chosen | None:
        """Return the pair that the policy chooses, or None to let the request wait."""
        self._now_s = now_s
        choice = choose(self, self._policy, self._shape(job))
        if choice is None:
            return None
        self._num_choices += 1
        return (*self._numbers(choice), choice.score)

    def choose_prefill(self, job: Job, now_s: float) -> bool:
        """Give a request that a decode holds another prefill. Return False when there is none."""
        self._now_s = now_s
        choice = choose(self, self._policy, self._shape(job), decode=_address(f"D{job.decode}"))
        if choice is not None:
            job.prefill = self._prefills[choice.prefill].number
        return choice is not None

    def promise(self, job: Job) -> None:
        """Count a request that its prefill will get, and the bytes that will cross the link."""
        known = self._prefills[_address(f"P{job.prefill}")].num_found(job)
        self._num_promises[job.prefill] += 1
        self._promised[job.prefill][job] = job.num_tokens - known
        if self._transfers is not None:
            at_decode = self._decodes[_address(f"D{job.decode}")].num_found(job, job.prefill)
            job.link_bytes = (job.num_tokens - at_decode) * self._cluster.network.token_bytes
            self._load_link(job, job.link_bytes)

    def keep_promise(self, job: Job) -> None:
        """Forget a request that its prefill has got, or never will."""
        self._num_promises[job.prefill] += 1
        self._promised[job.prefill].pop(job, None)

    def landed(self, job: Job) -> None:
        """Forget the bytes of a request, which are at decode or never will be."""
        if job.link_bytes:
            self._load_link(job, -job.link_bytes)
            job.link_bytes = 0

    def drop(self, engine: Prefill | Decode) -> None:
        """Show an engine no more."""
        side = "P" if isinstance(engine, Prefill) else "D"
        ports: dict[PeerAddress, Prefill] | dict[PeerAddress, Decode]
        ports = self._prefills if side == "P" else self._decodes
        ports.pop(_address(f"{side}{engine.number}"), None)
        self._links = self._links.among(self._prefills.keys(), self._decodes.keys())

    # -- what `choose` asks ------------------------------------------------------------------------------------------

    def fitting(self, total: int) -> tuple[Collection[PeerAddress], Collection[PeerAddress]]:
        """Return the ports of each side that may be chosen for a request of `total` tokens, full or not."""
        return self._prefills, self._decodes

    def prefill_loads(self, addresses: Collection[PeerAddress]) -> dict[PeerAddress, PrefillLoad]:
        """Return the loads of these prefills."""
        return {address: self._prefill_load(address) for address in addresses}

    def decode_loads(self, addresses: Collection[PeerAddress]) -> dict[PeerAddress, DecodeLoad]:
        """Return the loads of those decodes that are not full."""
        most = self._cluster.pairing.max_queued_per_decode
        loads = ((at, self._decode_load(at)) for at in addresses)
        return {at: load for at, load in loads if load.num_waiting_requests < most}

    def decode_load(self, address: PeerAddress) -> dict[PeerAddress, DecodeLoad]:
        """Return the load of this decode, full or not."""
        return {address: self._decode_load(address)}

    def links(self, prefills: Collection[PeerAddress], decodes: Collection[PeerAddress]) -> Links:
        """Return the links between these ports."""
        if len(prefills) == len(self._prefills) and len(decodes) == len(self._decodes):
            return self._links
        return self._links.among(set(prefills), set(decodes))

    def linked(self, prefill: PeerAddress, decode: PeerAddress) -> bool:
        """Return whether two ports reach each other."""
        here = prefill in self._prefills and decode in self._decodes
        return here and (not self._cluster.colocated or prefill.engine_id[1:] == decode.engine_id[1:])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _numbers(self, choice: Choice) -> tuple[int, int]:
        return self._prefills[choice.prefill].number, self._decodes[choice.decode].number

    def _shape(self, job: Job) -> RequestShape:
        return RequestShape(
            ordinal=self._num_choices,
            num_prompt_tokens=job.asked.prompt_tokens,
            num_output_tokens=job.num_output,
            max_new_tokens=job.asked.output_tokens,
            found_tokens=_Found(job, self._prefills, self._decodes),
        )

    def _make_links(self) -> Links:
        rate = self._cluster.network.bytes_per_s
        return Links(
            Link(prefill=prefill, decode=decode, bytes_per_s=rate)
            for prefill in self._prefills
            for decode in self._decodes
            if self.linked(prefill, decode)
        )

    def _load_link(self, job: Job, num_bytes: int) -> None:
        prefill, decode = _address(f"P{job.prefill}"), _address(f"D{job.decode}")
        link = self._links.between(prefill, decode)
        if link is not None:
            self._links = self._links.with_link(
                Link(
                    prefill=prefill,
                    decode=decode,
                    bytes_per_s=link.bytes_per_s,
                    backlog_bytes=link.backlog_bytes + num_bytes,
                )
            )

    def _prefill_load(self, address: PeerAddress) -> PrefillLoad:
        prefill = self._prefills[address]
        known = self._prefill_loads.get(address)
        if known is not None and known[:2] == (prefill.num_changes, self._num_promises[prefill.number]):
            return known[2]
        load = self._make_prefill_load(address, prefill)
        self._prefill_loads[address] = prefill.num_changes, self._num_promises[prefill.number], load
        return load

    def _make_prefill_load(self, address: PeerAddress, prefill: Prefill) -> PrefillLoad:
        promised, pages = self._promised[prefill.number], prefill.pages
        num_tokens, sizes = prefill.sizes()
        return PrefillLoad(
            address=address,
            num_free_pages=pages.num_free,
            num_cached_pages=pages.num_cached,
            num_total_pages=pages.num_pages,
            page_size=prefill.page_size,
            token_bytes=self._cluster.network.token_bytes,
            num_tokens=prefill.scheduler.costs.num_tokens,
            busy_s=prefill.scheduler.costs.busy_s,
            num_queued_requests=len(sizes) + len(promised),
            num_queued_tokens=num_tokens + sum(job.num_tokens for job in promised),
            queued=QueuedSizes.of((*sizes, *promised.values())),
            cost=prefill.cost,
        )

    def _decode_load(self, address: PeerAddress) -> DecodeLoad:
        decode = self._decodes[address]
        decode.sync(self._now_s)
        state = decode.state()
        return DecodeLoad(
            address=address,
            num_free_pages=state.num_free,
            num_cached_pages=state.num_cached,
            num_total_pages=decode.pages.num_pages,
            page_size=decode.page_size,
            token_bytes=self._cluster.network.token_bytes,
            num_tokens=decode.scheduler.costs.num_tokens,
            busy_s=decode.scheduler.costs.busy_s,
            num_waiting_requests=state.num_waiting,
            num_waiting_tokens=state.waiting_tokens,
            num_granted_requests=state.num_granted,
            num_running_requests=state.num_running,
            num_running_tokens=state.held_tokens,
            max_running_requests=decode.model.engine.max_running_requests,
            cost=decode.cost,
        )


class _Found(Mapping[PeerAddress, int]):
    """How many tokens of a prompt each port holds, looked up when the first of them is asked for. As in
    `pairing.choosing.FoundTokens`, a decode that keeps pages apart by writer is asked for those of the prefill that
    holds most."""

    def __init__(
        self, job: Job, prefills: Mapping[PeerAddress, Prefill], decodes: Mapping[PeerAddress, Decode]
    ) -> None:
        self._job, self._prefills, self._decodes = job, prefills, decodes
        self._found: dict[PeerAddress, int] | None = None

    def __getitem__(self, address: PeerAddress) -> int:
        return self._all()[address]

    def __iter__(self) -> Iterator[PeerAddress]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[PeerAddress, int]:
        if self._found is None:
            found = {address: prefill.num_found(self._job) for address, prefill in self._prefills.items()}
            most = max(found, key=found.__getitem__)
            writer = self._prefills[most].number if found[most] else None
            found |= {address: decode.num_found(self._job, writer) for address, decode in self._decodes.items()}
            self._found = found
        return self._found


@functools.cache
def _address(name: str) -> PeerAddress:
    return PeerAddress(name.encode(), 0, 0)
