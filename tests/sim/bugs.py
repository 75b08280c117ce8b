"""Bugs that others have had, or that we could have, each put back by a patch: the simulation must find every one.

`BUGS` names them; the docstring of a patch describes its bug. The numbers refer to the reports of the failures that
they stand for: pages reused under a late writer, failures that one side never tells the other, stale state that passes
for fresh.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import attrs
import pytest

from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.page_tables import GrantedRooms, PageTables, PromptTables
from pdinfer.kv.channel import receiver
from pdinfer.kv.channel.channel import ChannelArrivals, KVChannel
from pdinfer.kv.channel.rooms import ReceiverRooms, SenderRooms, Tombstones
from pdinfer.kv.channel.sender import Pushes
from pdinfer.kv.channel.wire import FrameMac
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.pool import PagePool
from pdinfer.kv.prefix import KeyScheme, PrefixChain, PrefixIndex
from pdinfer.kv.transports.base import Transfer
from pdinfer.pairing.broker import Broker
from pdinfer.pairing.request import TrackedRequest
from pdinfer.scheduling import decode as decode_scheduling
from pdinfer.scheduling import prefill as prefill_scheduling
from pdinfer.scheduling.decode import DecodeScheduler
from pdinfer.testing import Placement, SimNetwork
from pdinfer.testing.network import SimTransport
from pdinfer.types import PeerAddress
from tests.sim.plan import TROUBLES, Focus
from tests.sim.world import World

Patch = Callable[[pytest.MonkeyPatch], None]
IN_PLACE = (Placement.BY_SENDER,)


@attrs.frozen
class Bug:
    """A patch that puts the bug back, and the runs that are likely to meet it: one of a few, or of many if it is
    rare."""

    patch: Patch
    focus: Focus
    rare: bool = False


BUGS: dict[str, Bug] = {}


def bug(*, rare: bool = False, **focus: Any) -> Callable[[Patch], Patch]:
    """Add a patch to BUGS under its name."""

    def add(patch: Patch) -> Patch:
        BUGS[patch.__name__] = Bug(patch, Focus(**focus), rare)
        return patch

    return add


TROUBLED = {"cut": 0.9, "crash": 0.5, "freeze": 0.5}
SLOW = {"slow": 1.0, "late_read": 0.9, "late_done": 0.5, "pieces": 0.5}


def _free_orphans(patch: pytest.MonkeyPatch) -> None:
    """Free the pages of a room that was given up at once; later messages of its writers free nothing."""
    orphan = PageTables.orphan

    def orphan_and_free(self: PageTables, sequence: Any) -> Any:
        grant = orphan(self, sequence)
        self._pool.release(self.orphans[grant.room])
        self.orphans[grant.room] = ()
        return grant

    patch.setattr(PageTables, "orphan", orphan_and_free)


@bug(armed={**TROUBLED, **SLOW}, ports=("piped", "local"), cancel_share=0.6)
def pages_free_at_abort(patch: pytest.MonkeyPatch) -> None:
    """Pages that decode gives up are free although a writer may still be writing them (sglang#24527, #32564)."""
    _free_orphans(patch)


@bug(
    armed={**TROUBLED, **SLOW, "late_landing": 0.0},
    ports=("piped", "local"),
    placements=IN_PLACE,
    cancel_share=0.6,
)
def pages_free_at_abort_under_a_one_sided_writer(patch: pytest.MonkeyPatch) -> None:
    """The same bug where writes land in pages without the receiver, and nothing checks generations."""
    _free_orphans(patch)
    patch.setattr(PagePool, "generations", lambda self, pages: (0,) * len(pages))


@bug(armed={**TROUBLED, **SLOW, "stall": 0.9}, ports=("piped",), cancel_share=0.6, slowness=(8, 30))
def pages_free_after_a_while(patch: pytest.MonkeyPatch) -> None:
    """Abandoned pages are free after a fixed time, whatever the writer does (lease reapers)."""
    grant = DecodeEngine._grant

    def grant_and_reap(self: DecodeEngine) -> None:
        since = self.__dict__.setdefault("orphaned_at", {})
        for room, pages in self._tables.orphans.items():
            if pages and self._clock() - since.setdefault(room, self._clock()) > 0.05:
                self.channel.pool.release(pages)
                self._tables.orphans[room] = ()
        grant(self)

    patch.setattr(DecodeEngine, "_grant", grant_and_reap)


@bug(armed={"flip_payload": 1.0}, ports=("piped", "local"))
def digests_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """Bytes that did not verify are accepted (vllm#52234)."""
    placed = ChannelArrivals.placed
    patch.setattr(ChannelArrivals, "placed", lambda self, link, frame, error: placed(self, link, frame, None))


@bug(rare=True, armed={"drop": 1.0, "duplicate": 1.0, "reorder": 1.0, "flip_frame": 1.0}, ports=("piped", "local"))
def frames_are_not_verified(patch: pytest.MonkeyPatch) -> None:
    """Frames that were lost, doubled or altered go unseen."""
    patch.setattr(FrameMac, "verify", lambda self, tagged: tagged[: -self.tag_bytes])


@bug(armed={"cut": 1.0, "crash": 0.9}, ports=("piped", "local"))
def a_lost_writer_settles_nothing(patch: pytest.MonkeyPatch) -> None:
    """Rooms whose writer is gone wait for its word (sglang#28236, vllm#35943)."""
    patch.setattr(ReceiverRooms, "lost", lambda self, peer, error: {})


@bug(rare=True, armed={"cut": 1.0, "crash": 0.9, "freeze": 0.9}, ports=("piped",))
def a_failed_transfer_never_ends(patch: pytest.MonkeyPatch) -> None:
    """Prefill's pages wait for bytes that a closed link will never take (vllm#46283)."""
    written = Pushes.written

    def only_good(self: Pushes, group: Any, error: Any) -> None:
        if error is None:
            written(self, group, None)

    patch.setattr(Pushes, "written", only_good)


@bug(rare=True, armed={"slow": 1.0, "stall": 0.5}, ports=("piped",), cancel_share=0.8)
def an_unknown_room_is_not_answered(patch: pytest.MonkeyPatch) -> None:
    """An abort that comes before its request is forgotten, and nobody else ends the room (vllm#50754)."""
    stop = SenderRooms.stop
    patch.setattr(SenderRooms, "stop", lambda self, *stopped: stop(self, *stopped) and False)
    patch.setattr(receiver, "ANSWER_S", 1e9)


@bug(rare=True, armed={"cut": 1.0, "slow": 1.0}, ports=("piped",))
def a_request_before_its_link_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """Decode sees a new link first and grants; prefill drops the request unanswered."""
    patch.setattr(SenderRooms, "turn_away", lambda self, grant: None)


@bug(armed=SLOW, ports=("piped", "local"), tight=1.0)
def sources_are_free_before_they_are_read(patch: pytest.MonkeyPatch) -> None:
    """Prefill's pages go to the next prompt while a transfer still reads them (vllm#21570)."""
    patch.setattr(Pushes, "end", lambda self, room: Transfer(0, done=True))


@bug(armed=SLOW, ports=("piped", "local"), tight=1.0)
def the_last_write_speaks_for_all(patch: pytest.MonkeyPatch) -> None:
    """A room's pages return when its last write is done, though an earlier one may not be."""

    def written_for_all(self: Pushes, group: Any, error: Any) -> None:
        if group.num_writes == 1:
            self._unsent = {each for each in self._unsent if each.grant.room != group.grant.room}
        written(self, group, error)

    written = Pushes.written
    patch.setattr(Pushes, "written", written_for_all)


@bug(armed={**TROUBLED, "slow": 1.0}, ports=("piped",))
def rooms_have_the_name_of_their_request(patch: pytest.MonkeyPatch) -> None:
    """Every attempt of a request has the same room, so messages of the last attempt count for this one
    (sglang#40125)."""
    open_room = GrantedRooms.open

    def reopen(self: GrantedRooms, sequence: Any, clock: Callable[[], float]) -> None:
        name = sequence.request_id.encode().ljust(16, b"\0")
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "_random_bytes", lambda count: name)
            open_room(self, sequence, clock)

    patch.setattr(GrantedRooms, "open", reopen)


