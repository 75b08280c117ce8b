"""A model of exact integers: every token is a hash of every cell of KV it was drawn from.

A cell (layer, position) is 8 bytes: a hash of all tokens up to that position, different in each layer. A token is a
hash of all cells of its context as they lie in the pages. One wrong, stale, missing or foreign cell gives another
token, and the request alone determines the correct tokens.

The last layer is that of drafting. No token depends on it, a cell of it is written once the token behind is known, and
drafting checks that all of its cells are right. The number of correct drafts depends on the position alone; wrong
drafts leave wrong cells behind.
"""

from __future__ import annotations

import copy
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
import xxhash

from pdinfer.config import CacheConfig
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.execution.drafting import Draft, Sampler
from pdinfer.execution.runner import ModelRunner, Ready
from pdinfer.execution.sampling import Draw, Drawn
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.layout import MTP_PREFIX, KVComponent, KVLayout, Spans
from pdinfer.kv.memory import Landing, Memory
from pdinfer.kv.pool import PagePool, PageState
from pdinfer.model.batch import Row
from pdinfer.model.model import Model
from pdinfer.parallel.groups import Group, Groups
from pdinfer.parallel.topology import Topology
from pdinfer.scheduling.prefill import SINCE
from pdinfer.scheduling.rules import by_age, is_late
from pdinfer.types import NamedState, Request, SamplingParams

CELL = struct.Struct("<Q")
TOKEN = struct.Struct("<I")
NUM_LAYERS = 2
DRAFT_LAYER = NUM_LAYERS
VOCAB_SIZE = 1 << 15
EOS = 0
WRONG = 0
EOS_EVERY = 48
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


class Violation(AssertionError):
    """A promise that did not hold in a simulated run."""


def next_history(history: int, token: int) -> int:
    """Return the hash of all tokens up to and including `token`."""
    return int(xxhash.xxh3_64_intdigest(TOKEN.pack(token), seed=history))


def cell(history: int, layer: int) -> bytes:
    """Return the value of a position in one layer."""
    return CELL.pack((history + layer * GOLDEN) & MASK)


def token_of(cells: bytes, sampling: SamplingParams) -> int:
    """Return the token drawn from these cells, layer by layer in order of position."""
    digest = xxhash.xxh3_64_intdigest(cells, seed=sampling.seed or 0)
    return EOS if digest % EOS_EVERY == 0 else 1 + (digest >> 8) % (VOCAB_SIZE - 1)


@functools.lru_cache(64)
def expected_tokens(request: Request) -> tuple[int, ...]:
    """Return all tokens that the request must give if it runs to its end."""
    history, layers = 0, [bytearray() for _ in range(NUM_LAYERS)]
    output: list[int] = []
    sampling = request.sampling
    pending = list(request.prompt)
    while True:
        for token in pending:
            history = next_history(history, token)
            for layer, cells in enumerate(layers):
                cells += cell(history, layer)
        token = token_of(b"".join(layers), sampling)
        output.append(token)
        stops = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
        if stops or len(output) >= sampling.max_new_tokens:
            return tuple(output)
        pending = [token]


@attrs.frozen
class FakeConfig:
    """The part of a ModelConfig that engines read."""

    max_position_embeddings: int = 512
    vocab_size: int = VOCAB_SIZE
    eos_token_ids: tuple[int, ...] = (EOS,)
    fingerprint: bytes = b"fake"


@attrs.frozen
class NoChoices:
    """The part of resolved ops that engines read."""

    choices: tuple[Any, ...] = ()


@attrs.frozen
class NoExperts:
    """The part of a model's experts that engines read."""

    placement: None = None
    recorder: None = None
    epoch: int = 0

    def check_step(self, num_tokens: int, told: str, *, tp_size: int, num_queries: int = 1) -> None:
        """Accept a step of any size."""


class FakeModel:
    """The part of a Model that engines and pools use."""

    config = FakeConfig()
    resolved = NoChoices()
    mtp = "drafts with cells of DRAFT_LAYER"
    device = torch.device("cpu")
    groups = Topology().apart()
    topology = Topology()
    experts = NoExperts()

    @property
    def __class__(self) -> type[Model]:  # type: ignore[override]  # it passes for one, as the mocks of unittest do
        return Model

    def moe_layers(self) -> list[Any]:
        return []

    def kv_layout(self, cache: CacheConfig) -> KVLayout:
        components = tuple(
            KVComponent(name=name, format="u64", dtype="uint64", width=1, token_bytes=CELL.size, layers=layers)
            for name, layers in (("cell", tuple(range(NUM_LAYERS))), (f"{MTP_PREFIX}cell", (DRAFT_LAYER,)))
        )
        model_id = self.config.fingerprint
        return KVLayout(model_id=model_id, weights_id=b"none", page_size=cache.page_size, components=components)

    def auto_num_pages(self, layout: KVLayout, mem_fraction_static: float | None) -> int:
        raise AssertionError("give num_pages")

    def allocate_pages(self, layout: KVLayout, num_pages: int, memory: str = "auto") -> Memory:
        return CellMemory(layout, num_pages)


