"""Writes the page of results from what `goodput.py` printed: `python benchmarks/report.py` (needs matplotlib).

It reads every `benchmarks/results/*-goodput.jsonl`, the newest last: where two lines tell of the same thing, the
newer one counts. The page is docs/results.md with its plots in docs/plots; `--check` says if it is up to date.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, PLOTS = ROOT / "docs" / "results.md", ROOT / "docs" / "plots"
Line = dict[str, Any]
Panels = dict[str, list[tuple[str, float]]]
"""The bars of each panel of a plot: a name and a height."""

NAMED_BY = {
    "checks": (),
    "decisions": ("ports", "prompt_tokens", "policy"),
    "policies": ("setting", "policy"),
    "queues": ("queue", "rho"),
    "recording": (),
    "sessions": ("policy",),
    "speed": ("policy",),
}
"""What tells the lines of a case apart."""

MAX_US = {("2P2D", 1000): 40, ("16P32D", 1000): 150, ("16P32D", 32_768): 250}
MAX_SIMULATED_S = 4.0

HEAD = """# Results of routing and simulation

Made by `python benchmarks/report.py` from benchmarks/results, whose [README](../benchmarks/results/README.md) has the
commands and the machines. Times are those of two slow virtual cores, and scatter; simulated goodput varies with its
seeds only.
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


CASES: dict[str, tuple[str, Callable[[list[Line]], str], str, Callable[[list[Line]], Panels]]] = {
    "policies": (
        "Policies on real traces, simulated",
        policies,
        "requests/s within the SLO",
        _bars("policy", "goodput_req_s", lambda line: line["setting"]),
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
    "recording": ("What recording costs", recording, "share of a core", _bars("case", "share_of_a_core")),
}
"""Title, table, and the axis and the bars of the plot."""


def page(found: dict[str, list[Line]]) -> str:
    """Return the whole page."""
    parts = [HEAD]
    for case, (title, rows, _, _) in CASES.items():
        if case in found:
            dates = ", ".join(sorted({line["date"] for line in found[case]}))
            parts.append(f"## {title}\n\n`python benchmarks/goodput.py {case}`, {dates}.\n")
            parts.append(f"![{title}](plots/{case}.svg)\n")
            parts.append(rows(found[case]) + "\n")
    return "\n".join(parts)


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
    """Write the page, or check it."""
    found = read(ROOT / "benchmarks" / "results")
    text = page(found)
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text() != text:
            sys.exit("docs/results.md does not say what the results say: run python benchmarks/report.py")
        return
    PAGE.write_text(text)
    PLOTS.mkdir(exist_ok=True)
    for case, (title, _, axis, bars) in CASES.items():
        if case in found:
            draw(case, title, axis, bars(found[case]))


if __name__ == "__main__":
    main()
