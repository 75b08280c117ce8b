"""What the requests of several clients are called: each id is its client's own, and no two requests have one name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.remote.served_client import renamed
from pdinfer.remote.shared_engine import Names
from tests.e2e.setups import request

IDS = st.sampled_from(["a", "b", "1", "2"])  # two of them are what a second "a" might be called


@given(st.lists(st.tuples(st.sampled_from("XYZ"), IDS, st.booleans()), max_size=40))
def test_every_request_has_a_name_of_its_own_until_it_ends(happens: list[tuple[str, str, bool]]) -> None:
    names: Names[str] = Names()
    known: dict[tuple[str, str], str] = {}
    for client, request_id, ends in happens:
        if ends:
            known.pop((client, request_id), None)
            names.keep(known.values())
        else:
            name = names.give(client, request_id)
            assert known.setdefault((client, request_id), name) == name
        assert len(set(known.values())) == len(known)
        for (owner, own_id), name in known.items():
            assert names.owner(name) == (owner, own_id)
            assert names.of(owner, own_id) == name
        for owner in "XYZ":
            assert set(names.of_client(owner)) == {name for (of, _), name in known.items() if of == owner}


def test_an_id_that_nobody_else_has_stays_as_it_is() -> None:
    names: Names[str] = Names()
    assert [names.give("X", "a"), names.give("Y", "b")] == ["a", "b"]
    assert names.give("Y", "a") != "a"
    assert names.owner("nobody's") is None


def test_events_are_told_under_the_id_that_the_client_knows() -> None:
    writer = pd.PeerAddress(engine_id=bytes(16), epoch=1, rank=0, endpoints=("tcp://h:1",))
    grant = pd.PageGrant(
        room=bytes(16),
        request_id="1",
        writers=(writer,),
        destinations=(writer,),
        tokens=range(4),
        pages=(0,),
        generations=(0,),
        layout_id=bytes(16),
    )
    told = renamed(pd.Granted(grant=grant, request=request("1")), "a")
    assert isinstance(told, pd.Granted)
    assert (told.grant.request_id, told.request) == ("a", request("a"))
    refused = pd.Refused(request_id="1", error=pd.Overloaded("full"))
    assert renamed(refused, "a") == pd.Refused(request_id="a", error=refused.error)
    assert renamed(refused, "1") is refused
