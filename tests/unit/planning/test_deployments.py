"""What the ranks of two published deployments hold, added up from the models' configs: weights that stay as they are
stored, what must be floats, and KV.

`deployments.csv` holds an engine per row. The rows of "v3" are of a study of DeepSeek-V3 on 13 nodes of 8 H800 (SGLang
0.4.8, July 2025), whose tools see 79.1 GiB of an H800: "P2" is a prefill engine of 2 nodes. Those of "v32" are of
DeepSeek-V3.2 as W8A8 on 32 Ascend A3 cards, prefill context parallel and decode data parallel over 32 dies of 64 GB
each, on which pdinfer does not run. `requests` of `tokens` (prompt and output) are in the engine at once: a prompt in
prefill, and in decode the largest burst that was reported for it.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import attrs
import pytest

from pdinfer.config import CacheConfig, ExpertConfig, ModelConfig
from pdinfer.parallel import Topology
from pdinfer.planning import EnginePlan, profile
from tests.unit.config import published_configs

LINES = Path(__file__).with_name("deployments.csv").read_text("utf-8").splitlines()
ROWS = {row["engine"]: row for row in csv.DictReader(LINES)}
CONFIGS = {"v3": ModelConfig.from_dict(published_configs.V3), "v32": ModelConfig.from_dict(published_configs.V32)}
PAGE = (Path(__file__).parents[3] / "docs/howto/cluster.md").read_text("utf-8")
GIB = 1 << 30

SHORT_OF_PAGES = {"D2": {"bfloat16", "fp8"}, "A3 P": {"bfloat16", "fp8"}, "A3 D BS16": {"bfloat16"}}
"""Whose requests do not all fit into `mem_fraction_static` at once, and in which formats of KV."""


@attrs.frozen
class Deployed:
    """An engine of a deployment, and the tokens that the pool of a rank must hold for its requests."""

    plan: EnginePlan
    wanted_tokens: int

    @classmethod
    def of(cls, name: str, kv_format: str = "auto") -> Deployed:
        row = ROWS[name]
        ranks, cp, tp = int(row["ranks"]), int(row["cp_size"]), int(row["tp_size"])
        groups = ranks // (cp * tp)
        page_size, share = int(row["page_size"]), float(row["mem_fraction_static"])
        plan = EnginePlan(
            name=name,
            config=CONFIGS[row["model"]],
            topology=Topology(world_size=ranks, dp_size=groups, cp_size=cp, tp_size=tp, ep_size=ranks),
            cache=CacheConfig(page_size=page_size, mem_fraction_static=share, kv_format=kv_format),
            experts=ExpertConfig(num_redundant_experts=int(row["redundant"])),
            mtp=row["mtp"] == "1",
            stored=row["stored"],
            weights="auto" if row["device"] == "H800" else "stored",
            device=row["device"],
            device_bytes=int(row["memory_bytes"]),
        )
        return cls(plan, -(-int(row["requests"]) // groups) * int(row["tokens"]))

    @property
    def wanted_pages(self) -> int:
        return self.plan.layout.num_pages(self.wanted_tokens)

    @property
    def line(self) -> str:
        """Its row of the table in docs/howto/cluster.md."""
        plan, weights, placement = self.plan, self.plan.rank_weights, self.plan.placement
        assert placement is not None
        assert plan.num_pages is not None
        assert plan.device_bytes is not None
        sizes = (weights.quantized, weights.floats, weights.total, plan.device_bytes)
        cells = (
            plan.name,
            plan.topology.world_size,
            placement.slots_per_rank,
            *(f"{size / GIB:.2f}" for size in sizes),
            plan.cache.mem_fraction_static,
            f"{plan.num_pages * plan.layout.page_size:,}",
            f"{self.wanted_tokens:,}",
        )
        return f"| {' | '.join(map(str, cells))} |"


@pytest.mark.parametrize("name", ROWS)
def test_weights_and_the_requests_of_a_deployment_fit_its_devices(name: str) -> None:
    """FP8 on an H800 is kept because it is fast there. Pages are as large as they can be: bfloat16."""
    deployed = Deployed.of(name)
    plan = deployed.plan
    assert plan.device_bytes is not None
    assert plan.weight_bytes + deployed.wanted_pages * plan.layout.page_bytes <= plan.device_bytes
    assert deployed.line in PAGE, deployed.line


@pytest.mark.parametrize("kv_format", ["bfloat16", "fp8"])
@pytest.mark.parametrize("name", ROWS)
def test_which_requests_do_not_fit_the_share_that_a_deployment_gave_them(name: str, kv_format: str) -> None:
    deployed = Deployed.of(name, kv_format)
    assert deployed.plan.num_pages is not None
    assert (deployed.wanted_pages > deployed.plan.num_pages) == (kv_format in SHORT_OF_PAGES.get(name, ()))


def test_only_what_must_be_floats_is() -> None:
    """On a rank of P2: embedding, head, norms, kv_b_proj of every layer, and the routers in float32."""
    config, weights = CONFIGS["v3"], Deployed.of("P2").plan.rank_weights
    hidden, layers = config.hidden_size, config.num_hidden_layers
    kv_b = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
    norms = (2 * layers + 1) * hidden + layers * ((config.q_lora_rank or 0) + config.kv_lora_rank)
    routers = (layers - config.first_k_dense_replace) * config.n_routed_experts * (hidden + 1)
    assert weights.floats == 2 * (2 * config.vocab_size * hidden + layers * kv_b + norms) + 4 * routers


def test_experts_take_the_bytes_that_their_sizes_say() -> None:
    """Between 24 and 16 ranks a layer has 6 experts less of 3 matrices each, in blocks of 128 x 128 with a scale."""
    config = CONFIGS["v3"]
    numbers = 3 * config.hidden_size * config.moe_intermediate_size
    of_an_expert = numbers + 4 * numbers // (128 * 128)
    more = Deployed.of("P2").plan.rank_weights.quantized - Deployed.of("P3").plan.rank_weights.quantized
    assert more == (config.num_hidden_layers - config.first_k_dense_replace) * 6 * of_an_expert


def test_the_plan_of_a_cluster_is_that_of_its_deployment() -> None:
    for text in ("P3x3D4", "P4D9", "P2D2"):
        for engine in profile(f"deepseek-v3-h800-{text}").plan(CONFIGS["v3"]).engines:
            row = Deployed.of(f"{engine.name[0]}{engine.topology.world_size // 8}").plan
            assert (engine.rank_weights, engine.device_bytes) == (row.rank_weights, row.device_bytes)
            assert engine.layout == row.layout


def test_the_table_has_no_other_rows() -> None:
    table = PAGE[PAGE.index("| engine | ranks |") :].split("\n\n")[0]
    assert len(re.findall(r"^\| (?:P|D|A3)", table, re.MULTILINE)) == len(ROWS)