@bug(rare=True, ports=("piped", "local"), cancel_share=0.5)
def prefill_gives_up_without_a_word(patch: pytest.MonkeyPatch) -> None:
    """Prefill forgets a request that it aborts, and decode waits for it (sglang#36033)."""
    finish = KVChannel.finish

    def mute(self: KVChannel, grant: Any, handoff: Any) -> Transfer:
        return finish(self, grant, handoff) if handoff.error is None else Transfer(0, done=True)

    patch.setattr(KVChannel, "finish", mute)
    patch.setattr(receiver, "ANSWER_S", 1e9)


@bug(armed={**TROUBLED, "slow": 1.0}, ports=("piped", "local"))
def pages_of_a_failed_attempt_are_known(patch: pytest.MonkeyPatch) -> None:
    """The pages of an aborted room enter the prefix index, and others read them (vllm#50283)."""
    lose = DecodeEngine._lose

    def keep_and_lose(self: DecodeEngine, sequence: Any, error: Any) -> None:
        self._tables.adopt(sequence)
        self._tables.keep(sequence)
        lose(self, sequence, error)

    patch.setattr(DecodeEngine, "_lose", keep_and_lose)


@bug(ports=("piped", "local", "shared"))
def tenants_share_their_prefixes(patch: pytest.MonkeyPatch) -> None:
    """The salt is not part of the keys."""
    chain = KeyScheme.chain
    patch.setattr(KeyScheme, "chain", lambda self, salt, *writers, **more: chain(self, b"", *writers, **more))


