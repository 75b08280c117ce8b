"""Measure every kernel of pdinfer on the card at hand: JSON lines, then one table.

    python benchmarks/gpu/run.py [--minutes 8] [--provider triton] [--only decode,masked] [--like REGEX] > results.jsonl
    python benchmarks/gpu/run.py --dry-run [--card H200]       the plan with floors, on any machine
    python benchmarks/gpu/run.py --tiny --provider torch       everything once at small sizes, on a CPU too

First tokens: a tiny model goes through prefill, channel and decode. Then what this card does (copy, read, products of
random numbers), and then the kernels. Each is compared with the reference at a few rows before it is timed; a wrong one
is not timed. A kernel and its rivals take turns, A B A B, over inputs that no cache keeps, captured where that can be
done; every figure is a median. Rivals are the other providers of the op and what torch has; those that are absent are
named. Kernels of one family run in a process of their own, so that a fault of one leaves the others.

`floor_us` is the time below which the kernel cannot run here: bytes by the copy bandwidth, or operations by the product
of this card. `share` is of what the goal names: the copy, the bfloat16 product, or a rival. `ratio` above 1 means that
pdinfer is faster than `baseline`, found round by round.

What steps and hand-offs take, `slice.py` and `pushes.py` beside this file measure.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attention_cases
import attrs
import card
import product_cases
import row_cases
import tokens
import torch
from case import Case, Ceilings, complaint
from timing import Missing, Times, num_input_sets, race, sentence

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels import compositions, resolve, resolve_ops
from pdinfer.kernels.ops import function_of
from pdinfer.kernels.torch.products import sum_in_float32

CASES: tuple[Case, ...] = (*attention_cases.CASES, *product_cases.CASES, *row_cases.CASES)
FAMILIES = tuple(dict.fromkeys(case.family for case in CASES))
OURS = "triton"
COMPLETE = ("torch", "reference")
Line = dict[str, Any]


@attrs.frozen(kw_only=True)
class Bench:
    """What all cases of a run share."""

    device: torch.device
    provider: str
    ceilings: Ceilings
    deadline: float
    tiny: bool = False

    def lines(self, case: Case) -> Iterator[Line]:
        """Check a case, time it, and return a line for the kernel and each of its rivals."""
        head = {"bench": "gpu", "case": case.name, "provider": self.provider}
        if time.monotonic() > self.deadline:
            yield {**head, "missing": "no time left"}
            return
        try:
            ours = self.op_of(case, self.provider)
            wrong = self.check(case, ours)
        except BackendUnavailable as error:
            yield {**head, "missing": sentence(error)}
            return
        except Exception as error:  # noqa: BLE001 a kernel that fails is a result
            yield {**head, "wrong": sentence(error)}
            return
        if wrong is not None:
            yield {**head, "wrong": wrong}
            return
        yield from self.timed(case, ours, head)

    def op_of(self, case: Case, provider: str) -> Any:
        """Return the op of a provider. Those that have every op compose what is a sequence of others."""
        forced = provider if provider in COMPLETE else {case.op: provider}
        return resolve_ops(case.spec(self.device), forced=forced).ops[case.op]

    def check(self, case: Case, ours: Any) -> str | None:
        """Return how the kernel is wrong at a few rows, or None."""
        small = case if self.tiny else case.small()
        reference = self.op_of(small, "reference")
        got = small.call(ours, small.inputs(self.device, 1))
        return complaint(got, small.call(reference, small.inputs(self.device, 1)), small)

    def timed(self, case: Case, ours: Any, head: Line) -> Iterator[Line]:
        work = case.work
        inputs = [case.inputs(self.device, seed) for seed in range(num_input_sets(work.num_bytes, self.device))]
        contenders: dict[str, Any] = {"pdinfer": [lambda each=each: case.call(ours, each) for each in inputs]}
        found: dict[str, Times | Missing] = {}
        for name in (each.name for each in resolve.PROVIDERS):
            if name not in (self.provider, "reference") and (name != resolve.COMPOSITION or is_composed(case.op)):
                try:
                    theirs = self.op_of(case, name)
                    contenders[name] = [lambda each=each, op=theirs: case.call(op, each) for each in inputs]
                except BackendUnavailable as error:
                    found[name] = Missing(sentence(error))
        others = [case.rivals(each) for each in inputs]
        contenders |= {name: [each[name] for each in others] for name in others[0]}
        found |= race(contenders, self.device, rounds=2 if self.tiny else 7)
        mine = found.pop("pdinfer")
        if isinstance(mine, Missing):
            yield {**head, "wrong": mine.reason}
            return
        medians = {name: each.median for name, each in found.items() if isinstance(each, Times)}
        if sdpa := [seconds for name, seconds in medians.items() if name.startswith("sdpa ")]:
            medians["sdpa"] = min(sdpa)
        floor_s = work.floor_s(self.ceilings)
        share = case.goal.share(mine.median, work, self.ceilings, medians)
        line = {
            **head,
            "value": round(mine.median * 1e6, 2),
            "unit": "us",
            "bytes": work.num_bytes,
            "flops": work.flops,
            "floor_us": round(floor_s * 1e6, 2),
            "of_floor": round(floor_s / mine.median, 3),
            "goal": [case.goal.of, case.goal.least, case.goal.stretch],
            "share": None if share is None else round(share, 3),
            "captured": mine.captured,
        }
        yield line
        for name, theirs in found.items():
            yield {**head, "baseline": name, **against(mine, theirs)}


def is_composed(op: str) -> bool:
    """Return whether an op is a sequence of others, which a kernel of its own competes with."""
    return function_of(compositions, op) is not None


def against(ours: Times, theirs: Times | Missing) -> Line:
    """Return the part of a line that compares with a rival."""
    if isinstance(theirs, Missing):
        return {"missing": theirs.reason}
    ratios = [b / a for a, b in zip(ours.rounds, theirs.rounds, strict=True)]
    return {
        "value": round(ours.median * 1e6, 2),
        "unit": "us",
        "baseline_value": round(theirs.median * 1e6, 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_low": round(min(ratios), 3),
        "ratio_high": round(max(ratios), 3),
        "runs": len(ratios),
        "captured": theirs.captured,
    }


def verdict(line: Line) -> str:
    """Return "pass", "stretch" or "below" for a line with a goal."""
    _, least, stretch = line["goal"]
    if line["share"] is None:
        return "no rival"
    return "stretch" if line["share"] >= stretch else "pass" if line["share"] >= least else "below"


def table(lines: Sequence[Line]) -> str:
    """Return the lines as one table: a row for each kernel, its rivals at the end."""
    rows = [f"{'kernel':<58}{'us':>10}{'floor':>10}{'of floor':>9}  goal"]
    for line in lines:
        if "baseline" in line:
            continue
        if "goal" not in line:
            rows += [f"{line['case']:<58}{kind:>10}: {line[kind]}" for kind in ("wrong", "missing") if kind in line]
            continue
        of, least, stretch = line["goal"]
        rivals = ", ".join(
            f"{other['baseline']} {other['ratio']}x"
            for other in lines
            if other.get("case") == line["case"] and "ratio" in other
        )
        rows.append(
            f"{line['case']:<58}{line['value']:>10.1f}{line['floor_us']:>10.1f}{line['of_floor']:>9.2f}  "
            f"{line['share']} of {of} ({least} / {stretch}): {verdict(line)}{'; ' * bool(rivals)}{rivals}"
        )
    present = {line["baseline"] for line in lines if "ratio" in line}
    missing = {line["baseline"]: line["missing"] for line in lines if "baseline" in line and "missing" in line}
    absent = {name: reason for name, reason in missing.items() if name not in present}
    return "\n".join([*rows, *(f"absent: {name}: {reason}" for name, reason in sorted(absent.items()))])


def plan(name: str) -> str:
    """Return every case with its least work and its floor on a card, by the data sheet of that card."""
    ceilings = card.NOMINAL[name]
    rows = [f"{'kernel on ' + name:<58}{'MB':>10}{'GFLOP':>10}{'floor us':>10}  goal"]
    for case in CASES:
        work, goal = case.work, case.goal
        rows.append(
            f"{case.name:<58}{work.num_bytes / 1e6:>10.1f}{work.flops / 1e9:>10.1f}"
            f"{work.floor_s(ceilings) * 1e6:>10.1f}  {goal.least} / {goal.stretch} of {goal.of}"
        )
    rows.append(f"against every other provider of {', '.join(each.name for each in resolve.PROVIDERS)}, and torch")
    return "\n".join([*rows, "steps: slice.py; pushes beside prefill: pushes.py"])


def run_family(family: str, options: argparse.Namespace, ceilings: Ceilings, left_s: float) -> Iterator[Line]:
    """Run the cases of a family in a process of its own, which a fault of the card ends."""
    told = json.dumps(attrs.asdict(ceilings))
    command = [sys.executable, __file__, "--only", family, "--provider", options.provider, "--ceilings", told]
    command += ["--minutes", f"{left_s / 60:.3f}", "--like", options.like]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=left_s + 60, check=False)
        output, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output, status = (late.stdout or b"").decode(), "too late"
    yield from (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    if status:
        yield {"bench": "gpu", "case": f"family {family}", "wrong": f"its process ended: {status}"}


def check_tokens(device: torch.device) -> Line:
    """Return a line that tells whether engines on the device give the tokens of the CPU."""
    try:
        found = tokens.complaints(device)
    except Exception as error:  # noqa: BLE001 kernels are still worth timing one by one
        found = [sentence(error)]
    return {"bench": "gpu", "case": "tokens", **({"wrong": "; ".join(found)} if found else {"value": "equal"})}


def emitted(lines: Iterator[Line]) -> Iterator[Line]:
    """Print lines as they come."""
    for line in lines:
        print(json.dumps(line), flush=True)
        yield line


def whole_run(options: argparse.Namespace, device: torch.device, deadline: float) -> Iterator[Line]:
    yield {"bench": "gpu", "case": "card", "value": card.facts(device)}
    yield check_tokens(device)
    ceilings = card.measure(device, tiny=options.tiny)
    yield {"bench": "gpu", "case": "ceilings", "value": attrs.asdict(ceilings), "unit": "per second"}
    for family in options.only:
        if device.type == "cuda" and not options.tiny:
            yield from run_family(family, options, ceilings, max(1.0, deadline - time.monotonic()))
        else:
            yield from cases_of(family, options, device, ceilings, deadline)
    yield {"bench": "gpu", "case": "card at the end", "value": card.facts(device)}


def cases_of(
    family: str, options: argparse.Namespace, device: torch.device, ceilings: Ceilings, deadline: float
) -> Iterator[Line]:
    sum_in_float32(device)
    bench = Bench(device=device, provider=options.provider, ceilings=ceilings, deadline=deadline, tiny=options.tiny)
    chosen = [case for case in CASES if case.family == family and re.search(options.like, case.name)]
    cases = [case.tiny() if options.tiny else case for case in chosen]
    for case in {case.name: case for case in cases}.values():
        yield from bench.lines(case)


def families_of(names: str) -> list[str]:
    chosen = names.split(",")
    if unknown := [name for name in chosen if name not in FAMILIES]:
        raise SystemExit(f"no family is called {unknown[0]!r}; there are {', '.join(FAMILIES)}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--card", default="H200", choices=sorted(card.NOMINAL))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--provider", default=OURS)
    parser.add_argument("--only", type=families_of, default=list(FAMILIES), metavar="FAMILY,...")
    parser.add_argument("--like", default="", metavar="REGEX", help="only cases whose names match")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--ceilings", type=lambda text: Ceilings(**json.loads(text)), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.dry_run:
        print(plan(options.card))
        return 0
    deadline = time.monotonic() + 60 * options.minutes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        raise SystemExit("torch sees no card here: --dry-run prints the plan, --tiny runs on a CPU")
    if options.ceilings is not None:
        for family in options.only:
            list(emitted(cases_of(family, options, device, options.ceilings, deadline)))
        return 0
    lines = list(emitted(whole_run(options, device, deadline)))
    print(table(lines))
    return int(any("wrong" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