class CellMemory:
    """A pool's bytes. `pool` is set once there is one; among ranks it is the leader's, which does the accounts. Then
    every write is checked against the states of its pages until the pool is `over`."""

    pool: PagePool
    over: Callable[[], bool]

    def __init__(self, layout: KVLayout, num_pages: int) -> None:
        self.data = bytearray(num_pages * layout.page_bytes)
        self.view = memoryview(self.data)
        self.page_size = layout.page_size
        self.region = num_pages * layout.page_size * CELL.size

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def read(self, spans: Spans) -> list[memoryview]:
        return [self.view[start : start + length] for start, length in spans]

    block_bytes = num_bytes

    def landing(self, spans: Spans) -> Landing:
        if not self.over():
            check_landing(self.pool, spans, self.region, CELL.size)
        return Landing(self.read(spans))

    def copy_from(self, spans: Spans, source: Memory, source_spans: Spans) -> None:
        data = b"".join(source.read(source_spans))
        for view in self.landing(spans).views:
            view[:], data = data[: len(view)], data[len(view) :]


def check_landing(pool: PagePool, spans: Spans, region: int, token_bytes: int) -> None:
    """Check that arriving data only touches pages that are granted."""
    page_bytes = pool.layout.page_size * token_bytes
    for start, length in spans:
        start %= region
        for page in range(start // page_bytes, (start + length - 1) // page_bytes + 1):
            (state,) = pool.states((page,))
            if state is not PageState.GRANTED:
                raise Violation(f"bytes of a peer landed in page {page}, which is {state.value}")


class CellRunner(ModelRunner):
    """A runner of the fake model in a CellMemory. `writable` are the states in which a page may be computed into.

    Among ranks the leader draws, and sends with each token a digest of the cells it was drawn from: a follower's pages
    must hold the same. Only the leader knows which pages belong to whom, and its states may be a step ahead; a follower
    must not compute into pages that its `channel` expects.
    """

    def __init__(
        self,
        memory: CellMemory,
        writable: Callable[[], tuple[PageState, ...]],
        attention: Group,
        channel: KVChannel,
        *,
        drafts: bool,
    ) -> None:
        self._memory = memory
        self._writable = writable
        self._attention = attention
        self._channel = channel
        self._has_drafts = drafts
        self._drawn: list[tuple[int, int]] = []
        self._told: Iterator[list[int]] = iter(())
        self._contexts: list[tuple[Sequence[int], int]] = []
        self._work: Callable[[], None] | None = None

    @property
    def drafts(self) -> bool:
        return self._has_drafts

    @property
    def captured_passes(self) -> int:
        return 0

    def sample_with(self, sampler: Sampler) -> None:
        """Share the tokens that the leader draws, in `decode`."""

    def prefill(self, rows: Sequence[Row]) -> Iterator[tuple[int, Ready]]:
        histories = [self._histories(row) for row in rows]
        self._contexts = [(row.pages, row.start + len(row.tokens)) for row in rows]
        for layer in range(NUM_LAYERS):
            for row, history in zip(rows, histories, strict=True):
                self._write(row, history, layer)
            yield layer, None
        for row, history in zip(rows, histories, strict=True):
            known = history if row.next_token is not None else [*history[:-1], WRONG]
            self._write(row, known, DRAFT_LAYER)
        yield DRAFT_LAYER, None

    def first_tokens(self, rows: Sequence[int], draws: Sequence[Draw]) -> list[Drawn]:
        contexts = [self._contexts[row] for row in rows]
        return self._sample(contexts, draws)

    def states(self, rows: Sequence[int]) -> list[tuple[NamedState, ...]]:
        state = NamedState(name="to draft from", version=1, dtype="none", shape=(), data=b"")
        return [() if self._contexts[row][1] % 5 == 0 else (state,) for row in rows]

    def do_while_waiting(self, work: Callable[[], None]) -> None:
        self._work = work

    def idle(self) -> None:
        pass

    def draft(self, states: Sequence[NamedState]) -> Draft:
        return Draft.of(torch.empty(1, 0) if states else None)

    def order(self, rows: Sequence[Row]) -> list[int]:
        return [*range(len(rows))][::-1]

    def forward(self, rows: Sequence[Row]) -> None:
        draw = Draw(sampling=SamplingParams(), prompt=(), output=())
        self.decode(rows, [draw for _ in rows], [Draft() for _ in rows])

    def decode(
        self,
        rows: Sequence[Row],
        draws: Sequence[Draw],
        drafts: Sequence[Draft],
        *,
        num_passes: int = 0,
        on_host: bool = False,
    ) -> list[list[Drawn]]:
        shared = torch.zeros((sum(draft.num_tokens + 1 for draft in drafts), 2), dtype=torch.int64)
        if self._follows:
            self._told = iter(self._attention.broadcast(shared).tolist())
        self._drawn = []
        in_order = range(len(rows)) if self._follows else self.order(rows)  # a follower gets rows in order
        drawn = {at: self._turn(rows[at], draws[at], drafts[at]) for at in in_order}
        if self._work is not None:
            self._work()
        if self._attention.size > 1 and not self._follows:
            shared[: len(self._drawn)] = torch.tensor(self._drawn)
            self._attention.broadcast(shared)
        return [drawn[at] for at in range(len(rows))]

    @property
    def _follows(self) -> bool:
        return self._attention.rank > 0

    def _turn(self, row: Row, draw: Draw, draft: Draft) -> list[Drawn]:
        """Run one sequence's part of a step."""
        if draft.num_newest:
            self._catch_up(row, draft.num_newest)
        drawn: list[Drawn] = []
        token = row.tokens[0]
        for start in range(row.start, row.start + draft.num_tokens + 1):
            right = len(drawn) <= row.start % (draft.num_tokens + 1)
            ahead = Row((token if right else token ^ 1,), start, row.pages)
            histories = self._histories(ahead)
            for layer in range(NUM_LAYERS):
                self._write(ahead, histories, layer)
            if right:
                output = [*draw.output, *(new.token for new in drawn)]
                drawn += self._sample([(row.pages, start + 1)], [attrs.evolve(draw, output=output)])
                token = drawn[-1].token
            if draft.num_newest:
                self._write(ahead, [WRONG], DRAFT_LAYER)
        draft.num_newest = len(drawn) if draft.num_newest else 0
        return drawn

    def _catch_up(self, row: Row, count: int) -> None:
        """Write the newest cells of DRAFT_LAYER; those before them must be right already."""
        cells = self._cells(row.pages, row.start, range(1))
        history = struct.unpack(f"<{row.start}Q", cells)  # the cells of layer 0 are the hashes themselves
        self._write(Row((), row.start - count, row.pages), history[-count:], DRAFT_LAYER)
        right = b"".join(cell(one, DRAFT_LAYER) for one in history)
        if self._cells(row.pages, row.start, range(DRAFT_LAYER, DRAFT_LAYER + 1)) != right:
            raise Violation("a token is drafted from cells that are stale, missing or foreign")

    def _histories(self, row: Row) -> list[int]:
        history = 0
        if row.start:
            page, within = divmod(row.start - 1, self._memory.page_size)
            at = (row.pages[page] * self._memory.page_size + within) * CELL.size
            (history,) = CELL.unpack_from(self._memory.data, at)
        histories = []
        for token in row.tokens:
            history = next_history(history, token)
            histories.append(history)
        return histories

    def _write(self, row: Row, histories: Sequence[int], layer: int) -> None:
        memory = self._memory
        page_size, states, writable = memory.page_size, memory.pool.states(row.pages), self._writable()
        expected = self._expected_pages() if self._follows else ()
        for position, history in enumerate(histories, row.start):
            index, within = divmod(position, page_size)
            page = row.pages[index]
            if self._follows:
                if page in expected:
                    raise Violation(f"a follower computes into page {page}, which others may write")
            elif states[index] not in writable or memory.pool.is_kept(page) or memory.pool.num_users(page) > 1:
                raise Violation(f"an engine computes into page {page}, which is {states[index].value} or shared")
            at = layer * memory.region + (page * page_size + within) * CELL.size
            memory.data[at : at + CELL.size] = cell(history, layer)

    def _sample(self, contexts: Sequence[tuple[Sequence[int], int]], draws: Sequence[Draw]) -> list[Drawn]:
        drawn = []
        for (pages, length), draw in zip(contexts, draws, strict=True):
            cells = self._cells(pages, length, range(NUM_LAYERS))
            digest = xxhash.xxh3_64_intdigest(cells) >> 1
            if self._follows:
                token, told = next(self._told)
                if told != digest:
                    raise Violation(f"a follower's first {length} cells are not those of its leader")
            else:
                token = token_of(cells, draw.sampling)
                self._drawn.append((token, digest))
                if draw.position != length:
                    raise Violation(f"a token for position {draw.position} is drawn after {length} tokens")
            drawn.append(Drawn(token=token, logprob=-1.0))
        return drawn

    def _expected_pages(self) -> set[int]:
        return {page for room in self._channel.receiver.rooms().values() for page in room.pages}

    def _cells(self, pages: Sequence[int], length: int, layers: range) -> bytes:
        memory = self._memory
        view, page_bytes = memory.view, memory.page_size * CELL.size
        pieces = []
        used = pages[: -(-length // memory.page_size)]
        for page, state in zip(used, memory.pool.states(used), strict=True):
            if state is PageState.FREE and not self._follows:
                raise Violation(f"a token is drawn from page {page}, which is free")
        last = length * CELL.size - (len(used) - 1) * page_bytes
        for layer in layers:
            start = layer * memory.region
            pieces += [view[start + page * page_bytes : start + (page + 1) * page_bytes] for page in used]
            pieces[-1] = pieces[-1][:last]
        return b"".join(pieces)


class CellPrefill(PrefillEngine):
    """A prefill engine on the fake model. On a pool shared with decode it computes into granted pages."""

    def _make_runner(self) -> CellRunner:
        return CellRunner(
            self.pool.memory,
            lambda: (PageState.OWNED, PageState.GRANTED) if self.shared else (PageState.OWNED,),
            self.model.groups.attention,
            self.channel,
            drafts=self.config.num_draft_tokens > 0,
        )

    shared = False

    def _prepare(self) -> None:
        super()._prepare()
        self._scheduler.plan = functools.partial(self._checked, self._scheduler.plan)  # type: ignore[method-assign]

    def _checked(self, plan: Callable[..., list[tuple[Any, int]]], decoding_s: float | None) -> list[tuple[Any, int]]:
        """Check what a step promises: it uses no more than its budget, all of it, and half of it for the first in the
        queue."""
        scheduler, now = self._scheduler, self._clock()
        remaining = {prompt: prompt.num_remaining for prompt in scheduler.active}
        size, speed = scheduler._chunk_size(decoding_s), scheduler.costs.best_tokens_per_s
        oldest = by_age(remaining, SINCE, num_turns=scheduler.num_steps, now=now)

        def order(prompt: Any) -> tuple[bool, bool, Any]:
            late = is_late(prompt.deadline_at, prompt.num_remaining, now=now, tokens_per_s=speed)
            return prompt is not oldest, late, prompt.order

        chunk = plan(decoding_s)
        num_tokens = sum(count for _, count in chunk)
        if any(prompt.request.alone for prompt in remaining):
            return chunk  # it shares no step, and so leaves some of its budget
        if size != -1 and num_tokens != min(size, sum(remaining.values())):
            raise Violation(f"a step of {size} tokens runs {num_tokens} of {list(remaining.values())}")
        if chunk:
            first = min(remaining, key=order)
            due = remaining[first] if size == -1 else min(remaining[first], -(-size // 2))
            if dict(chunk).get(first, 0) < due:
                raise Violation(f"the first in line is owed {due} tokens of a step and gets {dict(chunk).get(first)}")
        return chunk


class CellDecode(DecodeEngine):
    """A decode engine on the fake model."""

    def _make_runner(self) -> CellRunner:
        return CellRunner(
            self.pool.memory,
            lambda: (PageState.OWNED,),
            self.model.groups.attention,
            self.channel,
            drafts=self.config.num_draft_tokens > 0,
        )

    def _prepare(self) -> None:
        super()._prepare()
        self._scheduler.plan = functools.partial(self._checked, self._scheduler.plan)  # type: ignore[method-assign]

    def _checked(self, plan: Callable[[], list[Any]]) -> list[Any]:
        """Check who gives way in a step: none at its last attempt, and none twice before its equals once."""
        able = [one for one in self._scheduler.running if not one.protected]
        batch = plan()
        for victim in self._scheduler.retracted:
            if victim not in able or victim.num_failed >= self.config.max_attempts:
                raise Violation(f"{victim.request_id} is retracted at its last attempt")
            able.remove(victim)
            if any(one.priority == victim.priority and one.attempts < victim.attempts for one in able):
                raise Violation(f"{victim.request_id} is retracted at attempt {victim.attempts}, others have had fewer")
        return batch


class CellBrain:
    """The fake model for a simulated world."""

    prefill = CellPrefill
    decode = CellDecode

    def __init__(self) -> None:
        self.model = FakeModel()

    def among(self, groups: Groups) -> FakeModel:
        """Return the same model, of which each rank has all."""
        model = copy.copy(self.model)
        model.groups = groups
        return model

    def watch(self, pool: PagePool, accounts: PagePool, over: Callable[[], bool]) -> None:
        assert isinstance(pool.memory, CellMemory)
        pool.memory.pool, pool.memory.over = accounts, over

    def check_token(self, request: Request, tokens: list[int]) -> None:
        expected = expected_tokens(request)
        at = len(tokens) - 1
        if at >= len(expected) or tokens[at] != expected[at]:
            raise Violation(f"{request.request_id}: token {at} is {tokens[at]}, expected {expected}")

    def is_whole(self, request: Request, tokens: list[int]) -> bool:
        return len(tokens) == len(expected_tokens(request))
