"""Policies choose the prefill and the decode for a request. They are pure functions of snapshots and show their scores.

A policy gets the loads of the ports that can take one more request, and every link between them in `shape.links`. It
returns a `Choice`, or None to let the request wait. It may score each side by itself, as the policies below do, or each
pair as a whole:

    def fastest_link(shape, prefills, decodes):
        link = max(shape.links, key=lambda link: link.bytes_per_s or math.inf, default=None)  # try the unknown first
        return None if link is None else Choice(prefill=link.prefill, decode=link.decode)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdinfer.stats import DecodeLoad, PrefillLoad
from pdinfer.types import Choice, RequestShape

Policy = Callable[[RequestShape, Sequence[PrefillLoad], Sequence[DecodeLoad]], Choice | None]


def round_robin(shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]) -> Choice | None:
    """Choose every port in turn, whatever its load."""
    if not prefills or not decodes:
        return None
    return Choice(
        prefill=prefills[shape.ordinal % len(prefills)].address,
        decode=decodes[shape.ordinal % len(decodes)].address,
    )


def least_tokens(shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]) -> Choice | None:
    """Choose the prefill with the fewest tokens still to compute, and the decode with the fewest tokens held or waiting
    per page of its pool. Counting tokens keeps long prompts from piling up behind each other."""
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
    """Return the tokens running, granted and waiting as a share of the tokens that the pool can hold."""
    return (load.num_running_tokens + load.num_waiting_tokens) / (load.num_total_pages * load.page_size)
