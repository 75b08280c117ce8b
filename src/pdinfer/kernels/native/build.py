"""The C sources beside it as a library that is compiled for this machine on first use; see `process.compiled`."""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import subprocess
from pathlib import Path

from pdinfer.errors import BackendUnavailable
from pdinfer.process.compiled import NativeLibrary, cpu_flags, find_or_build

_log = logging.getLogger("pdinfer")

FOLDER = Path(__file__).parent
NEEDED = "avx512_bf16"

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES = {
    "linear": (_P, _N, _N, _P, _N, _N, _P, _I),
    "linear_float": (_P, _N, _N, _P, _N, _N, _P, _I),
    "rotate": (_P, _N, _N, _N, _N, _N, _P, _P, _P, _I),
    "gated_silu": (_P, _N, _N, _P, _I),
    "experts": (_P, _P, _N, _P, _P, _N, _N, _P, _P, _I),
    "route": (_P, _P, _N, _N, _I, _N, _N, _N, _I, _F, _P, _P, _I),
    "group_rows": (_P, _N, _N, _N, _P, _P, _P),
    "combine_rows": (_P, _P, _P, _N, _N, _N, _P, _I),
    "rms_norm": (_P, _N, _N, _N, _P, _F, _P, _I),
    "heads_in": (_P, _N, _N, _N, _N, _N, _P, _N, _N, _P, _I),
    "heads_out": (_P, _N, _N, _N, _N, _N, _P, _N, _N, _P, _I),
    "mla_decode": (_P, _P, _P, _P, _N, _N, _P, _N, _N, _N, _N, _N, _F, _N, _P, _I),
    "mla_prefill": (_P, _P, _P, _N, _N, _N, _N, _N, _N, _N, _N, _F, _P, _P, _P, _P, _I),
}

RESULTS = {"mla_decode": _N}
"""The kernels that return something."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled kernels. Raises BackendUnavailable with the reason when this machine cannot have them."""
    found = library_or_reason()
    if isinstance(found, str):
        raise BackendUnavailable(found)
    return found


@functools.cache
def library_or_reason() -> ctypes.CDLL | str:
    """Return the compiled kernels, or the reason why there are none. It is found out once in a process.

    Where the CPU could run them the reason is also logged, because nothing fails without them.
    """
    flags = cpu_flags()
    if NEEDED not in flags:
        return f"needs a CPU with {NEEDED}, this {platform.machine()} has none"
    try:
        return find_or_build(sources(), flags)
    except (BackendUnavailable, OSError, subprocess.SubprocessError) as error:
        reason = str(error) if isinstance(error, BackendUnavailable) else f"could not be compiled: {error}"
        _log.warning("kernels for this CPU are not used, and bfloat16 runs slower: the library %s", reason)
        return reason


def sources() -> NativeLibrary:
    """Return what is compiled."""
    return NativeLibrary(name="native", folder=FOLDER, signatures=SIGNATURES, results=RESULTS, openmp=True)
