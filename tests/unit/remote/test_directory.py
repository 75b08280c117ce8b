"""What stands in a directory is believed only if it was made with the key, is whole, and is refreshed."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch.distributed as dist

import pdinfer as pd
from pdinfer.remote import messages
from pdinfer.remote.directory import Directory, Door, Folder, HeadlessService, Store, announcing, handshake, media
from pdinfer.remote.directory.announcement import MAX_BYTES, Announcement
from pdinfer.remote.directory.announcing import Announcer, announced_at
from pdinfer.remote.directory.directory import Entry
from pdinfer.testing import VirtualClock
from tests.backends import script
from tests.forks import FAR_S
from tests.golden.samples import DECODE_LOAD, PREFILL_LOAD
from tests.waiting import check_ends, check_returns, started, without_threads

KEY, OTHER_KEY = bytes(range(32)), bytes(32)


def announcement(number: int = 1, *, beat: int = 1, **more: Any) -> Announcement:
    values: dict[str, Any] = {
        "endpoint": f"10.0.0.{number}:7000",
        "role": "prefill",
        "engine": pd.PeerAddress(bytes([number]) * 16, number, 0, (f"tcp://10.0.0.{number}:7001",)),
        "limits": pd.types.RequestLimits(name="prefill", vocab_size=512, max_tokens=1024),
        "load": messages.LoadMessage(prefill=PREFILL_LOAD),
        "model_id": b"m" * 32,
        "weights_id": b"w" * 32,
        "layout_id": b"l" * 32,
        "version": messages.VERSION,
        "minor": messages.MINOR,
        "ttl_s": 15.0,
        "beat": beat,
    }
    return Announcement(**{**values, **more})


@pytest.fixture(params=["folder", "hash store", "tcp store"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder | Store]:
    if request.param == "folder":
        yield Folder(tmp_path)
    elif request.param == "hash store":
        yield Store(dist.HashStore())
    else:
        kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        yield Store(dist.TCPStore("127.0.0.1", kept.port, is_master=False, timeout=timedelta(seconds=60)))


def test_what_is_announced_is_found_until_it_is_withdrawn(medium: Folder | Store) -> None:
    directory = Directory(medium, key=KEY)
    assert directory.watch() == ()
    ours = announcement(1), announcement(2, role="decode", load=messages.LoadMessage(decode=DECODE_LOAD))
    for each in ours:
        directory.announce(each)
    assert directory.watch() == tuple(Entry(each.name, each.endpoint, each) for each in ours)
    again = msgspec.structs.replace(ours[0], beat=2, is_taken=True)
    directory.announce(again)
    assert [entry.is_taken for entry in directory.watch()] == [True, False]
    directory.withdraw(again)
    directory.withdraw(again)
    assert [entry.announced for entry in directory.watch()] == [ours[1]]
    assert directory.watch()[0].identity == b"m" * 32 + b"w" * 32


def test_an_announcement_lapses_by_the_clock_of_the_reader(tmp_path: Path) -> None:
    clock = VirtualClock()
    directory = Directory(Folder(tmp_path), key=KEY, clock=clock)
    directory.announce(announcement(beat=7))
    os.utime(next(tmp_path.iterdir()), (0, 0))  # as a host whose clock is decades behind would leave it
    assert len(directory.watch()) == 1
    clock.advance(15.0)
    assert len(directory.watch()) == 1
    clock.advance(0.1)
    assert directory.watch() == ()
    directory.announce(announcement(beat=8))
    assert len(directory.watch()) == 1


def test_an_old_announcement_that_comes_again_renews_nothing(tmp_path: Path) -> None:
    """As where two servers of a folder disagree, or somebody puts back what was there."""
    clock = VirtualClock()
    directory = Directory(Folder(tmp_path), key=KEY, clock=clock)
    for beat in (5, 3, 4, 5):
        directory.announce(announcement(beat=beat))
        assert len(directory.watch()) == 1
        clock.advance(5.0)
    directory.announce(announcement(beat=4))
    assert directory.watch() == ()


def hostile(folder: Path) -> None:
    """Put everything into a folder that should not be there."""
    good = announcement(9)
    sealed = good.sealed(KEY)
    for name, data in {
        "empty": b"",
        "garbage": b"\xff\x00" * 50,
        "oversized": b"[" * (2 * MAX_BYTES),
        "deep": b"[" * 5000 + b"\n" + b"0" * 64,
        "of-another": sealed,  # a copy under another name
        good.name: sealed[:-1],
        announcement(8).name: announcement(8).sealed(OTHER_KEY),
        announcement(7).name: announcement(7).sealed(KEY).replace(b"10.0.0.7", b"10.6.6.6"),
        announcement(6).name: announcement(6, version=messages.VERSION + 1).sealed(KEY),
        announcement(5).name: announcement(5, endpoint="\x1b[2J").sealed(KEY),
        announcement(4).name: announcement(4, ttl_s=1e9).sealed(KEY),
    }.items():
        (folder / f"{name}.json").write_bytes(data)
    (folder / f".{announcement(3).name}.json").write_bytes(announcement(3).sealed(KEY)[:100])  # is being written
    (folder / "a folder.json").mkdir()
    os.mkfifo(folder / "a pipe.json")
    (folder / "a link.json").symlink_to("/etc/hostname")
    (folder / "nowhere.json").symlink_to(folder / "missing")
    (folder / "notes.txt").write_text("ours")


def test_what_nobody_with_the_key_wrote_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hostile(tmp_path)
    directory = Directory(Folder(tmp_path), key=KEY)
    directory.announce(announcement(1))
    with caplog.at_level(logging.WARNING, "pdinfer"):
        for _ in range(3):
            check_returns(directory.watch)
            assert [entry.endpoint for entry in directory.watch()] == ["10.0.0.1:7000"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 11  # each once
    assert not [text for text in said if "\x1b" in text or len(text) > 1000]


def test_a_folder_that_is_gone_is_an_error_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    directory = Directory(Folder(folder), key=KEY)
    with pytest.raises(pd.TransferError, match=r"Directory\(Folder\) cannot be read: FileNotFoundError"):
        directory.watch()
    with pytest.raises(FileNotFoundError):
        directory.announce(announcement(1))
    folder.mkdir()
    directory.announce(announcement(1))
    assert len(directory.watch()) == 1


def test_an_entry_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS a file is stale that was replaced after it was opened."""
    directory = Directory(Folder(tmp_path), key=KEY)
    for number in (1, 2):
        directory.announce(announcement(number))
    opened, stale = media.open_regular, f"{announcement(1).name}.json"

    def open_regular(folder: Path, name: str, error: type[pd.PDInferError]) -> int:
        return os.open(folder / name, os.O_WRONLY) if name == stale else opened(folder, name, error)

    monkeypatch.setattr(media, "open_regular", open_regular)
    assert [entry.endpoint for entry in directory.watch()] == ["10.0.0.2:7000"]


