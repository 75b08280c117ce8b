"""No kind of decode step asks more of the device than is committed in census.json."""

from __future__ import annotations

import pytest

from tests.device.census import KINDS, STEPS, count, read
from tests.each_time import others_in_full

COMMAND = "python -m tests.device.census"
EACH_TIME = (
    "captured, temperature, top-k, top-p",
    "penalties, logit bias",
    "2 drafts, greedy",
    "FP8 pages, greedy",
    "FP8 weights, greedy",
)


def complaint(name: str, kind: str, now: int, before: int, lines: list[tuple[str, int]]) -> str:
    """Return what to say of a number that rose, with the lines that count most."""
    told = "".join(f"\n    {times:4} {line}" for line, times in lines)
    return f"{name}: {now} {kind} a step, {before} before; if that is meant, run `{COMMAND}`. Most come from{told}"


@pytest.mark.parametrize("name", others_in_full(STEPS, EACH_TIME))
def test_a_step_asks_no_more_of_the_device(name: str, record_property: pytest.RecordProperty) -> None:
    committed, complaints, fallen = read()[name], [], []
    for kind, watch in count(STEPS[name]).items():
        now, before = watch.totals()[kind], committed[kind]
        if now > before:
            complaints.append(complaint(name, kind, now, before, watch.counts[kind].most_common(8)))
        elif now < before:
            fallen.append(f"{kind} from {before} to {now}")
    if fallen:
        record_property("information", f"{name}: fewer {', '.join(fallen)}; `{COMMAND}` writes it down")
    assert not complaints, "\n".join(complaints)


def test_the_file_has_every_kind_of_step_and_nothing_else() -> None:
    assert {name: [*kinds] for name, kinds in read().items()} == {name: [*KINDS] for name in STEPS}