@bug(ports=("piped", "local", "shared"), tight=1.0)
def pages_in_use_are_evicted(patch: pytest.MonkeyPatch) -> None:
    """Eviction takes the oldest page, even one in use (trtllm#12542)."""
    use = PrefixIndex.use
    patch.setattr(PrefixIndex, "use", lambda self, page: None if page % 3 else use(self, page))


@bug(rare=True, armed={"slow": 1.0, "stall": 0.9, "freeze": 0.9}, ports=("piped",), cancel_share=0.9)
def a_grant_that_nobody_waits_for_stays(patch: pytest.MonkeyPatch) -> None:
    """Decode grants a request that ended meanwhile, and is not told (vllm#41269)."""
    patch.setattr(Broker, "_ignore", lambda self, event, request_id, decode: None)
    cancel = DecodeEngine.cancel
    patch.setattr(DecodeEngine, "cancel", lambda self, request_id: len(self._sequences) % 2 or cancel(self, request_id))


@bug(rare=True, tight=1.0, ports=("piped", "local"))
def a_retracted_request_forgets_its_output(patch: pytest.MonkeyPatch) -> None:
    """A retracted request comes back as it was submitted (sglang#6857)."""
    plan = DecodeScheduler.plan

    def forget(self: DecodeScheduler[Any]) -> list[Any]:
        batch = plan(self)
        for sequence in self.retracted:
            del sequence.output[len(sequence.request.output) :]
        return batch

    patch.setattr(DecodeScheduler, "plan", forget)


@bug(tight=1.0, ports=("piped", "local"), cancel_share=0.5)
def a_request_that_ends_keeps_its_spare_pages(patch: pytest.MonkeyPatch) -> None:
    """Pages reserved for growth are not returned (lmcache#2933)."""
    release = PageTables.release

    def keep_spare(self: PageTables, sequence: Any) -> None:
        sequence.spare = []
        release(self, sequence)

    patch.setattr(PageTables, "release", keep_spare)


