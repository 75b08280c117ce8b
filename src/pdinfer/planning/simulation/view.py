"""What a policy is shown of a simulated cluster, and how it is asked: by `pairing.choosing.choose`, as in a Pairing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from pdinfer.errors import Overloaded
from pdinfer.pairing.choosing import choose
from pdinfer.pairing.policy import Policy
from pdinfer.pairing.promise import Coming, Door
from pdinfer.pairing.queue import full
from pdinfer.planning.simulation.decode import Decode
from pdinfer.planning.simulation.deployment import Cluster
from pdinfer.planning.simulation.job import Job
from pdinfer.planning.simulation.prefill import Prefill
from pdinfer.stats import DecodeLoad, Links, PairingStats, PrefillLoad, with_queued
from pdinfer.types import Link, PeerAddress, RequestShape


class View:
    """The ports of a cluster as a policy sees them (`Shown`), and what was promised: to prefills, the requests that
    decode has not granted yet, and to links the bytes that have not landed."""

    def __init__(
        self, cluster: Cluster, prefills: Sequence[Prefill], decodes: Sequence[Decode], policy: Policy
    ) -> None:
        self._cluster, self._policy = cluster, policy
        self._addresses = [each.address for each in prefills], [each.address for each in decodes]
        self._prefills = {each.address: each for each in prefills}
        self._decodes = {each.address: each for each in decodes}
        self._promised: dict[PeerAddress, dict[Job, int]] = {each.address: {} for each in prefills}
        self._num_choices = 0
        self._door = Door(cluster.pairing.slo) if cluster.pairing.slo is not None else None
        self._limits = {"prefill": prefills[0].max_tokens, "decode": decodes[0].max_tokens}
        rate = cluster.network.bytes_per_s
        self._counts_bytes = rate is not None and not cluster.colocated
        self._links = Links(
            Link(prefill=prefill, decode=decode, bytes_per_s=rate)
            for prefill in self._prefills
            for decode in self._decodes
            if not cluster.colocated or self._prefills[prefill].rival is self._decodes[decode]
        )

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
        if num_queued >= most:
            return full(most)
        if self._door is not None:
            try:
                self._door.take(self._shape(job), (job.priority, b""), None, 0.0)
            except Overloaded as error:
                return str(error)
        return None

    def look(self, queue: Iterable[Job]) -> None:
        """Let the door see how things are now. `queue` has the requests that wait for a pair."""
        if self._door is not None:
            prefills = {address: self._prefill_load(address) for address in self._prefills}
            decodes = {address: decode.load() for address, decode in self._decodes.items()}
            self._door.look(prefills, decodes, self._links, self._coming(queue), 0.0)

    def ended(self, job: Job) -> None:
        """Let the door learn what an answer took."""
        if self._door is not None and job.is_whole:
            self._door.answers.note((job.priority, b""), job.num_output)

    def _coming(self, queue: Iterable[Job]) -> Iterator[Coming]:
        for job in queue:
            yield Coming(job.priority, job.num_tokens, job.num_tokens)
        for address, promised in self._promised.items():
            for job, to_compute in promised.items():
                yield Coming(job.priority, to_compute, job.num_tokens, address, self._pair(job)[1])
        for address, prefill in self._prefills.items():
            for prompt in prefill.scheduler.unfinished:
                yield Coming(prompt.job.priority, prompt.num_tokens, 0, address, self._pair(prompt.job)[1])

    def choose(self, job: Job) -> bool:
        """Give a request the pair that the policy chooses. Return False to let it wait."""
        choice = choose(self, self._policy, self._shape(job))
        if choice is None:
            return False
        self._num_choices += 1
        job.prefill, job.decode = self._prefills[choice.prefill].number, self._decodes[choice.decode].number
        job.score = choice.score
        self.promise(job)
        return True

    def choose_prefill(self, job: Job) -> bool:
        """Give a request that a decode holds another prefill. Return False when there is none."""
        choice = choose(self, self._policy, self._shape(job), decode=self._pair(job)[1])
        if choice is not None:
            job.prefill = self._prefills[choice.prefill].number
        return choice is not None

    def promise(self, job: Job) -> None:
        """Count a request that its prefill will get, and the bytes that will cross the link."""
        prefill, decode = self._pair(job)
        at_prefill = self._prefills[prefill].num_found(job)
        self._promised[prefill][job] = job.num_tokens - at_prefill
        if self._counts_bytes:
            at_decode = self._decodes[decode].num_found(job, job.prefill)
            self._load_link(job, (job.num_tokens - at_decode) * self._cluster.network.token_bytes)

    def keep_promise(self, job: Job) -> None:
        """Forget a request that its prefill has got, or never will."""
        self._promised[self._pair(job)[0]].pop(job, None)

    def landed(self, job: Job) -> None:
        """Forget the bytes of a request, which are at decode or never will be."""
        if job.link_bytes:
            self._load_link(job, -job.link_bytes)

    def stats(self) -> PairingStats:
        """Return what a Pairing says of its ports and of the requests that they serve."""
        loads = [engine.load() for side in (self._prefills, self._decodes) for engine in side.values()]
        groups = dict.fromkeys(tuple(rank.address for rank in self.ranks(load.address)) for load in loads)
        return PairingStats(
            num_queued_requests=0,
            num_unfinished_requests=0,
            ended=(),
            num_retries=0,
            num_reroutes=0,
            num_moved=0,
            num_ports_lost=0,
            links_down=(),
            loads=tuple(loads),
            together=tuple(group for group in groups if len(group) > 1),
        )

    def ranks(self, address: PeerAddress) -> Sequence[Prefill | Decode]:
        """Return all ranks of the engine of which one is shown with an address."""
        side = self._prefills if address in self._prefills else self._decodes
        return [rank for rank in side.values() if rank.group is side[address].group]

    def join(self, engine: Prefill | Decode) -> None:
        """Show an engine that is new, and linked to all of the other side."""
        address, rate = engine.address, self._cluster.network.bytes_per_s
        if isinstance(engine, Prefill):
            self._prefills[address], self._promised[address] = engine, {}
            self._addresses[0].append(address)
            new = [Link(prefill=address, decode=decode, bytes_per_s=rate) for decode in self._decodes]
        else:
            self._decodes[address] = engine
            self._addresses[1].append(address)
            new = [Link(prefill=prefill, decode=address, bytes_per_s=rate) for prefill in self._prefills]
        self._links = Links([*self._links, *new])

    def drop(self, engine: Prefill | Decode) -> None:
        """Show an engine no more."""
        for ports in (self._prefills, self._decodes):
            ports.pop(engine.address, None)
        self._links = self._links.among(self._prefills.keys(), self._decodes.keys())

    # -- what `choose` asks: see `Shown` ------------------------------------------------------------------------------

    def loads(
        self, total: int, decode: PeerAddress | None
    ) -> tuple[dict[PeerAddress, PrefillLoad], dict[PeerAddress, DecodeLoad]]:
        prefills = {address: self._prefill_load(address) for address in self._prefills}
        if decode is not None:
            return prefills, {decode: self._decodes[decode].load()}
        most = self._cluster.pairing.max_queued_per_decode
        loads = ((at, each.load()) for at, each in self._decodes.items())
        return prefills, {at: load for at, load in loads if load.num_waiting_requests < most}

    def links(self, prefills: Collection[PeerAddress], decodes: Collection[PeerAddress]) -> Links:
        if len(prefills) == len(self._prefills) and len(decodes) == len(self._decodes):
            return self._links
        return self._links.among(set(prefills), set(decodes))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _pair(self, job: Job) -> tuple[PeerAddress, PeerAddress]:
        return self._addresses[0][job.prefill], self._addresses[1][job.decode]

    def _shape(self, job: Job) -> RequestShape:
        return RequestShape(
            ordinal=self._num_choices,
            num_prompt_tokens=job.asked.prompt_tokens,
            num_output_tokens=job.num_output,
            max_new_tokens=job.asked.output_tokens,
            priority=job.priority,
            found_tokens=self._found(job),
        )

    def _found(self, job: Job) -> dict[PeerAddress, int]:
        """Return how many tokens of a prompt each port holds. As in `pairing.choosing.FoundTokens`, a decode that keeps
        pages apart by writer is asked for those of the prefill that holds most."""
        found = {address: prefill.num_found(job) for address, prefill in self._prefills.items()}
        most = max(found, key=found.__getitem__, default=None)
        writer = self._prefills[most].number if most is not None and found[most] else None
        return found | {address: decode.num_found(job, writer) for address, decode in self._decodes.items()}

    def _load_link(self, job: Job, num_bytes: int) -> None:
        """Count bytes of a request that have to cross its link, or that need not any more."""
        job.link_bytes += num_bytes
        self._links = self._links.loaded(*self._pair(job), num_bytes)

    def _prefill_load(self, address: PeerAddress) -> PrefillLoad:
        load, promised = self._prefills[address].load(), self._promised[address]
        if not promised:
            return load
        return with_queued(load, sum(job.num_tokens for job in promised), promised.values())
