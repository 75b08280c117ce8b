"""Writes the page of results, and the table of README.md, from what benchmarks printed: `python benchmarks/report.py`.

It reads every `*-goodput.jsonl` and `*-cpu-race*.jsonl` of benchmarks/results, the newest last: where two lines tell of
the same thing, the newer one counts. The page is docs/results.md with its plots in docs/plots, which need matplotlib
(`--no-plots` leaves them). `--check` says if both pages are up to date. The race has a table for each make of CPU: its
vendor, and those of its flags that decide how fast products are.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, PLOTS, README = ROOT / "docs" / "results.md", ROOT / "docs" / "plots", ROOT / "README.md"
Line = dict[str, Any]
Make = tuple[str, ...]
"""Vendor and flags of a CPU."""
Panels = dict[str, list[tuple[str, float]]]
"""The bars of each panel of a plot: a name and a height."""

NAMED_BY = {
    "calibration": ("req_s", "metric"),
    "checks": (),
    "decisions": ("ports", "prompt_tokens", "policy"),
    "overload": ("setting", "factor", "door"),
    "policies": ("setting", "policy"),
    "queues": ("queue", "rho"),
    "recording": (),
    "routing": ("setting", "policy"),
    "sessions": ("policy",),
    "speed": ("policy",),
}
"""What tells the lines of a case apart."""

MAX_US = {("2P2D", 1000): 40, ("16P32D", 1000): 150, ("16P32D", 32_768): 250}
MAX_SIMULATED_S = 4.0
WANTED = 1.1
"""Times the speed of a peer, in the median of the rounds."""

CPUS = {
    "2026-11-21-cpu-race.jsonl": {"name": "AMD EPYC", "flags": ["avx2", "avx512f", "avx512_bf16", "avx512_vnni"]},
}
"""Where the files of before lines named their CPU come from."""
RACED = ("prefill", "decode", "mixed", "poisson", "memory", "split", "host_us")
IN_WORDS = {
    "mixed": "many requests at once",
    "poisson": "requests at a Poisson rate",
    "total": "until all are done",
    "ttft": "TTFT",
    "itl": "ITL",
    "p50": "median",
    "p99": "99th percentile",
}
MARKS = "<!-- race -->", "<!-- /race -->"
FRONT_MAKE = "amd", "avx2", "avx512f", "avx512_bf16", "avx512_vnni"
"""The make of README.md: of those that all peers were raced on, the one on which they come closest."""
FRONT = (
    *(("prefill:512", "wall"), ("decode:1", "wall"), ("decode:32", "wall"), ("mixed/total", "wall")),
    *(("memory", "cpu"), ("split/ttft", "cpu")),
)
"""Cases and clocks of README.md."""

HEAD = """# Results

Made by `python benchmarks/report.py` from benchmarks/results, whose [README](../benchmarks/results/README.md) has the
commands and the machines. Times are those of two slow virtual cores, and scatter; simulated goodput varies with its
seeds only.
"""

RACE = """## The race on CPUs

`python benchmarks/cpu_race.py`. The model is a random DeepSeek-V3 of 1.27 billion parameters (296 million per token) in
bf16. The machines had other work to do. On the clock `cpu` times are CPU seconds of one thread; `wall` is the time that
passes, with two threads. The ratio is the median over rounds, with the lowest and highest round in parentheses. Above 1
pdinfer is better; bold, it is behind. Speeds are in tokens/s.

