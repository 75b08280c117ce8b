"""A leader does things with its own channel and tells its followers; what the followers see counts."""

from __future__ import annotations

import gc
from typing import Any

import attrs
import pytest

from pdinfer.engine.ranks import messages as say
from pdinfer.engine.ranks.leader import RankChannel, RankRunner, empty_decode, empty_prefill
from pdinfer.errors import PDInferError, TransferError
from pdinfer.execution.drafting import MAX_NEWEST, Draft
from pdinfer.execution.sampling import Draw
from pdinfer.kv.channel.wire import PackedGrant, pack_ints
from pdinfer.model.batch import Row
from pdinfer.parallel.slices import even_slices
from pdinfer.parallel.topology import Topology
from pdinfer.types import NamedState, SamplingParams
from tests.unit.engine.ranks.rank_fakes import (
    ABORTED,
    DECODE,
    OTHER,
    SIZE,
    FakeChannel,
    FakeLockstep,
    FakeRunner,
    agreement,
    grant_of,
    handoff,
    ready,
)

GRANT = grant_of()
ROOM = GRANT.room
STATE = NamedState(name="s", version=1, dtype="float32", shape=(1,), data=b"\0" * 4)


class Leader:
    """The channel and the runner of the leader in a group of three."""

    def __init__(self, *, drafts: bool = False) -> None:
        self.channel, self.lockstep, self.runner = FakeChannel(), FakeLockstep.of(0), FakeRunner(drafts)
        own: Any = self.channel
        lockstep: Any = self.lockstep
        runner: Any = self.runner
        self.ends = RankChannel(own, lockstep)
        self.runs = RankRunner(runner, lockstep, self.run_empty, self.ends)
        self.emptied: list[Any] = []

    def run_empty(self, runner: Any, agreed: Any) -> None:
        self.emptied.append(agreed)


# -- prefill's side ----------------------------------------------------------------------------------------------------


def test_pages_are_read_until_every_rank_has_sent_them() -> None:
    leader = Leader()
    sent = leader.ends.finish(GRANT, handoff())
    other = leader.ends.finish(grant_of(b"o" * 16), handoff())
    assert leader.lockstep.take() == [say.FinishMessage(ROOM, None), say.FinishMessage(b"o" * 16, None)]
    (own, _) = leader.channel.sent
    own.complete(None)
    assert not sent.done
    leader.ends.hear(1, say.SentMessage(ROOM))
    assert not sent.done
    leader.ends.hear(2, say.SentMessage(ROOM))
    assert sent.done
    assert not other.done


def test_pages_are_read_until_this_rank_has_sent_them() -> None:
    leader = Leader()
    sent = leader.ends.finish(GRANT, handoff(status=ABORTED, error=TransferError("stop")))
    (finish,) = leader.lockstep.take()
    assert (finish.room, str(finish.error)) == (ROOM, "stop")  # type: ignore[union-attr]
    for rank in (1, 2):
        leader.ends.hear(rank, say.SentMessage(ROOM))
    assert not sent.done
    leader.channel.sent[0].complete(None)
    assert sent.done


def test_behind_the_close_nobody_is_waited_for() -> None:
    """Followers close their channels too, and then nothing reads their pages."""
    leader = Leader()
    sent = leader.ends.finish(GRANT, handoff())
    leader.channel.sent[0].complete(None)
    leader.ends.close()
    assert sent.done
    leader.channel.handoffs = [handoff()]
    assert leader.ends.poll() == [handoff()]
    assert leader.channel.calls[1] == ("close",)


def test_each_rank_pushes_its_share_of_the_tokens() -> None:
    leader = Leader()
    row = Row([5, 6, 7, 8], 3, (4, 2, 7), 9)
    leader.runs.announce([row], [GRANT], [range(1, 7)])
    assert leader.lockstep.take() == [say.PrefillMessage([say.PackedRow.of(row)], [ROOM], [range(1, 7)])]
    leader.ends.push(GRANT, layers=range(2, 3), tokens=range(1, 7), pages=row.pages, ready=ready)
    ((share,), *_) = even_slices(range(1, 7), SIZE)
    assert leader.channel.take() == [("push", ROOM, range(2, 3), share, row.pages, ready)]


