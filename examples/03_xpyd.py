"""Run two prefills and two decodes; a third decode joins while requests run, and a prefill leaves.

    python examples/03_xpyd.py [CHECKPOINT]

All engines live in this process and share one model, each with a pool of its own, so every hand-off copies pages. To
move an engine into another process, put it behind `pdinfer.remote.serve`; nothing else here changes.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tiny_tasks import BOS, encode

import pdinfer as pd
from pdinfer.stats import DecodeLoad, PrefillLoad
from pdinfer.types import Choice, RequestShape

CHECKPOINT = Path(__file__).parent / "tiny"


def main(checkpoint: Path) -> None:
    model = pd.load_model(checkpoint)
    pools = [pd.PagePool(model, pd.CacheConfig(page_size=16, num_pages=64)) for _ in range(5)]
    ends = pd.KVChannel.loopback(*pools)
    prefills = [pd.PrefillEngine(model, end) for end in ends[:2]]
    decodes = [pd.DecodeEngine(model, end) for end in ends[2:]]
    names = {end.address: name for end, name in zip(ends, ("P0", "P1", "D0", "D1", "D2"), strict=True)}
    chosen: Counter[str] = Counter()

    def watched(
        shape: RequestShape, prefill_loads: Sequence[PrefillLoad], decode_loads: Sequence[DecodeLoad]
    ) -> Choice | None:
        """A policy is a function of snapshots: this one asks another policy and counts its choices."""
        choice = pd.policy.least_tokens(shape, prefill_loads, decode_loads)
        if choice is not None:
            chosen[f"{names[choice.prefill]} -> {names[choice.decode]}"] += 1
        return choice

    sampling = pd.SamplingParams(temperature=0, max_new_tokens=12)
    with pd.Pairing(prefills, decodes[:2], policy=watched) as pairing:
        for number in range(12):
            pairing.submit(pd.Request(prompt=(BOS, *encode(f"calc {number}+{number}=")), sampling=sampling))
        ended = sum(event.finish_reason is not None for _ in range(4) for event in pairing.step())
        pairing.add(decodes[2])
        pairing.remove(prefills[0], drain_s=5.0)
        for number in range(12):
            pairing.submit(pd.Request(prompt=(BOS, *encode(f"calc {number}-{number}=")), sampling=sampling))
        assert pairing.drain(60.0)
        ended += sum(event.finish_reason is not None for event in pairing.step())
    print(f"{ended} requests ended")
    for pair, count in sorted(chosen.items()):
        print(f"  {pair}: {count}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKPOINT)
