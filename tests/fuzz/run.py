"""Fuzz the parsers, guided by coverage, with atheris (`pip install atheris`).

    python -m tests.fuzz.run config --seconds 600        one parser
    python -m tests.fuzz.run --seconds 600               all parsers, one after the other

Prints one JSON line per target. An input that does anything but return or raise a PDInferError is written beside the
corpus and ends the run with status 1.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

NAMES = (
    *("frame", "packed", "command", "report", "stream_header", "config", "generation", "tensors"),
    *("session", "heads", "stream", "mapped", "ring"),
)
MAX_INPUT_BYTES = 8192
MAX_GROWTH_BYTES = 64 << 20
"""How much the process may grow during LOOK_INPUTS inputs of MAX_INPUT_BYTES. It gets no more, and the MemoryError is a
finding."""
LOOK_INPUTS = 1000
MAX_INPUT_S = 60
"""Seconds for one input, on a machine that has other work to do."""


def fuzz_one(name: str, corpus: Path, seconds: int) -> None:
    """Fuzz one target in a process of its own, because libFuzzer never returns."""
    import atheris

    with atheris.instrument_imports(include=["pdinfer"]):
        from tests.fuzz.targets import survives, targets
    target = targets()[name]
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(target.seeds):
        corpus.joinpath(f"seed-{index}").write_bytes(seed)
    inputs = 0

    def one(data: bytes) -> None:
        nonlocal inputs
        if inputs % LOOK_INPUTS == 0:
            limit_growth()
        inputs += 1
        survives(target, data)

    options = [
        f"-max_total_time={seconds}",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-timeout={MAX_INPUT_S}",
        "-rss_limit_mb=2048",
        f"-artifact_prefix={corpus}/../{name}-",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], str(corpus), *options], one)
    atheris.Fuzz()


def limit_growth() -> None:
    """Limit the memory here: libFuzzer's own limit of one allocation needs a sanitizer, which Python is not built
    with."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + MAX_GROWTH_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="target", help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--corpus", type=Path, default=Path(".fuzz"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.names or list(NAMES)
    if options.child:
        fuzz_one(names[0], options.corpus / names[0], options.seconds)
        return 0
    failed = 0
    for name in names:
        before = children_cpu_s()
        command = [sys.executable, "-m", "tests.fuzz.run", name, "--child"]
        command += ["--seconds", str(options.seconds), "--corpus", str(options.corpus)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        lines = done.stderr.splitlines()
        runs = next((line.split()[-1] for line in lines if "number_of_executed_units" in line), "0")
        cpu_s = round(children_cpu_s() - before)
        result = {"bench": "fuzz", "case": name, "value": int(runs), "unit": "inputs", "cpu_s": cpu_s}
        print(json.dumps({**result, "failed": done.returncode != 0}))
        sys.stdout.flush()
        if done.returncode:
            failed += 1
            print("\n".join(lines[-40:]), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