Without AVX-512 torch multiplies bfloat16 slowly, and so do the peers that rely on it. **Other CPUs differ.** On the
Xeon vLLM could not be raced, one or two rounds ran, and other work ran on other cores. On another Xeon with AMX vLLM
was ahead before products used AMX and weights were stored in the order in which its tiles read them: on one thread
the ratio was 0.70 and 0.83 for prefill of 512 and 2048 tokens, and 0.90 and 0.74 for decode of 8 and 32 sequences. No
results file in this repository holds that run.
"""


def read(folder: Path) -> dict[str, list[Line]]:
    """Return the lines of each case, the newest of each name."""
    newest: dict[tuple[Any, ...], Line] = {}
    for path in sorted(folder.glob("*-goodput.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            case = line["case"]
            key = (case, *(str(line.get(name)) for name in NAMED_BY[case]))
            newest.pop(key, None)
            newest[key] = {**line, "date": path.name[:10]}
    found: dict[str, list[Line]] = {}
    for line in newest.values():
        found.setdefault(line["case"], []).append(line)
    return found


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:g}" if isinstance(value, float) else str(value)


def calibration(lines: list[Line]) -> str:
    """What was predicted of engines in two processes, over what was seen."""
    fields = ("req_s", "metric", "predicted", "seen", "ratio", "asked")
    rows = [[line[field] for field in fields] for line in lines if "ratio" in line]
    return table(("requests/s", "metric", "predicted, ms", "seen, ms", "ratio", "asked"), rows)


def checks(lines: list[Line]) -> str:
    """The study's rows."""
    line = lines[0]
    rows = [
        ("an artefact, a stall, a meaningless rate", line["wrong_rows"], line["wrong_rows_flagged"], "at least 26"),
        ("other rows with data", line["other_rows"], line["other_rows_flagged"], "at most 4"),
    ]
    return table(("rows of the study", "how many", "flagged", "asked"), rows)


def decisions(lines: list[Line]) -> str:
    """Microseconds of a choice."""

    def row(line: Line) -> Sequence[Any]:
        most = MAX_US.get((line["ports"], line["prompt_tokens"])) if line["policy"] == "traffic_aware" else None
        return (
            line["ports"],
            line["prompt_tokens"],
            line["cached_pages"],
            line["policy"],
            line["us_per_request"],
            f"at most {most}" if most else "",
        )

    return table(("ports", "prompt tokens", "cached pages a port", "policy", "us a request", "asked"), map(row, lines))


def policies(lines: list[Line]) -> str:
    """Requests a second at which 90 % keep the SLO, and the ratios."""
    found = [line for line in lines if "policy" in line]
    fields = ("setting", "num_requests", "policy", "goodput_req_s", "attainment", "num_runs")
    rates = [[line[field] for field in fields] for line in found]
    ratios = [
        (line["setting"], rival, ratio, line["asked"].get(rival, 0.97), ratio >= line["asked"].get(rival, 0.97))
        for line in lines
        if "ratios" in line
        for rival, ratio in line["ratios"].items()
    ]
    return "\n\n".join(
        (
            table(("setting", "requests", "policy", "goodput, requests/s", "attainment there", "runs"), rates),
            "`traffic_aware` over the others:",
            table(("setting", "over", "ratio", "asked", "met"), ratios),
        )
    )


def routing(lines: list[Line]) -> str:
    """Shares of the requests within the SLO at one rate, and those of `traffic_aware` over the best other ones."""
    shares = [
        (*(line[name] for name in ("setting", "num_requests", "req_s", "policy")), _shares(line), line["mean"])
        for line in lines
        if "policy" in line
    ]
    ratios = [
        (line["setting"], line["over_the_best_other"], line["asked"], line["over_the_best_other"] >= line["asked"])
        for line in lines
        if "over_the_best_other" in line
    ]
    return "\n\n".join(
        (
            table(("setting", "requests", "requests/s", "policy", "attainment of each seed", "mean"), shares),
            "`traffic_aware` over the best of the others:",
            table(("setting", "ratio", "asked", "met"), ratios),
        )
    )


def _shares(line: Line) -> str:
    return ", ".join(f"{share:.3f}" for share in line["attainment"])


