"""What one decode step of 8 sequences asks of the device, for each kind of step. `python -m tests.device.census` counts
again and rewrites census.json; tests compare with it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

import pdinfer as pd
from pdinfer.process import memory
from tests.device.models import PACKED, WIDE, ModelKind, model_of
from tests.e2e.setups import join, prompt_of, step_until
from tests.simulated import order
from tests.simulated.device import DEVICE, set_up
from tests.simulated.watch import Watch

FILE = Path(__file__).parent / "census.json"
KINDS = ("launches", "allocations", "syncs", "pageable")

NUM_SEQUENCES = 8
NUM_STEPS = 4
"""Steps that are counted, of which the largest counts: in one alone an expert may be without tokens."""


@attrs.frozen
class Step:
    """A kind of step: the model, how its tokens are chosen, and whether the step was captured before."""

    model: ModelKind
    sampling: tuple[tuple[str, Any], ...] = (("temperature", 0.0),)
    captured: bool = False


FILTERED = (("temperature", 0.8), ("top_k", 20), ("top_p", 0.9))
PENALISED = (
    ("temperature", 0.0),
    ("repetition_penalty", 1.2),
    ("presence_penalty", 0.5),
    ("frequency_penalty", 0.25),
    ("logit_bias", ((5, 3.0), (6, -3.0))),
)
KIND = partial(ModelKind, dtype="bfloat16", num_layers=3)
PLAIN = KIND()
DRAFTS = KIND(num_drafts=2)

STEPS = {
    "captured, greedy": Step(PLAIN, captured=True),
    "captured, temperature, top-k, top-p": Step(PLAIN, FILTERED, captured=True),
    "captured, penalties, logit bias": Step(PLAIN, PENALISED, captured=True),
    "greedy": Step(PLAIN),
    "temperature, top-k, top-p": Step(PLAIN, FILTERED),
    "penalties, logit bias": Step(PLAIN, PENALISED),
    "captured, 2 drafts, greedy": Step(DRAFTS, captured=True),
    "captured, 2 drafts, temperature, top-k, top-p": Step(DRAFTS, FILTERED, captured=True),
    "2 drafts, greedy": Step(DRAFTS),
    "2 drafts, temperature, top-k, top-p": Step(DRAFTS, FILTERED),
    "v32, greedy": Step(KIND("v32")),
    "FP8 pages, greedy": Step(KIND(sizes=PACKED, kv_format="fp8")),
    "FP8 weights, greedy": Step(KIND(sizes=WIDE, scheme="fp8")),
    "INT8 weights, greedy": Step(KIND(sizes=WIDE, scheme="w8a8_dynamic")),
}


def count(step: Step) -> dict[str, Watch]:
    """Run a few steps of sequences of 20 tokens and more. Return, for each kind of thing, the step that had most."""
    model = model_of(step.model, DEVICE)
    pool = pd.PagePool(model, pd.CacheConfig(page_size=16, num_pages=64, kv_format=step.model.kv_format))
    engine = pd.EngineConfig(num_draft_tokens=step.model.num_drafts, graph_batch_sizes=(NUM_SEQUENCES,))
    watches = []
    with join(model, "shared", decode_pools=[pool], engine=engine) as setup:
        decode = setup.decodes[0]
        if step.captured:
            decode.warm_up()
        for seed in range(NUM_SEQUENCES):
            sampling = pd.SamplingParams(max_new_tokens=40, ignore_eos=True, seed=seed, **dict(step.sampling))
            setup.pairing.submit(pd.Request(prompt=prompt_of(20, seed=seed), sampling=sampling))
        step_until(setup.pairing, lambda _: decode.load().num_running_requests == NUM_SEQUENCES)
        for _ in range(NUM_STEPS):
            with Watch() as watch:
                decode.step()
            watches.append(watch)
    return {kind: max(watches, key=lambda watch: watch.totals()[kind]) for kind in KINDS}


def read() -> dict[str, dict[str, int]]:
    """Return what is committed, by kind of step."""
    counts: dict[str, dict[str, int]] = json.loads(FILE.read_text("utf-8"))
    return counts


def write() -> None:
    """Count all kinds of step, and write the file."""
    torch.set_num_threads(1)
    set_up()
    memory._page_locked = order.page_locked
    counts = {name: {kind: watch.totals()[kind] for kind, watch in count(step).items()} for name, step in STEPS.items()}
    lines = [f"  {json.dumps(name)}: {json.dumps(kinds)}" for name, kinds in counts.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    print(FILE.read_text("utf-8"), end="")


if __name__ == "__main__":
    write()
