"""The card: what it is, what it can do by its data sheet, and what it does here and now."""

from __future__ import annotations

import itertools
import platform
import subprocess
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from case import Ceilings, draw, draw_fp8
from timing import Times, num_input_sets, race

NOMINAL: Mapping[str, Ceilings] = MappingProxyType(
    {
        "H100": Ceilings(copy=3.35e12, read=3.35e12, bf16=989e12, fp8=1979e12),
        "H200": Ceilings(copy=4.8e12, read=4.8e12, bf16=989e12, fp8=1979e12),
        "H800": Ceilings(copy=3.35e12, read=3.35e12, bf16=989e12, fp8=1979e12),
        "H20": Ceilings(copy=4.0e12, read=4.0e12, bf16=148e12, fp8=296e12),
    }
)
"""NVIDIA's data sheets, dense rates. A card reaches about nine tenths of the bandwidth and eight tenths of the rate."""
COPY_BYTES, PRODUCT = 2 << 30, 8192
TINY_BYTES, TINY_PRODUCT = 1 << 20, 256
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw"


def facts(device: torch.device) -> dict[str, Any]:
    """Return what results are committed with: the name of the card, versions and clocks."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    if device.type != "cuda":
        return {"device": str(device), **found}
    properties = torch.cuda.get_device_properties(device)
    found |= {
        "device": properties.name,
        "cuda": torch.version.cuda,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": properties.L2_cache_size >> 20,
    }
    return {**found, **clocks()}


def clocks() -> dict[str, str]:
    """Return clocks, temperature and power as nvidia-smi tells them at this moment."""
    query = ["nvidia-smi", f"--query-gpu={CLOCKS},driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return dict(zip([*CLOCKS.split(","), "driver"], map(str.strip, told.split(",")), strict=False))


def measure(device: torch.device, *, tiny: bool) -> Ceilings:
    """Return what this card does: a copy and a sum of memory, and square products of random numbers."""
    num_bytes, side = (TINY_BYTES, TINY_PRODUCT) if tiny else (COPY_BYTES, PRODUCT)
    sets = num_input_sets(4 * side * side, device)
    numbers = [draw(device, seed, num_bytes // 4) for seed in range(2)]  # one half is copied to the other
    factors = [draw(device, 2 + seed, side, side) for seed in range(sets + 1)]
    pairs = list(itertools.pairwise(factors))
    contenders = {
        "copy": [lambda: torch.neg(numbers[1], out=numbers[0])],  # a copy becomes a node of a graph, and slower
        "read": [lambda: numbers[0].sum(dtype=torch.float32)],
        "bf16": [lambda pair=pair: torch.mm(*pair) for pair in pairs],
    }
    if device.type == "cuda" and hasattr(torch, "_scaled_mm"):
        one = torch.ones((), device=device)
        fp8 = [(draw_fp8(device, 9, side, side), draw_fp8(device, 10, side, side).t()) for _ in range(sets)]
        contenders["fp8"] = [
            lambda a=a, b=b: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)  # noqa: SLF001 the only FP8 product of older torch
            for a, b in fp8
        ]
    times = race(contenders, device)
    flops = 2.0 * side**3
    done = {"copy": num_bytes, "read": num_bytes // 2, "bf16": flops, "fp8": flops}
    rates = {name: done[name] / each.median for name, each in times.items() if isinstance(each, Times)}
    if missing := {"copy", "read", "bf16"} - rates.keys():
        raise SystemExit(f"no ceiling of {', '.join(sorted(missing))}: {times}")
    return Ceilings(**rates)
