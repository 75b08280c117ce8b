"""A follower does what the leader did, with its own channel and pages, and reports what only it can see."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from pdinfer.engine.ranks import follower as follower_module
from pdinfer.engine.ranks import messages as say
from pdinfer.engine.ranks.follower import Follower, SharedSampler
from pdinfer.engine.ranks.lockstep import Agreement
from pdinfer.errors import PDInferError, TransferError
from pdinfer.execution.sampling import Draw, sample
from pdinfer.kv.channel.wire import PackedGrant, pack_ints
from pdinfer.model.batch import Row
from pdinfer.parallel.groups import Groups
from pdinfer.parallel.slices import even_slices
from pdinfer.types import NamedState, SamplingParams
from tests.unit.engine.ranks.rank_fakes import (
    ABORTED,
    DECODE,
    FOLLOWER,
    LANDED,
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
from tests.unit.parallel.thread_groups import groups_of, on_ranks

GRANT = grant_of()
ROOM = GRANT.room
OTHER_GRANT = grant_of(b"o" * 16)
STATE = NamedState(name="s", version=1, dtype="float32", shape=(1,), data=b"\0" * 4)


class Following:
    """The second rank of a group of three."""

    def __init__(self, *, drafts: bool = False) -> None:
        self.channel, self.lockstep, self.runner = FakeChannel(), FakeLockstep.of(FOLLOWER), FakeRunner(drafts)
        given: Any = (self.runner, self.channel, self.lockstep, self.run_empty)
        self.follower = Follower(*given)
        self.emptied: list[Agreement] = []

    def run_empty(self, runner: Any, agreed: Agreement) -> None:
        self.emptied.append(agreed)

    def step(self, *orders: say.Message, num_rows: int = 0, num_passes: int = 0) -> list[say.Message]:
        """Run a step with these orders, and return what was reported in it."""
        heard = [(0, order) for order in orders]
        self.lockstep.next = [agreement(*heard, num_rows=num_rows, num_passes=num_passes)]
        self.follower.step()
        return self.lockstep.take()


def expect(grant: Any = GRANT) -> say.Expect:
    return say.Expect(PackedGrant.of(grant))


def accept(grant: Any = GRANT) -> say.Accept:
    return say.Accept(PackedGrant.of(grant))


@pytest.mark.parametrize("field", attrs.fields(Row), ids=lambda field: field.name)
def test_every_field_of_a_row_reaches_followers(field: Any) -> None:
    """One that is new travels once `PackedRow` has it, and needs a value here that is not its default."""
    row = Row(tokens=(5, 6), start=3, pages=(4, 2), next_token=9)
    assert getattr(row, field.name) != field.default
    (order,) = say.decode(say.encode([say.DecodeMessage([say.PackedRow.of(row)])]))
    assert isinstance(order, say.DecodeMessage)
    assert getattr(order.rows[0].unpack(), field.name) == getattr(row, field.name)


# -- decode's side -----------------------------------------------------------------------------------------------------


def test_orders_are_obeyed_in_order_with_the_pages_own_generations() -> None:
    following = Following()
    assert following.step(say.DialMessage(DECODE), expect()) == [say.Expecting(ROOM)]
    ours = attrs.evolve(GRANT, generations=(0, 0, 0))
    assert following.channel.take() == [("connect", DECODE, 0.0), ("expect", ours)]
    following.step(say.AbortMessage(ROOM, TransferError("enough")), say.DropPeerMessage(DECODE))
    assert following.channel.take() == [("abort", ours, "enough"), ("drop_peer", DECODE)]
    assert not following.emptied


def test_a_room_that_settled_is_reported_and_not_aborted_any_more() -> None:
    following = Following()
    following.step(expect(), expect(OTHER_GRANT))
    following.channel.take()
    following.channel.handoffs = [handoff()]
    assert following.step(say.AbortMessage(ROOM, TransferError("too late"))) == [say.Settled(ROOM, None)]
    assert following.channel.take() == []
    lost = handoff(OTHER_GRANT.room, ABORTED, TransferError("a bit fell over"))
    following.channel.handoffs = [handoff(OTHER_GRANT.room), lost]
    (settled,) = following.step()
    assert isinstance(settled, say.Settled)
    assert (settled.room, str(settled.error)) == (OTHER_GRANT.room, "a bit fell over")


# -- prefill's side ----------------------------------------------------------------------------------------------------

ROWS = [Row((5, 6, 7, 8), 0, (4, 2, 7), 9), Row((3, 4), 4, (1, 3), None)]


def prefill(*tokens: range) -> say.PrefillMessage:
    return say.PrefillMessage([say.PackedRow.of(row) for row in ROWS], [ROOM, OTHER_GRANT.room], list(tokens))


def test_it_runs_the_rows_and_pushes_its_share_of_each_layer() -> None:
    following = Following()
    following.step(accept(), accept(OTHER_GRANT), prefill(range(6), range(2, 8)), num_rows=2)
    assert following.channel.take()[:2] == [("accept", GRANT), ("accept", OTHER_GRANT)]
    following.step(prefill(range(6), range(2, 8)), num_rows=2)
    assert following.runner.calls[-2:] == [("layer", 0, ROWS), ("layer", 1, ROWS)]
    shares = [(ROOM, range(6), (4, 2, 7)), (OTHER_GRANT.room, range(2, 8), (1, 3))]
    assert following.channel.take() == [
        ("push", room, range(layer, layer + 1), share, pages, ready)
        for layer in range(2)
        for room, tokens, pages in shares
        for share in even_slices(tokens, SIZE)[FOLLOWER]
    ]
    assert not following.emptied


def test_a_room_that_its_channel_refused_is_reported_and_never_pushed_into() -> None:
    following = Following()
    following.channel.refuses = {ROOM}
    (stopped,) = following.step(accept(), accept(OTHER_GRANT))
    following.channel.take()
    assert isinstance(stopped, say.Stopped)
    assert (stopped.room, str(stopped.error)) == (ROOM, "not here")
    following.step(prefill(range(6), range(2, 8)), num_rows=2)
    assert {call[1] for call in following.channel.take()} == {OTHER_GRANT.room}
    assert following.runner.calls[-1] == ("layer", 1, ROWS)  # its rows run all the same: they are everybody's
    following.step(say.FinishMessage(ROOM, TransferError("stopped")))
    (finish,) = following.channel.take()
    assert (finish[1].room, finish[2]) == (ROOM, ABORTED)
    following.channel.refuses = set()
    following.step(accept(), prefill(range(6), range(0)), num_rows=1)
    assert [call[0] for call in following.channel.take()] == ["accept", "push", "push"]


def test_what_it_has_sent_is_reported_once() -> None:
    following = Following()
    following.step(accept(), accept(OTHER_GRANT))
    error = PDInferError("the prompt failed")
    following.step(say.FinishMessage(ROOM, None), say.FinishMessage(OTHER_GRANT.room, error))
    assert following.channel.take()[2:] == [
        ("finish", GRANT, LANDED, None),
        ("finish", OTHER_GRANT, ABORTED, error),
    ]
    assert following.step() == []
    following.channel.sent[1].complete(None)
    assert following.step() == [say.SentMessage(OTHER_GRANT.room)]
    assert following.step() == []
    following.channel.sent[0].complete(TransferError("the link broke"))
    assert following.step() == [say.SentMessage(ROOM)]


def test_stops_and_links_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "LOOK_S", 0.0)
    following = Following()
    assert following.step() == []
    error = TransferError("no more")
    following.channel.stops = [(ROOM, error)]
    assert following.step() == [say.Stopped(ROOM, error)]
    following.channel.linked = {DECODE.engine_id}
    assert following.step() == [say.Linked([DECODE])]
    assert following.step() == []
    following.channel.linked = {OTHER.engine_id}
    assert following.step() == [say.Linked([OTHER])]
    following.channel.linked = set()
    assert following.step() == [say.Linked([])]


def test_it_looks_for_links_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "LOOK_S", 3600.0)
    following = Following()
    assert following.step() == []
    following.channel.linked = {DECODE.engine_id}
    assert following.step() == []


# -- the model ---------------------------------------------------------------------------------------------------------


def test_it_runs_nothing_while_no_agreement_is_due() -> None:
    following = Following()
    following.channel.stops = [(ROOM, TransferError("no more"))]
    following.lockstep.next = [None]
    following.follower.step(is_closing=True)
    assert following.lockstep.said == [{"num_passes": 0, "is_closing": True}]
    assert following.lockstep.num_together == 0
    assert len(following.lockstep.told) == 1  # goes with the next agreement
    assert (following.runner.calls, following.emptied) == ([], [])


@pytest.mark.parametrize(("num_rows", "runs"), [(0, False), (3, True)])
def test_it_runs_without_rows_when_others_have_some(num_rows: int, runs: bool) -> None:
    following = Following()
    following.step(say.DialMessage(DECODE), num_rows=num_rows)
    assert bool(following.emptied) is runs
    assert following.lockstep.num_together == 1


def test_without_drafts_it_runs_rows_and_draws_nothing() -> None:
    following = Following()
    following.step(say.DecodeMessage([say.PackedRow.of(row) for row in ROWS]), num_rows=2)
    assert following.runner.calls == [("forward", ROWS)]


def test_drafts_are_those_of_their_numbers() -> None:
    following = Following(drafts=True)
    following.step(say.KeepDraft(5, [STATE]), say.KeepDraft(6, [STATE]))
    order = say.DecodeMessage(
        [say.PackedRow.of(row) for row in ROWS], [None, 5], [0, 2], [pack_ints([1]), pack_ints([2, 3])]
    )
    following.step(order, num_rows=2, num_passes=4)
    ((_, rows, draws, drafts, num_passes, on_host),) = following.runner.calls
    assert (rows, num_passes, on_host) == (ROWS, 4, False)
    assert [list(draw.output) for draw in draws] == [[1], [2, 3]]
    assert [(draft.num_tokens, draft.state is None) for draft in drafts] == [(0, True), (2, False)]
    following.step(order, num_rows=2)
    assert following.runner.calls[1][3][1] is drafts[1]  # it goes on where it was
    following.step(say.DropDraft(5), say.DropDraft(77))
    with pytest.raises(KeyError):
        following.step(order, num_rows=2)


def test_it_runs_what_is_drawn_on_the_host_as_its_leader_does() -> None:
    following = Following(drafts=True)
    following.runner.captured_passes = 3
    order = say.DecodeMessage([say.PackedRow.of(ROWS[1])], [None], [0], [pack_ints([1])], on_host=True)
    (heard,) = say.decode(say.encode([order]))
    following.step(heard, num_rows=1, num_passes=3)
    assert following.runner.calls[-1][-1] is True
    assert following.lockstep.said == [{"num_passes": 3, "is_closing": False}]


def test_all_ranks_go_on_with_the_tokens_that_the_leader_drew() -> None:
    """A row from which no token can be drawn is an error on all ranks."""
    groups = groups_of(tp_size=3)
    logits_BV = 30 * torch.randn(3, 11, generator=torch.Generator().manual_seed(0))  # more than the noise
    logits_BV[1] = float("nan")
    draws = [Draw(sampling=SamplingParams(seed=seed), prompt=(1,), output=()) for seed in range(3)]

    def draw(one: Groups) -> list[tuple[int, bool]]:
        drawer = SharedSampler(one.attention)
        assert drawer(logits_BV[:0], []) == []
        mine = logits_BV if one.attention.rank == 0 else -logits_BV
        return [(0 if new.error else new.token, new.error is not None) for new in drawer(mine, draws)]

    expected = [(0 if new.error else new.token, new.error is not None) for new in sample(logits_BV, draws)]
    assert [failed for _, failed in expected] == [False, True, False]
    assert on_ranks(groups, draw) == [expected] * 3
