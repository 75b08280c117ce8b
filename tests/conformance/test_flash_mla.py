"""Attention by FlashMLA is that of the reference: through a stand-in that checks what the library checks, or through
the library on a card that has it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.config import CacheConfig
from pdinfer.errors import BackendUnavailable
from pdinfer.execution.runner import ModelRunner
from pdinfer.execution.sampling import Draw
from pdinfer.kernels import OpSpec, resolve_ops
from pdinfer.kernels import flash_mla as adapter
from pdinfer.kernels.arguments import DecodeCache, TokenCache
from pdinfer.kernels.torch import attention as torch_attention
from pdinfer.model.batch import Row
from pdinfer.testing import random_model, tiny_config
from pdinfer.types import SamplingParams
from tests.conformance import fake_flash_mla
from tests.conformance.libraries import check_parameters, installed
from tests.conformance.op_suite import SCALE, Attention, contexts_of, draw
from tests.conformance.test_sparse_ops import Sparse
from tests.rounding import assert_within

BF16 = OpSpec(device="cpu")
OPS = ("mla_decode", "mla_sparse")
DIMS = (512, 64, 128, 128)


@pytest.fixture(params=["2025", "2026", pytest.param("real", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device on which a version of the library is."""
    if request.param == "real":
        yield "cuda"
        return
    with installed(adapter, fake_flash_mla.build(request.param)):
        yield "cpu"


def dense(contexts: tuple[int, ...], heads: int, num_queries: int) -> Attention:
    """The table is wider than any context, of int64, and slots of nobody are NaN."""
    lens = (1,) * len(contexts)
    return Attention(torch.bfloat16, heads, 64, contexts, lens, DIMS, num_queries, torch.int64, spare_columns=2)


@pytest.mark.parametrize("version", ["dense", "2025", "2026"])
def test_the_stand_in_is_called_as_the_library_is(version: str) -> None:
    """At 261330b ("dense"), c28eca9 and 9241ae3, whose plan takes anything."""
    library = fake_flash_mla.build(version)
    names = "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal "
    later = "is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length"
    check_parameters(library.flash_mla_with_kvcache, names if version == "dense" else names + later)
    of_plan = {
        "dense": "cache_seqlens num_heads_per_head_k num_heads_k",
        "2025": "cache_seqlens num_q_tokens_per_head_k num_heads_k num_heads_q is_fp8_kvcache topk",
    }
    if version in of_plan:
        check_parameters(library.get_mla_metadata, of_plan[version])


@pytest.mark.parametrize(("heads", "num_queries"), [(1, 1), (16, 2), (3, 4)])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_mla_decode(device: str, heads: int, num_queries: int, count: int) -> None:
    contexts = tuple(max(num_queries, context) for context in contexts_of(64, count))
    dense(contexts, heads, num_queries).check("mla_decode", "flash_mla", device)


@pytest.mark.parametrize("version", ["2025", "2026"])
def test_the_layers_of_a_step_have_one_plan(version: str) -> None:
    """What is made of their lengths is made once. The next step, whose lengths differ, has its own."""
    q, rope = draw(2, 2, 64, 512).bfloat16(), draw(2, 2, 64, 64).bfloat16()
    table, lens = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32), torch.tensor([66, 3])
    packed = torch.zeros(3, 64, 656, dtype=torch.uint8)
    chosen, sequence = torch.tensor([[0, 65], [1, 2]]), torch.tensor([0, 1])
    with installed(adapter, fake_flash_mla.build(version)):
        library, plans = sys.modules["flash_mla"], []
        plan = library.get_mla_metadata

        def counted(*given: Any, **named: Any) -> Any:
            plans.append(plan(*given, **named))
            return plans[-1]

        library.get_mla_metadata = counted  # type: ignore[attr-defined]
        ops = resolve_ops(BF16, forced=dict.fromkeys(OPS, "flash_mla")).ops

        def layer(seed: int, of_step: dict[object, Any]) -> list[Tensor]:
            pages = draw(3, 64, 576, seed=seed).bfloat16()
            cache = DecodeCache(pages, table, lens, of_step=of_step)
            of_tokens = TokenCache(packed, table, sequence, of_step=of_step)
            return [
                ops.mla_decode(q, rope, cache, scale=SCALE),
                ops.mla_decode(q[:, :1], rope[:, :1], cache, scale=SCALE),
                ops.mla_sparse(q[:, 0], rope[:, 0], of_tokens, chosen, scale=SCALE),
            ]

        step: dict[object, Any] = {}
        layer(1, step)
        again = layer(2, step)
        assert len(plans) == 3  # Q and the op tell plans apart
        assert all(torch.equal(*both) for both in zip(again, layer(2, {}), strict=True))
        assert len(plans) == 6


