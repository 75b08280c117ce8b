"""How long a step takes by a model's config and a part's numbers: what is computed, read and sent, over what the part
does per second.

A step is a sum of works (`Work`): each takes as long as its products at the share of the peak rate that products
reach, or as its bytes from memory, whichever is longer. The all-to-all comes on top, hidden in part by two batches.
Formulas and published points that it was compared with: docs/decisions/0071."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdinfer.checks import clip, is_number, typed
from pdinfer.errors import ConfigError
from pdinfer.kv.layout import MTP_PREFIX
from pdinfer.kv.view import DTYPES
from pdinfer.moe.placement.placement import ExpertPlacement
from pdinfer.planning.parts import Hardware
from pdinfer.planning.plan import EnginePlan
from pdinfer.planning.simulation import StepRows
from pdinfer.planning.traffic import Traffic
from pdinfer.values import Value

_BYTES = {"fp8": 1.0, "w8a8_dynamic": 1.0, "int4": 4.5 / 8, "mxfp4": 4.25 / 8}
"""Of a quantized weight. In four bits 32 weights share a scale; in eight so many do that scales do not count."""
_EIGHT_BITS = frozenset({"fp8", "w8a8_dynamic"})
MOST_IMBALANCE = 1e6
"""More than the ranks that experts are spread over, which it is at most."""


@attrs.frozen
class Work:
    """A part of a step: `flops` that run at `flops_per_s` times `reached`, and `num_bytes` of device memory. It waits
    for one of both, and has a name for each."""

    names: tuple[str, str]
    flops: Any = 0.0
    flops_per_s: float = 1.0
    reached: float = 1.0
    num_bytes: Any = 0.0


@attrs.frozen(kw_only=True)
class _Pass:
    """The model's layers, `num_dense` and `num_moe` of them, over some rows of an attention group: its tokens, their
    contexts, and the pairs that attend, in the latent space if it is `absorbed`. The logits of `num_logits` tokens are
    computed."""

    absorbed: bool
    num_dense: int
    num_moe: int
    num_tokens: Any
    num_context: Any
    num_pairs: Any
    num_logits: float

    @property
    def num_layers(self) -> int:
        return self.num_dense + self.num_moe


@attrs.frozen(kw_only=True)
class Roofline(Value):
    """The seconds of an engine's step, `roofline(rows)`, where each of its attention groups has `rows`: the fullest
    counts, since all groups step together. Where there are fewer requests than groups it is the mean, such as 1/32 of a
    row, as most groups choose no experts then. Make it with `planning.roofline`.

    Rows of at most 1 + `num_draft_tokens` tokens are a step of decode, whose attention is absorbed. Drafts run the MTP
    layer once each. At decode contexts and pairs may be numpy arrays, as in `StepRows`."""

    plan: EnginePlan
    hardware: Hardware
    imbalance: float
    fp8_attention: bool

    def __call__(self, rows: StepRows) -> Any:
        """Return the seconds of a step. Raises ConfigError for rows that no step has, as the other methods do."""
        compute, traffic = (sum(seconds.values()) for seconds in (self._compute_s(rows), self._traffic_s(rows)))
        if not self.plan.experts.two_batch_overlap:
            return compute + traffic
        factors = self.hardware.factors
        compute = compute / (1.0 - factors.communication_share * self._traffic.takes_multiprocessors)
        return np.maximum(compute, traffic) + (1.0 - factors.overlap) * np.minimum(compute, traffic)

    @typed
    def bound(self, rows: StepRows) -> str:
        """Return what takes the longest: "all-to-all", "all-reduce", "experts' FLOPs", "KV bytes" or alike."""
        compute, traffic = self._compute_s(rows), self._traffic_s(rows)
        rivals = compute | traffic
        if self.plan.experts.two_batch_overlap:  # one hides the other
            rivals = max(compute, traffic, key=lambda seconds: float(np.max(sum(seconds.values()))))
        return max(rivals, key=lambda name: float(np.max(rivals[name])))

    @typed
    def floor_s(self, rows: StepRows) -> Any:
        """Return the seconds that no step of these rows can be faster than: all products at their peak rates, all bytes
        at the peak rate of memory, whichever is longer."""
        works = list(self._works(rows))
        return np.maximum(
            sum(work.flops / work.flops_per_s for work in works),
            sum(work.num_bytes for work in works) / self.hardware.memory_bytes_per_s,
        )

    @typed
    def rate(self, rows: StepRows, *, accept_rate: float = 0.0) -> Any:
        """Return the tokens per second and rank: of prompts, or at decode those that rows get. A draft is right with
        the chance `accept_rate` if those before it are, so a row gets 1 + a + a² + … of them. Raises ConfigError for a
        chance that is not from 0 to 1."""
        if not 0.0 <= accept_rate <= 1.0:
            raise ConfigError(f"accept_rate must be from 0 to 1, the share of drafts that are right, got {accept_rate}")
        took_s, num_tokens = self(rows), rows.num_tokens
        if self._is_decode(rows):
            num_drafts = int(rows.num_tokens // rows.num_rows) - 1
            num_tokens = rows.num_rows * sum(accept_rate**right for right in range(num_drafts + 1))
        return num_tokens / took_s / self._group_size

    # -- what a step does --------------------------------------------------------------------------------------------

    @property
    def _group_size(self) -> int:
        """The ranks that have the same requests."""
        return self.plan.topology.tp_size * self.plan.topology.cp_size

    @cached_property
    def _traffic(self) -> Traffic:
        return Traffic(self.plan, self.hardware)

    def _traffic_s(self, rows: StepRows) -> dict[str, Any]:
        """Return the seconds of what ranks send, by name. The all-to-all ends when the fullest rank has its rows."""
        return self._traffic.seconds(rows.num_tokens, imbalance=self.imbalance)

    def _is_decode(self, rows: StepRows) -> bool:
        return rows.num_tokens <= rows.num_rows * (1 + self.plan.engine.num_draft_tokens)

    def _compute_s(self, rows: StepRows) -> dict[str, Any]:
        """Return the seconds of everything but the all-to-all, by what it waits for."""
        factors, found = self.hardware.factors, dict[str, Any]()
        bytes_per_s = self.hardware.memory_bytes_per_s * factors.memory
        for work in self._works(rows):
            products, memory = work.flops / (work.flops_per_s * work.reached), work.num_bytes / bytes_per_s
            name = work.names[bool(np.max(memory) > np.max(products))]
            found[name] = found.get(name, 0.0) + np.maximum(products, memory)
        launches = factors.decode_launches if self._is_decode(rows) else factors.prefill_launches
        num_layers = sum(run.num_layers for run in self._passes(rows))
        return found | {"launches": launches * factors.launch_s * num_layers * self._num_batches}

    def _passes(self, rows: StepRows) -> Iterator[_Pass]:
        """Yield the model over all rows, then its MTP layer: once per draft at decode, or once to fill its pages."""
        config, is_decode = self.plan.config, self._is_decode(rows)
        main = _Pass(
            absorbed=is_decode or config.is_sparse,
            num_dense=config.first_k_dense_replace,
            num_moe=config.num_hidden_layers - config.first_k_dense_replace,
            num_tokens=rows.num_tokens,
            num_context=rows.num_context_tokens,
            num_pairs=rows.num_pairs,
            num_logits=rows.num_tokens if is_decode else rows.num_rows,
        )
        yield main
        mtp = attrs.evolve(main, num_dense=0, num_moe=1)
        if not is_decode:
            yield from [attrs.evolve(mtp, num_logits=0)] * self.plan.mtp
            return
        draft = attrs.evolve(mtp, num_tokens=rows.num_rows, num_pairs=rows.num_context_tokens, num_logits=rows.num_rows)
        yield from [draft] * (int(rows.num_tokens // rows.num_rows) - 1)

    def _works(self, rows: StepRows) -> Iterator[Work]:
        _check_rows(rows)
        for run in self._passes(rows):
            yield from self._projections(run)
            yield self._attention(run)
            yield from self._experts(run)
            yield self._activations(run)
            yield self._head(run)

    @cached_property
    def _format(self) -> str:
        """How large matrices are held: "float" where the device has no op for them as they are stored."""
        return self.plan.stored if self.plan.rank_weights.quantized else "float"

    @property
    def _float_bytes(self) -> int:
        return int(DTYPES[self.plan.config.dtype].itemsize)

    @property
    def _num_batches(self) -> int:
        """Two batches read all weights and launch all kernels twice."""
        return 1 + self.plan.experts.two_batch_overlap

    def _weight_bytes(self, *, routed: bool = False) -> float:
        """The bytes of a weight. In four bits are those of routed experts alone."""
        return _BYTES[self._format] if self._format in (_BYTES if routed else _EIGHT_BITS) else self._float_bytes

    def _products(self, what: str, flops: Any, num_bytes: float) -> Work:
        """Return products with weights of so many bytes, which each batch reads."""
        wide = self._format in _EIGHT_BITS
        return Work(
            (f"{what} FLOPs", f"{what} bytes"),
            flops,
            self.hardware.fp8_flops if wide else self.hardware.bf16_flops,
            self.hardware.factors.product,
            num_bytes * self._num_batches,
        )

    def _projections(self, run: _Pass) -> Iterator[Work]:
        """The projections of attention, whose heads tensor-parallel ranks share, and dense MLPs. Attention that is not
        absorbed expands the keys and values of earlier chunks again."""
        config, at = self.plan.config, self.plan.topology
        heads, hidden = config.num_attention_heads // at.tp_size, config.hidden_size
        query = (config.q_lora_rank or hidden) * heads * config.qk_head_dim
        shared = hidden * ((config.q_lora_rank or 0) + config.kv_lora_rank + config.qk_rope_head_dim)
        expanded = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
        output = heads * config.v_head_dim * hidden
        parameters = shared + query + expanded + output
        tokens = run.num_tokens / at.cp_size
        again = 0.0 if run.absorbed else (run.num_context - run.num_tokens) / at.cp_size
        flops = 2 * (parameters * tokens + expanded * again)
        width = self._weight_bytes()
        yield self._products("projections'", flops * run.num_layers, parameters * width * run.num_layers)
        dense = 3 * hidden * config.intermediate_size
        flops = 2 * dense * run.num_tokens / self._group_size
        read = dense * width / at.moe_dense_tp_size
        yield self._products("dense MLPs'", flops * run.num_dense, read * run.num_dense)

    def _attention(self, run: _Pass) -> Work:
        """Scores and values over pairs of tokens, and the cached tokens that are read for them. The indexer of sparse
        attention scores all pairs, and attention then has at most `index_topk` for each token."""
        config, at, part = self.plan.config, self.plan.topology, self.hardware
        heads, rope = config.num_attention_heads // at.tp_size, config.qk_rope_head_dim
        width = 2 * config.kv_lora_rank + rope if run.absorbed else config.qk_head_dim + config.v_head_dim
        pairs, context, indexing, index_bytes = run.num_pairs, run.num_context, 0.0, 0.0
        if config.index_topk is not None:
            share = sum(map(config.has_indexer, range(config.num_hidden_layers))) / config.num_hidden_layers
            indexing = 2 * pairs * (config.index_n_heads or 0) * (config.index_head_dim or 0) * share
            index_bytes = context * self._token_bytes("index_k") * share
            pairs = np.minimum(pairs, run.num_tokens * config.index_topk)
            context = np.minimum(context, run.num_tokens * config.index_topk)
        peak = part.fp8_flops if self.fp8_attention else part.bf16_flops
        scores, factors = 2 * pairs * heads * width + indexing * peak / part.fp8_flops, part.factors
        return Work(
            ("attention FLOPs", "KV bytes"),
            scores * run.num_layers / at.cp_size,
            peak,
            factors.decode_attention if run.absorbed else factors.prefill_attention,
            (context * self._token_bytes("latent") + index_bytes) * run.num_layers / at.cp_size,
        )

    def _token_bytes(self, name: str) -> int:
        """The bytes that a layer keeps of a token, in the format of the cache."""
        return sum(
            part.token_bytes
            for part in self.plan.layout.components
            if part.name.removeprefix(MTP_PREFIX) == name and not part.name.startswith(MTP_PREFIX)
        )

    def _experts(self, run: _Pass) -> Iterator[Work]:
        """Routed experts, the fullest rank's rows, and the shared ones. A rank reads those of its experts that some
        token of its group chose: all but (1 - top_k / experts) ^ tokens of them."""
        config, placement = self.plan.config, self.plan.placement
        if placement is None or not run.num_moe:
            return
        expert = 3 * config.hidden_size * config.moe_intermediate_size
        tokens, chosen = run.num_tokens / self._group_size, config.num_experts_per_tok / config.n_routed_experts
        rows = tokens * (config.num_experts_per_tok * self.imbalance + config.n_shared_experts)
        all_tokens = tokens * self.plan.topology.ep_size / self._num_batches
        touched = placement.slots_per_rank * (1.0 - (1.0 - chosen) ** all_tokens)
        read = expert * (touched * self._weight_bytes(routed=True) + config.n_shared_experts * self._weight_bytes())
        yield self._products("experts'", 2 * expert * rows * run.num_moe, read * run.num_moe)

    def _activations(self, run: _Pass) -> Work:
        """What is read and written between products: two norms with their sums, and for each row at an expert its way
        there in the format of products, the activation, and its way back in floats. A tensor counts once each way."""
        config, floats = self.plan.config, self._float_bytes
        small = 1 if self._format in _EIGHT_BITS else floats
        hidden, inner, top_k = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
        norms = 2 * 4 * hidden * floats * run.num_layers * run.num_tokens / self.plan.topology.cp_size
        row = 2 * hidden * small + 2 * inner * floats + inner * small + hidden * floats
        at_experts = top_k * row * run.num_moe * run.num_tokens / self._group_size
        return Work(("activations' FLOPs", "activations' bytes"), num_bytes=norms + at_experts)

    def _head(self, run: _Pass) -> Work:
        """The vocabulary's weights, whole on every rank, over the tokens whose logits are computed."""
        parameters = self.plan.config.vocab_size * self.plan.config.hidden_size * bool(run.num_logits)
        return Work(
            ("the head's FLOPs", "the head's bytes"),
            2 * parameters * run.num_logits / self._group_size,
            self.hardware.bf16_flops,
            self.hardware.factors.product,
            parameters * self._float_bytes,
        )


