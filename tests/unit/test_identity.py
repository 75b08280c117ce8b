"""Digests of tensors in parts: what is equal, and where two sets of tensors differ."""

from __future__ import annotations

import attrs
import pytest

from pdinfer.identity import DIGITS, NO_TENSORS, TensorDigest, TensorDigests

TENSORS = [TensorDigest(f"model.layers.{place}.weight", "bfloat16 [2, 3]", bytes([place]) * 16) for place in range(40)]


def test_every_tensor_is_in_one_of_sixteen_parts() -> None:
    tensors = TensorDigests(TENSORS)
    for part in ("", "3", "c"):
        parts = [tensors.of(part + digit) for digit in DIGITS]
        assert [tensor for held in parts for tensor in held] == tensors.of(part)
    assert sorted(tensors.of(""), key=lambda tensor: tensor.digest) == TENSORS
    assert [tensors.of(tensor.key) for tensor in TENSORS] == [[tensor] for tensor in TENSORS]


def test_the_order_of_tensors_is_no_difference() -> None:
    one, other = TensorDigests(TENSORS), TensorDigests(reversed(TENSORS))
    assert one.digest() == other.digest() != NO_TENSORS.digest()
    assert one.digests("") == other.digests("")


@pytest.mark.parametrize(
    "other",
    [{"digest": b"x" * 16}, {"form": "float16 [2, 3]"}, {"form": "bfloat16 [3, 2]"}, {"name": "model.norm.weight"}],
    ids=str,
)
def test_a_tensor_that_differs_changes_its_own_part_alone(other: dict[str, object]) -> None:
    changed = attrs.evolve(TENSORS[7], **other)
    ours, theirs = TensorDigests(TENSORS), TensorDigests([*TENSORS[:7], changed, *TENSORS[8:]])
    assert ours.digest() != theirs.digest()
    parts = {tensor.key[0] for tensor in (TENSORS[7], changed)}
    pairs = zip(DIGITS, ours.digests(""), theirs.digests(""), strict=True)
    assert {digit for digit, one, another in pairs if one != another} == parts
