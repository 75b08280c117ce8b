"""What loading a model takes, with this code and with another checkout's, by turns: a JSON line per model.

    python benchmarks/loading.py MODEL … --before CHECKOUT/src [--threads 2] [--rounds 15]

Each side is a process that loads the model in bfloat16 again and again, from the page cache, which must have room for
the files. `value` is how many times as long this code takes: the ratio of the fastest loads, by the wall clock. `cpu`
is that of CPU seconds, which other processes change less, and `medians` are both ratios over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cpu_race"))

from machine import cpu_here

SIDE = """
import sys, time, torch, pdinfer
torch.set_num_threads(int(sys.argv[2]))
for _ in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    model = pdinfer.load_model(sys.argv[1], dtype="bfloat16")
    print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)
    del model
"""


class Side:
    """A process that loads a model with the code in a folder."""

    def __init__(self, source: Path, model: Path, threads: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SIDE, str(model), str(threads)],
            env={**os.environ, "PYTHONPATH": str(source)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def load_s(self) -> tuple[float, float]:
        """Return the seconds of a load, by the wall clock and of the CPU."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        wall, cpu = map(float, self.process.stdout.readline().split())
        return wall, cpu


def compare(model: Path, sources: list[Path], threads: int, rounds: int) -> dict[str, object]:
    """Return the line of a model."""
    sides = [Side(source, model, threads) for source in sources]
    for side in sides:
        side.load_s()  # imports, compiled kernels, the page cache
    before_R, after_R = zip(*([side.load_s() for side in sides] for _ in range(rounds)), strict=True)
    for side in sides:
        side.process.communicate()
    (wall, cpu), (wall_before, cpu_before) = (map(min, zip(*one, strict=True)) for one in (after_R, before_R))
    medians = [
        statistics.median(after[clock] / before[clock] for before, after in zip(before_R, after_R, strict=True))
        for clock in range(2)
    ]
    return {
        "bench": "loading",
        "model": model.name,
        "gb": round(sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e9, 2),
        "value": round(wall / wall_before, 3),
        "cpu": round(cpu / cpu_before, 3),
        "medians": [round(ratio, 3) for ratio in medians],
        "unit": "ratio",
        "s": {"before": round(wall_before, 3), "after": round(wall, 3)},
        "cpu_s": {"before": round(cpu_before, 3), "after": round(cpu, 3)},
        "rounds": rounds,
        "threads": threads,
        "load": round(os.getloadavg()[0], 1),
        "machine": cpu_here(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--before", type=Path, required=True, help="the src folder of another checkout")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    sources = [args.before.resolve(), (Path(__file__).parents[1] / "src").resolve()]
    for model in args.models:
        print(json.dumps(compare(model.resolve(), sources, args.threads, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
