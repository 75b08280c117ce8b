"""The C sources beside it as a library that is compiled for this machine on first use; see `process.compiled`."""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import subprocess
from pathlib import Path
from typing import Any

from pdinfer.errors import BackendUnavailable
from pdinfer.process.compiled import NativeLibrary, cpu_flags, find_or_build
from pdinfer.process.recording import RecordedLibrary, recording_here

_log = logging.getLogger("pdinfer")

FOLDER = Path(__file__).parent
EXTENSIONS = ("avx512_bf16", "avx512f", "avx2")
"""What makes the kernels faster where a CPU has it, the best first."""

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES = {
    "find_tiles": (),
    "is_served": (_N, _N),
    "experts_are_served": (_N, _N, _N),
    "strips_are_served": (),
    "linear_strips": (_P, _N, _N, _P, _N, _N, _I, _P, _I),
    "experts_strips": (_P, _P, _N, _P, _P, _N, _N, _P, _I),
    "linear": (_P, _N, _N, _P, _N, _N, _P, _I),
    "linear_float": (_P, _N, _N, _P, _N, _N, _P, _I),
    "rotate": (_P, _N, _N, _N, _N, _N, _P, _P, _P, _I),
    "gated_silu": (_P, _N, _N, _P, _I),
    "experts": (_P, _P, _N, _P, _P, _N, _N, _P, _P, _I),
    "draw_greedy": (_P, _P, _N, _N, _P, _I),
    "route": (_P, _P, _N, _N, _I, _N, _N, _N, _I, _F, _P, _P, _I),
    "group_rows": (_P, _N, _N, _N, _P, _P, _P),
    "gather_rows": (_P, _N, _N, _P, _N, _P, _I),
    "combine_rows": (_P, _P, _P, _N, _N, _N, _P, _I),
    "rms_norm": (_P, _N, _N, _N, _P, _F, _P, _I),
    "add_rms_norm": (_P, _P, _N, _N, _P, _F, _P, _P, _I),
    "combine_experts": (_P, _P, _P, _P, _P, _N, _N, _N, _P, _I),
    "norm_rotate_store": (_P, _N, _P, _N, _N, _N, _N, _P, _F, _P, _P, _P, _N, _P, _I),
    "heads_in": (_P, _N, _N, _N, _N, _N, _P, _N, _N, _P, _I),
    "heads_out": (_P, _N, _N, _N, _N, _N, _P, _N, _N, _P, _I),
    "mla_decode": (_P, _P, _P, _P, _N, _N, _P, _N, _N, _N, _N, _N, _F, _N, _P, _I),
    "is_served_int8": (_N,),
    "linear_int8": (_P, _N, _N, _P, _P, _N, _N, _P, _I),
    "experts_int8": (_P, _P, _N, _P, _P, _P, _P, _N, _N, _P, _P, _I),
    "linear_fp8": (_P, _P, _N, _N, _N, _P, _P, _N, _N, _N, _P, _I),
    "fp8_strips_are_served": (),
    "linear_fp8_strips": (_P, _P, _N, _N, _N, _P, _P, _N, _N, _N, _P, _I),
    "experts_fp8_strips": (_P, _P, _N, _N, _P, _N, _P, _P, _P, _P, _N, _N, _I, _P, _I),
    "dequantize_fp8": (_P, _P, _N, _N, _N, _N, _N, _P, _I),
    "quantize_fp8": (_P, _N, _N, _N, _I, _P, _P, _I),
    "prefill_scratch": (_N, _N, _N, _N),
    "mla_prefill": (_P, _P, _P, _N, _N, _N, _N, _N, _N, _N, _N, _F, _P, _P, _P, _P, _I),
}

NEED_MEMORY = (
    *("linear", "linear_strips", "heads_in", "heads_out", "experts", "experts_strips"),
    *("linear_int8", "experts_int8", "linear_fp8", "mla_decode"),
    *("linear_fp8_strips", "experts_fp8_strips"),
)
"""The kernels that return how many bytes of memory they could not have."""
FAILURES = {
    **dict.fromkeys(NEED_MEMORY, "lacks {} bytes of memory"),
    "norm_rotate_store": "was given {} slots that are not among those of the cache",
    "gather_rows": "was given {} rows that are not there",
}
"""What it means when these kernels return another number than 0."""
ANSWERS = {
    **dict.fromkeys(("find_tiles", "is_served", "is_served_int8", "experts_are_served"), _I),
    **dict.fromkeys(("strips_are_served", "fp8_strips_are_served"), _I),
    "prefill_scratch": _N,
}
"""What the library tells of itself."""
RESULTS = dict.fromkeys(FAILURES, _N) | ANSWERS


def library() -> Any:
    """Return the compiled kernels: a `ctypes.CDLL`, or in a recording what records their calls, too. Raises
    BackendUnavailable with the reason when this machine cannot have them."""
    recording = recording_here()
    if recording is None:
        return _library()
    return RecordedLibrary(_library(), recording, queries=ANSWERS, failures=FAILURES)


@functools.cache
def _library() -> ctypes.CDLL:
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
    if not flags:
        return f"is for x86-64 CPUs, and this {platform.machine()} is none that Linux describes as one"
    try:
        found = find_or_build(sources(), flags)
    except (BackendUnavailable, OSError, subprocess.SubprocessError) as error:
        reason = str(error) if isinstance(error, BackendUnavailable) else f"could not be compiled: {error}"
        _log.warning("kernels for this CPU are not used, and bfloat16 runs slower: the library %s", reason)
        return reason
    found.find_tiles()
    return found


def sources() -> NativeLibrary:
    """Return what is compiled."""
    return NativeLibrary(name="native", folder=FOLDER, signatures=SIGNATURES, results=RESULTS, openmp=True)