def overload(lines: list[Line]) -> str:
    """Goodput as a share of the knee's."""
    fields = ("setting", "num_requests", "num_seeds", "knee_req_s", "factor")
    rows = [
        [
            *(line[field] for field in fields),
            "yes" if line["door"] else "",
            line["of_the_knees_goodput"],
            line["refused"],
        ]
        for line in lines
    ]
    heads = (
        "setting",
        "requests",
        "seeds",
        "knee, requests/s",
        "times the knee",
        "promise",
        "of its goodput",
        "refused",
    )
    return table(heads, rows)


def queues(lines: list[Line]) -> str:
    """Waits against formulas."""
    keys = [key for key in lines[0] if key not in ("case", "python", "cores", "date")]
    return table(keys, ([line.get(key, "") for key in keys] for line in lines))


def recording(lines: list[Line]) -> str:
    """What records cost."""
    rows = [(line["tokens"], line["us_per_token"], line["share_of_a_core"], "below 0.1") for line in lines]
    return table(("tokens", "us a token", "share of a core", "asked"), rows)


def sessions(lines: list[Line]) -> str:
    """Conversations on real engines."""
    rows = [
        (
            line["policy"],
            line["request_rate"],
            ", ".join(f"{share:.2f}" for share in line["attainment"]),
            line["attainment_to_best"],
            line["p99_ttft_to_best"],
            line["equal_tokens"],
        )
        for line in lines
    ]
    heads = ("policy", "requests/s", "attainment in each round", "over the better of the first two", "P99 TTFT over it")
    return table((*heads, "tokens equal"), rows)


def speed(lines: list[Line]) -> str:
    """Seconds of the whole trace."""
    rows = [
        (line["policy"], line["num_requests"], line["seconds"], line["events_per_s"], f"at most {MAX_SIMULATED_S:g} s")
        for line in lines
    ]
    return table(("policy", "requests", "seconds", "events a second", "asked"), rows)


def _bars(name: str, value: str, panel: Callable[[Line], str] = lambda _: "") -> Callable[[list[Line]], Panels]:
    def bars(lines: list[Line]) -> Panels:
        panels: Panels = {}
        for line in lines:
            if value in line:
                height = line[value]
                height = statistics.median(height) if isinstance(height, list) else height
                panels.setdefault(panel(line), []).append((str(line[name]), height))
        return panels

    return bars


def _overloads(lines: list[Line]) -> Panels:
    panels: Panels = {}
    for line in lines:
        name = f"{line['factor']:g} x{', promised' if line['door'] else ''}"
        panels.setdefault(line["setting"], []).append((name, line["of_the_knees_goodput"]))
    return panels


CASES: dict[str, tuple[str, Callable[[list[Line]], str], str, Callable[[list[Line]], Panels]]] = {
    "policies": (
        "Policies on real traces, simulated",
        policies,
        "requests/s within the SLO",
        _bars("policy", "goodput_req_s", lambda line: line["setting"]),
    ),
    "routing": (
        "Policies at one rate, on traces and on conversations of several turns, simulated",
        routing,
        "mean attainment",
        _bars("policy", "mean", lambda line: line["setting"]),
    ),
    "overload": (
        "Overload with a promise and without, simulated",
        overload,
        "share of the knee's goodput",
        _overloads,
    ),
    "sessions": ("Policies on real engines", sessions, "attainment, median", _bars("policy", "attainment")),
    "decisions": (
        "What a choice costs",
        decisions,
        "us a request",
        _bars("policy", "us_per_request", lambda line: f"{line['ports']}, {line['prompt_tokens']} tokens"),
    ),
    "speed": ("The simulator's speed", speed, "seconds", _bars("policy", "seconds")),
    "checks": (
        "Honesty checks",
        checks,
        "rows flagged",
        lambda lines: {"": list(lines[0]["by_check"].items())},
    ),
    "queues": (
        "The simulator against the formulas of queues",
        queues,
        "wait over that of the formula",
        _bars("queue", "ratio", lambda line: f"rho {line['rho']}"),
    ),
    "calibration": (
        "What calibrated steps predict of engines in two processes",
        calibration,
        "predicted over seen",
        _bars("metric", "ratio", lambda line: f"{line.get('req_s')} requests/s"),
    ),
    "recording": ("What recording costs", recording, "share of a core", _bars("case", "share_of_a_core")),
}
"""Title, table, and the axis and the bars of the plot."""


