"""Versions, libraries that can be imported, providers of ops, the compiler and the caches of what is compiled."""

from __future__ import annotations

import re
from pathlib import Path

from pdinfer.diagnosis.machine import Machine
from pdinfer.diagnosis.report import Fact, Found, failure, warning
from pdinfer.kernels.native.build import EXTENSIONS, by_reason
from pdinfer.kv.transports.mooncake import DISTRIBUTIONS, OLDEST, advice_for
from pdinfer.process.compiled import cache_path, cpu_flags, is_open_to_others
from pdinfer.process.compiler import COMPILERS, REPORT

PYTHON = (3, 11)
REQUIRED = {
    "torch": (2, 8),
    "numpy": (1, 26),
    "attrs": (24, 1),
    "safetensors": (0, 6, 2),
    "msgspec": (0, 19),
    "xxhash": (3, 4),
}
"""The oldest versions that are good enough, as pyproject.toml has them."""
OPTIONAL = (
    "triton",
    "deep_gemm",
    "sgl-deep-gemm",
    "deep_ep",
    "flash_mla",
    *DISTRIBUTIONS,
    "matplotlib",
    "opentelemetry-api",
)
TRITON = (3, 4)
ON_GPUS = ("triton", "deep_gemm", "deep_ep", "flash_mla")
"""Libraries that only run on GPUs, named as their modules are."""
DEEP_GEMM = ("deep_gemm", "sgl-deep-gemm")
"""The distributions that have DeepGEMM."""
INSTALL = "apt-get install -y gcc libc6-dev"


def versions(machine: Machine) -> Found:
    """pdinfer, Python, and every library that has a part in it."""
    yield Fact(name="pdinfer", value=machine.version("pdinfer") or "not installed, runs from its sources")
    yield Fact(name="python", value=machine.python)
    yield Fact(name="system", value=machine.system)
    if _numbers(machine.python) < PYTHON:
        yield failure(f"pdinfer needs Python 3.11 or newer, this is {machine.python}", "python3.12 -m venv .venv")
    for name in (*REQUIRED, *OPTIONAL):
        version = machine.version(name)
        yield Fact(name=name, value=version)
        oldest = REQUIRED.get(name, (0,))
        if name in REQUIRED and (version is None or _numbers(version) < oldest):
            wanted = f"{name}>={'.'.join(map(str, oldest))}"
            yield failure(f"pdinfer needs {wanted}, found {version or 'none'}", f"pip install '{wanted}'")


def libraries(machine: Machine) -> Found:
    """Yield the optional libraries that are installed, and whether they can be imported."""
    has_gpu = bool(machine.gpus())
    for name in ON_GPUS:
        holders = DEEP_GEMM if name == "deep_gemm" else (name,)
        found = [(holder, version) for holder in holders if (version := machine.version(holder)) is not None]
        if not found:
            yield Fact(name=name, value="not installed")
            continue
        reason = machine.why_not_imported(name)
        yield Fact(name=name, value="can be imported" if reason is None else "cannot be imported")
        holder, version = found[0]
        mend = f"pip install --force-reinstall --no-deps '{holder}=={version}'"
        if reason is not None and has_gpu and name in ("triton", "deep_ep"):
            yield failure(f"{name} {version} is installed and cannot be imported: {reason}", mend)
        elif reason is not None:
            yield warning(f"{name} {version} is installed and cannot be imported, so it is not used: {reason}", mend)
        elif name == "triton" and _numbers(version) < TRITON:
            yield warning(f"triton must be 3.4 or newer to be used, found {version}", "pip install 'triton>=3.4'")
    yield from _mooncake(machine)