def test_a_stop_that_one_rank_hears_of_is_heard_once() -> None:
    leader = Leader()
    leader.channel.stops = [(b"own", TransferError("mine"))]
    leader.ends.hear(1, say.Stopped(ROOM, PDInferError("theirs")))
    stops = leader.ends.poll_stops()
    assert [(room, type(error), str(error)) for room, error in stops] == [
        (b"own", TransferError, "mine"),
        (ROOM, TransferError, "theirs"),
    ]
    assert leader.ends.poll_stops() == []


def test_what_the_channel_refuses_is_told_to_nobody() -> None:
    leader = Leader()
    leader.channel.refuses = {ROOM}
    with pytest.raises(TransferError, match="not here"):
        leader.ends.accept(GRANT)
    assert leader.lockstep.told == []
    assert leader.ends.is_full(GRANT)
    assert not leader.ends.shares_pool(GRANT.destinations)


# -- decode's side -----------------------------------------------------------------------------------------------------


def test_what_is_decided_is_done_and_told_in_order() -> None:
    leader = Leader()
    leader.ends.connect(DECODE, timeout_s=3.0)
    leader.ends.expect(GRANT)
    leader.ends.abort(GRANT, TransferError("enough"))
    leader.ends.accept(GRANT)
    leader.ends.drop_peer(DECODE)
    assert leader.channel.take() == [
        ("connect", DECODE, 3.0),
        ("expect", GRANT),
        ("abort", GRANT, "enough"),
        ("accept", GRANT),
        ("drop_peer", DECODE),
    ]
    connect, expect, abort, accept, drop = leader.lockstep.take()
    assert (connect, expect, accept, drop) == (
        say.DialMessage(DECODE),
        say.Expect(PackedGrant.of(GRANT)),
        say.Accept(PackedGrant.of(GRANT)),
        say.DropPeerMessage(DECODE),
    )
    assert isinstance(abort, say.AbortMessage)
    assert (abort.room, str(abort.error)) == (ROOM, "enough")


def test_a_room_is_expected_when_every_rank_has_said_so() -> None:
    """Otherwise a writer might finish and lose its link before a slow follower listens for its hand-off."""
    leader = Leader()
    leader.ends.expect(GRANT)
    assert not leader.ends.expects(ROOM)
    leader.ends.hear(1, say.Expecting(ROOM))
    leader.ends.hear(2, say.Expecting(b"o" * 16))
    assert not leader.ends.expects(ROOM)
    leader.ends.hear(2, say.Expecting(ROOM))
    assert leader.ends.expects(ROOM)
    leader.channel.handoffs = [handoff()]
    for rank in (1, 2):
        leader.ends.hear(rank, say.Settled(ROOM, None))
    assert leader.ends.poll() == [handoff()]
    assert not leader.ends.expects(ROOM)  # and it is forgotten


def test_a_peer_is_connected_when_every_rank_is_linked_to_it() -> None:
    leader = Leader()
    leader.channel.linked = {DECODE.engine_id, OTHER.engine_id}
    leader.ends.hear(1, say.Linked([DECODE, OTHER]))
    assert not leader.ends.connected(DECODE)
    leader.ends.hear(2, say.Linked([DECODE]))
    assert leader.ends.connected(DECODE)
    assert not leader.ends.connected(OTHER)
    leader.channel.linked = set()
    assert not leader.ends.connected(DECODE)
    leader.channel.linked = {DECODE.engine_id}
    leader.ends.hear(1, say.Linked([OTHER]))
    assert not leader.ends.connected(DECODE)


@pytest.mark.parametrize("own_first", [False, True])
def test_a_room_has_landed_when_it_has_on_all_ranks(own_first: bool) -> None:
    leader = Leader()
    if own_first:
        leader.channel.handoffs = [handoff(), handoff(b"x" * 16)]
    assert leader.ends.poll() == []
    leader.ends.hear(2, say.Settled(ROOM, None))
    assert leader.ends.poll() == []
    leader.ends.hear(1, say.Settled(ROOM, None))
    if not own_first:
        assert leader.ends.poll() == []
        leader.channel.handoffs = [handoff()]
    assert leader.ends.poll() == [handoff()]
    assert leader.ends.poll() == []


def test_a_room_that_one_follower_lost_is_lost_with_its_reason() -> None:
    leader = Leader()
    leader.channel.handoffs = [handoff()]
    leader.ends.hear(1, say.Settled(ROOM, None))
    leader.ends.hear(2, say.Settled(ROOM, TransferError("a bit fell over")))
    (told,) = leader.ends.poll()
    assert (told.status, str(told.error)) == (ABORTED, "a bit fell over")


