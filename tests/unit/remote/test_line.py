"""A line hears of its engine from several threads: what one of them is about to do is still right when it does it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import pytest

from pdinfer.config import RemoteConfig
from pdinfer.errors import TransferError
from pdinfer.remote import messages
from pdinfer.remote.client import PrefillClient
from pdinfer.remote.line import Line
from tests.unit.remote.test_known import ready
from tests.waiting import check_returns, wait_until

SILENT = RemoteConfig(silent_s=3600.0)


def line_of(role: str, *, follows: bool = False) -> Line[Any]:
    return Line(role, SILENT, None, lambda report: None, lambda: None, follows=follows)


@pytest.fixture
def far() -> Iterator[tuple[Line[Any], Connection]]:
    """The line to a prefill, and its engine's end."""
    line, (ours, theirs) = line_of("prefill"), Pipe()
    line.meet(theirs)
    ours.send_bytes(messages.encode(ready("prefill")))
    wait_until(lambda: line.engine.is_live)
    yield line, ours
    line.close()


class Later:
    """A lock that another thread is faster to take: it does its work first."""

    def __init__(self, lock: threading.RLock, work: Any) -> None:
        self.lock, self.work = lock, work

    def __enter__(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            check_returns(work)
        self.lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lock.release()


def test_an_engine_that_answers_while_it_is_heard_again_is_not_asked_to_begin_once_more(
    far: tuple[Line[Any], Connection],
) -> None:
    """One that stood still twice answers the first renewal when it goes on. Two threads hear of that: one reads the
    answer, and one sees that the silence is over. A second renewal would end a session that has begun."""
    line, _ = far
    line._silent(True)
    line._silent(False)
    line._silent(True)
    assert (line.engine.is_live, line.engine.num_renewals) == (False, 1)
    answer = ready("prefill")
    answer.session = 1
    line.lock = Later(line.lock, lambda: line._deliver(answer))  # type: ignore[assignment]
    line._silent(False)
    assert (line.engine.is_live, line.engine.num_renewals) == (True, 1)


def test_a_line_takes_over_no_session_that_was_lost_meanwhile(far: tuple[Line[Any], Connection]) -> None:
    """The other line is told of the loss, so this one would wait for ever."""
    line, engine = far
    told, deliver = threading.Event(), line._session._deliver
    line._session._deliver = lambda report: (told.wait(), deliver(report))  # type: ignore[assignment,func-returns-value]
    engine.close()
    wait_until(lambda: line._session.loss)
    assert line.engine.is_live, "nobody was told yet"
    with pytest.raises(TransferError, match="other end of a port is gone"):
        line_of("decode", follows=True).follow(line)
    told.set()
    wait_until(lambda: line.is_gone)
    with pytest.raises(TransferError, match="other end of a port is gone"):
        line_of("decode", follows=True).follow(line)


def test_what_a_line_notices_late_takes_no_message_from_the_one_that_follows_it(
    far: tuple[Line[Any], Connection],
) -> None:
    line, _ = far
    line_of("decode", follows=True).follow(line)
    forgotten: list[bool] = []
    line._session.forget = lambda: forgotten.append(True)  # type: ignore[method-assign]
    line._silent(True)  # its thread was on the way
    assert not forgotten


def test_an_engine_that_goes_when_it_is_to_change_its_role_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    (ours, theirs), said = Pipe(), ready("prefill")
    said.roles = ("decode",)
    ours.send_bytes(messages.encode(said))
    client = PrefillClient(theirs, config=SILENT)
    other = client._other

    def goes() -> Any:
        ours.close()
        wait_until(lambda: client._line._session.loss)
        return other()

    monkeypatch.setattr(client, "_other", goes)
    for _ in range(2):
        with pytest.raises(TransferError, match="other end of a port is gone"):
            client.become("decode")
    client.close()
    assert client._line._closing.is_set(), "it is its own to close"


def test_an_engine_that_hangs_when_it_is_to_change_its_role_is_lost(far: tuple[Line[Any], Connection]) -> None:
    """How long its steps may take it says again only when it has changed."""
    line, _ = far
    assert line.engine.ready is not None
    line.engine.ready.hung_s = 5.0
    after = line_of("decode", follows=True)
    after.follow(line)
    for age_s, is_gone in (5.1 + after.config.return_s, True), (4.9 + after.config.return_s, False):
        after.is_gone = False
        after._deliver(messages.BeatMessage(step_age_s=age_s))
        assert after.is_gone is is_gone
    assert "hangs: its step has not ended for 65.1 s, and 5 s are its limit" in str(after.loss())


def test_a_client_whose_engine_changes_its_role_is_a_lost_port() -> None:
    """Requests that it took would never end."""
    (ours, theirs), said = Pipe(), ready("prefill")
    said.roles = ("decode",)
    ours.send_bytes(messages.encode(said))
    client = PrefillClient(theirs, config=SILENT)
    assert client.become("decode") is None
    assert client.wait(0.0)
    for call in (client.step, client.recover):
        with pytest.raises(TransferError, match="changes its role: use the port that it becomes"):
            call()
    client.close()
