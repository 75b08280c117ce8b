"""Host memory that another process may read: a memfd, sealed so that its size never changes and no other process can
write it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import weakref

import numpy as np

from pdinfer.errors import ConfigError, TransferError
from pdinfer.process.memory import MEMFD_PREFIX

CAN_SHARE = sys.platform == "linux"
"""Whether this system has memfds. Without them, nothing in this module may be called."""

if sys.platform == "linux":
    import fcntl

F_SEAL_FUTURE_WRITE = 0x10
"""From linux/fcntl.h. Python's fcntl module does not define it."""


class Memfd:
    """`num_bytes` of zeroed memory with a descriptor. The kernel takes a page when it is first touched, and gives it
    back when the last map is gone: this one, those made from `readable`, and those of forked children, which see and
    change the very same bytes. Raises ConfigError when the system refuses."""

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
        self.address = _address(self.map)

    def readable(self) -> int:
        """Return a new read-only descriptor of all of it. The caller closes it."""
        try:
            return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(f"cannot open a memfd for reading: {error}; shared memory needs /proc") from error

    def close(self) -> None:
        """Unmap it, at once when nothing else refers to the bytes."""
        self.view.release()
        with contextlib.suppress(BufferError):
            self.map.close()
        self._close()


def _seal(descriptor: int) -> None:
    """Fix the size, and forbid writes except through maps that exist already. A file that shrinks under a peer's map
    kills the peer with SIGBUS. A process that was given a read-only descriptor could open it again for writing, from
    any account, because memfds are created with mode 0777."""
    os.fchmod(descriptor, 0o400)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)  # Linux before 5.1: other accounts are kept out by the mode


def _address(mapping: mmap.mmap) -> int:
    """Return where a map begins in this process."""
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


class PeerMemfd:
    """Another process's memfd, mapped read-only. Takes over the descriptor and closes it. Raises TransferError unless
    it is a memfd of exactly `num_bytes` that can no longer shrink."""

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
        self.address = _address(self._map)

    def close(self) -> None:
        self.view.release()
        self._map.close()


def _check_memfd(descriptor: int, num_bytes: int) -> None:
    """Raise OSError or TransferError for memory that could fault when it is read."""
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    size = os.fstat(descriptor).st_size
    if not seals & fcntl.F_SEAL_SHRINK:
        raise TransferError("a peer's memory is not sealed against shrinking")
    if size != num_bytes:
        raise TransferError(f"a peer's memory has {size} bytes, not the {num_bytes} it says")
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
        raise TransferError("a peer's memory is not made of ordinary pages")
