"""The ops a model is made of, as one frozen value of callables.

Each field names an op, whose Protocol states shapes and dtypes (legend in docs/shapes.md). A provider is a module with
functions of these names. `resolve_ops` picks one per op, once, at load. `reference.py` has every op that is not a
sequence of others (those are in `fused.py`) and is their specification; the others must agree with it.

Cache pages are in the model's dtype, or uint8. In uint8 pages a row is packed FP8 as `kernels.formats.cache_rows` says:
the store ops pack, and the others unpack what they read. Rows that no token of a context was written to may hold
anything, NaN included.

NaN and infinity are not lost, so that an engine sees them in its logits: a row of a result that was computed from one
holds one. So a sum of squares or a score that overflows turns its row or head into NaN. Integers, which cannot be NaN,
and a softmax, which would give -inf no weight, get NaN added. Rows of other tokens stay as they are, to the bit; only
the tokens of one sequence in one call of `mla_prefill` may share the NaN that one of them reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import attrs
from torch import Tensor

from pdinfer.kernels.draws import Controls, DrawKind
from pdinfer.kernels.formats import WEIGHT_FORMATS
from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.floats import Plain
from pdinfer.kernels.formats.format import BY_FORMAT, Format, Rounding, Weight
from pdinfer.kernels.fused import (
    AddRMSNorm,
    AddRMSNormFP8,
    ChooseExperts,
    CombineExperts,
    GatedMLP,
    GatedSiluFP8,
    MLAAbsorbed,
    NormRotateStore,
    SortRows,
)
from pdinfer.values import brief


class RMSNorm(Protocol):
    """Normalises rows."""

    def __call__(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Return weight * x / sqrt(mean(x^2) + eps) over the last axis, computed in float32, in x's dtype."""


