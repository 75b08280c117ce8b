"""Engines that announce themselves are found, lost, replaced and drained while streams go on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import pdinfer as pd
from pdinfer.remote.directory import Directory, Door, Folder
from pdinfer.remote.directory.directory import Entry
from tests.backends import ROOT, child_environment
from tests.e2e.setups import PROMPT, collect, model_of, pool_of, reference, request, tokens_of
from tests.waiting import TIMEOUT_S, check_ends, started, wait_until

KEY = os.urandom(32)


def engine_of(role: type, family: str = "v3") -> Any:
    model = model_of(family)
    return role(model, pd.KVChannel(pool_of(model, num_pages=64), pd.kv.SocketTransport(), key=KEY))


@contextmanager
def listening(role: type, family: str = "v3", **more: Any) -> Iterator[str]:
    """Serve an engine in a thread at the endpoint that is given, until `drain` is set."""
    with Door("127.0.0.1", 0, key=KEY) as door:
        config = pd.remote.RemoteConfig(return_s=TIMEOUT_S)
        thread = started(pd.remote.serve, engine_of(role, family), door, config=config, **more)
        host, port = door.address
        yield f"{host}:{port}"
        check_ends(thread)


@contextmanager
def serving(
    role: type, directory: Directory | None = None, family: str = "v3", **more: Any
) -> Iterator[threading.Event]:
    """Serve an engine, and announce it. The event drains it, at the latest when the block ends."""
    drain = threading.Event()
    with listening(role, family, directory=directory, drain=drain, **more):
        try:
            yield drain
        finally:
            drain.set()


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(Folder(tmp_path), key=KEY)


def step_until(pairing: pd.Pairing, condition: Callable[[], object]) -> list[pd.TokenEvent]:
    events: list[pd.TokenEvent] = []

    def stepped() -> object:
        if pairing.wait(0.01):
            events.extend(pairing.step())
        return condition()

    wait_until(stepped)
    return events


def roles(pairing: pd.Pairing) -> list[str]:
    return sorted(port.role for port in pairing.ports)


@contextmanager
def paired(directory: Directory) -> Iterator[pd.Pairing]:
    """A pairing that has found a prefill and a decode."""
    with (
        serving(pd.PrefillEngine, directory),
        serving(pd.DecodeEngine, directory),
        pd.Pairing(directory=directory) as pairing,
    ):
        step_until(pairing, lambda: roles(pairing) == ["decode", "prefill"])
        yield pairing


def test_a_pairing_begins_with_what_the_directory_names_and_leaves_it_to_the_next(directory: Directory) -> None:
    with (
        serving(pd.PrefillEngine, directory, max_clients=1),
        serving(pd.DecodeEngine, directory, max_clients=1),
    ):
        for name in ("first", "second"):  # front ends, one after the other
            with pd.Pairing(directory=directory) as pairing:
                pairing.submit(request(name))  # before there is any port
                assert tokens_of(collect(pairing)) == list(reference("v3", PROMPT, 5).tokens)
                wait_until(lambda: [entry.is_taken for entry in directory.watch()] == [True, True])
            wait_until(lambda: [entry.is_taken for entry in directory.watch()] == [False, False])


def test_an_engine_that_drains_ends_its_streams_and_then_itself(directory: Directory) -> None:
    with ExitStack() as served:
        served.enter_context(serving(pd.PrefillEngine, directory))
        drain = served.enter_context(serving(pd.DecodeEngine, directory))
        with pd.Pairing(directory=directory) as pairing:
            step_until(pairing, lambda: roles(pairing) == ["decode", "prefill"])
            pairing.submit(request("a", 40))
            events = step_until(pairing, lambda: pairing.ports[0].load().num_tokens)
            drain.set()
            events += step_until(pairing, lambda: roles(pairing) == ["prefill"])
            assert tokens_of(events) == list(reference("v3", PROMPT, 40).tokens)
            assert pairing.stats.num_ports_lost == 0
            assert [entry.announced and entry.announced.role for entry in directory.watch()] == ["prefill"]
            served.enter_context(serving(pd.DecodeEngine, directory))
            pairing.submit(request("b"))
            assert tokens_of(collect(pairing)) == list(reference("v3", PROMPT, 5).tokens)


def test_an_engine_that_nobody_has_drains_at_once(directory: Directory) -> None:
    with serving(pd.PrefillEngine, directory):
        wait_until(directory.watch)
    assert directory.watch() == ()


def test_streams_go_on_while_the_folder_is_gone_and_back(tmp_path: Path, directory: Directory) -> None:
    hidden = tmp_path.with_name("hidden")
    with (
        serving(pd.PrefillEngine, directory),
        serving(pd.DecodeEngine, directory),
        pd.Pairing(directory=directory) as pairing,
    ):
        step_until(pairing, lambda: roles(pairing) == ["decode", "prefill"])
        os.rename(tmp_path, hidden)
        for number in range(20):
            pairing.submit(request(str(number)))
            assert tokens_of(collect(pairing)) == list(reference("v3", PROMPT, 5).tokens)
        following_ = pairing._followings[0]
        wait_until(lambda: following_._is_lost)
        os.rename(hidden, tmp_path)
        wait_until(lambda: not following_._is_lost)
        assert roles(pairing) == ["decode", "prefill"]
        assert pairing.stats.num_ports_lost == 0


def test_an_engine_of_another_model_is_let_alone(directory: Directory) -> None:
    with (
        serving(pd.PrefillEngine, directory),
        serving(pd.DecodeEngine, directory),
        pd.Pairing(directory=directory) as pairing,
    ):
        step_until(pairing, lambda: roles(pairing) == ["decode", "prefill"])
        with serving(pd.PrefillEngine, directory, "v2"):
            wait_until(lambda: len(directory.watch()) == 3)
            pairing.submit(request("a"))
            assert tokens_of(collect(pairing)) == list(reference("v3", PROMPT, 5).tokens)
            assert roles(pairing) == ["decode", "prefill"]


def test_engines_that_are_known_by_an_address_alone_say_what_they_are() -> None:
    drain = threading.Event()
    with (
        listening(pd.PrefillEngine, drain=drain) as prefill,
        listening(pd.DecodeEngine, drain=drain) as decode,
        listening(pd.DecodeEngine, "v2", drain=drain) as other,
    ):
        named: dict[str, bytes | None] = dict.fromkeys((prefill, decode))
        directory = Directory(SimpleNamespace(read=lambda: named), key=KEY)
        with pd.Pairing(directory=directory) as pairing:
            step_until(pairing, lambda: roles(pairing) == ["decode", "prefill"])
            named[other] = None
            wait_until(lambda: other in pairing._followings[0]._tries)  # its pages mean something else
            pairing.submit(request("a"))
            assert tokens_of(collect(pairing)) == list(reference("v3", PROMPT, 5).tokens)
            assert roles(pairing) == ["decode", "prefill"]
            with directory.dial(Entry(other, other)) as found:  # it was left, and takes others
                assert found.role == "decode"
        drain.set()


def test_a_stale_announcement_leads_to_no_engine_that_took_the_place(directory: Directory) -> None:
    """It tells of other weights. If it led there, no engine of the right ones would be dialled any more."""
    with serving(pd.PrefillEngine, directory), serving(pd.DecodeEngine, directory):
        wait_until(lambda: len(directory.watch()) == 2)
        now = directory.watch()[0].announced
        assert now is not None
        before = pd.PeerAddress(bytes(16), 1, 0, now.engine.endpoints)
        directory.announce(msgspec.structs.replace(now, engine=before, weights_id=bytes(32)))
        with pytest.raises(pd.TransferError, match=r"engine 00000000 .* was announced at .*, where Found.* answers"):
            directory.dial(directory.watch()[0])
        with pd.Pairing(directory=directory) as pairing:
            step_until(pairing, lambda: roles(pairing) == ["decode", "prefill"])


def test_an_engine_that_drains_lets_nobody_else_in() -> None:
    """A directory may go on naming it for a while. Front ends that came and left by turns would keep it for ever."""
    drain = threading.Event()
    with listening(pd.DecodeEngine, drain=drain) as decode:
        directory = Directory(SimpleNamespace(read=dict), key=KEY)
        with directory.dial(Entry(decode, decode)):
            drain.set()
            with pytest.raises(pd.TransferError, match="no engine answers"):
                directory.dial(Entry(decode, decode))


def test_a_pairing_that_is_closed_follows_nothing(directory: Directory) -> None:
    with paired(directory) as pairing:
        pairing.close()
        with pytest.raises(pd.TransferError, match="the pairing is closed"):
            pairing.follow(directory)
        assert len(pairing._followings) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (pd.Pairing, "or a directory of them"),
        (lambda: pd.Pairing(directory="/shared"), "directory must be"),  # type: ignore[arg-type]
    ],
)
def test_a_pairing_without_ports_needs_a_directory(make: Callable[[], object], message: str) -> None:
    with pytest.raises(pd.ConfigError, match=message):
        make()


def test_what_has_no_listener_is_not_announced(directory: Directory) -> None:
    with engine_of(pd.PrefillEngine) as engine, pytest.raises(pd.ConfigError, match="give `serve` a listener"):
        pd.remote.serve(engine, None, directory=directory)


# -- in processes ------------------------------------------------------------------------------------------------------


class Engines:
    """Processes of engines that announce themselves in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, role: str, *, waits: bool = False) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.e2e.announced", role, str(self._folder), "waits" if waits else "now"]
        process = subprocess.Popen(command, cwd=ROOT, env=child_environment(), stdin=subprocess.PIPE, text=True)
        assert process.stdin is not None
        process.stdin.write(f"{KEY.hex()}\n")
        process.stdin.flush()
        self._processes.append(process)
        return process

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def ask(pairing: pd.Pairing, name: str, at_event: dict[int, Callable[[], object]]) -> list[list[int]]:
    """Return the answers to eight questions, and do at the given events what there is to do."""
    sampling = pd.SamplingParams(max_new_tokens=24, temperature=0, ignore_eos=True)
    asked = {f"{name} {n}": (256, *f"calc {n}7+38=".encode()) for n in range(1, 9)}
    answers: dict[str, list[int]] = {request_id: [] for request_id in asked}
    requests = [pd.Request(request_id=key, prompt=prompt, sampling=sampling) for key, prompt in asked.items()]
    for number, event in enumerate(pairing.generate(requests)):
        assert event.error is None, event.error
        if event.token is not None:
            answers[event.request_id].append(event.token)
        at_event.get(number, lambda: None)()
    return list(answers.values())