def _check_rows(rows: StepRows) -> None:
    """Raise ConfigError for what are no sizes of a step."""
    if isinstance(rows, StepRows):
        sizes = [np.asarray(size) for size in attrs.astuple(rows, recurse=False)]
        if all(size.size and size.dtype.kind in "iuf" for size in sizes):
            num_rows, num_tokens, *others = (size.min() for size in sizes)
            if 0 < num_rows <= num_tokens <= min(others) and all(size.max() < np.inf for size in sizes):
                return
    raise ConfigError(
        "rows must be StepRows of finite numbers, with num_rows above 0, as many num_tokens or more, and as many "
        f"num_context_tokens and num_pairs as tokens or more, got {clip(rows)}"
    )


def roofline(
    plan: EnginePlan, hardware: Hardware, *, imbalance: float | npt.ArrayLike | None = None, fp8_attention: bool = False
) -> Roofline:
    """Return how long steps of an engine take on ranks of a part, as a function of `StepRows`.

    `imbalance` is the rows of the fullest rank of experts over the mean: a number of at least 1, or recorded counts
    [moe layers, logical experts] that the plan's placement spreads over ranks; None is the part's factor. Attention
    multiplies in BF16 whatever the cache's format, unless `fp8_attention` says that its kernels quantize queries too.
    Raises ConfigError for another value."""
    for name, value, kind in (("plan", plan, EnginePlan), ("hardware", hardware, Hardware)):
        if not isinstance(value, kind):
            raise ConfigError(f"roofline: {name} must be a {kind.__name__}, got {clip(value)}")
    told: Any = hardware.factors.imbalance if imbalance is None else imbalance
    try:
        counts = np.asarray(told, dtype=float)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"imbalance must be a number or counts of experts, got {clip(imbalance)}") from None
    if counts.ndim:
        told = _imbalance(counts, plan.placement)
    if not is_number(told) or not 1.0 <= told <= MOST_IMBALANCE:
        raise ConfigError(f"imbalance must be at least 1, the fullest rank's rows over the mean, got {clip(told)}")
    return Roofline(plan=plan, hardware=hardware, imbalance=float(told), fp8_attention=fp8_attention)


def _imbalance(counts: np.ndarray, placement: ExpertPlacement | None) -> float:
    """Return the mean over layers of the fullest rank's rows over the mean, with replicas that share alike."""
    num_layers, experts = (0, 0) if placement is None else placement.logical_replica_counts.shape
    if placement is None or counts.shape[1:] != (experts,) or not 1 <= len(counts) <= num_layers:
        raise ConfigError(
            f"counts of experts must have the shape [layers, {experts}], got {list(counts.shape)}; there are "
            f"{num_layers} layers with experts"
        )
    if not (np.isfinite(counts).all() and counts.min() >= 0 and counts.any(axis=1).all()):
        raise ConfigError("counts of experts must be finite, not negative, and not all 0 in a layer")
    layers = placement.physical_to_logical_map[-len(counts) :]
    replicas = placement.logical_replica_counts[-len(counts) :]
    slots = np.take_along_axis(counts / replicas, layers, axis=1)
    ranks = slots.reshape(len(counts), placement.num_ranks, -1).sum(axis=2)
    return float((ranks.max(axis=1) / ranks.mean(axis=1)).mean())