def test_what_this_rank_was_told_goes_first() -> None:
    leader = Leader()
    own = handoff(status=ABORTED, error=PDInferError("the prompt failed"))
    leader.channel.handoffs = [own]
    for rank in (1, 2):
        leader.ends.hear(rank, say.Settled(ROOM, TransferError("stopped")))
    assert leader.ends.poll() == [own]


# -- the model ---------------------------------------------------------------------------------------------------------

ROWS = [Row([7], 3, (4, 2)), Row([8], 5, (1, 3))]


def draws_of(*lengths: int) -> list[Draw]:
    return [Draw(sampling=SamplingParams(), prompt=(1,), output=list(range(length))) for length in lengths]


def test_what_decode_runs_is_told_before_all_agree() -> None:
    leader = Leader()
    leader.lockstep.next = [agreement((2, say.Stopped(ROOM, PDInferError("no"))), num_rows=2)]
    leader.runs.decode(ROWS, draws_of(1, 2), [Draft(), Draft()])
    assert leader.lockstep.take() == [say.DecodeMessage([say.PackedRow.of(row) for row in ROWS])]
    assert leader.lockstep.said == [{"num_rows": 2, "num_passes": 0, "is_closing": False}]
    assert leader.lockstep.num_together == 1
    assert [room for room, _ in leader.ends.poll_stops()] == [ROOM]


def test_followers_run_rows_in_the_order_of_the_leader() -> None:
    leader = Leader()
    leader.lockstep.next = [agreement(num_rows=3)]
    leader.runner.in_order = [1, 2, 0]
    rows = [*ROWS, Row([9], 1, (6,))]
    drawn = leader.runs.decode(rows, draws_of(1, 2, 3), [Draft() for _ in rows])
    (order,) = leader.lockstep.take()
    assert order == say.DecodeMessage([say.PackedRow.of(rows[index]) for index in (1, 2, 0)])
    (_, ran, draws, *_) = leader.runner.calls[-1]
    assert (ran, [len(draw.output) for draw in draws]) == (rows, [1, 2, 3])  # the runner puts them in order itself
    assert drawn == [[7], [8], [9]]


def test_drafts_are_told_by_number_until_they_are_gone() -> None:
    leader = Leader(drafts=True)
    one, none, other = (leader.runs.draft(states) for states in ([STATE], [], [STATE]))
    assert leader.lockstep.take() == [say.KeepDraft(0, [STATE]), say.KeepDraft(1, [STATE])]
    one.num_tokens, other.num_tokens = 2, 1
    leader.lockstep.next = [agreement(num_rows=1, num_passes=4)]
    leader.runs.decode([*ROWS, ROWS[0]], draws_of(9, 2, 1), [other, none, one])
    (order,) = leader.lockstep.take()
    assert isinstance(order, say.DecodeMessage)
    assert (order.drafts, order.counts) == ([1, None, 0], [1, 0, 2])
    assert order.newest == [pack_ints(range(9 - MAX_NEWEST, 9)), pack_ints([0, 1]), pack_ints([0])]
    assert leader.lockstep.said[-1]["num_passes"] == 2
    assert leader.runner.calls[-1][-2] == 4  # as many passes as the rank that needs most
    leader.runner.calls.clear()
    del one
    gc.collect()
    assert leader.lockstep.take() == [say.DropDraft(0)]


def test_a_rank_without_rows_runs_when_others_do() -> None:
    leader = Leader()
    runs = agreement(num_rows=1)
    leader.lockstep.next = [None, agreement((1, say.Settled(ROOM, None))), runs]
    for _ in range(3):
        leader.runs.idle()
    assert leader.emptied == [runs]
    assert leader.lockstep.num_together == 1
    assert leader.lockstep.said == [{"num_rows": 0, "num_passes": 0, "is_closing": False}] * 3
    leader.lockstep.next = [agreement()]
    leader.runs.idle(is_closing=True)
    assert leader.lockstep.said[-1]["is_closing"]


