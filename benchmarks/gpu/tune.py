"""Find the best configs of a family's kernels on the card at hand, and write them as vLLM and SGLang do.

    python benchmarks/gpu/tune.py masked [--minutes 8] [--into tuned] [--read FOLDER]
    python benchmarks/gpu/tune.py masked --list      what would be tried, on any machine

Families are those of run.py. A config here is what a function of pdinfer.kernels.triton.configs returns. Candidates
differ from the one in use in at most two of their values: tiles, warps, stages; or they come from files in `--read`.
All are compiled for sm_90 before anything runs, and those that spill, lack wgmma or take too much shared memory are
dropped, as tests/unit/kernels/aot.py judges. The others must give the result of the one in use, and take turns with it.
What the best one gains is printed, and for products it is written under the names and keys of `config_files`. A file in
`--read` that is for other sizes, or another card, is named.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import card
import run
import torch
from case import Case, complaint
from config_files import Target, nearest, of_entry, read, to_entry, unread, write
from product_cases import Dense, Experts
from timing import Call, Missing, Times, num_input_sets, race, sentence
from tuning import Choices, Key, asked_by, candidates, chosen, judged, op_of, values_of, with_values

from pdinfer.kernels.triton.configs import Config

AT_ONCE = 6
"""How many candidates take turns with the config in use."""
TOP_K = 8
"""Experts of a token: files count tokens, cases count the rows of an expert."""
DEPTH = "DEPTH"
"""The tile that products have, and other kernels of the same op have not."""
Line = dict[str, Any]


def file_of(case: Case, device_name: str, *, down: bool = False) -> tuple[Target, int] | None:
    """Return the file that others look for, and its number of tokens; None for what is no product with
    weights in FP8."""
    if isinstance(case, Dense):
        return Target(sizes={"N": case.outputs, "K": case.channels}, device_name=device_name), case.rows
    if isinstance(case, Experts) and case.op == Experts.op:
        target = Target(sizes={"E": case.experts, "N": case.sizes[1]}, device_name=device_name, down=down)
        return target, max(1, case.experts * case.rows // TOP_K)
    return None


def from_files(place: tuple[Target, int] | None, folder: Path | None, like: Config) -> list[Config]:
    """Return the configs that files of others have."""
    if folder is None or place is None:
        return []
    target, num_tokens = place
    entries = [nearest(read(path), num_tokens) for path in target.find(folder)]
    return [with_values(like, of_entry(entry)) for entry in entries]


def left_out(cases: Sequence[Case], device_name: str, folder: Path) -> Iterator[Line]:
    """Yield a line for each file of others that no case is for."""
    places = [file_of(case, device_name, down=down) for case in cases for down in (False, True)]
    targets = [place[0] for place in places if place is not None]
    wanted = ", ".join(dict.fromkeys(target.file_name for target in targets if not target.down)) or "none"
    for name, what in unread(folder, targets):
        yield {"bench": "gpu-tune", "file": name, "missing": f"{what}; this family reads {wanted}"}


@attrs.frozen(kw_only=True)
class Tuning:
    """One config of one case: what asks for it, the one in use, and what to try instead."""

    case: Case
    key: Key
    in_use: Config
    tried: Sequence[Config]

    def best(self, device: torch.device, deadline: float) -> tuple[Config, float, int]:
        """Return the fastest config, by how much it is faster than the one in use, and how many were timed."""
        op, case = op_of(self.case, device), self.case
        inputs = [case.inputs(device, seed) for seed in range(num_input_sets(case.work.num_bytes, device))]

        def calls_of(config: Config) -> list[Call]:
            def call(each: Any) -> Any:
                with chosen(Choices({self.key: config})):
                    return case.call(op, each)

            return [lambda each=each: call(each) for each in inputs]

        wanted = calls_of(self.in_use)[0]()
        best, gain, timed = self.in_use, 1.0, 0
        for first in range(0, len(self.tried), AT_ONCE):
            if time.monotonic() > deadline:
                break
            right = [each for each in self.tried[first : first + AT_ONCE] if is_right(calls_of(each)[0], wanted, case)]
            found = race({str(at): calls_of(each) for at, each in enumerate([self.in_use, *right])}, device)
            ours = found["0"]
            if isinstance(ours, Missing):
                raise SystemExit(f"{case.name}: the config in use cannot run: {ours.reason}")
            for each, times in zip([self.in_use, *right], found.values(), strict=True):
                if isinstance(times, Times) and ours.median / times.median > gain:
                    best, gain = each, ours.median / times.median
            timed += len(right)
        return best, gain, timed


def is_right(call: Call, wanted: Any, case: Case) -> bool:
    """Return whether a config gives the result of the one in use."""
    try:
        return complaint(call(), wanted, case) is None
    except Exception:  # noqa: BLE001 a config that the card refuses
        return False


@attrs.frozen
class Judge:
    """What the gates say of configs, remembered: cases of a family ask for the same ones."""

    known: dict[tuple[Any, ...], list[str]] = attrs.field(factory=dict)

    def reasons(self, case: Case, key: Key, tried: Sequence[Config]) -> list[list[str]]:
        """Return for each config why it is not worth running."""
        names = [(key, *sorted(values_of(each).items())) for each in tried]
        new = {name: each for name, each in zip(names, tried, strict=True) if name not in self.known}
        if new:
            self.known.update(zip(new, judged(case, key, list(new.values())), strict=True))
        return [self.known[name] for name in names]


def tune(
    case: Case, options: argparse.Namespace, judge: Judge, device: torch.device, deadline: float
) -> Iterator[Line]:
    """Yield a line for each config of a case, and write the best ones of products."""
    device_name = card.facts(device)["device"]
    for at, (key, in_use) in enumerate(asked_by(case).items()):
        place = file_of(case, device_name, down=at > 0) if DEPTH in in_use.tiles else None
        found = [*from_files(place, options.read, in_use), *candidates(in_use)][: options.most]
        tried = list({tuple(sorted(values_of(each).items())): each for each in found}.values())
        reasons = judge.reasons(case, key, tried)
        good = [each for each, why in zip(tried, reasons, strict=True) if not why]
        head = {"bench": "gpu-tune", "case": case.name, "key": list(key), "in_use": values_of(in_use)}
        if options.list:
            dropped = [[values_of(each), why[0]] for each, why in zip(tried, reasons, strict=True) if why]
            yield {**head, "tried": [values_of(each) for each in good], "dropped": dropped}
            continue
        tuning = Tuning(case=case, key=key, in_use=in_use, tried=good)
        best, gain, timed = tuning.best(device, deadline)
        if place is not None:
            write(options.into / place[0].file_name, {place[1]: to_entry(values_of(best))})
        dropped_count = len(tried) - len(good)
        yield {**head, "best": values_of(best), "ratio": round(gain, 3), "timed": timed, "dropped": dropped_count}


def main(arguments: Sequence[str] | None = None, cases: Sequence[Case] = run.CASES) -> int:
    families = sorted({case.family for case in cases})
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("family", choices=families)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--most", type=int, default=64, help="candidates for each config")
    parser.add_argument("--into", type=Path, default=Path("tuned"), help="folder of the files that are written")
    parser.add_argument("--read", type=Path, help="folder with files of vLLM or SGLang")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mine = [case.tiny() if options.tiny else case for case in cases if case.family == options.family]
    deadline, judge = time.monotonic() + 60 * options.minutes, Judge()
    if options.read is not None:
        for line in left_out(mine, card.facts(device)["device"], options.read):
            print(json.dumps(line), flush=True)
    for at, case in enumerate(mine):
        share_s = (deadline - time.monotonic()) / (len(mine) - at)  # each case gets as much as the others
        try:
            for line in tune(case, options, judge, device, time.monotonic() + share_s):
                print(json.dumps(line), flush=True)
        except Exception as error:  # noqa: BLE001 other cases are still worth tuning
            print(json.dumps({"bench": "gpu-tune", "case": case.name, "missing": sentence(error)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
