"""Published speeds of DeepSeek-V3 and R1 with their conditions, typed from their sources, as plans and rows."""

from __future__ import annotations

from typing import Any

import attrs

from pdinfer.config import CacheConfig, EngineConfig, ExpertConfig, ModelConfig
from pdinfer.parallel.topology import Topology
from pdinfer.planning import EnginePlan, StepRows
from tests.unit.config import published_configs

V3, K2 = (ModelConfig.from_dict(config) for config in (published_configs.V3, published_configs.KIMI_K2))
BALANCED = 1.0


def plan(
    ranks: int,
    *,
    tp_size: int = 1,
    drafts: int = 0,
    mode: str = "normal",
    overlap: bool = True,
    kv_format: str = "auto",
    redundant: int = 0,
    config: ModelConfig = V3,
    stored: str = "fp8",
    **experts: Any,
) -> EnginePlan:
    """Return an engine of so many ranks, all of which share the experts."""
    return EnginePlan(
        name="P",
        config=config,
        topology=Topology(world_size=ranks, tp_size=tp_size, dp_size=ranks // tp_size, ep_size=ranks),
        cache=CacheConfig(kv_format=kv_format),
        engine=EngineConfig(num_draft_tokens=drafts, max_running_requests=256),
        experts=ExpertConfig(
            **{
                "moe_a2a_backend": "deep_ep",
                "deepep_mode": mode,
                "two_batch_overlap": overlap,
                "ranks_per_node": 8,
                "num_redundant_experts": redundant,
                "num_max_dispatch_tokens_per_rank": 256,
            }
            | experts
        ),
        mtp=drafts > 0,
        stored=stored,
        device="H800",
    )


def prompts(count: int, num_tokens: int) -> StepRows:
    """Return a step of whole prompts."""
    return StepRows(count, count * num_tokens, count * num_tokens, count * num_tokens * (num_tokens + 1) // 2)


def running(count: int, context: int, drafts: int = 0) -> StepRows:
    """Return a step of decode, in which each request has `drafts` tokens beside the certain one."""
    tokens = count * (1 + drafts)
    return StepRows(count, tokens, count * context, tokens * context)


@attrs.frozen
class Point:
    """A speed in tokens per second and card. None as imbalance is the part's factor."""

    part: str
    plan: EnginePlan
    rows: StepRows
    seen: float
    imbalance: float | None = None
    accept_rate: float = 0.0
    fp8_attention: bool = False


def points() -> dict[str, Point]:
    """DeepSeek's profile-data (P1, D1), which balances routing by construction, as does P2; the tensor-parallel experts
    of P4 have no fullest rank. SGLang's posts of 2025-05-05 (P2, P3, D2, D3) and 2025-07-20 (K2, of which 480 requests
    are two batches of 240); Ant's of 2025-09-26 (P4, D4)."""
    low = {"mode": "low_latency"}
    k2_decode = low | {"num_max_dispatch_tokens_per_rank": 480}
    return {
        "P1": Point("H800", plan(32), prompts(4, 4096), 7839, BALANCED),
        "P2": Point("H100", plan(32), prompts(4, 4096), 7417, BALANCED),
        "P3": Point("H100", plan(32, redundant=32), prompts(8, 2048), 6818),
        "P4": Point(
            "H20-96G",
            plan(8, tp_size=8, overlap=False, moe_a2a_backend="auto", mode="normal"),
            prompts(4, 4096),
            2062,
            BALANCED,
            fp8_attention=True,
        ),
        "D1": Point(
            "H800", plan(128, drafts=1, redundant=128, **low), running(128, 4096, 1), 2325, BALANCED, accept_rate=0.6
        ),
        "D2": Point("H100", plan(72, redundant=32, **low), running(256, 2000), 2785),
        "D3": Point("H100", plan(72, redundant=32, drafts=1, **low), running(128, 4000, 1), 2194, accept_rate=0.6),
        "D4": _of_ant(32, 675),
        "D4 batch 8": _of_ant(8, 278),
        "D4 batch 48": _of_ant(48, 714),
        "D4 EP32": _of_ant(32, 585, ranks=32),
        "D4 two drafts": _of_ant(32, 554, drafts=2, accept_rate=0.775),
        "P3 1K": Point("H100", plan(32, redundant=32), prompts(16, 1024), 7209),
        "P3 4K": Point("H100", plan(32, redundant=32), prompts(4, 4096), 6288),
        "D3 one batch": Point(
            "H100", plan(72, redundant=32, drafts=1, overlap=False, **low), running(128, 4000, 1), 1616, accept_rate=0.6
        ),
        "K2 prefill": Point("H200", plan(32, config=K2), prompts(8, 2048), 7000),
        "K2 decode": Point("H200", plan(96, redundant=96, config=K2, **k2_decode), running(480, 2050), 3000),
    }


def _of_ant(count: int, seen: float, *, ranks: int = 16, drafts: int = 1, accept_rate: float = 0.85) -> Point:
    """Return a decode of so many requests on each card, with 4096 tokens and half of 1536 more."""
    engine = plan(ranks, drafts=drafts, overlap=False, kv_format="fp8", mode="low_latency")
    rows = running(count, 4864, drafts)
    return Point("H20-96G", engine, rows, seen, accept_rate=accept_rate, fp8_attention=True)
