"""Two ends that have read other weights find a tensor in which they differ: each message names the first sixteenth of a
part that differs, and what is in it, until few tensors are left."""

from __future__ import annotations

from pdinfer.errors import LayoutMismatch
from pdinfer.identity import DIGITS, FEW_TENSORS, TensorDigests
from pdinfer.kv.channel.wire import Compare
from pdinfer.kv.layout import WEIGHTS_IDS, KVLayout

MAX_COMPARES = 32
"""How many such messages an end reads from a peer: two for each digit of a part's name."""


def is_findable(error: LayoutMismatch, ours: KVLayout, theirs: KVLayout) -> bool:
    """Return whether nothing but weights differs that both ends have read."""
    have_read = all(layout.weights_id and layout.sampled_weights_id for layout in (ours, theirs))
    return have_read and all(name in WEIGHTS_IDS for name, _, _ in error.fields)


def told(tensors: TensorDigests, part: str) -> Compare:
    """Return the message that tells what is in a part: its tensors when they are few, else digests of its parts."""
    few = tensors.of(part)
    return Compare(part, (), tuple(few)) if len(few) <= FEW_TENSORS else Compare(part, tensors.digests(part))


def answer(tensors: TensorDigests, message: Compare) -> Compare:
    """Return what to tell whoever has told this."""
    if not message.digests:
        return told(tensors, message.part)
    pairs = zip(DIGITS, tensors.digests(message.part), message.digests, strict=True)
    return told(tensors, message.part + next((digit for digit, ours, theirs in pairs if ours != theirs), ""))


def found(tensors: TensorDigests, message: Compare) -> tuple[tuple[str, str, str], ...]:
    """Return the tensors that differ as (name, ours, theirs), once both ends have told theirs of a part; none before
    that."""
    ours = {tensor.name: tensor for tensor in tensors.of(message.part)}
    if message.digests or len(ours) > FEW_TENSORS:
        return ()
    theirs = {tensor.name: tensor for tensor in message.tensors}
    return tuple(
        (f"weights.{name}", str(ours.get(name, "absent")), str(theirs.get(name, "absent")))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    )