def _mooncake(machine: Machine) -> Found:
    """Yield whether `kv.MooncakeTransport` can be made. Nothing is wrong where Mooncake is not installed."""
    found = {name: version for name in DISTRIBUTIONS if (version := machine.version(name)) is not None}
    if not found:
        yield Fact(name="mooncake", value="not installed")
        return
    reason = machine.why_not_imported("mooncake.engine")
    yield Fact(name="mooncake", value="can be imported" if reason is None else "cannot be imported")
    if len(found) > 1:
        yield failure(
            f"{' and '.join(found)} overwrite each other's files",
            f"pip uninstall -y {' '.join(found)} && pip install --force-reinstall {DISTRIBUTIONS[0]}",
        )
    elif reason is not None:
        sentence, mend = advice_for(reason)
        yield failure(f"MooncakeTransport cannot load Mooncake ({reason}): {sentence}", mend)
    for name, version in found.items():
        if _numbers(version) < OLDEST:
            wanted = f"{name}>={'.'.join(map(str, OLDEST))}"
            yield failure(f"MooncakeTransport refuses {name} {version}", f"pip install '{wanted}'")


def devices(machine: Machine) -> Found:
    """The CPU and the GPUs."""
    cpu = re.search(r"^model name\s*:\s*(.*)$", machine.read("/proc/cpuinfo") or "", re.MULTILINE)
    yield Fact(name="cpu", value=cpu[1] if cpu else None, remarks=(f"{machine.num_cpus} cores for this process",))
    gpus = machine.gpus()
    for gpu in gpus:
        capability = "{}.{}".format(*gpu.capability)
        shown = f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, compute capability {capability}"
        yield Fact(name=f"cuda:{gpu.index}", value=shown)
    yield Fact(name="torch's CUDA", value=machine.torch_cuda)
    driver = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", machine.read("/proc/driver/nvidia/version") or "")
    yield Fact(name="nvidia driver", value=driver[1] if driver else None)
    if driver and not gpus and machine.torch_cuda is None:
        yield warning(
            "there is an NVIDIA driver, and torch was built without CUDA: everything runs on the CPU",
            "pip install --force-reinstall torch",
        )
    elif driver and not gpus and machine.environment.get("CUDA_VISIBLE_DEVICES", "all").strip() not in ("", "-1"):
        yield failure(
            f"torch for CUDA {machine.torch_cuda} finds no GPU with driver {driver[1]}, so load_model(device='cuda') "
            "fails: update the driver, or install a torch for an older CUDA",
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126",
        )


def ops(machine: Machine) -> Found:
    """The provider of each op on each kind of device, and why not a faster one."""
    for device in ("cpu", "cuda") if machine.gpus() else ("cpu",):
        try:
            choices = machine.choices(device)
        except Exception as error:  # noqa: BLE001 - a provider's library may raise anything
            library = error.name if isinstance(error, ImportError) else None
            mend = f"pip install --force-reinstall --no-deps {library}" if library else ""
            yield failure(f"no model can be loaded on {device}: {type(error).__name__}: {error}", mend)
            continue
        for choice in choices:
            remarks = [f"not {refusal}" for refusal in choice.refusals]
            remarks += [f"slow: {choice.slow}"] if choice.slow else []
            provider = ", else ".join((choice.provider, *choice.others))
            yield Fact(name=f"{device}: {choice.op}", value=provider, remarks=tuple(remarks))