class LayerNorm(Protocol):
    """Normalises and centres rows."""

    def __call__(self, x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
        """Return weight * (x - mean(x)) / sqrt(var(x) + eps) + bias over the last axis, computed in float32, in x's
        dtype."""


class Linear(Protocol):
    """Multiplies by a weight matrix."""

    def __call__(self, x_TI: Any, weight: Any) -> Tensor:
        """Return the linear map without bias, x @ weight.T -> [T, O], in x's dtype.

        Products with quantized weights round x first, and are summed in float32 or exactly:

            float, strips         x as it is
            fp8, fp8_strips       as `quantize_fp8` does by `weight.ue8m0`, unless x comes as `FP8Rows`. Products are
                                  summed in float32 within a block, then scaled and summed
            w8a8_dynamic          to int8 per token, scale amax / 127. Products are summed exactly
            int4, mxfp4           x as it is; of the weight the product of number and scale, unrounded
            w8a8                  (clamp(round(x / input_scale) + input_offset, -128, 127) . numbers + output_offset) *
                                  output_scale, where each part of the rows has its own input scale and offset. Products
                                  are summed exactly
        """


class QuantizeFP8(Protocol):
    """Rounds activations to FP8, for all the products that read them."""

    def __call__(self, x_TI: Tensor, *, ue8m0: bool) -> FP8Rows:
        """Return x rounded to e4m3 per token and 128 channels, I >= 1: scale max(amax, 1e-4) / 448, or the next power
        of two with `ue8m0` (DeepSeek-V3's report, arXiv 2412.19437, section 3.3.2). Readers take scales in every
        layout."""


class RoundFP8(Protocol):
    """Rounds activations as products in FP8 do."""

    def __call__(self, x_TI: Tensor, *, ue8m0: bool) -> Tensor:
        """Return the value of x after that rounding, in x's dtype."""


class RoundInt8(Protocol):
    """Rounds activations as products in INT8 with scales of tokens do."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return the value of x after that rounding, in x's dtype."""


class Rotate(Protocol):
    """Applies rotary positions."""

    def __call__(self, x_THR: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool = True) -> Tensor:
        """Return the rotary embedding of pairs (2i, 2i+1), or (i, i + R/2) where not `interleaved`, by angle i. cos and
        sin are float32 [T, R/2]. The result is a new tensor with its elements in the order of x."""


class StoreLatent(Protocol):
    """Writes the cache."""

    def __call__(self, pages_PGW: Tensor, slots_T: Tensor, c_TC: Tensor, k_rope_TR: Tensor) -> None:
        """Write token t's latent and rotated key to slot `page * page_size + offset` of the cache. Mutates `pages_PGW`
        alone."""


class StoreIndexKeys(Protocol):
    """Writes the indexer's cache."""

    def __call__(self, pages_PGY: Tensor, slots_T: Tensor, keys_TY: Tensor) -> None:
        """Write token t's index key to slot `page * page_size + offset`. Mutates `pages_PGY` alone."""


class IndexTopK(Protocol):
    """Chooses the tokens that sparse attention reads."""

    def __call__(
        self,
        q_TXY: Tensor,
        weights_TX: Tensor,
        pages_PGY: Tensor,
        page_table_BM: Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        *,
        top_k: int,
    ) -> Tensor:
        """Return the `top_k` best positions for each of a sequence's last `query_lens[b]` tokens, among its own and all
        before, by the sum over heads x of weights[x] * relu(q[x] . key), in float32. Weights are float32.

        Returns int64 [T, S], S = min(top_k, longest context): *logical* positions, from 0 at the start of the token's
        own sequence, ascending, with -1 after the last where a token sees fewer than S. Among equal scores the lowest
        position is taken, whatever the sizes of pages, chunks and batches. A token chooses nothing, -1 everywhere, when
        its query, its weights, a key it sees or one of its scores is not finite; `mla_sparse` turns that into NaN.
        Lengths are host ints.
        """


class IndexTopKDecode(Protocol):
    """Chooses as `index_topk`, with lengths that no host knows."""

    def __call__(
        self,
        q_BQXY: Tensor,
        weights_BQX: Tensor,
        pages_PGY: Tensor,
        page_table_BM: Tensor,
        context_lens_B: Tensor,
        *,
        top_k: int,
    ) -> Tensor:
        """Return what `index_topk` chooses for the last Q cached tokens of each sequence -> int64 [B, Q, S]. S =
        min(top_k, M * page_size) follows from shapes alone: a token that sees fewer positions reads all of them, and -1
        follows. The table and the lengths are as in `mla_decode`. A query whose own key was not written chooses
        anything, and changes nothing for those before it."""


class MLASparse(Protocol):
    """Attends to chosen tokens."""

    def __call__(
        self,
        q_latent_THC: Tensor,
        q_rope_THR: Tensor,
        pages_PGW: Tensor,
        page_table_BM: Tensor,
        sequence_T: Tensor,
        selected_TS: Tensor,
        *,
        scale: float,
    ) -> Tensor:
        """Compute the absorbed attention of each token over the cached latents at `selected_TS` -> [T, H, C]. These are
        *logical* positions in its own sequence as `index_topk` returns them (-1 is none). `sequence_T` is each token's
        row of the page table. The result is that of `mla_decode` over these positions alone, and NaN for a token
        without any."""


class HeadsIn(Protocol):
    """Multiplies each head by a matrix of its own."""

    def __call__(self, x_THN: Tensor, weight_HNC: Tensor) -> Tensor:
        """Return x[:, h] @ weight[h] -> [T, H, C] in x's dtype. Attention brings queries into the latent space with
        it."""


class HeadsOut(Protocol):
    """Multiplies each head by the transpose of a matrix of its own."""

    def __call__(self, x_THC: Tensor, weight_HVC: Tensor) -> Tensor:
        """Return x[:, h] @ weight[h].T -> [T, H, V] in x's dtype. Attention leaves the latent space with it."""


class MLAPrefill(Protocol):
    """Attends with many queries per sequence."""

    def __call__(
        self,
        q_THQ: Tensor,
        pages_PGW: Tensor,
        kv_b_OC: Tensor,
        page_table_BM: Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        *,
        v_head_dim: int,
        scale: float,
    ) -> Tensor:
        """Compute the expanded causal attention of each sequence's last `query_lens[b]` tokens over its first
        `context_lens[b]` cached tokens (the queries' own latents are already stored) -> [T, H, V]. Here Q = nope + R.
        W = C + R. kv_b holds per head the rows of K (nope) and then those of V. Lengths are host ints: no sync."""


class MLADecode(Protocol):
    """Attends with few queries per sequence."""

    def __call__(
        self,
        q_latent_BQHC: Tensor,
        q_rope_BQHR: Tensor,
        pages_PGW: Tensor,
        page_table_BM: Tensor,
        context_lens_B: Tensor,
        *,
        scale: float,
    ) -> Tensor:
        """Compute the absorbed attention of the last Q cached tokens of each sequence over its cached latents:
        softmax(scale * (q_latent . c + q_rope . k_rope)) . c -> [B, Q, H, C]. Query i sees the first `context_lens[b] -
        Q + 1 + i` tokens: its own and all before.

        Lengths are int64, at least Q, and like the table (int32 or int64) on the device, where no host waits for them.
        The table may be wider than any context: entries beyond one hold any valid page. A query whose own latent was
        not written returns anything, and changes nothing for those before it.
        """


class Route(Protocol):
    """Chooses experts."""

    def __call__(
        self,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        *,
        sigmoid: bool,
        top_k: int,
        num_groups: int,
        top_k_groups: int,
        normalize: bool,
        scaling_factor: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, (ids_TK int64, weights_TK float32), from float32 logits.

        Scores are sigmoid or softmax of the logits, computed in float64 and rounded to float32 once, so that they are
        equal wherever they are computed. `bias_E` (DeepSeek-V3's correction) is added, in float32, for choosing and
        never for weighing. With more than one group only the best `top_k_groups` compete. A group is worth the sum of
        its two best biased scores when there is a bias, and its best score otherwise. `normalize` divides the weights
        by their sum; `scaling_factor` multiplies them.

        The best expert comes first. Among equal experts the lowest id is better, and among equally good groups the
        first. When a logit or a bias is not finite, all weights of the token are NaN, and its ids are distinct experts
        without meaning.
        """


class GroupRows(Protocol):
    """Sorts tokens by expert."""

    def __call__(self, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Assign a row to each of a token's experts: (counts_E, token_of_row_S, row_TK), int64 on the device of the
        ids, S = T * K. Rows of one expert are together and in the order of tokens. An id of -1 is no expert: it has
        no row, `row_TK` is -1 there, and the rows that are left over, which come last, name token 0. Syncs nothing."""


class GatherRows(Protocol):
    """Collects the rows that `group_rows` assigns."""

    def __call__(self, x_TD: Tensor, token_S: Tensor) -> Tensor:
        """Return x[token[s]] -> [S, D] in x's dtype. Tokens are int64. Does not sync the device."""


class CombineRows(Protocol):
    """Sums what experts return."""

    def __call__(self, y_SD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return sum_k weights[t, k] * y[row[t, k]], summed in float32 -> float32 [T, D]. A row of -1 adds 0, whatever
        its weight."""


class GatedSilu(Protocol):
    """The activation of every MLP."""

    def __call__(self, x_TJ: Tensor) -> Tensor:
        """Return silu(first half) * second half over the last axis, J = 2I -> I, computed in float32, in x's dtype."""


class GroupedMLP(Protocol):
    """Runs experts."""

    def __call__(self, x: Any, counts_E: Tensor, gate_up: Any, down: Any) -> Tensor:
        """Run the gated MLP of each expert on its `counts_E[e]` rows (integers, on the device of the rows), with
        products as `linear` of the format that both stacks have: gate_up [E, 2I, D] in two parts, down [E, D, I]. x is
        [S, D] with rows sorted by expert, or [E, N, D] with room for N rows per expert, of which the first ones are
        present. Rows that no expert has may hold anything. So may their results, in the shape of x."""


class GatherPages(Protocol):
    """Collects parts of a pool."""

    def __call__(self, pool_NW: Tensor, rows_S: Tensor, into_SW: Tensor) -> None:
        """Copy row `rows[s]` of a pool, which is cut into N rows of equal size, to row s of `into_SW`. Rows are int64,
        numbers are integers of any one size. Mutates `into_SW` alone. Does not sync the device."""


class ScatterPages(Protocol):
    """Distributes what `gather_pages` collects."""

    def __call__(self, pool_NW: Tensor, rows_S: Tensor, from_SW: Tensor) -> None:
        """Copy row s of `from_SW` to row `rows[s]` of the pool. No row is named twice. Mutates `pool_NW` alone. Does
        not sync the device."""


class DrawTokens(Protocol):
    """Draws tokens."""

    def __call__(self, logits_BV: Tensor, changed_BV: Tensor, controls: Controls, kind: DrawKind) -> Tensor:
        """Draw one token per row of `changed_BV`, which are the raw logits `logits_BV` or what a request made of them,
        both float32. `kind` is at least that of every row. Does not sync.

        Greedy rows take the largest logit, of equal ones the first. The others scale the distance of each logit to the
        largest by 1 / temperature, in float32, and keep: the `top_k` best; of these, best first, as many as it takes
        for a share of `top_p` of their softmax; and what is not below `min_logit`. Tokens tied with the last one that
        top_k or top_p keeps are kept too. To each is added the noise of its id, `draws.gumbel_noise`, and the
        largest sum wins.

        Returns int32 [3, B]: the tokens, and as the bits of float32 their log-probabilities and the logsumexp of the
        raw logits. The latter is not finite where a raw logit is NaN or +inf, or all are -inf. The token of such a row
        means nothing, but is a token.
        """


class Composed(functools.partial[Any]):
    """An op that calls other ops: a function whose first argument are the Ops that it is one of."""

    def __repr__(self) -> str:
        return f"Composed({self.func.__name__})"


@attrs.frozen
class Products:
    """What a provider has for a format of weights: a row of its table `WEIGHTS`. None stands for what it lacks."""

    linear: Any = None
    grouped_mlp: Any = None


F = TypeVar("F", bound=Callable[..., Tensor])


class ByFormat(Generic[F]):
    """An op with a function for each format of the weight that it takes last. A layer asks once which is its own."""

    def __init__(self, functions: Mapping[type[Format], F]) -> None:
        self.functions: Mapping[type, F] = functions

    def of(self, weight: Weight) -> F:
        """Return the function for weights of that format."""
        return self.functions.get(type(weight)) or self.functions[Plain]

    def __call__(self, *arguments: Any) -> Tensor:
        return self.of(arguments[-1])(*arguments)


def _by_format(op: F | ByFormat[F]) -> ByFormat[F]:
    return op if isinstance(op, ByFormat) else ByFormat(dict.fromkeys(WEIGHT_FORMATS, op))


@attrs.frozen(kw_only=True)
class Ops:
    """One callable per op. Swap one with `attrs.evolve(ops, linear=mine)`; those that are `Composed` call it too. What
    takes the place of a `ByFormat` serves every format."""

    __repr__ = brief

    rms_norm: RMSNorm
    layer_norm: LayerNorm
    linear: ByFormat[Linear] = attrs.field(converter=_by_format)
    quantize_fp8: QuantizeFP8
    round_fp8: RoundFP8
    round_int8: RoundInt8
    rotate: Rotate
    store_latent: StoreLatent
    store_index_keys: StoreIndexKeys
    index_topk: IndexTopK
    index_topk_decode: IndexTopKDecode
    heads_in: HeadsIn
    heads_out: HeadsOut
    mla_prefill: MLAPrefill
    mla_decode: MLADecode
    mla_sparse: MLASparse
    route: Route
    group_rows: GroupRows
    gather_rows: GatherRows
    combine_rows: CombineRows
    gated_silu: GatedSilu
    grouped_mlp: ByFormat[GroupedMLP] = attrs.field(converter=_by_format)
    draw: DrawTokens
    gather_pages: GatherPages
    scatter_pages: ScatterPages
    add_rms_norm: AddRMSNorm
    add_rms_norm_fp8: AddRMSNormFP8
    gated_silu_fp8: GatedSiluFP8
    norm_rotate_store: NormRotateStore
    mla_absorbed: MLAAbsorbed
    gated_mlp: GatedMLP
    choose_experts: ChooseExperts
    sort_rows: SortRows
    combine_experts: CombineExperts

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(Ops):
            op = getattr(self, field.name)
            if isinstance(op, ByFormat):
                object.__setattr__(
                    self, field.name, ByFormat({kind: self._bound(each) for kind, each in op.functions.items()})
                )
            else:
                object.__setattr__(self, field.name, self._bound(op))

    def _bound(self, op: Any) -> Any:
        return Composed(op.func, self) if isinstance(op, Composed) else op

    @classmethod
    def of(cls, functions: Mapping[str, Any]) -> Ops:
        """Return the ops with a function for each of `OP_NAMES`."""
        fields: dict[str, Any] = {op: {} for op in BY_FORMAT}
        for name, (op, kind) in OPS.items():
            if kind is None:
                fields[op] = functions[name]
            else:
                fields[op][kind] = functions[name]
        return cls(**fields | {op: ByFormat(fields[op]) for op in BY_FORMAT})

    def __getitem__(self, name: str) -> Any:
        """Return the function of one of `OP_NAMES`."""
        op, kind = OPS[name]
        return getattr(self, op) if kind is None else getattr(self, op).functions[kind]

    def rounded(self, x_TI: Tensor, rounding: Rounding) -> Tensor:
        """Return the value of x after that rounding, in x's dtype."""
        if rounding is Rounding.INT8:
            return self.round_int8(x_TI)
        return self.round_fp8(x_TI, ue8m0=rounding is Rounding.FP8_UE8M0)


def _names() -> Iterator[tuple[str, tuple[str, type[Format] | None]]]:
    for op in (field.name for field in attrs.fields(Ops)):
        if op in BY_FORMAT:
            yield from ((name, (op, kind)) for kind in WEIGHT_FORMATS for name in kind.ops() if name.startswith(op))
        else:
            yield op, (op, None)


OPS: Mapping[str, tuple[str, type[Format] | None]] = MappingProxyType(dict(_names()))
"""The name of each function: its field of `Ops`, and the format where that has one for each."""
OP_NAMES: tuple[str, ...] = tuple(OPS)


def function_of(provider: object, name: str) -> Any:
    """Return a provider's function of that name, or None where it has none: it stands in one of the `MODULES` of the
    provider, or in itself, and products with weights in its table `WEIGHTS`."""
    op, kind = OPS[name]
    if kind is not None:
        return getattr(getattr(provider, "WEIGHTS", {}).get(kind), op, None)
    return next((getattr(each, op) for each in getattr(provider, "MODULES", (provider,)) if hasattr(each, op)), None)