def test_drafts_are_queries_of_their_sequence() -> None:
    """So that its latents are read once for all of them: one call has them, with a plan for as many rows."""
    library, asked = fake_flash_mla.build("2025"), []
    attend = library.flash_mla_with_kvcache

    def noted(*of: Any, **named: Any) -> Any:
        asked.append((of[0].shape, len(of[2]), named["causal"]))
        return attend(*of, **named)

    library.flash_mla_with_kvcache = noted  # type: ignore[attr-defined]
    with installed(adapter, library):
        dense((66, 3), 32, 3).check("mla_decode", "flash_mla")
        dense((66, 3), 32, 1).check("mla_decode", "flash_mla")
    assert asked == [((2, 3, 32, 576), 2, True), ((2, 1, 32, 576), 2, False)]


@pytest.mark.parametrize("num_live", [(1, 1, 1, 1, 1), (4, 4, 4, 4, 4), (2, 1, 4, 3, 0), (0, 3, 2, 1, 4)])
def test_a_query_that_is_not_live_changes_no_other(device: str, num_live: tuple[int, ...]) -> None:
    """Its latent was not written: NaN lies where its own would, also in a page behind those of the others. Sequences
    are as short as their queries, and end before, on and behind the border of a page."""
    case = attrs.evolve(dense((20, 4, 64, 66, 130), 3, 4), num_live=num_live)
    unused = case.pages
    for mine, context, live in zip(case.owned, case.contexts, num_live, strict=True):
        for position in range(context - 4 + live, context):
            unused[mine[position // 64], position % 64] = torch.nan
    got = case.run("mla_decode", "flash_mla", device, unused)
    exact, error = case.expected("mla_decode")
    for row, live in enumerate(num_live):
        assert_within(got[row, :live], exact[row, :live], error[row, :live], torch.bfloat16)


def test_a_step_that_drafts_reads_nothing_that_was_not_written() -> None:
    """One row drafts three tokens, and the other none. All else in the pages is NaN."""
    config = tiny_config("v3", num_nextn_predict_layers=1, kv_lora_rank=512, qk_rope_head_dim=64)
    prompts, tables = ((3, 4, 5), (6, 7, 8)), ((1,), (2,))
    with installed(adapter, fake_flash_mla.build("2026")):
        model = random_model(config, mtp=True, dtype=torch.bfloat16)
        assert {each.op: each.provider for each in model.resolved.choices}["mla_decode"] == "flash_mla"
        memory = model.allocate_pages(model.kv_layout(CacheConfig(page_size=64)), 4)
        memory.buffer.fill_(0xFF)
        runner = ModelRunner(model, memory)
        for _ in runner.prefill([Row(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)]):
            pass
        drafts = [runner.draft(state) for state in runner.states([0, 1])]
        drafts[0].num_tokens = 3
        draws = [Draw(sampling=SamplingParams(temperature=0.0), prompt=prompt, output=(7,)) for prompt in prompts]
        drawn = runner.decode([Row((7,), 3, table) for table in tables], draws, drafts)
    assert [one.error for row in drawn for one in row] == [None] * sum(map(len, drawn))


@pytest.mark.parametrize("heads", [64, 128])
def test_mla_sparse(device: str, heads: int) -> None:
    """One token reads nothing; the others read fewer positions than a step of the kernel has."""
    case = Sparse(torch.bfloat16, 64, packed=True, heads=heads, latent=512, rope=64, contexts=(70, 1, 130))
    got, (exact, error) = case.run("flash_mla", device), case.expected()
    some = [token for token, count in enumerate(case.counts) if count]
    assert_within(got[some], exact[some], error[some], torch.bfloat16)
    assert all(got[token].isnan().all() for token, count in enumerate(case.counts) if not count)


@pytest.mark.parametrize(("tokens", "chosen"), [(0, 3), (2, 0)])
def test_nothing_chosen_is_nan(device: str, tokens: int, chosen: int) -> None:
    q_latent, q_rope = (torch.zeros(tokens, 64, width, dtype=torch.bfloat16, device=device) for width in (512, 64))
    pages = torch.zeros(1, 64, 656, dtype=torch.uint8, device=device)
    sequence = torch.zeros(tokens, dtype=torch.int64, device=device)
    op = resolve_ops(OpSpec(device=device), forced={"mla_sparse": "flash_mla"}).ops.mla_sparse
    cache = TokenCache(pages, sequence[:, None], sequence)
    got = op(q_latent, q_rope, cache, sequence[:, None].expand(-1, chosen), scale=SCALE)
    assert got.shape == (tokens, 64, 512)
    assert got.isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["query", "latent"])
def test_what_is_not_finite_is_not_lost(device: str, where: str, value: float) -> None:
    """A query of one sequence, which may have a single token, or a latent of one."""
    case = dense((1, 70), 3, 1)
    for row in range(2):
        pages = case.pages
        if where == "latent":
            pages[case.owned[row][0], 0, 5] = value

        def put(x: torch.Tensor, row: int = row) -> torch.Tensor:
            x = x.to(device)
            if where == "query" and x.shape[-1] == 512:
                x[row, 0, :, 7] = value
            return x

        op = resolve_ops(OpSpec(device=device), forced={"mla_decode": "flash_mla"}).ops.mla_decode
        got = case.decode(op, pages.to(device), put)
        assert not got[row].isfinite().all(-1).any()
        assert got[1 - row].isfinite().all()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"page_size": 16}, "reads pages of 64 tokens, these have 16"),
        ({"dims": (256, 64, 128, 128)}, "reads latents of 512 and rotary keys of 64 elements, they have 256 and 64"),
        ({"dtype": torch.float32}, "computes in bfloat16, these queries are of torch.float32"),
    ],
)
def test_what_the_kernels_do_not_take_goes_to_the_next_provider(changes: dict[str, object], told: str) -> None:
    case = attrs.evolve(dense((20, 4), 3, 1), **changes)
    with installed(adapter, fake_flash_mla.build("2026")):
        in_turn = resolve_ops(BF16).ops.mla_decode
        assert torch.equal(*(case.decode(op, case.pages, lambda x: x) for op in (in_turn, torch_attention.mla_decode)))
        op = resolve_ops(BF16, forced={"mla_decode": "flash_mla"}).ops.mla_decode
        with pytest.raises(BackendUnavailable, match=f"op mla_decode: {told}"):
            case.decode(op, case.pages, lambda x: x)


