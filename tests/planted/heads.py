"""Bugs in pages with heads."""

from __future__ import annotations

from tests.planted.mutant import Mutant

CHANNEL = "test_heads.py::"
VLLM = "test_vllm_heads.py::"
SHAPES = "test_shapes.py::"

MUTANTS = [
    Mutant(
        "a rank's first head counts as head 0",
        "(np.arange(heads.start, heads.stop) - component.axes.heads.start)",
        "np.arange(heads.start, heads.stop)",
        SHAPES + "test_a_payload_means_the_same_in_another_order_page_size_and_slice_of_heads",
    ),
    Mutant(
        "every rank of decode is sent every head",
        "heads if peer is None else common(heads, peer.heads)",
        "heads",
        CHANNEL + "test_every_byte_lands_between_ranks_with_other_heads",
    ),
    Mutant(
        "a payload is read in the order of the reader's pages",
        "by_token=peer.layout is not None and peer.layout.by_token",
        "by_token=layout.by_token",
        CHANNEL + "test_every_byte_lands_between_ranks_with_other_heads",
    ),
    Mutant(
        "of several heads only the first is noted as announced",
        "for layer in layers for head in heads]",
        "for layer in layers for head in heads[:1]]",
        CHANNEL + "test_a_head_that_two_writers_send_costs_the_second_its_link",
    ),
    Mutant(
        "packed pages of other sizes meet",
        "may_differ: set[str] = set()",
        'may_differ: set[str] = {"page_size"}',
        CHANNEL + "test_packed_pages_need_the_same_pages_at_both_ends",
    ),
    # -- inside vLLM
    Mutant(
        "a packed block leaves before it is full, and not again",
        "border(save.stop, up=save.whole)",
        "border(save.stop, up=True)",
        VLLM + "test_packed_blocks_land_whole",
    ),
    Mutant(
        "blocks that another instruction set packs are taken",
        "cpu_attn {isa} ",
        "cpu_attn ",
        VLLM + "test_blocks_of_another_form_are_refused_by_name",
    ),
]
