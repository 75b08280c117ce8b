"""Which prefill and which decode take a request: pure functions over snapshots, scores shown.

A policy gets the ports that can take one more request, with every link between them in `shape.links`, and returns a
`Choice`, or None to let the request wait. It may score the two sides apart, as those below do, or pairs together:

    def fastest_link(shape, prefills, decodes):
        link = max(shape.links, key=lambda link: link.bytes_per_s or 0.0, default=None)
        return None if link is None else Choice(prefill=link.prefill, decode=link.decode)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdinfer.stats import DecodeLoad, PrefillLoad
from pdinfer.types import Choice, RequestShape

Policy = Callable[[RequestShape, Sequence[PrefillLoad], Sequence[DecodeLoad]], Choice | None]


def round_robin(shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]) -> Choice | None:
    """Every port in turn, whatever its load."""
    if not prefills or not decodes:
        return None
    return Choice(
        prefill=prefills[shape.ordinal % len(prefills)].address,
        decode=decodes[shape.ordinal % len(decodes)].address,
    )


def least_tokens(shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]) -> Choice | None:
    """The prefill with the fewest tokens still to compute, and the decode with the fewest tokens held or waiting per
    page of its pool: traffic-aware, so long prompts do not pile up behind each other."""
    if not prefills or not decodes:
        return None
    prefill = min(prefills, key=lambda load: load.num_queued_tokens)
    decode = min(decodes, key=_held_share)
    return Choice(
        prefill=prefill.address,
        decode=decode.address,
        score=(("prefill_queued_tokens", float(prefill.num_queued_tokens)), ("decode_held_share", _held_share(decode))),
    )


def _held_share(load: DecodeLoad) -> float:
    """Tokens running, granted and waiting over the tokens the pool can hold."""
    return (load.num_running_tokens + load.num_waiting_tokens) / (load.num_total_pages * load.page_size)
