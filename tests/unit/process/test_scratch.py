"""Temporary folders are gone with their owner, however it ends, and other folders are left alone."""

from __future__ import annotations

import errno
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pdinfer.kv.memfd import CAN_SHARE
from pdinfer.kv.transports.shm.transport import listen_shm
from pdinfer.process import scratch
from pdinfer.process.scratch import LOCK, ScratchFolder
from tests.forks import check_ended, fork


def in_child(work: Callable[[], object], *, killed: bool = True) -> None:
    """Run `work` in a forked child, which is then killed, or ends without any cleanup."""

    def work_and_end() -> None:
        work()
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)

    check_ended(fork(work_and_end), code=-signal.SIGKILL if killed else 0)


def kept(parent: Path, folders: list[ScratchFolder] = []) -> ScratchFolder:  # noqa: B006 - kept until the process ends
    folders.append(ScratchFolder(parent))
    return folders[-1]


def test_it_is_there_until_it_is_closed(tmp_path: Path) -> None:
    with ScratchFolder(tmp_path) as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
        (folder.path / "file").write_text("content")
        with ScratchFolder(tmp_path):
            assert (folder.path / "file").exists(), "its owner lives"
    folder.close()
    assert not list(tmp_path.iterdir())


def test_it_stays_where_it_is_when_its_process_moves_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ScratchFolder(Path()) as folder:
        monkeypatch.chdir("/")
        assert folder.path.parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    in_child(lambda: (kept(tmp_path).path / "file").write_text("content"))
    assert len(list(tmp_path.iterdir())) == 1
    with ScratchFolder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder.path]


def test_a_forked_child_leaves_what_is_its_parents(tmp_path: Path) -> None:
    folder = ScratchFolder(tmp_path)
    in_child(folder.close, killed=False)
    in_child(lambda: ScratchFolder(tmp_path).close(), killed=False)
    assert (folder.path / LOCK).exists()
    folder.close()


def test_it_is_gone_with_its_owner(tmp_path: Path) -> None:
    """At the end of Python, too, where what refers to nothing any more is asked alike."""
    folder = ScratchFolder(tmp_path)
    assert folder._remove.atexit
    del folder
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_where_no_file_can_be_opened_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(OSError, match="Too many open files"):
            ScratchFolder(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_known_to_be_abandoned_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders without a lock, folders of others, and links to folders stay."""
    in_child(lambda: kept(tmp_path))
    (abandoned,) = tmp_path.iterdir()
    elsewhere = tmp_path / "elsewhere"
    abandoned.rename(elsewhere)
    (tmp_path / "pdinfer-link").symlink_to(elsewhere)
    mine = tmp_path / "pdinfer-results"
    mine.mkdir()
    (mine / "lock").write_text("")
    (tmp_path / "pdinfer-pipe").mkdir()
    os.mkfifo(tmp_path / "pdinfer-pipe" / LOCK)
    before = sorted(tmp_path.rglob("*"))
    ScratchFolder(tmp_path).close()
    assert sorted(tmp_path.rglob("*")) == before
    elsewhere.rename(abandoned)
    monkeypatch.setattr(scratch.os, "geteuid", lambda: os.getuid() + 1)
    scratch.remove_abandoned(tmp_path)
    assert abandoned.exists()


def test_without_locks_it_is_made_and_removed_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(scratch.fcntl, "flock", refuse)
    with ScratchFolder(tmp_path) as folder:
        assert not (folder.path / LOCK).exists()
        ScratchFolder(tmp_path).close()
        assert folder.path.exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not CAN_SHARE, reason="needs Linux")
def test_an_engine_that_is_killed_leaves_no_socket_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "temporary_folder", lambda: tmp_path)
    listeners: list[object] = []
    in_child(lambda: listeners.append(listen_shm(None)))
    (left,) = tmp_path.iterdir()
    assert (left / "kv.sock").is_socket()
    listener = listen_shm(None)
    (folder,) = tmp_path.iterdir()
    assert folder != left
    listener.close()
    assert not list(tmp_path.iterdir())


def test_sockets_have_a_place_where_the_temporary_folder_has_a_long_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(long))
    listener = listen_shm(None)
    try:
        assert not [*long.iterdir()]
        assert listener.endpoint.startswith("shm:///tmp/pdinfer-")
    finally:
        listener.close()


def test_many_processes_may_clean_up_at_once(tmp_path: Path) -> None:
    for _ in range(5):
        in_child(lambda: kept(tmp_path))
    for cleaner in [fork(lambda: ScratchFolder(tmp_path).close()) for _ in range(4)]:
        check_ended(cleaner)
    ScratchFolder(tmp_path).close()
    assert not list(tmp_path.iterdir())
