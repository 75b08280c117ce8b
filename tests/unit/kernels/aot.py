"""Compiles kernels for sm_90 without a GPU, and reads from the machine code what decides whether they are fast.

    python -m tests.unit.kernels.aot [WORDS]    measures what is named so, and prints its table
    python -m tests.unit.kernels.aot --write    measures all and writes their table into docs/kernels.md

A specimen calls an op on tensors without memory, of the shapes of a real model. What the op starts is compiled with the
types, strides and constants that it gives. Specimens are data: a module of `specimens/` per family.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from tests.forks import context

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
TRITON = "3.6.0"
"""The version whose numbers are committed. Another one allocates registers in another way."""
SHARED_LIMIT = 227 * 1024
"""Bytes of a block on sm_90 (CUDA C++ Programming Guide, technical specifications per compute capability); 1 KB more is
taken per block. A multiprocessor has 65,536 registers, given to a warp in units of 256, and 64 warps."""


@attrs.frozen
class Specimen:
    """A call of an op. `narrow` is how many loads of fewer than 8 bytes its kernels may have: page tables, lengths,
    scales. `exception` is that of its config. Those that are `full` are measured in the long run alone."""

    name: str
    call: Callable[[], object]
    narrow: int = 0
    exception: str | None = None
    full: bool = False


@attrs.frozen
class Measured:
    """What a kernel of a specimen was compiled to, and the gates that it misses."""

    specimen: str
    kernel: str
    warps: int
    registers: int
    stack: int
    spills: int
    shared: int
    blocks: int
    wgmma: int
    mma: int
    tma: int
    cp_async: int
    wide: int
    narrow: int
    missed: tuple[str, ...] = ()
    exception: str | None = None


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return an argument of a specimen, without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def specimens() -> list[Specimen]:
    files = sorted((Path(__file__).parent / "specimens").glob("*.py"))
    families = [importlib.import_module(f"tests.unit.kernels.specimens.{file.stem}") for file in files]
    return [specimen for family in families for specimen in family.SPECIMENS]


@contextmanager
def replaced(start: Callable[..., None]) -> Iterator[None]:
    """Give every module of the room `start` in place of `launch`. One that was imported meanwhile would keep it."""
    from pdinfer.kernels import triton as room
    from pdinfer.kernels.triton.launch import launch

    modules = [importlib.import_module(f"{room.__name__}.{each.name}") for each in pkgutil.iter_modules(room.__path__)]
    users = [module for module in modules if getattr(module, "launch", None) is launch]
    try:
        for user in users:
            user.launch = start  # type: ignore[attr-defined]
        yield
    finally:
        for user in users:
            user.launch = launch  # type: ignore[attr-defined]


def launches(call: Callable[[], object]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return the kernels that a call starts, with their arguments."""
    started = []

    def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        assert all(isinstance(size, int) and size > 0 for size in grid), f"a grid of {grid}"
        started.append((kernel, arguments, constants))

    with replaced(start):
        call()
    return started


def compiled(kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]) -> Any:
    """Return the kernel compiled as Triton would on the first launch with these arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*arguments, **constants)
    options, signature, constexprs, attributes = kernel._pack_args(backend, constants, bound, specialization, options)
    return triton.compile(ASTSource(kernel, signature, constexprs, attributes), target=target, options=options.__dict__)


def measure(specimen: Specimen) -> list[Measured]:
    """Compile each kernel of a specimen once."""
    found: dict[str, Measured] = {}
    for kernel, arguments, constants in launches(specimen.call):
        one = _read(specimen, compiled(kernel, arguments, constants))
        name, again = one.kernel, 2
        while one.kernel in found and attrs.evolve(found[one.kernel], kernel=name) != attrs.evolve(one, kernel=name):
            one, again = attrs.evolve(one, kernel=f"{name} {again}"), again + 1
        found[one.kernel] = one
    return list(found.values())


def _read(specimen: Specimen, kernel: Any) -> Measured:
    usage, sass = _dump(kernel.asm["cubin"])
    counts = instructions(sass)
    registers, stack = (int(re.search(rf"\b{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    per_warp = -(-registers * 32 // 256) * 256
    one = Measured(
        specimen=specimen.name,
        kernel=kernel.metadata.name.strip("_"),
        warps=warps,
        registers=registers,
        stack=stack,
        spills=counts["spill"],
        shared=shared,
        blocks=min(65536 // per_warp // warps, 64 // warps, (SHARED_LIMIT + 1024) // (shared + 1024), 32),
        wgmma=counts["wgmma"],
        mma=counts["mma"],
        tma=counts["tma"],
        cp_async=counts["cp_async"],
        wide=counts["wide"],
        narrow=counts["narrow"],
        exception=specimen.exception,
    )
    return attrs.evolve(one, missed=tuple(missed(one, specimen.narrow, kernel.asm["ttgir"])))


def _dump(cubin: bytes) -> tuple[str, str]:
    """Return what cuobjdump tells of the use of resources, and the instructions."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    return usage, sass