PAGES_OF_32 = (
    "reads pages of 64 tokens, these have 32: with page_size=64 it was {} as fast as Triton on an H200 "
    "(benchmarks/results/2026-11-26-gpu-h200.jsonl)"
)


@pytest.mark.parametrize(
    ("op", "known", "told"),
    [
        ("mla_decode", {"page_size": 32}, PAGES_OF_32.format("1.5 to 2 times with 128 heads, 1.2 times with 16,")),
        ("mla_sparse", {"page_size": 32}, PAGES_OF_32.format("2.6 to 2.8 times")),
        ("mla_decode", {"page_size": 32, "kv_format": "fp8"}, "reads pages of bfloat16, these are packed FP8"),
        ("mla_decode", {"kv_format": "fp8"}, "reads pages of bfloat16, these are packed FP8"),
        ("mla_sparse", {"kv_format": "bfloat16"}, "reads pages of packed FP8, these are not"),
        ("mla_sparse", {"num_heads": 16}, "has sparse kernels for 64 and 128 heads on a rank, there are 16"),
        (
            "mla_decode",
            {"kv_lora_rank": 256},
            "reads latents of 512 and rotary keys of 64 elements, they have 256 and any",
        ),
        ("mla_sparse", {"dtype": torch.float16}, "computes in bfloat16, the model runs in torch.float16"),
        ("mla_decode", {"num_heads": 16, "kv_lora_rank": 512, "page_size": 64, "kv_format": "bfloat16"}, None),
        ("mla_sparse", {"num_heads": 128, "qk_rope_head_dim": 64, "page_size": 64, "kv_format": "fp8"}, None),
    ],
)
def test_what_is_known_to_be_beyond_the_kernels_is_refused(op: str, known: dict[str, object], told: str | None) -> None:
    with installed(adapter, fake_flash_mla.build("2025")):
        refusal = adapter.refuses(op, attrs.evolve(BF16, **known))
    assert refusal == told


def test_a_version_without_sparse_attention_decodes() -> None:
    with installed(adapter, fake_flash_mla.build("dense")):
        assert adapter.refuses("mla_sparse", BF16) == "this flash_mla is too old for sparse attention"
        dense((66, 3), 2, 2).check("mla_decode", "flash_mla")


@pytest.mark.parametrize("name", ["cpu", "A100", "B200"])
def test_other_devices_are_refused(name: str) -> None:
    assert adapter.unavailable(OpSpec(device=name)) == f"is used on Hopper cards, not on {name}"


def test_without_the_library() -> None:
    with installed(adapter, None):
        assert "cannot be imported (" in str(adapter.unavailable(BF16))
    with installed(adapter, ModuleType("flash_mla")):
        assert adapter.unavailable(BF16) == "this flash_mla has no get_mla_metadata"
