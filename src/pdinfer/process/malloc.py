"""What malloc does with memory that a step has freed. Torch has no cache of its own for the CPU."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT_BYTES = 1 << 30
MOST_KEPT_BYTES = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks of up to 1 GiB, 2 GiB of them in all, for the next allocation. Return whether it
    does.

    Otherwise each large tensor of a step is new memory, which the kernel zeroes page by page: 13 to 17 % of a prefill
    step. This is a setting of the whole process (mallopt(3)), and replaces what its host has set there. Return False
    where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES) and mallopt(M_TRIM_THRESHOLD, MOST_KEPT_BYTES))
