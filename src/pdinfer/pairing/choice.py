"""Shows a policy what it may choose from, and checks its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from pdinfer.errors import ConfigError
from pdinfer.pairing.policy import Policy
from pdinfer.pairing.ports import Ports
from pdinfer.pairing.tracked_request import TrackedRequest
from pdinfer.stats import DecodeLoad, EngineLoad, PrefillLoad
from pdinfer.types import Choice, PeerAddress, RequestShape


class PendingLoad:
    """The work that each prefill will get once decode has granted pages for it. The prefill's own load does not include
    it yet, so a policy that saw only that load would send a whole burst to one prefill."""

    def __init__(self, coming: Iterable[tuple[PeerAddress | None, RequestShape]] = ()) -> None:
        self._requests: Counter[PeerAddress] = Counter()
        self._tokens: Counter[PeerAddress] = Counter()
        for prefill, shape in coming:
            if prefill is not None:
                self.add(prefill, shape)

    def add(self, prefill: PeerAddress, shape: RequestShape) -> None:
        """Count a request that this prefill will get."""
        self._requests[prefill] += 1
        self._tokens[prefill] += shape.num_prompt_tokens + shape.num_output_tokens

    def on_top_of(self, load: PrefillLoad) -> PrefillLoad:
        """Return the load including the pending work."""
        return attrs.evolve(
            load,
            num_queued_requests=load.num_queued_requests + self._requests[load.address],
            num_queued_tokens=load.num_queued_tokens + self._tokens[load.address],
        )


class Chooser:
    """Asks one policy for every request, and counts its choices."""

    def __init__(self, ports: Ports, policy: Policy, max_queued_per_decode: int) -> None:
        self._ports = ports
        self._policy = policy
        self._max_queued_per_decode = max_queued_per_decode
        self._num_choices = 0

    def pending(self, requests: Iterable[TrackedRequest]) -> PendingLoad:
        """Return the work that the prefills of these requests do not know of yet."""
        coming = [tracked for tracked in requests if not tracked.forwarded]
        return PendingLoad((tracked.prefill, tracked.shape(self._num_choices)) for tracked in coming)

    def pair(self, tracked: TrackedRequest, pending: PendingLoad) -> Choice | None:
        """Return a prefill and a decode for a request, and add it to `pending`; None lets the request wait."""
        shape = tracked.shape(self._num_choices)
        choice = choose(self._ports, self._policy, shape, pending, max_queued_per_decode=self._max_queued_per_decode)
        if choice is not None:
            pending.add(choice.prefill, shape)
            self._num_choices += 1
        return choice

    def prefill(self, tracked: TrackedRequest, decode: PeerAddress, pending: PendingLoad) -> PeerAddress | None:
        """Return another prefill for a request that `decode` holds, and add it to `pending`; None when there is
        none."""
        shape = tracked.shape(self._num_choices)
        choice = choose(self._ports, self._policy, shape, pending, decode=decode)
        if choice is None:
            return None
        pending.add(choice.prefill, shape)
        return choice.prefill


def choose(
    ports: Ports,
    policy: Policy,
    shape: RequestShape,
    pending: PendingLoad,
    *,
    max_queued_per_decode: int = 0,
    decode: PeerAddress | None = None,
) -> Choice | None:
    """Return the pair that `policy` chooses for a request, or None to let it wait.

    The policy is shown the ports that can hold the request and are not full, with every link between them. With
    `decode`, it is shown that decode alone, full or not. A policy that names a link of `shape.links` is asked once. One
    that looks at loads alone may name two ports without a link: it is asked again with only the prefills that reach
    that decode, or without a decode that no prefill reaches. Raises ConfigError when it names a port it was not shown.
    """
    fitting, decode_ports = ports.fitting(shape.num_prompt_tokens + shape.max_new_tokens)
    prefills = [pending.on_top_of(port.load()) for port in fitting.values()]
    if decode is not None:
        decodes = [ports.decodes[decode].load()]
    else:
        decodes = [port.load() for port in decode_ports.values()]
        decodes = [load for load in decodes if load.num_waiting_requests < max_queued_per_decode]
    near = prefills
    while (choice := policy(_with_links(shape, ports, near, decodes), near, decodes)) is not None:
        if not (_shows(near, choice.prefill) and _shows(decodes, choice.decode)):
            raise ConfigError(
                "the policy chose a port that is not part of this pairing, is full or out of the other's reach; "
                "it must take one it was shown"
            )
        if ports.linked(choice.prefill, choice.decode):
            break
        near = [load for load in prefills if ports.linked(load.address, choice.decode)]
        decodes = [load for load in decodes if (load.address == choice.decode) == bool(near)]
        near = near or prefills
    return choice


def _with_links(
    shape: RequestShape, ports: Ports, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]
) -> RequestShape:
    """Return the shape with the links between these ports."""
    shown = {load.address for load in (*prefills, *decodes)}
    links = tuple(link for link in ports.links() if link.prefill in shown and link.decode in shown)
    return attrs.evolve(shape, links=links)


def _shows(loads: Iterable[EngineLoad], address: PeerAddress) -> bool:
    return any(load.address == address for load in loads)