KINDS = {"HGMMA": "wgmma", "QGMMA": "wgmma", "IGMMA": "wgmma", "HMMA": "mma", "QMMA": "mma", "IMMA": "mma"} | {
    "LDL": "spill", "STL": "spill", "UTMALDG": "tma", "LDGSTS": "cp_async"
}  # fmt: skip


def instructions(sass: str) -> Counter[str]:
    """Count the kinds of instructions. A narrow load brings fewer than 8 bytes to a thread."""
    counts: Counter[str] = Counter()
    for name in re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.MULTILINE):
        head, *more = name.split(".")
        if head == "LDG":
            counts["wide" if {"64", "128"} & {*more} else "narrow"] += 1
        elif head in KINDS:
            counts[KINDS[head]] += 1
    return counts


def missed(one: Measured, narrow: int, ttgir: str) -> Iterator[str]:
    """Tell in words which gates a kernel misses."""
    if one.stack or one.spills:
        yield f"{one.stack} bytes of stack, {one.spills} instructions that spill"
    if one.shared > SHARED_LIMIT:
        yield f"{one.shared} bytes of shared memory, more than {SHARED_LIMIT}"
    if one.narrow > narrow:
        yield f"{one.narrow} loads of fewer than 8 bytes, {narrow} were expected"
    for rows in re.findall(r"\btt\.dot .*-> tensor<(\d+)x", ttgir):
        if int(rows) >= 64:
            yield f"a product of {rows} rows without wgmma"
    for loop in loops(ttgir):
        reads = re.search(r"\btt\.load .*: tensor<", loop) or "tt.descriptor_load" in loop
        if re.search(r"\b(tt\.dot|ttng\.warp_group_dot) ", loop) and reads and not re.search(ASYNC, loop):
            yield "a loop with products waits for its loads, without TMA or cp.async"


ASYNC = r"\basync_(?:tma_)?copy_global_to_local "


def loops(ttgir: str) -> list[str]:
    """Return the text of every loop, also of those in another. A closing brace stands at the indentation of its
    loop."""
    pattern = r"^(?=( *)((?:%\S+ = )?scf\.(?:for|while) .*?^\1\}))"
    return [match[2] for match in re.finditer(pattern, ttgir, re.MULTILINE | re.DOTALL)]


def measure_all(chosen: Sequence[Specimen]) -> list[Measured]:
    """Measure specimens in two processes, which keep nothing for a later run."""
    with tempfile.TemporaryDirectory() as folder:
        pool = ProcessPoolExecutor(2, context(), initializer=_keep_in, initargs=(folder,))
        with pool:
            return [one for found in pool.map(_measure_named, [one.name for one in chosen]) for one in found]


def _keep_in(folder: str) -> None:
    import triton

    triton.knobs.cache.dir = folder


def _measure_named(name: str) -> list[Measured]:
    (specimen,) = (specimen for specimen in specimens() if specimen.name == name)
    return measure(specimen)


HEADS = (
    *("call", "kernel", "warps", "registers", "stack / spills", "shared KB", "blocks per SM"),
    *("wgmma / mma", "TMA / cp.async", "loads wide / narrow", "remark"),
)


def table(found: Sequence[Measured]) -> str:
    """Return the table of docs/kernels.md."""
    lines = [f"| {' | '.join(HEADS)} |", f"|{' --- |' * len(HEADS)}"]
    for one in found:
        cells = (
            one.specimen,
            f"`{one.kernel}`",
            one.warps,
            one.registers,
            f"{one.stack} / {one.spills}",
            f"{one.shared / 1024:.1f}",
            one.blocks,
            f"{one.wgmma} / {one.mma}",
            f"{one.tma} / {one.cp_async}",
            f"{one.wide} / {one.narrow}",
            "; ".join((*one.missed, *filter(None, (one.exception,)))),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def committed() -> str:
    """Return the table that docs/kernels.md has."""
    return TABLE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]


def main(arguments: Sequence[str]) -> None:
    if "--write" in arguments:
        text = table(measure_all([specimen for specimen in specimens() if not specimen.full]))
        before, _, rest = TABLE.read_text("utf-8").partition(BEGIN)
        TABLE.write_text(before + BEGIN + text + END + rest.partition(END)[2], "utf-8")
    else:
        words = [word for word in arguments if not word.startswith("-")]
        chosen = [one for one in specimens() if all(word in one.name for word in words)]
        print(table(measure_all(chosen)))


if __name__ == "__main__":
    main(sys.argv[1:])
