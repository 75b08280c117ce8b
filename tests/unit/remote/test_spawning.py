"""Starting an engine's process: what it is told, and what becomes of one that dies, fails or falls silent. The
processes here run no pdinfer, since only what they say counts."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pdinfer as pd
from pdinfer.remote import child, orders, spawning
from pdinfer.remote.orders import Failed, Loaded, Loading, Named, Order, Warming
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.forks import FAR_S
from tests.unit.remote.processors import allow_all
from tests.waiting import check_ends, started

CHILD = """
import os, sys, time
from multiprocessing.connection import Connection
parent = Connection(int(sys.argv[1]))
order = parent.recv_bytes()
def write(text):
    os.write(2, text.encode())
"""
LOADING = "parent.send_bytes(bytes.fromhex('{}'))\n"


def say(*messages: orders.Said) -> str:
    """Return a line of a child's program that says so."""
    return "".join(LOADING.format(msgspec.msgpack.encode(message).hex()) for message in messages)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Every process that was started."""
    processes = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            processes.append(self)

    monkeypatch.setattr(spawning.subprocess, "Popen", Recorded)
    return processes


def spawn(monkeypatch: pytest.MonkeyPatch, program: str, **more: Any) -> Any:
    monkeypatch.setattr(spawning, "CODE", CHILD + program)
    return pd.remote.spawn_prefill("a/folder", **more)


def descriptors() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)}


def _is_open(name: str) -> bool:
    return Path(f"/proc/self/fd/{name}").is_symlink()


@pytest.mark.parametrize(
    ("ends", "how"),
    [
        ("os._exit(3)", "exited with status 3"),
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("raise MemoryError('no weights fit')", "exited with status 1"),
    ],
)
def test_a_child_that_dies_while_it_loads_leaves_its_last_lines(
    monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]], ends: str, how: str
) -> None:
    before = descriptors()
    lines = "write('much\\n' * 3000)\nwrite('a shard is torn\\n')\n"
    with pytest.raises(pd.TransferError, match=f"process of a prefill engine {how} before it was ready") as caught:
        spawn(monkeypatch, say(Loading(1, 2)) + lines + ends)
    text = str(caught.value)
    assert "much\na shard is torn" in text
    assert len(text) < spawning.LAST_BYTES + 200
    assert "no weights fit" in text or "Memory" not in ends
    assert children[0].poll() is not None
    assert descriptors() <= before


def test_what_making_an_engine_raised_there_is_raised_here(
    monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    with pytest.raises(pd.CheckpointError, match=r"^a folder without weights$"):
        spawn(monkeypatch, say(Failed("CHECKPOINT", "a folder without weights")), timeout_s=float("inf"))
    assert children[0].poll() is not None


def test_a_child_that_says_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    wait, heard = spawning.wait, []

    def wait_for_its_start(sources: Sequence[Any], timeout_s: float) -> list[Any]:
        """Python may take a while to begin: the time counts from what the child writes."""
        ready = wait(sources, timeout_s if heard else FAR_S)
        heard.extend(ready)
        return ready

    monkeypatch.setattr(spawning, "wait", wait_for_its_start)
    with pytest.raises(
        pd.TransferError, match=r"said nothing for 0\.3 s before it was ready; .*\nit waits for a lock$"
    ):
        spawn(monkeypatch, "write('it waits for a lock')\ntime.sleep(600)", timeout_s=0.3)
    assert children[0].poll() is not None
    with pytest.raises(pd.TransferError, match="sent something that cannot be read"):
        spawn(monkeypatch, "parent.send_bytes(b'hello')\ntime.sleep(600)")
    assert children[1].poll() is not None


def test_an_interrupt_while_it_loads_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spawn(monkeypatch, say(Loading(1, 2)) + "time.sleep(600)", progress=interrupt)
    assert children[0].poll() is not None


def test_a_child_is_told_everything_over_the_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = b"a secret of a channel"
    told, seen = tmp_path / "told", tmp_path / "argv"
    program = (
        f"open({str(told)!r}, 'wb').write(order)\n"
        f"open({str(seen)!r}, 'wb').write(open('/proc/self/cmdline', 'rb').read() + repr(os.environ).encode())\n"
    )
    progress: list[tuple[int, int]] = []
    with pytest.raises(pd.TransferError, match="exited with status 0 before it was ready, and wrote nothing"):
        spawn(
            monkeypatch,
            program + say(Loading(1, 7), Loading(7, 7)),
            cache=pd.CacheConfig(page_size=16),
            engine=pd.EngineConfig(graph_batch_sizes=(1, 2), trace=tmp_path),
            transport=partial(pd.kv.SocketTransport, host="127.0.0.1", path=None),
            logits_processors={"all": allow_all},
            dtype=__import__("torch").float32,
            key=key,
            warm_up=True,
            progress=lambda done, total: progress.append((done, total)),
            config=pd.remote.RemoteConfig(silent_s=5),
        )
    order = orders.decode_order(told.read_bytes())
    assert (order.role, order.checkpoint, order.device, order.dtype) == ("prefill", "a/folder", "cpu", "float32")
    assert (order.key, order.warm_up) == (key, True)
    assert pd.CacheConfig(**order.cache) == pd.CacheConfig(page_size=16)
    assert pd.EngineConfig(**order.engine) == pd.EngineConfig(graph_batch_sizes=(1, 2), trace=str(tmp_path))
    assert pd.remote.RemoteConfig(**order.remote).silent_s == 5.0
    assert order.logits_processors["all"].find()("") is not None
    made = order.transport.find()()
    assert isinstance(made, pd.kv.SocketTransport)
    assert progress == [(1, 7), (7, 7)]
    assert key not in seen.read_bytes()
    assert sys.executable.encode() in seen.read_bytes()


def _in_a_test() -> pd.kv.Transport:
    return pd.kv.SocketTransport()


def test_what_cannot_be_handed_over_is_refused_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {"transport": pd.kv.SocketTransport()},
            "transport must be a function or class that is called in the engine's",
        ),
        ({"transport": lambda: None}, "define it at the top of a module"),
        ({"warm_up": -1}, "warm_up must be how often, from 0 to 16, or a bool, got -1"),
        ({"warm_up": "yes"}, "warm_up must be how often, from 0 to 16, or a bool, got 'yes'"),
        ({"transport": partial(pd.kv.SocketTransport, strangers=pd.kv.Strangers())}, "is plain data"),
        ({"logits_processors": {"json": partial(lambda text: None)}}, "logits processor 'json' is "),
        ({"cache": {"page_size": 16}}, "cache must be a CacheConfig"),
        ({"engine": pd.CacheConfig()}, "engine must be a EngineConfig"),
        ({"config": "fast"}, "config must be a RemoteConfig"),
        ({"progress": 1}, "progress must be True, a function of"),
    ]
    for more, message in refused:
        with pytest.raises(pd.ConfigError, match=message):
            pd.remote.spawn_decode("a/folder", **more)
    with pytest.raises(pd.ConfigError, match="checkpoint must be the path"):
        pd.remote.spawn_decode(None)  # type: ignore[arg-type]
    monkeypatch.setattr(_in_a_test, "__module__", "__main__")
    with pytest.raises(pd.ConfigError, match="not in a script"):
        pd.remote.spawn_decode("a/folder", transport=_in_a_test)
    assert not children


def test_progress_is_drawn_unless_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    lines = "loading prefill: 100 % of 7.0 MB\nwarming up prefill: 100 % of 2 steps\n"
    told: list[tuple[int, int]] = []
    for progress, written in (
        (True, lines),
        (None, ""),
        (False, ""),
        (lambda done, total: told.append((done, total)), ""),
    ):
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        said = say(Loading(1, 7_000_000), Loading(7_000_000, 7_000_000), Warming(1, 2), Warming(2, 2))
        with pytest.raises(pd.TransferError, match="exited with status 0"):
            spawn(monkeypatch, said, progress=progress)
        assert sys.stderr.getvalue() == written
    assert [process.args[-1 - len(sys.path)] for process in children] == ["pdinfer-prefill"] * 4
    assert told == [(1, 7_000_000), (7_000_000, 7_000_000)]


# -- the child, in a thread of this process ---------------------------------------------------------------------------


def order_of(checkpoint: Path, **more: Any) -> bytes:
    fields: dict[str, Any] = {
        "role": "prefill",
        "checkpoint": str(checkpoint),
        "device": "cpu",
        "dtype": None,
        "cache": {"page_size": 4, "num_pages": 32},
        "engine": {},
        "other_engine": {},
        "remote": {},
        "transport": Named.of("transport", pd.kv.SocketTransport),
        "logits_processors": {},
        "trusted_roots": [],
        "key": None,
        "warm_up": 0,
        "log_level": 30,
        **more,
    }
    return msgspec.msgpack.encode(Order(**fields))


def start(order: bytes) -> tuple[Any, threading.Thread]:
    """Run a child; return the parent's end of its connection."""
    ours, theirs = Pipe()
    ours.send_bytes(order)

    def run() -> None:
        with contextlib.suppress(SystemExit):
            child.run(theirs)

    thread = started(run)
    return ours, thread


