"""Host memory that another process can be given to read: a memfd, sealed so that it never changes its size and nobody
else can write it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import weakref

from pdinfer.errors import ConfigError, TransferError
from pdinfer.process.memory import MEMFD_PREFIX

CAN_SHARE = sys.platform == "linux"
"""Whether this system has memfds. Elsewhere nothing of this module may be called."""

if sys.platform == "linux":
    import fcntl

F_SEAL_FUTURE_WRITE = 0x10
"""Of linux/fcntl.h; Python's fcntl does not name it."""


class Memfd:
    """`num_bytes` of zeroed memory behind a descriptor. The kernel takes a page when it is first touched, and gives it
    back when the last map is gone: this one, those of `readable`, and those of forked children, which see and change
    the very same bytes. Raises ConfigError when the system refuses."""

    def __init__(self, num_bytes: int, name: str) -> None:
        self.num_bytes = num_bytes
        try:
            self._descriptor = os.memfd_create(f"{MEMFD_PREFIX}{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._close = weakref.finalize(self, os.close, self._descriptor)
            os.ftruncate(self._descriptor, num_bytes)
            self.map = mmap.mmap(self._descriptor, num_bytes)
            _seal(self._descriptor)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"cannot share {num_bytes} bytes of memory between processes: {error}") from error
        self.view = memoryview(self.map)

    def readable(self) -> int:
        """A new descriptor of all of it, for reading only; the caller closes it."""
        try:
            return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(f"cannot open a memfd for reading: {error}; shared memory needs /proc") from error

    def close(self) -> None:
        """Unmaps at once, when nothing else refers to the bytes."""
        self.view.release()
        with contextlib.suppress(BufferError):
            self.map.close()
        self._close()


def _seal(descriptor: int) -> None:
    """No size of it changes, and nobody writes it but through a map that is there already. A peer that maps it must
    never meet the end of a file that shrank: that is a SIGBUS. And who is given a descriptor for reading could open it
    anew for writing, as any account, since memfds are made with mode 0777."""
    os.fchmod(descriptor, 0o400)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)  # Linux before 5.1: other accounts are kept out by the mode


class PeerMemfd:
    """Another process's memfd, mapped for reading. Takes the descriptor over and closes it. Raises TransferError
    unless it is a memfd of exactly `num_bytes` that can no longer shrink."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        try:
            _check_memfd(descriptor, num_bytes)
            self._map = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            raise TransferError(f"a peer's memory of {num_bytes} bytes cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self.num_bytes = num_bytes
        self.view = memoryview(self._map)

    def close(self) -> None:
        self.view.release()
        self._map.close()


def _check_memfd(descriptor: int, num_bytes: int) -> None:
    """Raises OSError or TransferError for what could fault when it is read."""
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    size = os.fstat(descriptor).st_size
    if not seals & fcntl.F_SEAL_SHRINK:
        raise TransferError("a peer's memory is not sealed against shrinking")
    if size != num_bytes:
        raise TransferError(f"a peer's memory has {size} bytes, not the {num_bytes} it says")
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
        raise TransferError("a peer's memory is not made of ordinary pages")