def compilers(machine: Machine) -> Found:
    """The C compiler, and the folders where what was compiled is kept."""
    compiler, install = machine.which(*COMPILERS), INSTALL
    yield Fact(name="C compiler", value=compiler)
    has_gpu, has_triton = bool(machine.gpus()), machine.version("triton") is not None
    if compiler is None and has_gpu and has_triton:
        yield failure("Triton compiles the launchers of its kernels with a C compiler, and none was found", install)
    flags = cpu_flags(machine.root)
    best = next((name for name in EXTENSIONS if name in flags), None)
    yield Fact(name="vector instructions", value=best, remarks=() if flags else ("no native ops",))
    if flags:
        yield from _native(machine, compiler, flags)
    yield from _cache(machine)
    if has_gpu and has_triton:
        home = Path(machine.environment.get("TRITON_HOME") or machine.environment.get("HOME", "/root"))
        kept = Path(machine.environment.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
        yield Fact(name="Triton's cache", value=str(kept))
        if (problem := machine.why_not_written(kept)) is not None:
            yield failure(
                f"Triton cannot write what it compiles to {kept} ({problem})", "export TRITON_CACHE_DIR=$(mktemp -d)"
            )
    if has_gpu and any(map(machine.version, DEEP_GEMM)):
        yield from _deep_gemm(machine)
    if machine.environment.get("TRITON_INTERPRET") == "1":
        yield warning("TRITON_INTERPRET=1 runs Triton's kernels in Python, for tests", "unset TRITON_INTERPRET")


def _deep_gemm(machine: Machine) -> Found:
    """Whether DeepGEMM can compile its kernels, which it does when each is first used, and keep them."""
    given = machine.environment
    home = given.get("CUDA_HOME") or given.get("CUDA_PATH")
    known = machine.which("nvcc")
    nvcc = given.get("DG_JIT_NVCC_COMPILER") or (f"{home}/bin/nvcc" if home else known or "/usr/local/cuda/bin/nvcc")
    found = nvcc if nvcc == known or machine.at(nvcc).exists() else None
    yield Fact(name="nvcc", value=found)
    if found is None and given.get("DG_JIT_USE_NVRTC") != "1":
        package = f"cuda-nvcc-{(machine.torch_cuda or '12.9').replace('.', '-')}"
        yield failure(
            f"DeepGEMM compiles its kernels with nvcc when they are first used, and {nvcc} is not there",
            f"apt-get install -y {package}  # of NVIDIA's repository; or set CUDA_HOME to a toolkit",
        )
    kept = Path(given.get("DG_JIT_CACHE_DIR") or Path(given.get("HOME", "/root")) / ".deep_gemm")
    yield Fact(name="DeepGEMM's cache", value=str(kept), remarks=("ranks may share it: the first one compiles",))
    if (problem := machine.why_not_written(kept)) is not None:
        yield failure(
            f"DeepGEMM cannot write what it compiles to {kept} ({problem})", "export DG_JIT_CACHE_DIR=$(mktemp -d)"
        )


def _native(machine: Machine, compiler: str | None, flags: frozenset[str]) -> Found:
    """Yield whether native kernels can be used, and whether they use all of the CPU."""
    for reason, families in by_reason(machine.lost_kernels()).items():
        sentence = (
            f"bfloat16 on this CPU runs slower than it could, without the native {families}: the library {reason}"
        )
        absent = compiler is None or "No such file" in reason or "cannot find" in reason
        yield warning(sentence, INSTALL if absent and REPORT not in reason else "")
    sets = machine.compiler_sets()
    unused = [name for name in EXTENSIONS if sets is not None and name in flags and name not in sets]
    if unused:
        listed = ", ".join(f"{name} ({EXTENSIONS[name]})" for name in unused)
        yield warning(
            f"{compiler} is too old for this CPU, or has options that leave out what it has: what is compiled makes no "
            f"use of {listed}, and is slower for it; gcc 11 and clang 12 know all of these"
        )


def _cache(machine: Machine) -> Found:
    folder = cache_path(machine.environment)
    yield Fact(name="cache folder", value=None if folder is None else str(folder))
    if folder is None:
        reason, mend = "no home folder is known", "export XDG_CACHE_HOME=$(mktemp -d)"
    elif (problem := machine.why_not_written(folder)) is not None:
        reason, mend = f"{folder} cannot be written ({problem})", "export XDG_CACHE_HOME=$(mktemp -d)"
    elif is_open_to_others(folder):
        reason, mend = f"{folder} is another user's, or others can write it", f"chmod go-w {folder}"
    else:
        return
    yield warning(f"kernels are compiled anew in every process: {reason}", mend)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