def test_a_child_loads_tells_how_far_it_is_and_serves_until_its_port_is_closed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config_dict("v3"))
    ours, thread = start(order_of(tmp_path, warm_up=2, logits_processors={"all": Named.of("", allow_all)}))
    said = [orders.decode_said(ours.recv_bytes())]
    while not isinstance(said[-1], Loaded):
        said.append(orders.decode_said(ours.recv_bytes()))
    loading = [each for each in said if isinstance(each, Loading)]
    assert loading[-1].done_bytes == loading[-1].total_bytes > 0
    assert said[-5:-1] == [Warming(done, 4) for done in range(1, 5)]
    ran = [[(step.kind, step.size) for step in warm_up.steps] for warm_up in said[-1].warm_ups]
    assert ran == [[("prefill", 16), ("prefill", 128)]] * 2
    assert all(step.seconds > 0 for warm_up in said[-1].warm_ups for step in warm_up.steps)
    with pd.remote.PrefillClient(ours) as port:
        assert port.limits.logits_processors == ("all",)
        assert port.limits.max_tokens == 4 * 32
    check_ends(thread)


def test_a_child_tells_why_there_is_no_engine(tmp_path: Path) -> None:
    ours, thread = start(order_of(tmp_path / "none"))
    said = orders.decode_said(ours.recv_bytes())
    check_ends(thread)
    assert isinstance(said, Failed)
    assert isinstance(said.error(), pd.CheckpointError)
    assert "none" in said.message
    write_checkpoint(tmp_path, tiny_config_dict("v3"))
    ours, thread = start(order_of(tmp_path, key=b"short"))
    while isinstance(said := orders.decode_said(ours.recv_bytes()), Loading):
        pass
    assert isinstance(said, Failed)
    assert isinstance(said.error(), pd.ConfigError)
    check_ends(thread)


