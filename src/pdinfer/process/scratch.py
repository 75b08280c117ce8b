"""Temporary folders. Each is removed by its process, at its end if not before, or, when that was killed, by the next
process that makes one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path

PREFIX = "pdinfer-"
LOCK = "pdinfer.lock"
LONGEST = 80
"""The bytes of a folder's path that leave room for a socket in a scratch folder of it, whose path may have 107."""


def temporary_folder() -> Path:
    """Return the system's temporary folder, or /tmp where sockets in that would have too long a path."""
    folder = Path(tempfile.gettempdir())
    return folder if len(os.fsencode(folder)) <= LONGEST else Path("/tmp")  # noqa: S108 - what is in it has a new name


class ScratchFolder:
    """A new folder below `parent` (`temporary_folder()`) that only this user can enter.

    Its owner holds a lock on a file in it until `close`, which removes the whole folder. In a forked child `close` does
    nothing. Making a folder first removes those beside it that are this user's and whose lock nobody holds, because
    their owner is gone. Raises OSError when it cannot be made."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = temporary_folder() if parent is None else parent
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)).absolute()  # the process may move on
        nameless = self.path / "lock"
        try:
            lock = os.open(nameless, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            self.path.rmdir()
            raise
        self._remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())
        with contextlib.suppress(OSError):  # a file system without locks: nobody else will ever remove it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            nameless.rename(self.path / LOCK)  # locked before anyone looks for it

    def close(self) -> None:
        """Remove the folder. A second call does nothing."""
        self._remove()

    def __enter__(self) -> ScratchFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove(path: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:
        os.close(lock)  # first: the removal needs a descriptor, and there may be no other
        shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove the scratch folders in `parent` that are this user's and whose owner is gone."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(entry)


def _remove_if_abandoned(entry: os.DirEntry[str]) -> None:
    """Remove one of them. Raise OSError when its lock is held, or when it is not a scratch folder."""
    if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
        return
    lock = os.open(Path(entry.path, LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(os.fstat(lock).st_mode):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(lock)
