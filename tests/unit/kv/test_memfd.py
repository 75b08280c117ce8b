"""Memory that another process is shown: that process can read all of it and change nothing."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import subprocess
import sys

import pytest

from pdinfer.kv.memfd import CAN_SHARE, Memfd
from tests.forks import FAR_S

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="shared memory needs Linux")

SIZE = 4096


def keeps_writers_out() -> bool:
    """Whether this kernel has F_SEAL_FUTURE_WRITE (Linux 5.1)."""
    descriptor = os.memfd_create("probe", os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0x10)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_who_is_shown_a_pool_reads_all_of_it_and_writes_none() -> None:
    """Not even by opening the descriptor again, which the mode of a memfd allows to any account."""
    memfd = Memfd(SIZE, "pool")
    memfd.view[:4] = b"ours"
    shown = memfd.readable()
    assert os.pread(shown, SIZE, 0) == bytes(memfd.view)
    with pytest.raises(OSError, match=r"(?i)not permitted|bad file descriptor|denied"):
        os.pwrite(shown, b"evil", 0)
    with pytest.raises(OSError, match=r"(?i)not permitted|denied"):
        mmap.mmap(shown, SIZE)
    assert os.fstat(shown).st_mode & 0o377 == 0
    with contextlib.suppress(PermissionError):  # root may open it all the same
        writable = os.open(f"/proc/self/fd/{shown}", os.O_RDWR)
        for write in (lambda: os.pwrite(writable, b"evil", 0), lambda: mmap.mmap(writable, SIZE)):
            with pytest.raises(PermissionError) if keeps_writers_out() else contextlib.nullcontext():
                write()
        os.close(writable)
    memfd.view[4:8] = b"mine"
    assert os.pread(shown, 8, 0)[4:] == b"mine"
    os.close(shown)
    memfd.close()


READER = """
import fcntl, mmap, os, sys
shown, uid, size = map(int, sys.argv[1:])
if uid:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
done = []
def attempt(name, call):
    try:
        call()
    except OSError:
        return
    done.append(name)
def opened(path, mode):
    descriptor = os.open(path, mode)
    attempt("write after open", lambda: os.pwrite(descriptor, b"evil", 0))
    attempt("map after open", lambda: mmap.mmap(descriptor, size))
    attempt("shrink after open", lambda: os.ftruncate(descriptor, 0))
    attempt("grow after open", lambda: os.ftruncate(descriptor, 2 * size))
    attempt("punch", lambda: os.posix_fallocate(descriptor, size, size))
    view = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    attempt("remove pages", lambda: view.madvise(mmap.MADV_REMOVE))
attempt("write", lambda: os.pwrite(shown, b"evil", 0))
attempt("map", lambda: mmap.mmap(shown, size))
attempt("shrink", lambda: os.ftruncate(shown, 0))
attempt("more seals", lambda: fcntl.fcntl(shown, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE))
for path in (f"/proc/self/fd/{shown}", f"/proc/{os.getpid()}/fd/{shown}"):
    for mode in (os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
        try:
            opened(path, mode)
        except OSError:
            pass
try:
    os.fchmod(shown, 0o666)
    opened(f"/proc/self/fd/{shown}", os.O_RDWR)
except OSError:
    pass
assert os.pread(shown, 4, 0) == b"ours"
print(done)
"""


@pytest.mark.parametrize("uid", [0, 65534], ids=["the same account", "nobody"])
def test_a_reader_in_another_process_alters_nothing_whoever_it_is(uid: int) -> None:
    """Not by its descriptor, by opening it again, or by changing its mode, its size or its seals."""
    if uid and os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    if not keeps_writers_out():
        pytest.skip("before Linux 5.1 a process of the same account can open it for writing; SECURITY.md says so")
    memfd = Memfd(SIZE, "pool")
    memfd.view[:4] = b"ours"
    shown = memfd.readable()
    command = [sys.executable, "-c", READER, str(shown), str(uid), str(SIZE)]
    said = subprocess.run(command, check=False, pass_fds=[shown], capture_output=True, text=True, timeout=FAR_S)
    assert (said.returncode, said.stdout.strip()) == (0, "[]"), said.stderr
    assert bytes(memfd.view) == b"ours" + bytes(SIZE - 4)
    memfd.view[:4] = b"mine"
    assert os.pread(shown, 4, 0) == b"mine"
    os.close(shown)
    memfd.close()