def test_writers_remove_what_was_left_behind(tmp_path: Path) -> None:
    directory = Directory(Folder(tmp_path), key=KEY)
    directory.announce(announcement(1))
    (tmp_path / ".half.json").touch()
    for path, age_s in ((tmp_path / ".half.json", 3700), (next(tmp_path.glob("0*.json")), 3500)):
        at = path.stat().st_mtime - age_s
        os.utime(path, (at, at))
    directory.announce(announcement(2))
    assert [entry.endpoint for entry in directory.watch()] == ["10.0.0.1:7000", "10.0.0.2:7000"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_crowded_folder_is_read_from_its_newest_file_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MAX_ENTRIES", 3)
    directory = Directory(Folder(tmp_path), key=KEY)
    for number in range(1, 9):
        directory.announce(announcement(number))
        path = tmp_path / f"{announcement(number).name}.json"
        os.utime(path, (path.stat().st_mtime, 1000.0 + path.stat().st_mtime - number))
    assert [entry.endpoint for entry in directory.watch()] == [f"10.0.0.{number}:7000" for number in (1, 2, 3)]


def test_a_store_has_as_many_slots_as_it_is_read_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MAX_ENTRIES", 3)
    store = dist.HashStore()
    writers = [Directory(Store(store), key=KEY) for _ in range(5)]
    reader = Directory(Store(store), key=KEY)

    def listed() -> set[str]:
        return {entry.endpoint for entry in reader.watch()}

    for number, writer in enumerate(writers, 1):
        writer.announce(announcement(number))
    assert listed() == {f"10.0.0.{number}:7000" for number in (3, 4, 5)}
    writers[0].withdraw(announcement(1))  # its slot is another one's by now
    assert listed() == {f"10.0.0.{number}:7000" for number in (3, 4, 5)}
    writers[1].announce(announcement(2, beat=2))
    assert listed() == {f"10.0.0.{number}:7000" for number in (2, 4, 5)}


def test_a_slot_that_nobody_filled_is_not_waited_for() -> None:
    """Its writer died in between."""
    store = dist.HashStore()
    store.add("pdinfer.directory/count", 2)
    directory = Directory(Store(store), key=KEY)
    check_returns(directory.watch)
    assert directory.watch() == ()


def test_a_service_in_dns_tells_addresses_and_takes_none() -> None:
    def resolve(host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        assert host == "prefill.default.svc"
        found = ["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.2"]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    directory = Directory(HeadlessService("prefill.default.svc", 7000, resolve=resolve), key=KEY)
    endpoints = ["10.0.0.1:7000", "10.0.0.2:7000", "[fd00::1]:7000"]
    assert directory.watch() == tuple(Entry(each, each) for each in endpoints)
    assert [(entry.identity, entry.is_taken) for entry in directory.watch()] == [(None, False)] * 3
    several = Directory(HeadlessService("prefill.default.svc", 7000, num_ports=2, resolve=resolve), key=KEY)
    assert [entry.endpoint for entry in several.watch()][:2] == ["10.0.0.1:7000", "10.0.0.1:7001"]
    assert len(several.watch()) == 6
    with pytest.raises(pd.ConfigError, match=r"Directory\(HeadlessService\), which is only read"):
        directory.announce(announcement(1))


def test_a_name_without_addresses_is_an_error() -> None:
    def resolve(*_: object, **__: object) -> list[tuple[Any, ...]]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(pd.TransferError, match="cannot be read: gaierror"):
        Directory(HeadlessService("nobody", 7000, resolve=resolve), key=KEY).watch()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Directory(SimpleNamespace(), key=KEY), "medium must be Medium"),  # type: ignore[arg-type]
        (lambda: Directory(Folder("."), key=b"short"), "at least 16 random bytes"),
        (lambda: Directory(Folder("."), key=KEY, ttl_s=0.0), "ttl_s must be greater than 0 and at most 3600, got 0"),
        (lambda: Directory(Folder("."), key=KEY, ttl_s=4000.0), "at most 3600, got 4000"),
        (lambda: HeadlessService("name", 0), "ports from 1 to 65535, got 1 from 0 on"),
        (lambda: HeadlessService("name", 65530, num_ports=7), "got 7 from 65530 on"),
        (lambda: HeadlessService("name", 7000, num_ports=0), "got 0 from 7000 on"),
        (lambda: Folder(3), "path must be"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_directory_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(pd.ConfigError, match=message):
        make()


def test_an_announcement_has_few_bytes(tmp_path: Path) -> None:
    assert len(announcement().sealed(KEY)) < 4096
    long = pd.types.RequestLimits(
        name="prefill", vocab_size=512, max_tokens=1024, logits_processors=tuple(f"{n:0>100}" for n in range(200))
    )
    with pytest.raises(pd.ConfigError, match=f"at most {MAX_BYTES} bytes, .* fewer or shorter names"):
        Directory(Folder(tmp_path), key=KEY).announce(announcement(limits=long))


# -- media of the examples ---------------------------------------------------------------------------------------------


class Gateway(BaseHTTPRequestHandler):
    """What of etcd's JSON gateway is used, as etcd 3.4.23 answers: keys and values in base64, empty ones left out,
    leases that end."""

    keys: ClassVar[dict[bytes, tuple[bytes, str]]]
    leases: ClassVar[dict[str, int]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer: dict[str, Any] = {}
        match self.path:
            case "/v3/lease/grant":
                answer = {"ID": str(len(self.leases) + 1), "TTL": str(body["TTL"])}
                self.leases[answer["ID"]] = body["TTL"]
            case "/v3/kv/put":
                assert body["lease"] in self.leases
                self.keys[b64decode(body["key"])] = b64decode(body["value"]), body["lease"]
            case "/v3/kv/range":
                low, high = b64decode(body["key"]), b64decode(body["range_end"])
                found = [(key, value) for key, (value, lease) in self.keys.items() if low <= key < high]
                pairs = [
                    {name: b64encode(data).decode() for name, data in (("key", key), ("value", value)) if data}
                    for key, value in found
                ]
                answer = {"kvs": pairs, "count": str(len(pairs))} if pairs else {}
            case "/v3/kv/deleterange":
                self.keys.pop(b64decode(body["key"]), None)
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def check_medium(medium: Any) -> None:
    directory = Directory(medium, key=KEY)
    assert directory.watch() == ()
    for number in (1, 2):
        directory.announce(announcement(number))
    directory.announce(announcement(1, beat=2))
    assert [entry.announced and entry.announced.beat for entry in directory.watch()] == [2, 1]
    directory.withdraw(announcement(1))
    assert [entry.endpoint for entry in directory.watch()] == ["10.0.0.2:7000"]


def test_etcd_of_the_examples_keeps_announcements_with_leases() -> None:
    others = b"/pdinfer/other", b"/pdinfer/enginf", b"/pdinfer/engines/\xff"
    Gateway.keys, Gateway.leases = {b"/pdinfer/engines/empty": (b"", "0"), **dict.fromkeys(others, (b"x", "0"))}, {}
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = started(server.serve_forever)
        check_medium(script("examples/directories.py").Etcd(f"http://127.0.0.1:{server.server_port}/"))
        server.shutdown()
        check_ends(thread)
    assert set(Gateway.leases.values()) == {15}


def test_the_store_of_ray_of_the_examples_keeps_announcements(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[tuple[bytes, bytes], bytes] = {(b"pdinfer", b"\xff"): b"x"}
    fake = SimpleNamespace(
        _internal_kv_list=lambda prefix, *, namespace: [key for space, key in kept if space == namespace],
        _internal_kv_get=lambda key, *, namespace: kept.get((namespace, key)),
        _internal_kv_put=lambda key, value, *, overwrite, namespace: kept.update({(namespace, key): value}),
        _internal_kv_del=lambda key, *, namespace: kept.pop((namespace, key), None),
    )
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.experimental", SimpleNamespace(internal_kv=fake))
    check_medium(script("examples/directories.py").RayCluster())


# -- how an engine announces itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("connection", "advertise", "expected"),
    [
        (SimpleNamespace(accept=None, address=("10.0.0.1", 7000)), None, "10.0.0.1:7000"),
        (SimpleNamespace(accept=None, address=("fd00::1", 7000, 0, 0)), None, "[fd00::1]:7000"),
        (SimpleNamespace(accept=None, address=("0.0.0.0", 7000)), "node-7:7000", "node-7:7000"),
        (SimpleNamespace(accept=None, address=("0.0.0.0", 7000)), None, "give advertise='host:port'"),
        (SimpleNamespace(accept=None, address="/run/a.sock"), None, "/run/a.sock is not where others reach"),
        (SimpleNamespace(accept=None), None, "None is not where others reach"),
        (SimpleNamespace(accept=None), "node-7", "a host and a port, such as .*, got 'node-7'"),
        (SimpleNamespace(accept=None), "node-7:70000", "got 'node-7:70000'"),
        (SimpleNamespace(), "node-7:7000", "give `serve` a listener"),
        (None, "node-7:7000", "give `serve` a listener"),
    ],
)
def test_the_address_that_others_are_told(connection: object, advertise: str | None, expected: str) -> None:
    if expected in ("10.0.0.1:7000", "[fd00::1]:7000", "node-7:7000"):
        assert announced_at(connection, advertise) == expected
        return
    with pytest.raises(pd.ConfigError, match=expected):
        announced_at(connection, advertise)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A served engine, as an Announcer sees it, and no real engine behind it."""

    def of(engine: Any, endpoint: str, **more: Any) -> Announcement:
        return announcement(3, endpoint=endpoint, **more)

    monkeypatch.setattr(Announcement, "of", of)
    return SimpleNamespace(engine=None, stepped_at=0.0, is_taken=False, drain=threading.Event())


def test_an_engine_that_has_changed_its_role_is_announced_in_the_new_one(
    tmp_path: Path, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(engine: Any, endpoint: str, **more: Any) -> Announcement:
        return announcement(3, endpoint=endpoint, role=engine, **more)

    monkeypatch.setattr(Announcement, "of", of)
    directory = Directory(Folder(tmp_path), key=KEY)
    announcer = Announcer(directory, "prefill", "10.0.0.3:7000")  # type: ignore[arg-type]
    for now, role in enumerate(("prefill", "decode")):
        served.engine, served.stepped_at = role, float(now)
        announcer.look(served, 20.0 * now)
        assert [entry.announced.role for entry in directory.watch() if entry.announced] == [role]


def test_an_engine_is_announced_while_its_loop_goes_round(tmp_path: Path, served: Any) -> None:
    directory = Directory(Folder(tmp_path), key=KEY)
    announcer = Announcer(directory, None, "10.0.0.3:7000")  # type: ignore[arg-type]

    def look(now: float) -> tuple[int, bool] | None:
        announcer.look(served, now)
        found = [entry.announced for entry in directory.watch()]
        return (found[0].beat, found[0].is_taken) if found and found[0] else None

    assert look(0.0) == (1, False)
    served.stepped_at = 0.1
    assert look(4.9) == (1, False)  # a third of the 15 s is not over
    assert look(5.0) == (2, False)
    assert look(60.0) == (2, False)  # a step that does not end
    served.stepped_at, served.is_taken = 60.1, True
    assert look(60.2) == (3, True)
    served.stepped_at, served.is_taken = 60.3, False
    assert look(60.4) == (4, False)  # news does not wait for its time
    served.stepped_at = 60.5
    served.drain.set()
    assert look(60.6) is None
    assert look(99.0) is None


def test_an_engine_goes_on_announcing_itself_when_the_folder_is_back(
    tmp_path: Path, served: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "shared"
    directory = Directory(Folder(folder), key=KEY)
    announcer = Announcer(directory, None, "10.0.0.3:7000")  # type: ignore[arg-type]
    for now in (0.0, 5.0, 10.0):
        served.stepped_at += 1
        announcer.look(served, now)
    assert len([record for record in caplog.records if "cannot announce itself" in record.getMessage()]) == 1
    folder.mkdir()
    served.stepped_at += 1
    announcer.look(served, 10.2)  # what failed does not wait for its time, else three failures in a row lose an engine
    assert len(directory.watch()) == 1
    folder.rename(away := tmp_path / "away")
    served.stepped_at, served.is_taken = served.stepped_at + 1, True
    announcer.look(served, 10.4)
    away.rename(folder)
    served.stepped_at += 1
    announcer.look(served, 10.6)
    assert [entry.is_taken for entry in directory.watch()] == [True]


def test_a_medium_that_hangs_keeps_no_engine_from_ending(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcing, "WITHDRAW_S", 0.05)
    go, asked = threading.Event(), threading.Event()

    class Hangs(Folder):
        def write(self, name: str, data: bytes, *, ttl_s: float) -> None:
            asked.set()
            go.wait()

    announcer = Announcer(Directory(Hangs("."), key=KEY), None, "10.0.0.3:7000")  # type: ignore[arg-type]
    announcer.start(served)
    assert asked.wait()
    check_returns(announcer.close)
    go.set()


# -- who answers -------------------------------------------------------------------------------------------------------


def test_whoever_does_not_prove_the_key_becomes_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "DIAL_S", 0.2)
    directory = Directory(Folder("."), key=KEY)

    def dialled(endpoint: str) -> str:
        said: list[str] = []

        def dial() -> None:
            with pytest.raises(pd.TransferError) as raised:
                directory.dial(Entry(endpoint, endpoint))
            said.append(str(raised.value))

        check_returns(dial)
        return said[0]

    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes the connection, and says nothing
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        assert f"no engine answers at {at}: EOFError" in dialled(at)
    assert "ConnectionRefusedError" in dialled(at)
    assert "an endpoint is a host and a port" in dialled("nowhere")
    assert "an endpoint is a host and a port" in dialled("127.0.0.1:0655359")
    assert "no engine answers at a..b:7000: Unicode" in dialled("a..b:7000")

    def speak(listener: Listener, said: bytes) -> None:
        try:
            with listener.accept() as connection:
                connection.send_bytes(said)
                connection.recv_bytes()
        except Exception:  # noqa: BLE001 - the other end hangs up, rightly
            pass

    monkeypatch.undo()
    for key, said, expected in (
        (OTHER_KEY, b"", "AuthenticationError"),
        (KEY, b"hello", "something that is not a report"),
    ):
        with Listener(("127.0.0.1", 0), authkey=key) as listener:
            thread = started(speak, listener, said)
            host, port = listener.address
            assert expected in dialled(f"{host}:{port}")
            check_ends(thread)


def test_strangers_at_the_door_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "GREET_S", 10 * FAR_S)
    with Door("127.0.0.1", 0, key=KEY) as door, ExitStack() as strangers:
        first, *_ = [
            strangers.enter_context(socket.create_connection(door.address, None))
            for _ in range(handshake.MAX_NEWCOMERS + 1)
        ]
        for _ in range(3):
            accepted: list[Any] = []
            thread = started(lambda accepted=accepted: accepted.append(door.accept()))
            host, port = door.address
            with handshake.connected(f"{host}:{port}", KEY) as connection:
                check_ends(thread)
                connection.send_bytes(b"hello")
                assert accepted[0].recv_bytes() == b"hello"
        read_to_end(first)  # it made room for the last
        thread = started(lambda: accepted.append(door.accept()))
        with Client(door.address, authkey=KEY):
            check_ends(thread)
        thread = started(lambda: check_closed(door))
    check_ends(thread, *(other for other in threading.enumerate() if other.name == "pdinfer-door"))


def read_to_end(stranger: socket.socket) -> None:
    """Wait until the other end has hung up, with what it asked first."""
    stranger.settimeout(FAR_S)
    with suppress(ConnectionError):
        while stranger.recv(100):
            pass


def check_closed(door: Door) -> None:
    with pytest.raises(OSError, match=r"\[Errno"):
        door.accept()


def test_whoever_does_not_prove_the_key_at_the_door_is_let_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handshake, "GREET_S", 0.1)
    with Door("127.0.0.1", 0, key=KEY) as door, ExitStack() as strangers:
        thread = started(lambda: check_closed(door))
        for said in (b"", b"\0\0\0\x04ping", b"\xff" * 64):
            stranger = strangers.enter_context(socket.create_connection(door.address, None))
            stranger.sendall(said)
            read_to_end(stranger)
        with without_threads("pdinfer-door"), socket.create_connection(door.address, None) as stranger:
            read_to_end(stranger)
    check_ends(thread)
    said_of_them = [record.getMessage() for record in caplog.records if "was refused" in record.getMessage()]
    assert ["has not proven the key" in said for said in said_of_them] == [True, True, True, False]
    assert "the thread pdinfer-door cannot be started" in said_of_them[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("127.0.0.1", 0, b"short"), "at least 16 random bytes"),
        (("203.0.113.7", 0, KEY), r"cannot listen on 203\.0\.113\.7 port 0: .*; port 0 takes any free one"),
        (("\udcff", 0, KEY), r"cannot listen on host '\\udcff': .*; use an address of this machine"),
        (("127.0.0.1", 70000, KEY), "port 70000 is not a TCP port; use 1 to 65535, or 0 for any free one"),
    ],
)
def test_a_door_that_cannot_be_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    host, port, key = arguments
    with pytest.raises(pd.ConfigError, match=message):
        Door(host, port, key=key)
