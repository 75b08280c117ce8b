"""Clients and served engines when the other end is silent, wrong or gone: errors that say so, and no thread left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

import pdinfer as pd
from tests.e2e.setups import local, wait_until

Engine = pd.PrefillEngine | pd.DecodeEngine


def num_readers() -> int:
    return sum(thread.name == "pdinfer-remote" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    before = num_readers()
    yield
    wait_until(lambda: num_readers() == before, 5.0)


def serving(engine: Engine) -> tuple[Connection, threading.Thread]:
    ours, theirs = Pipe()
    thread = threading.Thread(target=pd.remote.serve, args=(engine, theirs), daemon=True)
    thread.start()
    return ours, thread


def test_a_client_that_waits_in_vain_leaves_nothing_behind() -> None:
    ours, theirs = Pipe()
    with pytest.raises(pd.TransferError, match=r"did not answer within 0\.05 s"):
        pd.remote.PrefillClient(ours, timeout_s=0.05)
    assert ours.closed
    theirs.close()


def test_a_client_for_the_other_role_is_refused() -> None:
    with local() as setup:
        ours, thread = serving(setup.decodes[0])
        with pytest.raises(pd.TransferError, match="a prefill engine was asked for, the other end serves a decode"):
            pd.remote.PrefillClient(ours, timeout_s=5.0)
        thread.join(5.0)
        assert not thread.is_alive()


class Strange:
    """A connection of one's own whose reads fail in a way of their own."""

    def send_bytes(self, buf: bytes, /) -> None:
        pass

    def recv_bytes(self) -> bytes:
        raise RuntimeError("the actor is dead")

    def poll(self, timeout: float, /) -> bool:
        return True

    def close(self) -> None:
        pass


def test_whatever_a_connection_raises_means_gone() -> None:
    with pytest.raises(pd.TransferError, match="is gone"):
        pd.remote.DecodeClient(Strange(), timeout_s=5.0)
    with local() as setup:
        thread = threading.Thread(target=pd.remote.serve, args=(setup.prefills[0], Strange()), daemon=True)
        thread.start()
        thread.join(5.0)
        assert not thread.is_alive()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x80" * 100, b"\x81\xa4type\xa6cancel"])
def test_garbage_closes_a_served_engine(garbage: bytes) -> None:
    with local() as setup:
        ours, thread = serving(setup.prefills[0])
        ours.send_bytes(garbage)
        thread.join(5.0)
        assert not thread.is_alive()
        ours.close()


def test_a_connection_that_ends_before_anything_was_said() -> None:
    with local() as setup:
        for engine in setup.engines:
            ours, thread = serving(engine)
            ours.close()
            thread.join(5.0)
            assert not thread.is_alive()
