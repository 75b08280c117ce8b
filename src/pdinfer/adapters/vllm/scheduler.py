"""The half of the connector in vLLM's scheduler: which requests load, wait for a grant, or are sent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from pdinfer.adapters.vllm.messages import Arrivals, Orders, Save, VLLMLoad, proof_of
from pdinfer.adapters.vllm.settings import Ask, Settings, asked

_log = logging.getLogger("vllm.pdinfer")


@attrs.define(eq=False)
class Sent:
    """A request that is computed here for a decode. `num_tokens` are those of its prompt. A `first_token` goes with
    it."""

    room: str
    proofs: tuple[str, ...]
    num_tokens: int
    first_token: bool = False
    blocks: list[int] = attrs.field(factory=list)
    is_whole: bool = False


class SchedulerHalf:
    """The connector's half in vLLM's scheduler. `block_size` is that of its one cache group."""

    def __init__(self, block_size: int, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._block_size = block_size
        self._settings = settings
        self._clock = clock
        self._grants: dict[str, float] = {}
        self._asks: dict[str, Ask] = {}
        self._since: dict[str, float] = {}
        self._loaded: set[str] = set()
        self._loading: set[str] = set()
        self._sent: dict[str, Sent] = {}
        self._next = Orders()
        self._unallocated: set[str] = set()  # of those that somebody waits for, since the last step

    # -- what vLLM asks ---------------------------------------------------------------------------------------------

    def matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Return how many tokens come from a peer, and whether they do so between steps: all but the last for a load
        that was not tried before. (None, False) means that a request waits for its grant."""
        ask, req_id = self._ask(request), str(request.request_id)
        if ask.sends and not ask.problem and ask.room not in self._grants:
            return self._held(req_id)
        self._unallocated.add(req_id)
        if ask.loads and req_id not in self._loaded:
            missing = int(request.num_prompt_tokens) - 1 - num_computed
            return (missing, True) if missing > 0 else (0, False)
        return 0, False

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], num_external: int) -> None:
        """Note the blocks of a request that is scheduled, or will be when its load has ended."""
        ask, req_id = self._ask(request), str(request.request_id)
        self._unallocated.discard(req_id)
        if ask.sends and not ask.problem and req_id not in self._sent:
            tokens = request.prompt_token_ids
            proofs = proof_of(tokens), proof_of(tokens[:-1])
            self._sent[req_id] = Sent(ask.room, proofs, len(tokens), ask.first_token)
        elif ask.loads and num_external and req_id not in self._loaded:
            stop = int(request.num_prompt_tokens) - 1
            start, size = stop - num_external, self._block_size
            blocks = tuple(block_ids[0][start // size : -(-stop // size)])
            proof = "" if ask.problem else proof_of(request.prompt_token_ids[:stop])
            load = VLLMLoad(req_id, ask.room, ask.prefill, proof, (start, stop), blocks, ask.problem)
            self._next.loads.append(load)
            self._loaded.add(req_id)
            self._loading.add(req_id)

    def orders(self, output: Any) -> Orders:
        """Return what a step means for the worker, from vLLM's SchedulerOutput."""
        orders, self._next = self._next, Orders()
        orders.preempted += sorted(set(output.preempted_req_ids or ()) & self._sent.keys())
        for req_id in orders.preempted:
            self._sent[req_id].is_whole = False
        orders.saves += self._saves(output)
        orders.is_idle = not output.total_num_scheduled_tokens
        orders.lacks_blocks = orders.is_idle and bool(self._unallocated)
        self._unallocated.clear()
        return orders

    def arrived(self, arrivals: Arrivals | None, received: Any) -> None:
        """Note the grants that have come to the worker, and the loads that have ended."""
        self._loading -= set(received or ())
        now, kept_s = self._clock(), self._settings.hold_s + self._settings.lease_s
        if arrivals is not None:
            self._grants = {room: since for room, since in self._grants.items() if now - since <= kept_s}
            self._grants |= dict.fromkeys(arrivals.rooms, now)

    def finished(self, request: Any) -> bool:
        """Note that a request has finished. Return whether its blocks are held until the worker says otherwise."""
        req_id = str(request.request_id)
        ask = self._ask(request)  # vLLM may never have asked about it
        del self._asks[req_id]
        self._since.pop(req_id, None)
        self._loaded.discard(req_id)
        if req_id in self._loading:  # vLLM holds these blocks itself
            self._loading.discard(req_id)
            self._next.cancelled.append(req_id)
        if not ask.sends:
            return False
        self._grants.pop(ask.room, None)
        sent = self._sent.pop(req_id, None)
        if not ask.problem and (sent is None or not sent.is_whole):
            self._next.unwanted.append(ask.room)
        if sent is None:
            return False
        self._next.ended.append(req_id)
        if sent.first_token:
            self._next.drawn += [(req_id, int(token)) for token in request.output_token_ids[:1]]
        return True

    # -- inside -----------------------------------------------------------------------------------------------------

    def _held(self, req_id: str) -> tuple[int | None, bool]:
        """Hold a request without a grant. When it has waited long enough, those with a grant still go first, since
        their decodes wait for them, until it has waited twice as long."""
        hold_s, now = self._settings.hold_s, self._clock()
        waited_s = now - self._since.setdefault(req_id, now)
        if waited_s >= 2 * hold_s or (waited_s >= hold_s and not self._has_granted(now - hold_s)):
            return 0, False
        self._next.waits = True
        return None, False

    def _has_granted(self, since: float) -> bool:
        """Return whether a grant came after this moment whose prompt has not started, or is not even here yet."""
        started = {sent.room for sent in self._sent.values()}
        return any(came > since and room not in started for room, came in self._grants.items())

    def _ask(self, request: Any) -> Ask:
        req_id = str(request.request_id)
        if req_id not in self._asks:
            ask = self._asks[req_id] = asked(request, self._settings)
            if ask.sends and ask.problem:
                _log.warning("request %s is not handed over: %s", req_id, ask.problem)
        return self._asks[req_id]

    def _saves(self, output: Any) -> Iterator[Save]:
        """Yield the prompts that go on in this step. Blocks of a request that is new or resumed replace those known."""
        for new in output.scheduled_new_reqs:
            if (sent := self._sent.get(new.req_id)) is not None:
                sent.blocks = list(new.block_ids[0])
                yield from self._save(new.req_id, sent, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for at, req_id in enumerate(cached.req_ids):
            if (sent := self._sent.get(req_id)) is not None:
                blocks = list((cached.new_block_ids[at] or ([],))[0])
                sent.blocks = blocks if req_id in cached.resumed_req_ids else [*sent.blocks, *blocks]
                yield from self._save(req_id, sent, cached.num_computed_tokens[at], output)

    def _save(self, req_id: str, sent: Sent, num_computed: int, output: Any) -> Iterator[Save]:
        stop = min(num_computed + output.num_scheduled_tokens[req_id], sent.num_tokens)
        if not sent.is_whole:
            sent.is_whole = stop == sent.num_tokens
            yield Save(req_id, sent.room, sent.proofs, stop, tuple(sent.blocks), sent.is_whole, sent.first_token)
