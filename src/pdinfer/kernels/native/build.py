"""The C sources beside it as libraries that are compiled for this machine on first use; see `process.compiled`."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdinfer.errors import BackendUnavailable
from pdinfer.log import log
from pdinfer.process.compiled import NativeLibrary, cpu_flags, find_or_build
from pdinfer.process.recording import RecordedLibrary, here

FOLDER = Path(__file__).parent
EXTENSIONS = {
    "avx512_bf16": "products and attention in bfloat16",
    "amx_bf16": "products and experts of many rows",
    "avx512_vnni": "products in INT8",
    "avx512bw": "all kernels",
    "avx2": "all kernels",
    "f16c": "weights in FP8",
}
"""The instruction sets that sets.h looks at, as Linux names them, and what runs faster with each; the best first."""

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
FAMILIES: dict[str, tuple[str, ...]] = {
    "products": (
        *("products.c", "experts.c", "parts.c", "pairs.c", "floats.c", "strips.c", "tiles.c"),
        "thread_scratch.c",
    ),
    "attention": ("decode.c", "decode_tiles.c", "prefill.c", "thread_scratch.c"),
    "int8": ("int8.c", "thread_scratch.c"),
    "fp8": ("fp8.c", "fp8_strips.c", "parts.c", "strips.c", "thread_scratch.c"),
    "four_bits": ("four_bits.c", "parts.c", "strips.c", "thread_scratch.c"),
    "rows": ("rows.c", "draws.c"),
}
"""The sources of each library. One that does not compile costs the ops of the families it is part of, and no others."""
SIGNATURES: dict[str, dict[str, tuple[Any, ...]]] = {
    "products": {
        "find_tiles": (),
        "is_served": (_N, _N),
        "linear": (_P, _N, _N, _P, _N, _N, _P, _I),
        "heads_in": (_P, _N, _N, _N, _N, _N, _P, _N, _N, _P, _I),
        "heads_out": (_P, _N, _N, _N, _N, _N, _P, _N, _N, _P, _I),
        "strips_are_served": (),
        "linear_strips": (_P, _N, _N, _P, _N, _N, _I, _P, _I),
        "experts_are_served": (_N, _N, _N),
        "experts": (_P, _P, _N, _P, _P, _N, _N, _P, _P, _I),
        "experts_strips": (_P, _P, _N, _P, _P, _N, _N, _P, _I),
    },
    "attention": {
        "find_decode_tiles": (),
        "mla_decode": (_P, _P, _P, _P, _N, _N, _P, _N, _N, _N, _N, _N, _F, _N, _P, _I),
        "prefill_scratch": (_N, _N, _N, _N),
        "mla_prefill": (_P, _P, _P, _N, _N, _N, _N, _N, _N, _N, _N, _F, _P, _P, _P, _P, _I),
    },
    "int8": {
        "is_served_int8": (_N,),
        "linear_int8": (_P, _N, _N, _P, _P, _N, _N, _P, _I),
        "experts_int8": (_P, _P, _N, _P, _P, _P, _P, _N, _N, _P, _P, _I),
    },
    "fp8": {
        "quantize_fp8": (_P, _N, _N, _N, _I, _P, _P, _I),
        "dequantize_fp8": (_P, _P, _N, _N, _N, _N, _N, _P, _I),
        "linear_fp8": (_P, _P, _N, _N, _N, _P, _P, _N, _N, _N, _P, _I),
        "fp8_strips_are_served": (),
        "linear_fp8_strips": (_P, _P, _N, _N, _N, _P, _P, _N, _N, _N, _P, _I),
        "experts_fp8_strips": (_P, _P, _N, _N, _P, _N, _P, _P, _P, _P, _N, _N, _I, _P, _I),
    },
    "four_bits": {
        "linear_four_bits": (_P, _N, _N, _I, _P, _P, _N, _N, _I, _P, _I),
        "experts_four_bits": (_P, _P, _N, _I, _P, _P, _P, _P, _N, _N, _P, _I),
    },
    "rows": {
        "rms_norm": (_P, _N, _N, _N, _P, _F, _P, _I),
        "add_rms_norm": (_P, _P, _N, _N, _P, _F, _P, _P, _I),
        "rotate": (_P, _N, _N, _N, _N, _N, _P, _P, _P, _I),
        "norm_rotate_store": (_P, _N, _P, _N, _N, _N, _N, _P, _F, _P, _P, _P, _N, _P, _I),
        "gated_silu": (_P, _N, _N, _P, _I),
        "route": (_P, _P, _N, _N, _I, _N, _N, _N, _I, _F, _P, _P, _I),
        "choose_experts": (_P, _N, _N, _P, _P, _N, _N, _I, _N, _N, _N, _I, _F, _P, _P, _P, _I),
        "group_rows": (_P, _N, _N, _N, _P, _P, _P),
        "sort_rows": (_P, _N, _N, _N, _P, _N, _P, _P, _P, _I),
        "gather_rows": (_P, _N, _N, _P, _N, _P, _I),
        "combine_rows": (_P, _P, _P, _N, _N, _N, _P, _I),
        "combine_experts": (_P, _P, _P, _P, _P, _N, _N, _N, _P, _I),
        "draw_greedy": (_P, _P, _N, _N, _P, _I),
    },
}
"""The functions of each family, and the types of their arguments."""
FAMILY_OF = {function: family for family, functions in SIGNATURES.items() for function in functions}

NEED_MEMORY = (
    *("linear", "linear_strips", "heads_in", "heads_out", "experts", "experts_strips"),
    *("linear_int8", "experts_int8", "linear_fp8", "mla_decode"),
    *("linear_fp8_strips", "experts_fp8_strips", "linear_four_bits", "experts_four_bits"),
)
"""The kernels that return how many bytes of memory they could not have."""
FAILURES = {
    **dict.fromkeys(NEED_MEMORY, "lacks {} bytes of memory"),
    "norm_rotate_store": "was given {} slots that are not among those of the cache",
    "gather_rows": "was given {} rows that are not there",
}
"""What it means when these kernels return another number than 0."""
FIND_TILES = ("find_tiles", "find_decode_tiles")
"""What is called once, before all others."""
ANSWERS = {
    **dict.fromkeys((*FIND_TILES, "is_served", "is_served_int8", "experts_are_served"), _I),
    **dict.fromkeys(("strips_are_served", "fp8_strips_are_served"), _I),
    "prefill_scratch": _N,
}
"""What the library tells of itself."""
RESULTS = dict.fromkeys(FAILURES, _N) | ANSWERS


class Kernels:
    """The functions of all families that this machine has, by name. `reasons` tells why it lacks the others."""

    def __init__(self, found: Mapping[str, ctypes.CDLL | str]) -> None:
        self.libraries = {family: each for family, each in found.items() if not isinstance(each, str)}
        self.reasons = {family: each for family, each in found.items() if isinstance(each, str)}
        for name in FIND_TILES:
            if self.why_not(name) is None:
                getattr(self, name)()

    def __getattr__(self, name: str) -> Any:
        if name not in FAMILY_OF:
            raise AttributeError(f"no kernel is called {name}")
        if (reason := self.why_not(name)) is not None:
            raise BackendUnavailable(reason)
        function = getattr(self.libraries[FAMILY_OF[name]], name)
        setattr(self, name, function)  # so that it is looked for once
        return function

    def why_not(self, name: str) -> str | None:
        """Return why there is no such function, or None where it is there."""
        return self.reasons.get(FAMILY_OF[name])


def library() -> Any:
    """Return the compiled kernels, or in a recording what records their calls, too. Raises BackendUnavailable with the
    reason when this machine cannot have any of them."""
    if here.recording is None:
        return _library()
    return RecordedLibrary(_library(), here.recording, queries=ANSWERS, failures=FAILURES)


def serves(name: str) -> bool:
    """Return whether a function is there, so that an op of another family can do without it."""
    return FAMILY_OF[name] not in _library().reasons


@functools.cache
def _library() -> Kernels:
    found = library_or_reason()
    if isinstance(found, str):
        raise BackendUnavailable(found)
    return found


@functools.cache
def library_or_reason() -> Kernels | str:
    """Return the compiled kernels, or the reason why there are none. It is found out once in a process.

    Where the CPU could run them, reasons are also logged, because nothing fails without them."""
    flags = cpu_flags()
    if not flags:
        return f"is for x86-64 CPUs, and this {platform.machine()} is none that Linux describes as one"
    kernels = Kernels(find_or_build(families(), flags))
    for reason, lost in by_reason(kernels.reasons).items():
        log.warning("kernels for this CPU (%s) are not used, and bfloat16 runs slower: the library %s", lost, reason)
    return kernels if kernels.libraries else next(iter(kernels.reasons.values()))


def by_reason(lost: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the families that are lost for each reason, in one text."""
    return {
        reason: ", ".join(family for family, each in lost.items() if each == reason)
        for reason in dict.fromkeys(lost.values())
    }


def lost_kernels() -> dict[str, str]:
    """Return the families that this machine lacks, and why."""
    found = library_or_reason()
    return dict.fromkeys(FAMILIES, found) if isinstance(found, str) else found.reasons


def families() -> tuple[NativeLibrary, ...]:
    """Return what is compiled."""
    return tuple(
        NativeLibrary(
            name=family,
            folder=FOLDER,
            sources=sources,
            signatures=SIGNATURES[family],
            results=RESULTS,
            header="sets.h",
            openmp=True,
        )
        for family, sources in FAMILIES.items()
    )
