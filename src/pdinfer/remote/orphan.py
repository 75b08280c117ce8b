"""Ends a process whose interpreter is stuck when its parent is gone, by the Linux kernel alone.

No thread of ours runs while a step holds the interpreter's lock. So the kernel is asked to send a signal when the
parent dies. The signal's handler is `alarm` of the C library, which takes the signal's number for seconds, and SIGALRM
ends a process that has not called `disarm` by then. A process that makes progress calls it all the time."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2
STUCK_S = 36
"""The seconds, and the number of the signal: a real-time signal, which nothing else sends."""


def arm() -> bool:
    """Make this process end STUCK_S after its parent unless `disarm` is called, and return whether that is possible. It
    is not when the parent's death signal, this signal or the process's timer is in use. Main thread only."""
    if sys.platform != "linux" or not signal.SIGRTMIN < STUCK_S < signal.SIGRTMAX:
        return False
    in_use = signal.getsignal(STUCK_S) != signal.SIG_DFL or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL
    libc, asked_for = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    if in_use or signal.getitimer(signal.ITIMER_REAL)[0]:
        return False
    if libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(asked_for)) or asked_for.value not in (0, STUCK_S):
        return False
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(STUCK_S, ctypes.cast(libc.alarm, ctypes.c_void_p))
    return bool(libc.prctl(PR_SET_PDEATHSIG, STUCK_S) == 0)


def disarm() -> None:
    """Stop the countdown if it runs. That the interpreter got here shows that it is not stuck."""
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.alarm(0)
