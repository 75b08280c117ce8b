"""What vLLM 0.32 calls on a connector and in which order, with blocks, steps and preemption, and without a model.

A token's cache is a function of the layer and of all tokens before it, so whoever computes or lands it has the same
bytes. Blocks that nobody has hold `POISON`; a free block that changes was written by a peer too late.
"""

from __future__ import annotations

import enum
import functools
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import attrs
import torch
import xxhash

from pdinfer.adapters.vllm.loading import connector_on
from pdinfer.adapters.vllm.messages import TransferCounts
from tests.forks import FAR_S

POISON = 0x7F
LAYERS, WIDTH = 4, 96  # of examples/tiny


class FakeBase(ABC):
    """The parts of vLLM's base class that a connector meets."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def hook_that_we_never_heard_of(self) -> str:
        return "as in the base class"


@functools.cache
def latents(tokens: tuple[int, ...]) -> torch.Tensor:
    """Return what a prompt leaves, [layers, tokens, bytes]: each row depends on every token up to it."""
    digest, seeds = xxhash.xxh64(), []
    for token in tokens:
        digest.update(token.to_bytes(4, "little"))
        seeds.append(digest.intdigest() % (1 << 31))
    layers = torch.arange(LAYERS)[:, None, None] * 7919
    columns = torch.arange(WIDTH * 4) * 2654435761
    return ((columns + torch.tensor(seeds)[None, :, None] + layers) >> 7).to(torch.uint8)


class Status(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@attrs.define(eq=False)
class FakeRequest:
    request_id: str
    prompt: tuple[int, ...]
    kv_transfer_params: dict[str, Any] | None
    status: Status = Status.WAITING
    num_computed: int = 0
    blocks: list[int] = attrs.field(factory=list)
    output_token_ids: list[int] = attrs.field(factory=list)
    landed: torch.Tensor | None = None
    num_steps: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self.prompt)

    @property
    def is_over(self) -> bool:
        return self.status in (Status.DONE, Status.FAILED)


@attrs.define(eq=False, slots=False)
class FakeEngine:
    """One engine: a scheduler and a worker, each with its own connector, stepped by the test."""

    role: str
    extra: dict[str, Any]
    block_size: int = 16
    num_blocks: int = 64
    chunk: int = 64
    max_seqs: int = 1000
    policy: str = "recompute"
    model: str = "examples/tiny"
    dtype: torch.dtype = torch.float32
    num_heads: int = 1
    base: type = FakeBase
    compute: Callable[[tuple[int, ...]], torch.Tensor] = latents
    draw: Callable[[tuple[int, ...]], int] = len
    equal: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal
    num_ranks: int = 1
    data_rank: int = 0
    data_size: int = 1
    config_more: dict[str, Any] = attrs.field(factory=dict)
    model_more: dict[str, Any] = attrs.field(factory=dict)
    requests: dict[str, FakeRequest] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        parallel = {
            "tensor_parallel_size": self.num_ranks,
            "pipeline_parallel_size": 1,
            "data_parallel_size": self.data_size,
            "data_parallel_index": self.data_rank,
        }
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_role=self.role, kv_connector_extra_config=self.extra),
            model_config=SimpleNamespace(model=self.model, **self.model_more),
            cache_config=SimpleNamespace(block_size=self.block_size, cache_dtype="auto"),
            parallel_config=SimpleNamespace(**parallel),
            **self.config_more,
        )
        made = connector_on(self.base, "0.32.0")
        self.scheduler = made(config, SimpleNamespace(name="SCHEDULER"), None)
        self.workers = []
        for rank in range(self.num_ranks):
            own = SimpleNamespace(**{**vars(config), "parallel_config": SimpleNamespace(**parallel, rank=rank)})
            self.workers.append(made(own, SimpleNamespace(name="WORKER"), None))
        self.worker = self.workers[0]
        self.caches = [self._cached(worker) for worker in self.workers]
        self.bytes = [  # of rank 0, then of rank 1, ...
            cache.view(torch.uint8).view(self.num_blocks, self.block_size, -1)
            for caches in self.caches
            for cache in caches.values()
        ]
        for layer in self.bytes:
            layer[:] = POISON
        self.counts = TransferCounts()
        self.told: tuple[Counter[str], Counter[str]] = (Counter(), Counter())  # workers that said: sent, received
        self.taken: list[int] = []
        self.held: set[str] = set()
        self.free = list(range(self.num_blocks))
        self.ended: set[str] = set()
        self.recved: set[str] = set()
        self.failed: set[str] = set()
        self.preempt: set[str] = set()
        self.prefix: dict[tuple[int, ...], int] = {}  # full blocks of prompts that are held for good, as a prefix cache

    def _cached(self, worker: Any) -> dict[str, torch.Tensor]:
        """Give a worker caches of its own."""
        size = self.num_blocks * self.block_size * WIDTH * self.dtype.itemsize
        with worker.get_mem_pool_context() or nullcontext():
            whole = torch.zeros(size * LAYERS, dtype=torch.int8)
        shape = (self.num_blocks, self.num_heads, self.block_size, WIDTH // self.num_heads)
        parts = [whole[at * size : (at + 1) * size] for at in range(LAYERS)]
        caches = {
            f"model.layers.{at}.self_attn.attn": part.view(self.dtype).view(shape) for at, part in enumerate(parts)
        }
        worker.register_kv_caches(caches)
        return caches

    @property
    def channel(self) -> Any:
        return self.worker._worker.channel

    @property
    def address(self) -> str:
        return self.channel.address.endpoints[0]

    def add(self, req_id: str, prompt: tuple[int, ...], params: dict[str, Any] | None) -> FakeRequest:
        request = self.requests[req_id] = FakeRequest(req_id, prompt, params)
        return request

    def remember(self, prompt: tuple[int, ...], num_blocks: int) -> None:
        """Have the first blocks of a prompt in the prefix cache."""
        for at in range(num_blocks):
            block = self.prefix[prompt[: (at + 1) * self.block_size]] = self.free.pop(0)
            for slot in range(self.block_size):
                for number, layer in enumerate(self.bytes):
                    layer[block, slot] = self.compute(prompt)[number % LAYERS, at * self.block_size + slot]

    def abort(self, req_id: str) -> None:
        request = self.requests[req_id]
        if not request.is_over:
            is_written = request.status is Status.LOADING and req_id not in self.recved
            self.recved.discard(req_id)
            self._finish(request, Status.FAILED, delay=is_written)

    def step(self) -> None:
        """Schedule, compute and take the connector's word, as vLLM's engine core does."""
        output, finished = self._schedule(), set(self.ended)
        self.ended.clear()
        orders = self.scheduler.build_connector_meta(output)
        for worker in self.workers:
            worker.handle_preemptions(orders)
        for layer in self.bytes:  # only from here on may others write the blocks of preempted requests
            layer[self.taken] = POISON
        self.taken = []
        for worker in self.workers:
            worker.bind_connector_metadata(orders)
        self._compute(output)
        for worker in self.workers:
            worker.start_load_kv(None)
            worker.wait_for_save()
        said = self._aggregated(finished)
        self._update(output, said.bad)
        self.scheduler.update_connector_output(said)
        for req_id in said.finished_recving or ():
            request = self.requests[req_id]
            if request.status is Status.LOADING:
                self.recved.add(req_id)
            else:
                assert request.is_over
                self._free(request)
        for req_id in said.finished_sending or ():
            assert req_id in self.held, "vLLM does not know the request any more"
            self.held.discard(req_id)
            self._free(self.requests[req_id])

    def _aggregated(self, finished: set[str]) -> Any:
        """Return what the workers say, as vLLM's KVOutputAggregator joins it: a request is done when as many have said
        so as the connector wants, and a block is lost when one of them lacks it."""
        done: tuple[set[str], set[str]] = (set(), set())
        bad: set[int] = set()
        news = None
        for worker in self.workers:
            for kind, (those, counts) in enumerate(zip(worker.get_finished(finished), self.told, strict=True)):
                counts.update(those or ())
                done[kind].update(each for each in those or () if counts[each] == self.scheduler.get_finished_count())
            bad |= worker.get_block_ids_with_load_errors()
            if (counted := worker.get_kv_connector_stats()) is not None:
                self.counts.aggregate(counted)
            if (said := worker.build_connector_worker_meta()) is not None:
                news = said if news is None else news.aggregate(said)
        for those, counts in zip(done, self.told, strict=True):
            for each in those:
                del counts[each]
        sent, received = (those or None for those in done)
        return SimpleNamespace(kv_connector_worker_meta=news, finished_recving=received, finished_sending=sent, bad=bad)

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()

    @property
    def is_at_rest(self) -> bool:
        """Whether every block is back and nothing was written behind anybody's back."""
        return not any(request.blocks for request in self.requests.values())

    def check_nothing_is_kept(self) -> None:
        """Fail when a request that has ended has left anything in either half."""
        assert not any(self.told), "not all workers have told of a request"
        open_ones = [worker._worker for worker in self.workers if hasattr(worker._worker, "channel")]
        sides = [half for worker in open_ones for half in (worker._sending, worker._receiving)]
        for half in (self.scheduler._scheduler, *sides):
            kept = {name: value for name, value in vars(half).items() if isinstance(value, dict | set) and value}
            kept.pop("_grants", None)  # of requests that may still come
            assert not kept, f"{type(half).__name__} keeps {kept}"

    def check_free_blocks(self) -> None:
        for layer in self.bytes:
            assert bool((layer[self.free] == POISON).all()), "a free block was written"

    def contents(self, request: FakeRequest, stop: int, rank: int = 0) -> torch.Tensor:
        """Return the bytes of a request's tokens in all layers of a rank."""
        places = [request.blocks[at // self.block_size] * self.block_size + at % self.block_size for at in range(stop)]
        layers = self.bytes[rank * LAYERS : (rank + 1) * LAYERS]
        return torch.stack([layer.flatten(0, 1)[places] for layer in layers])

    # -- inside -----------------------------------------------------------------------------------------------------

    def _schedule(self) -> Any:
        new, cached, resumed, preempted = [], [], set(), set()
        counts: dict[str, int] = {}
        for request in self.requests.values():
            if request.request_id in self.preempt and request.status is Status.RUNNING:
                self.preempt.discard(request.request_id)
                preempted.add(request.request_id)
                self.taken += request.blocks
                self._free(request, poison=False)
                request.status, request.num_computed = Status.WAITING, 0
        for request in list(self.requests.values()):
            was_new = request.num_steps == 0
            if request.status is Status.LOADING and request.request_id in self.recved:
                self.recved.discard(request.request_id)
                request.num_computed = 0 if request.request_id in self.failed else len(request.prompt) - 1
                if request.request_id not in self.failed:
                    request.landed = self.contents(request, request.num_computed)
                    for rank in range(1, self.num_ranks):
                        assert self.equal(request.landed, self.contents(request, request.num_computed, rank))
                request.status = Status.RUNNING
            elif request.status is Status.WAITING and request.request_id not in preempted:
                if len(counts) >= self.max_seqs:
                    break
                hits = [block for prefix, block in self.prefix.items() if request.prompt[: len(prefix)] == prefix]
                hits = hits[: (len(request.prompt) - 1) // self.block_size]
                computed = len(hits) * self.block_size
                matched, is_async = self.scheduler.get_num_new_matched_tokens(request, computed)
                need = -(-len(request.prompt) // self.block_size) - len(hits)
                if matched is None or need > len(self.free):
                    continue
                request.blocks = [*hits, *(self.free.pop(0) for _ in range(need))]
                blocks = SimpleNamespace(get_block_ids=lambda ids=list(request.blocks): (ids,))
                self.scheduler.update_state_after_alloc(request, blocks, matched)
                request.num_computed = computed
                if is_async:
                    request.status = Status.LOADING
                    continue
                request.status = Status.RUNNING
            if request.status is not Status.RUNNING:
                continue
            count = min(self.chunk, len(request.prompt) - request.num_computed)
            counts[request.request_id] = count
            request.num_steps += 1
            entry = SimpleNamespace(
                req_id=request.request_id, block_ids=(list(request.blocks),), num_computed_tokens=request.num_computed
            )
            if was_new:
                new.append(entry)
            else:
                cached.append(entry)
                if request.num_computed == 0:
                    resumed.add(request.request_id)
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[entry.req_id for entry in cached],
                new_block_ids=[entry.block_ids if entry.req_id in resumed else None for entry in cached],
                num_computed_tokens=[entry.num_computed_tokens for entry in cached],
                resumed_req_ids=resumed,
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            preempted_req_ids=preempted,
        )

    def _compute(self, output: Any) -> None:
        if not output.total_num_scheduled_tokens:
            return
        for layer, name in enumerate(self.caches[0]):
            for req_id, count in output.num_scheduled_tokens.items():
                request = self.requests[req_id]
                new = range(request.num_computed, request.num_computed + count)
                slots = [request.blocks[at // self.block_size] * self.block_size + at % self.block_size for at in new]
                for of_rank in self.bytes[layer::LAYERS]:
                    of_rank.flatten(0, 1)[slots] = self.compute(request.prompt)[layer, new.start : new.stop]
            for worker, caches in zip(self.workers, self.caches, strict=True):
                worker.wait_for_layer_load(name)
                worker.save_kv_layer(name, caches[name], None)

    def _update(self, output: Any, bad: set[int]) -> None:
        for request in self.requests.values():
            if request.status is Status.LOADING and bad & set(request.blocks):
                self.failed.add(request.request_id)
                if self.policy == "fail":
                    self._finish(request, Status.FAILED, delay=True)
        for req_id, count in output.num_scheduled_tokens.items():
            request = self.requests[req_id]
            request.num_computed += count
            if request.num_computed == len(request.prompt):
                for rank in range(self.num_ranks):
                    whole = self.contents(request, len(request.prompt), rank)
                    assert self.equal(whole, self.compute(request.prompt)), f"{req_id} has a wrong cache"
                request.output_token_ids.append(self.draw(request.prompt))
                self._finish(request, Status.DONE, delay=False)

    def _finish(self, request: FakeRequest, status: Status, *, delay: bool) -> None:
        request.status = status
        held, _ = self.scheduler.request_finished(request, list(request.blocks))
        self.ended.add(request.request_id)
        if held:
            self.held.add(request.request_id)
        if not (held or delay):
            self._free(request)

    def _free(self, request: FakeRequest, *, poison: bool = True) -> None:
        blocks = [block for block in request.blocks if block not in self.prefix.values()]
        for layer in self.bytes if poison else ():
            layer[blocks] = POISON
        self.free.extend(blocks)
        request.blocks = []


def run(engines: list[FakeEngine], until: Callable[[], object]) -> None:
    """Step engines in turn until something is so."""
    end = time.monotonic() + FAR_S
    while not until():
        assert time.monotonic() < end, f"it did not happen in {FAR_S} s"
        for engine in engines:
            engine.step()


def run_at_random(rng: random.Random, prefill: FakeEngine, decode: FakeEngine, requests: list[FakeRequest]) -> None:
    """Step both engines in any order, with aborts and preemptions, until no request holds a block."""
    end = time.monotonic() + FAR_S
    while not all(request.is_over and not request.blocks for request in requests):
        assert time.monotonic() < end, f"requests did not end in {FAR_S} s"
        for engine in rng.sample([prefill, decode], 2):
            engine.step()
            running = [request for request in engine.requests.values() if not request.is_over]
            if running and rng.random() < 0.02:
                engine.abort(rng.choice(running).request_id)
            if running and rng.random() < 0.1:
                engine.preempt.add(rng.choice(running).request_id)
            engine.check_free_blocks()


LISTEN = "tcp://127.0.0.1:0"
Pair = tuple[FakeEngine, FakeEngine]


@attrs.define
class Pairs:
    """Makes a prefill and a decode, and closes what a test has made."""

    made: list[FakeEngine] = attrs.field(factory=list)

    def engine(self, role: str, extra: dict[str, Any] | None = None, **more: Any) -> FakeEngine:
        self.made.append(FakeEngine(role, {"listen": LISTEN, **(extra or {})}, **more))
        return self.made[-1]

    def __call__(
        self, extra: dict[str, Any] | None = None, *, decode: dict[str, Any] | None = None, **more: Any
    ) -> Pair:
        first = self.engine("kv_producer", extra, **more)
        return first, self.engine("kv_consumer", extra, **{**more, **(decode or {})})