@pytest.mark.full
def test_engines_are_killed_join_and_drain_while_streams_go_on(tmp_path: Path) -> None:
    with Engines(tmp_path) as engines:
        first = [engines.start("prefill"), engines.start("decode"), engines.start("decode")]
        newcomer = engines.start("decode", waits=True)
        directory = Directory(Folder(tmp_path), key=KEY)
        config = pd.PairingConfig(continue_elsewhere=True, port_wait_s=TIMEOUT_S)
        with pd.Pairing(directory=directory, config=config, policy=pd.policy.round_robin) as pairing:
            step_until(pairing, lambda: roles(pairing) == ["decode", "decode", "prefill"])
            expected = ask(pairing, "quiet", {})
            assert {len(answer) for answer in expected} == {24}

            def join() -> None:
                assert newcomer.stdin is not None
                newcomer.stdin.write("now\n")
                newcomer.stdin.flush()

            assert ask(pairing, "killed", {10: join, 40: first[1].kill}) == expected
            assert pairing.stats.num_ports_lost == 1
            assert pairing.stats.num_moved > 0
            rounds = 0
            while roles(pairing) != ["decode", "decode", "prefill"]:
                rounds += 1
                assert ask(pairing, f"joined {rounds}", {}) == expected
            first[2].terminate()  # the newcomer goes on alone
            assert ask(pairing, "drained", {}) == expected
            step_until(pairing, lambda: roles(pairing) == ["decode", "prefill"])
            assert ask(pairing, "alone", {}) == expected
            assert pairing.stats.num_ports_lost == 1
        for process in (first[0], newcomer):  # left by their front end, and nobody has them
            process.terminate()
        assert [process.wait(TIMEOUT_S) for process in (first[2], first[0], newcomer)] == [0, 0, 0]
        assert (
            not list(tmp_path.glob("*.json")) or len(list(tmp_path.glob("*.json"))) == 1
        )  # of the one that was killed


def test_a_forged_entry_is_dialled_by_nobody(tmp_path: Path, directory: Directory) -> None:
    """And one that points elsewhere, made with the key, meets an engine that says who it is."""
    with Listener(("127.0.0.1", 0), authkey=bytes(32)) as stranger, serving(pd.PrefillEngine, directory):
        wait_until(directory.watch)
        entry = directory.watch()[0]
        assert entry.announced is not None
        host, port = stranger.address
        data = (
            (tmp_path / f"{entry.name}.json").read_bytes().replace(entry.endpoint.encode(), f"{host}:{port}".encode())
        )
        (tmp_path / "00-1-0.json").write_bytes(data)
        assert [each.name for each in directory.watch()] == [entry.name]
        with directory.dial(entry) as found:
            assert (found.role, found.address) == ("prefill", entry.announced.engine)