@bug(ports=("local", "piped"))
def pages_are_paired_by_position(patch: pytest.MonkeyPatch) -> None:
    """The first page sent is written to the first granted one, whatever tokens it holds (sglang#37175)."""
    spans = KVLayout.spans

    def by_position(
        self: KVLayout, num_pages: int, *, layers: range, tokens: range, pages: Any, first_token: int, **more: Any
    ) -> Any:
        if first_token and tokens.start - first_token >= self.page_size:
            tokens = range(first_token, first_token + len(tokens))
        return spans(self, num_pages, layers=layers, tokens=tokens, pages=pages, first_token=first_token, **more)

    patch.setattr(KVLayout, "spans", by_position)


@bug(placements=(Placement.THROUGH_SLOT,), armed={"late_landing": 1.0})
def a_failed_write_lands_in_pages(patch: pytest.MonkeyPatch) -> None:
    """A one-sided transport writes to pages and not to a ring, so that nobody knows when a write ends (vllm#44238)."""
    patch.setattr(SimNetwork, "transport", lambda self, node, placement: SimTransport(self, node, Placement.BY_SENDER))


@bug(armed={"slow": 0.8}, cancel_share=0.6)
def a_second_word_is_news(patch: pytest.MonkeyPatch) -> None:
    """What a writer says of a room that is over settles it once more (sglang#9817)."""
    finished = ReceiverRooms.finished

    def finished_again(self: ReceiverRooms, peer: Any, handoff: Any) -> Any:
        if handoff.room in self._rooms:
            return finished(self, peer, handoff)
        self._settled.append(handoff)
        return []

    patch.setattr(ReceiverRooms, "finished", finished_again)


@bug(rare=True, armed={"slow": 0.8, "stall": 0.8}, ports=("piped",), cancel_share=0.6)
def an_aborted_room_is_run(patch: pytest.MonkeyPatch) -> None:
    """A request that comes after its room was aborted is run (vllm#25067)."""
    accept = SenderRooms.accept

    def accept_anything(self: SenderRooms, grant: Any) -> None:
        self.tombstones = Tombstones()
        accept(self, grant)

    patch.setattr(SenderRooms, "accept", accept_anything)


@bug(tight=1.0)
def a_prefix_is_known_before_it_is_there(patch: pytest.MonkeyPatch) -> None:
    """Others find prefill's pages before they are computed (vllm#50283)."""
    lay_out = PromptTables.lay_out

    def lay_out_and_keep(self: PromptTables, prompt: Any) -> None:
        lay_out(self, prompt)
        if prompt.held == prompt.pages:
            full = prompt.held[: len(prompt.keys)]
            prompt.held = prompt.pages = (*self._pool.keep(prompt.keys, full), *prompt.held[len(full) :])

    patch.setattr(PromptTables, "lay_out", lay_out_and_keep)


@bug(armed=dict.fromkeys(TROUBLES, 0.0), deadline_share=0.6, max_new=40, steps_s=(0.05,), tight=0.0)
def the_head_of_the_queue_hides_the_others(patch: pytest.MonkeyPatch) -> None:
    """A reaper that stops at the first request whose time is not over (vllm#58222); the Pairing's own is switched off
    with it, or it would do the work."""
    overdue = DecodeScheduler.overdue

    def overdue_if_first(self: DecodeScheduler[Any]) -> list[Any]:
        found = overdue(self)
        return found if found and min(self._all(), key=attrgetter("arrival")) in found else []

    patch.setattr(DecodeScheduler, "overdue", overdue_if_first)
    patch.setattr(Broker, "_end_overdue", lambda self: None)


@bug(ports=("piped",), armed={"crash": 1.0})
def the_death_of_an_engine_is_not_told(patch: pytest.MonkeyPatch) -> None:
    """The list of ports is shorter, and who waited for the dead one waits on (sglang#31144)."""
    patch.setattr(Broker, "_part_with", lambda self, address, error: self._ports.drop(address))


