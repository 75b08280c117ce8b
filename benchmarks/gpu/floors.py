"""What a decode step must cost: each of its kernels takes at least what its bytes and operations take on the card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from attention_cases import COMPUTE, Decode
from case import Ceilings, Work
from product_cases import Dense, MaskedExperts

from pdinfer.config import ModelConfig

MOST_OVER_KERNELS, MOST_HOST_US = 1.15, 300
"""The goals: a step as a share of the sum of its kernels, and what the host adds to it."""


@attrs.frozen
class Kernel:
    """A kernel of a step, as often as a step has it."""

    name: str
    count: int
    work: Work


@attrs.frozen
class Step:
    """A decode step of `batch` sequences of `context` tokens, with all experts here. Matrices are in FP8 or bfloat16,
    and rows of the cache are packed in FP8 or not. Each sequence drafts `num_drafts` tokens and checks them."""

    config: ModelConfig
    batch: int
    context: int
    fp8: bool = attrs.field(kw_only=True)
    packed: bool = attrs.field(kw_only=True, default=False)
    num_drafts: int = attrs.field(kw_only=True, default=0)

    def kernels(self) -> Iterator[Kernel]:
        """Yield the kernels that read weights or the cache. Norms, rounding and draws are left out, since others may
        be joined with them: they are about a hundredth."""
        config, hidden, checked = self.config, self.config.hidden_size, self.batch * (1 + self.num_drafts)
        yield from self._layers("dense", config.first_k_dense_replace, checked)
        yield from self._layers("MoE", config.num_hidden_layers - config.first_k_dense_replace, checked)
        yield Kernel("head", 1, self._floats(checked, config.vocab_size, hidden))
        for name, tokens, count in self._drafting(checked):
            yield Kernel(
                f"{name}: joined states", count, self._matrix(tokens, config.hidden_size, 2 * config.hidden_size)
            )
            yield from self._layers(f"{name}: MoE", count, tokens)
            yield Kernel(f"{name}: head", count, self._floats(self.batch, config.vocab_size, hidden))

    def floor_s(self, ceilings: Ceilings) -> float:
        """Return the seconds below which the step cannot run on a card."""
        return sum(kernel.count * kernel.work.floor_s(ceilings) for kernel in self.kernels())

    def _drafting(self, checked: int) -> Iterator[tuple[str, int, int]]:
        """Yield the passes of the layer that drafts: the first one takes all newest tokens, the others one of each
        sequence."""
        if self.num_drafts:
            yield "first draft", checked, 1
        if self.num_drafts > 1:
            yield "next draft", self.batch, self.num_drafts - 1

    def _layers(self, kind: str, count: int, tokens: int) -> Iterator[Kernel]:
        for name, work in {**self._attention(tokens), **self._mlp(kind, tokens)}.items():
            yield Kernel(f"{kind}: {name}", count, work)

    def _attention(self, tokens: int) -> Mapping[str, Work]:
        config, heads = self.config, self.config.num_attention_heads
        latent, rope, q_rank = config.kv_lora_rank, config.qk_rope_head_dim, config.q_lora_rank or 0
        attention = Decode(
            heads=heads,
            batch=self.batch,
            context=self.context,
            num_queries=tokens // self.batch,
            packed=self.packed,
            widths=(latent, rope),
            goal=COMPUTE,
        )
        return {
            "q_a, kv_a": self._matrix(tokens, q_rank + latent + rope, config.hidden_size),
            "q_b": self._matrix(tokens, heads * config.qk_head_dim, q_rank),
            "heads in": self._heads(tokens, config.qk_nope_head_dim),
            "attention": attention.work,
            "heads out": self._heads(tokens, config.v_head_dim),
            "o": self._matrix(tokens, config.hidden_size, heads * config.v_head_dim),
        }

    def _mlp(self, kind: str, tokens: int) -> Mapping[str, Work]:
        config = self.config
        if "MoE" not in kind:
            return self._gated(tokens, config.intermediate_size)
        inner = config.moe_intermediate_size
        return {
            "router": self._floats(tokens, config.n_routed_experts, config.hidden_size),
            "experts": self._experts(tokens),
            **{f"shared {name}": work for name, work in self._gated(tokens, config.n_shared_experts * inner).items()},
        }

    def _gated(self, tokens: int, inner: int) -> Mapping[str, Work]:
        hidden = self.config.hidden_size
        return {"gate, up": self._matrix(tokens, 2 * inner, hidden), "down": self._matrix(tokens, hidden, inner)}

    def _experts(self, tokens: int) -> Work:
        """Return the work of the experts that tokens choose if all are chosen alike often: so many are read."""
        config = self.config
        num_experts, top_k = config.n_routed_experts, config.num_experts_per_tok
        read = num_experts * (1 - (1 - top_k / num_experts) ** tokens)
        sizes = config.hidden_size, config.moe_intermediate_size
        one = MaskedExperts(experts=1, rows=0, sizes=sizes).work.num_bytes
        rows = MaskedExperts(experts=1, rows=tokens * top_k, sizes=sizes).work
        weights = one if self.fp8 else 6 * sizes[0] * sizes[1]
        return attrs.evolve(rows, num_bytes=int(read * weights) + rows.num_bytes - one, in_fp8=self.fp8)

    def _heads(self, tokens: int, width: int) -> Work:
        """Return the work of one half of kv_b_proj, which is held in bfloat16, by heads."""
        heads, latent = self.config.num_attention_heads, self.config.kv_lora_rank
        moved = 2 * heads * (width * latent + tokens * (width + latent))
        return Work(num_bytes=moved, flops=2 * tokens * heads * width * latent)

    def _matrix(self, tokens: int, outputs: int, channels: int) -> Work:
        if self.fp8:
            return Dense(rows=tokens, outputs=outputs, channels=channels).work
        return self._floats(tokens, outputs, channels)

    def _floats(self, tokens: int, outputs: int, channels: int) -> Work:
        moved = 2 * (outputs * channels + tokens * (outputs + channels))
        return Work(num_bytes=moved, flops=2 * tokens * outputs * channels)


def table(step: Step, ceilings: Ceilings) -> str:
    """Return the kernels of a step with their floors, and the sum."""
    rows = [f"{'kernel of a step':<34}{'times':>6}{'MB each':>10}{'GFLOP each':>12}{'floor us':>10}"]
    rows += [
        f"{kernel.name:<34}{kernel.count:>6}{kernel.work.num_bytes / 1e6:>10.1f}{kernel.work.flops / 1e9:>12.2f}"
        f"{kernel.count * kernel.work.floor_s(ceilings) * 1e6:>10.1f}"
        for kernel in step.kernels()
    ]
    return "\n".join([*rows, f"{'sum':<62}{step.floor_s(ceilings) * 1e6:>10.1f}"])


def floor_of(step_us: float, step: Step, ceilings: Ceilings) -> dict[str, float]:
    """Return what a line says of a step beside its floor."""
    floor_us = step.floor_s(ceilings) * 1e6
    return {"step_us": round(step_us, 1), "floor_us": round(floor_us, 1), "over_floor": round(step_us / floor_us, 2)}


def told(line: Mapping[str, Any]) -> str:
    """Return the sentence of a card run on a line of results: what a step took and must cost, and what it misses."""
    host_us, over_kernels = line.get("host_us"), line.get("over_kernels")
    missed = ["the sum of its kernels"] * ((over_kernels or 0) > MOST_OVER_KERNELS)
    missed += ["host_us"] * ((host_us or 0) > MOST_HOST_US)
    missed += ["captured"] * (line["captured"] < line["steps"])
    return (
        f"step {line['case']}: {line['step_us']} us, {line['over_floor']} of its floor, host_us "
        f"{host_us or 'not measured'}, captured {line['captured']} of {line['steps']}; "
        f"goals missed: {', '.join(missed) or 'none'}"
    )


def tell(line: Mapping[str, Any]) -> None:
    """Print a line of results, and the sentence on it if it is of a step."""
    print(json.dumps(line), flush=True)
    if "over_floor" in line:
        print(told(line), flush=True)
