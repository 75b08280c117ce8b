"""Measure how much `import pdinfer` adds to `import torch`: one JSON line.

    python benchmarks/import_time.py [ROUNDS]

Both are timed in fresh interpreters, in turns (A B A B). The ratio is torch's time over ours, so 1 is the best possible
value.
"""

import json
import statistics
import subprocess
import sys
import time


def seconds(statement: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - started


def main(rounds: int) -> None:
    torch_s, pdinfer_s = [], []
    for _ in range(rounds):
        torch_s.append(seconds("import torch"))
        pdinfer_s.append(seconds("import pdinfer"))
    ratios = [theirs / ours for theirs, ours in zip(torch_s, pdinfer_s, strict=True)]
    line = {
        "bench": "import_time",
        "case": "pdinfer",
        "value": round(statistics.median(pdinfer_s), 3),
        "unit": "s",
        "baseline": "import torch",
        "baseline_value": round(statistics.median(torch_s), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_low": round(min(ratios), 3),
        "ratio_high": round(max(ratios), 3),
        "runs": rounds,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