def test_a_child_follows_links_where_the_host_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "disk", tiny_config_dict("v3"))
    (tmp_path / "model").mkdir()
    for path in (tmp_path / "disk").iterdir():
        (tmp_path / "model" / path.name).symlink_to(path)
    for roots, expected in (([], Failed), ([str(tmp_path / "disk")], Loaded)):
        ours, thread = start(order_of(tmp_path / "model", trusted_roots=roots))
        while isinstance(said := orders.decode_said(ours.recv_bytes()), Loading):
            pass
        assert isinstance(said, expected)
        ours.close()
        check_ends(thread)
    told = "if b'a/disk' in order:\n    " + say(Failed("CHECKPOINT", "told of the disk"))
    with pytest.raises(pd.CheckpointError, match="told of the disk"):
        spawn(monkeypatch, told, trusted_roots=[Path("a/disk")])
    with pytest.raises(pd.ConfigError, match="each of trusted_roots must be the path of a folder, got 7"):
        spawn(monkeypatch, told, trusted_roots=[7])


def test_a_child_that_loads_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = threading.Event()

    def load(*_: Any, **__: Any) -> None:
        ours.close()
        assert gone.wait(FAR_S), "the child did not notice"
        raise pd.CheckpointError("it would have gone on")

    def leave(status: int) -> None:
        gone.set()

    monkeypatch.setattr(child, "load_model", load)
    monkeypatch.setattr(child.os, "_exit", leave)
    ours, theirs = Pipe()
    ours.send_bytes(order_of(tmp_path))
    with pytest.raises(OSError, match="Broken pipe"):
        child.run(theirs)
    assert gone.is_set()


def test_a_child_whose_parent_is_gone_before_it_orders_ends() -> None:
    ours, theirs = Pipe()
    ours.close()
    child.run(theirs)
