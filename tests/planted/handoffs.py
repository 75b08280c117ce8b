"""Bugs in what makes hand-offs fast: copies and digests in one pass, and a thread that serves links while it waits."""

from __future__ import annotations

from tests.planted.mutant import Mutant

FUSED = "test_fused.py::"
SHM = "test_transport_conformance.py::TestShm::"

MUTANTS = [
    Mutant(
        "the last stripe is taken in before its time",
        "int64_t stripes = (num - 1) / STRIPE;",
        "int64_t stripes = num / STRIPE;",
        FUSED + "test_what_is_read_has_the_digest_of_xxhash",
    ),
    Mutant(
        "bytes before the border of a line are not copied",
        "    memcpy(to, from, (size_t)at);\n    for",
        "    for",
        FUSED + "test_what_is_copied_lies_where_it_belongs_and_is_digested",
    ),
    Mutant(
        "what is copied is written beyond its targets",
        "if (index == num_targets)\n                goto end;",
        "if (index == num_targets)\n                index--;",
        FUSED + "test_nothing_is_copied_beyond_the_targets",
    ),
    Mutant(
        "the sender's digest covers no header",
        "FusedDigest(loops, start)",
        'FusedDigest(loops, b"")',
        SHM + "test_writes_are_placed_byte_for_byte",
        where="sender.py",
    ),
    Mutant(
        "a receiver that waits is named a long section first",
        "DIGESTED_SECTION_BYTES if self._digest and is_waited_for else",
        "DIGESTED_SECTION_BYTES if self._digest and not is_waited_for else",
        "test_lender.py::test_who_has_enough_to_copy_is_named_more_at_once",
    ),
]