# -- the race on CPUs ---


def races(folder: Path) -> dict[Make, list[Line]]:
    """Return the lines of the race by make of CPU, the newest of each case, clock and peer."""
    newest: dict[tuple[Any, ...], Line] = {}
    for path in sorted(folder.glob("*-cpu-race*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            if line.get("bench") != "cpu_race" or "ratio" not in line:
                continue  # of a runner, of the check, or of a run that did not take place
            cpu = line.get("cpu") or CPUS[path.name]
            make = (re.findall(r"\w+", cpu["name"].lower())[0], *cpu["flags"])
            key = (make, *(line[name] for name in ("clock", "threads", "dtype", "case", "baseline")))
            newest[key] = {**line, "cpu": cpu, "date": path.name[:10]}
    found: dict[Make, list[Line]] = {}
    for make, *_ in sorted(newest):
        found[make] = sorted((line for key, line in newest.items() if key[0] == make), key=_place)
    return found


def _place(line: Line) -> tuple[Any, ...]:
    """Where a line stands in the table of its make."""
    case = line["case"]
    kind, numbers = re.split("[:/]", case)[0], [*map(int, re.findall(r"\d+", case))]
    return line["clock"], RACED.index(kind), "total" not in case, "itl" in case, numbers, line["ratio"]


def closest(lines: list[Line]) -> list[Line]:
    """Return the line of each case and clock with the lowest ratio. Medians that are ahead, and limits of our own, are
    left to the whole table."""
    best: dict[tuple[str, str], Line] = {}
    for line in lines:
        if line["baseline"] != "limit" and ("p50" not in line["case"] or line["ratio"] < 1):
            key = line["clock"], line["case"]
            best[key] = min(best.get(key, line), line, key=lambda each: float(each["ratio"]))
    return [*best.values()]


def _named(case: str) -> str:
    """A case in words."""
    kind, *rest = re.split("[:@/_]", case)
    if kind == "prefill":
        return f"prefill of {rest[0]} tokens"
    if kind == "decode":
        plural = "s" if rest[0] != "1" else ""
        return f"decode, {rest[0]} sequence{plural} of {rest[1] if rest[1:] else 512} tokens"
    if kind in ("mixed", "poisson"):
        return f"{IN_WORDS[kind]}: {', '.join(IN_WORDS[word] for word in rest)}"
    return {"memory": "peak memory", "split": "TTFT, prefill and decode in two processes"}[kind]


def _ratio(line: Line) -> str:
    ratio = f"{line['ratio']:.2f}"
    ratio = f"**{ratio}**" if line["ratio"] < 1 else ratio
    return ratio if line["runs"] == 1 else f"{ratio} ({line['ratio_low']:.2f} to {line['ratio_high']:.2f})"


def _heading(lines: list[Line]) -> str:
    cpu = lines[-1]["cpu"]
    return f"{cpu['name']} ({', '.join(cpu['flags']) or 'no flags that matter'})"


def summary(found: dict[Make, list[Line]]) -> str:
    """Return a table for each make: the closest peer of each case."""
    return "\n".join(f"### {_heading(lines)}\n\n{_closest_table(closest(lines))}\n" for lines in found.values())


def _closest_table(lines: Sequence[Line]) -> str:
    rows = (
        (
            _named(line["case"]),
            line["clock"],
            f"{line['value']:g} {line['unit']}",
            f"{line['baseline']} {line['baseline_value']:g}",
            _ratio(line),
        )
        for line in lines
    )
    return table(("case", "clock", "pdinfer", "closest peer", "ratio"), rows)


def opponents(found: dict[Make, list[Line]]) -> str:
    """Return a table of what was raced with what on each make of CPU, and when; a peer that never was is named too."""
    peers = sorted({line["baseline"] for lines in found.values() for line in lines} - {"limit", "one process"})
    rows = []
    for lines in found.values():
        for peer in peers:
            raced = [line for line in lines if line["baseline"] == peer]
            if not raced:
                rows.append((_heading(lines), peer, "never", "", "", ""))
                continue
            rounds, dates = ([line[name] for line in raced] for name in ("runs", "date"))
            ahead = sum(line["ratio"] >= WANTED and line["ratio_low"] > 1 for line in raced)
            rows.append((_heading(lines), peer, len(raced), _span(rounds), _span(dates), f"{ahead} of {len(raced)}"))
    heads = ("make", "peer", "cases", "rounds", "dates", f"at least {WANTED}, every round above 1")
    return table(heads, rows)


def _span(values: Sequence[Any]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def whole(found: dict[Make, list[Line]]) -> str:
    """Return the sections of the page: who was raced, the closest peer of each case, and every peer."""
    parts = [RACE, opponents(found) + "\n", summary(found), "## The race on CPUs, every peer\n"]
    for lines in found.values():
        rows = [
            (
                f"`{line['case']}`",
                f"{line['clock']}, {line['threads']}",
                f"{line['value']:g} {line['unit']}",
                f"{line['baseline']} {line['baseline_value']:g}",
                _ratio(line),
                line["runs"],
                line["date"],
            )
            for line in lines
        ]
        heads = ("case", "clock, threads", "pdinfer", "compared with", "ratio", "rounds", "date")
        parts.append(f"### {_heading(lines)}\n\n{table(heads, rows)}\n")
    return "\n".join(parts)


def front(text: str, found: dict[Make, list[Line]]) -> str:
    """Return the text of README.md with the table between the marks."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    raced = {(line["case"], line["clock"]): line for line in closest(found[FRONT_MAKE])}
    rows = _closest_table([raced[name] for name in FRONT])
    return f"{before}{MARKS[0]}\n\n{rows}\n\n{MARKS[1]}{after}"


# -- the page ---


def page(found: dict[str, list[Line]], raced: dict[Make, list[Line]]) -> str:
    """Return the whole page."""
    parts = [HEAD]
    for case, (title, rows, _, _) in CASES.items():
        if case in found:
            dates = ", ".join(sorted({line["date"] for line in found[case]}))
            parts.append(f"## {title}\n\n`python benchmarks/goodput.py {case}`, {dates}.\n")
            parts.append(f"![{title}](plots/{case}.svg)\n")
            parts.append(rows(found[case]) + "\n")
    return "\n".join([*parts, whole(raced)] if raced else parts)


def draw(case: str, title: str, axis: str, panels: Panels) -> None:
    """Draw the bars of a case, one panel for each setting or size."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = case
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(2.0 + 2.2 * len(panels), 3.2), squeeze=False)
    for panel, (where, found) in zip(axes[0], panels.items(), strict=True):
        names, heights = zip(*found, strict=True)
        panel.bar(range(len(names)), heights, color=["C1" if each == "traffic_aware" else "C0" for each in names])
        panel.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        panel.set_title(where, fontsize=8)
    axes[0][0].set_ylabel(axis)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(PLOTS / f"{case}.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Write the pages, or check them."""
    folder = ROOT / "benchmarks" / "results"
    found, raced = read(folder), races(folder)
    texts = {PAGE: page(found, raced), README: front(README.read_text(), raced)}
    if "--check" in sys.argv[1:]:
        for path, text in texts.items():
            if not path.exists() or path.read_text() != text:
                sys.exit(f"{path.name} does not say what the results say: run python benchmarks/report.py")
        return
    for path, text in texts.items():
        path.write_text(text)
    if "--no-plots" in sys.argv[1:]:
        return
    PLOTS.mkdir(exist_ok=True)
    for case, (title, _, axis, bars) in CASES.items():
        if case in found:
            draw(case, title, axis, bars(found[case]))


if __name__ == "__main__":
    main()