def test_a_prefill_is_agreed_upon_before_its_first_layer() -> None:
    leader = Leader()
    leader.lockstep.next = [agreement(num_rows=2)]
    layers = leader.runs.prefill(ROWS)
    assert next(layers) == (0, ready)
    assert leader.lockstep.said == [{"num_rows": 2, "num_passes": 0, "is_closing": False}]
    assert list(layers) == [(1, ready)]
    assert leader.lockstep.num_together == 1


def test_a_rank_that_leads_nobody_tells_nothing() -> None:
    lockstep, channel, runner = FakeLockstep(Topology().apart()), FakeChannel(), FakeRunner(drafts=True)
    own: Any = channel
    given: Any = (runner, lockstep)
    runs = RankRunner(*given, empty_decode, RankChannel(own, given[1]))
    lockstep.next = [agreement(num_rows=2)]
    draft = runs.draft([STATE])
    runs.announce(ROWS[:1], [GRANT], [range(1)])
    runs.decode(ROWS[:1], draws_of(1), [draft])
    del draft
    runner.calls.clear()
    gc.collect()
    assert lockstep.told == []


def test_steps_without_rows_take_part_in_all_there_is() -> None:
    runner: Any = FakeRunner()
    empty_prefill(runner, agreement())
    empty_decode(runner, agreement(num_passes=3))
    assert runner.calls == [("layer", 0, []), ("layer", 1, []), ("decode", [], [], [], 3, False)]


def test_followers_are_told_when_the_host_of_their_leader_draws() -> None:
    leader = Leader(drafts=True)
    (plain, penalised) = draws_of(1, 2)
    penalised = attrs.evolve(penalised, sampling=SamplingParams(presence_penalty=0.5))
    for draws, told in (([plain, plain], False), ([plain, penalised], True)):
        leader.lockstep.next = [agreement(num_rows=2)]
        leader.runs.decode(ROWS, draws, [Draft(), Draft()])
        (order,) = leader.lockstep.take()
        assert isinstance(order, say.DecodeMessage)
        assert order.on_host is told


class Alone:
    """A leader of nobody."""

    def __init__(self, *, drafts: bool = False, captured_passes: int = 0) -> None:
        self.lockstep, self.runner = FakeLockstep(Topology().apart()), FakeRunner(drafts, captured_passes)
        own: Any = FakeChannel()
        given: Any = (self.runner, self.lockstep)
        self.runs = RankRunner(*given, empty_decode, RankChannel(own, given[1]))

    def decode(self, *draws: Draw) -> None:
        self.lockstep.next = [agreement(num_rows=len(draws))]
        self.runs.decode([Row([7], 3, (page,)) for page in range(len(draws))], draws, [Draft() for _ in draws])


def test_passes_of_captured_steps_are_asked_for_with_rows_and_without() -> None:
    leader = Alone(drafts=True, captured_passes=3)
    leader.decode(*draws_of(1))
    leader.lockstep.next = [agreement()]
    leader.runs.idle()
    assert [said["num_passes"] for said in leader.lockstep.said] == [3, 3]


def test_the_next_agreement_is_begun_while_a_device_computes() -> None:
    """It says how many rows go on, as far as that is known: here all but one, which ends with this token."""
    leader = Alone()
    draws = [attrs.evolve(draw, sampling=SamplingParams(max_new_tokens=3)) for draw in draws_of(1, 2, 0)]
    leader.decode(*draws)
    leader.lockstep.next = [agreement(num_rows=1)]
    leader.runs.idle()
    assert leader.lockstep.begun == [{"num_rows": 2, "num_passes": 0}, {"num_rows": 0, "num_passes": 0}]
    leader.runner.while_waiting()  # in a step that this rank runs by itself, to warm up
    assert len(leader.lockstep.begun) == 2


@pytest.mark.parametrize(("captured_passes", "begun"), [(0, []), (2, [{"num_rows": 1, "num_passes": 2}])])
def test_where_tokens_are_drafted_it_is_begun_if_passes_are_known(captured_passes: int, begun: list[Any]) -> None:
    leader = Alone(drafts=True, captured_passes=captured_passes)
    leader.decode(*draws_of(1))
    assert leader.lockstep.begun == begun


def test_a_leader_of_others_begins_no_agreement_before_its_tokens_are_drawn() -> None:
    leader = Leader()
    leader.lockstep.next = [agreement(num_rows=2)]
    leader.runs.decode(ROWS, draws_of(1, 2), [Draft(), Draft()])
    assert not leader.lockstep.begun