DEATHS = {"crash": 1.0, "freeze": 0.9}


@bug(ports=("piped",), armed=DEATHS)
def requests_end_with_their_decode(patch: pytest.MonkeyPatch) -> None:
    """Whatever a dead decode had fails, though another one could take it."""
    patch.setattr(TrackedRequest, "stays_lost", lambda self, *, may_continue: True)


@bug(ports=("piped",), armed=DEATHS)
def a_stream_that_goes_on_begins_anew(patch: pytest.MonkeyPatch) -> None:
    """Its reader gets the first tokens twice."""
    leave = TrackedRequest.leave

    def forget(self: TrackedRequest, now: float, lost: Any) -> None:
        self.attempt.tokens.clear()
        self.num_tokens = len(self.request.output)
        leave(self, now, lost)

    patch.setattr(TrackedRequest, "leave", forget)


@bug(ports=("piped",), armed=DEATHS)
def a_stream_that_goes_on_draws_by_another_seed(patch: pytest.MonkeyPatch) -> None:
    """Behind the loss it is another answer."""
    leave = TrackedRequest.leave

    def reseed(self: TrackedRequest, now: float, lost: Any) -> None:
        leave(self, now, lost)
        sampling = attrs.evolve(self.request.sampling, seed=99)
        self.request = attrs.evolve(self.request, sampling=sampling)

    patch.setattr(TrackedRequest, "leave", reseed)


@bug(ports=("piped",), armed=DEATHS)
def a_request_on_its_way_to_another_decode_is_lost(patch: pytest.MonkeyPatch) -> None:
    """It left the dead one and stands in no queue."""
    patch.setattr(Broker, "_move", lambda self, tracked, lost: tracked.leave(self._clock(), lost))


@bug(drafts=(1, 2, 3))
def pages_are_known_before_all_is_written(patch: pytest.MonkeyPatch) -> None:
    """Others find a page though the cell that drafting needs of its last token is for another token behind it, or is
    not there yet."""
    chain = KeyScheme.chain

    def without_lookahead(self: KeyScheme, salt: bytes, writers: tuple[PeerAddress, ...] = ()) -> PrefixChain:
        return chain(attrs.evolve(self, lookahead=0), salt, writers)

    patch.setattr(KeyScheme, "chain", without_lookahead)


@bug(chunks=(8,))
def only_short_prompts_are_run(patch: pytest.MonkeyPatch) -> None:
    """All of a step goes to the shortest prompts, and a long prompt waits as long as others come."""

    def shortest_first(remaining: Any, classes: Any, *, chunk_size: int, max_tokens: int) -> list[int]:
        counts = [0] * len(remaining)
        for index in sorted(range(len(remaining)), key=remaining.__getitem__):
            counts[index] = min(remaining[index], chunk_size - sum(counts))
        return counts

    patch.setattr(prefill_scheduling, "plan_chunk", shortest_first)


@bug(rare=True)
def who_gave_way_gives_way_again(patch: pytest.MonkeyPatch) -> None:
    """Steps take pages from the same sequence again and again."""

    def most_attempts(candidates: Any) -> int:
        return max(range(len(candidates)), key=lambda index: candidates[index][1])

    patch.setattr(decode_scheduling, "choose_victim", most_attempts)


def find(name: str, *, most: int = 2000) -> tuple[int, str]:
    """Return the first seed below `most` whose run meets the bug, and how it showed; raise AssertionError when none
    does."""
    found = BUGS[name]
    with pytest.MonkeyPatch.context() as patch:
        found.patch(patch)
        for seed in range(most):
            try:
                World(seed, found.focus).run()
            except Exception as error:  # noqa: BLE001 - any way of noticing will do
                return seed, f"{type(error).__name__}: {error}"
    raise AssertionError(f"{most} runs did not meet the bug {name}: the harness is blind to it")
