"""The ops a model is made of, as one frozen value of callables.

A method of `Ops` states what an op takes, returns and promises (legend in docs/shapes.md). A provider is a module with
functions of these names and types: `mla_decode`, and `linear_fp8` for FP8 weights. `resolve_ops` picks one per op,
once, at load. `reference.py` has every op that is not a sequence of others and is their specification; the others
must agree with it.

Cache pages are in the model's dtype, or uint8. In uint8 pages a row is packed FP8 as `kernels.formats.cache_rows` says:
the store ops pack, and the others unpack what they read. Rows that no token of a context was written to may hold
anything, NaN included.

NaN and infinity are not lost, so that an engine sees them in its logits: a row of a result that was computed from one
holds one. So a sum of squares or a score that overflows turns its row or head into NaN. Integers, which cannot be NaN,
and a softmax, which would give -inf no weight, get NaN added. Rows of other tokens stay as they are, to the bit; only
the tokens of one sequence in one call of `mla_prefill` or `mla_decode` may share the NaN that a live one of them reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar, cast

import attrs
from torch import Tensor

from pdinfer.kernels.arguments import DecodeCache, PrefillCache, RouterRule, TokenCache
from pdinfer.kernels.draws import Controls, DrawKind
from pdinfer.kernels.formats import WEIGHT_FORMATS
from pdinfer.kernels.formats.activations import FP8Rows, INT8Rows, Rounded
from pdinfer.kernels.formats.floats import Plain
from pdinfer.kernels.formats.format import BY_FORMAT, Format, Rounding, Weight
from pdinfer.kernels.formats.int8 import Int8Dynamic
from pdinfer.values import Value

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


class FusedOps(Protocol):
    """Ops that are a sequence of others, so that one kernel can do what they do between two large products. A provider
    may have any of them. Where none has, the op is the function of that name in `compositions.py`, which calls the ops
    that were chosen and is the specification."""

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm of the sum, the sum), where the sum is residual + x rounded to x's dtype, or x itself
        without a residual."""

    def add_rms_norm_fp8(
        self, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, *, ue8m0: bool
    ) -> tuple[Rounded, Tensor]:
        """Do as `add_rms_norm`, and `quantize_fp8` the norm as it is returned, in x's dtype."""

    def gated_silu_fp8(self, x_TJ: Tensor, *, ue8m0: bool, counts_E: Tensor | None = None) -> FP8Rows:
        """`quantize_fp8` what `gated_silu` returns, in x's dtype. With counts x is [E, N, 2I], in room for N rows per
        expert, and rows behind the first `counts_E[e]` of each may get any result."""

    def norm_rotate_store(
        self,
        c_TC: Tensor,
        k_TR: Tensor,
        weight_C: Tensor,
        eps: float,
        cos_TF: Tensor,
        sin_TF: Tensor,
        pages_PGW: Tensor,
        slots_T: Tensor,
        *,
        rounding: Rounding | None,
    ) -> None:
        """Write token t's latent c after `rms_norm`, and its key k after `rotate` (of interleaved pairs), to its slot
        as `store_latent` does. With a `rounding` the normed latent is rounded so first, by `round_fp8` or `round_int8`.
        c and k may be views of wider rows. Mutates `pages_PGW` alone."""

    def mla_absorbed(
        self,
        q_THQ: Tensor,
        cos_TF: Tensor,
        sin_TF: Tensor,
        cache: DecodeCache,
        k_b_HNC: Tensor,
        v_b_HVC: Tensor,
        *,
        scale: float,
    ) -> Tensor:
        """Return heads_out(o, v_b) -> [T, H, V], where o is `mla_decode` of the last T / B tokens of each sequence. Of
        each query the first N values come into the latent space by heads_in(q, k_b), and the others are rotated."""

    def gated_mlp(self, x_TD: Tensor, gate_up: Any, down: Any) -> Tensor:
        """Return linear(gated_silu(linear(x, gate_up)), down) -> [T, D], of weights in one format of floats. gate_up is
        [2I, D] in two parts, down is [D, I]."""

    def choose_experts(
        self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, rule: RouterRule
    ) -> tuple[Tensor, Tensor]:
        """Return what `route` makes of the logits x @ weight.T, computed in float32. Weights are float32."""

    def sort_rows(self, x_TD: Tensor, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (x_SD, counts_E, row_TK): the rows in the order that `group_rows` assigns, how many each expert has,
        and the row of each choice."""

    def sort_rows_fp8(
        self, x_TD: FP8Rows, ids_TK: Tensor, num_experts: int, num_rows: int
    ) -> tuple[FP8Rows, Tensor, Tensor]:
        """Do as `sort_rows` for rows in FP8. At most the first `num_rows` rows are some expert's. A provider may fill
        up the rows of each expert with others, so that they are whole tiles of its products; counts have these too."""

    def combine_experts(
        self,
        y_SD: Tensor,
        row_TK: Tensor | None,
        weights_TK: Tensor | None,
        shared_TD: Tensor | None,
        residual_TD: Tensor | None,
    ) -> Tensor:
        """Return residual + (combine_rows(y, row, weights) + shared) -> [T, D] in y's dtype. The inner sum is float32,
        and rounded to that dtype before the residual is added in it. None adds nothing; without `row_TK` and
        `weights_TK` y has the sum of each token already, S = T."""


class Ops(FusedOps, Protocol):
    """One callable per op. Swap one with `ops.replace(linear=mine)`."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Return weight * x / sqrt(mean(x^2) + eps) over the last axis, computed in float32, in x's dtype."""

    def layer_norm(self, x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
        """Return weight * (x - mean(x)) / sqrt(var(x) + eps) + bias over the last axis, computed in float32, in x's
        dtype."""

    @property
    def linear(self) -> ByFormat[Callable[[Any, Any], Tensor]]:
        """linear(x_TI, weight): return the linear map without bias, x @ weight.T -> [T, O], in x's dtype.

        Products with quantized weights round x first, and are summed in float32 or exactly:

            float, strips         x as it is
            fp8, fp8_strips       as `quantize_fp8` does by `weight.ue8m0`, unless x comes as `FP8Rows`. Products are
                                  summed in float32 within a block, then scaled and summed
            w8a8_dynamic          to int8 per token, scale amax / 127. Products are summed exactly
            w8a8                  (clamp(round(x / input_scale) + input_offset, -128, 127) . numbers + output_offset) *
                                  output_scale, where each part of the rows has its own input scale and offset. Products
                                  are summed exactly
        """

    def quantize_fp8(self, x_TI: Tensor, *, ue8m0: bool) -> FP8Rows:
        """Return x rounded to e4m3 per token and 128 channels, I >= 1: scale max(amax, 1e-4) / 448, or the next power
        of two with `ue8m0` (DeepSeek-V3's report, arXiv 2412.19437, section 3.3.2). Readers take scales at
        any strides."""

    def round_fp8(self, x_TI: Tensor, *, ue8m0: bool) -> Tensor:
        """Return the value of x after that rounding, in x's dtype."""

    def round_int8(self, x_TI: Tensor) -> Tensor:
        """Return the value of x after that rounding, in x's dtype."""

    def rotate(self, x_THR: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool = True) -> Tensor:
        """Return the rotary embedding of pairs (2i, 2i+1), or (i, i + R/2) where not `interleaved`, by angle i. cos and
        sin are float32 [T, R/2]. The result is a new tensor with its elements in the order of x."""

    def store_latent(self, pages_PGW: Tensor, slots_T: Tensor, c_TC: Tensor, k_rope_TR: Tensor) -> None:
        """Write token t's latent and rotated key to slot `page * page_size + offset` of the cache. Mutates `pages_PGW`
        alone."""

    def store_index_keys(self, pages_PGY: Tensor, slots_T: Tensor, keys_TY: Tensor) -> None:
        """Write token t's index key to slot `page * page_size + offset`. Mutates `pages_PGY` alone."""

    def index_topk(self, q_TXY: Tensor, weights_TX: Tensor, cache: PrefillCache, *, top_k: int) -> Tensor:
        """Return the `top_k` best positions for each query, among its own and all before, by the sum over heads x of
        weights[x] * relu(q[x] . key), in float32. Weights are float32.

        Returns int64 [T, S], S = min(top_k, longest context): *logical* positions, from 0 at the start of the token's
        own sequence, ascending, with -1 after the last where a token sees fewer than S. Among equal scores the lowest
        position is taken, whatever the sizes of pages, chunks and batches. A token chooses nothing, -1 everywhere, when
        its query, its weights, a key it sees or one of its scores is not finite; `mla_sparse` turns that into NaN."""

    def index_topk_decode(self, q_BQXY: Tensor, weights_BQX: Tensor, cache: DecodeCache, *, top_k: int) -> Tensor:
        """Return what `index_topk` chooses for the last Q cached tokens of each sequence -> int64 [B, Q, S]. S =
        min(top_k, M * G) follows from shapes alone: a token that sees fewer positions reads all of them, and -1
        follows. A query whose own key was not written chooses anything, and changes nothing for those before it."""

    def heads_in(self, x_THN: Tensor, weight_HNC: Tensor) -> Tensor:
        """Return x[:, h] @ weight[h] -> [T, H, C] in x's dtype. Attention brings queries into the latent space with
        it."""

    def heads_out(self, x_THC: Tensor, weight_HVC: Tensor) -> Tensor:
        """Return x[:, h] @ weight[h].T -> [T, H, V] in x's dtype. Attention leaves the latent space with it."""

    def mla_prefill(
        self, q_THQ: Tensor, kv_b_OC: Tensor, cache: PrefillCache, *, v_head_dim: int, scale: float
    ) -> Tensor:
        """Compute the expanded causal attention of queries over the cached tokens of their sequences -> [T, H, V]. Here
        Q = nope + R. kv_b holds per head the rows of K (nope) and then those of V. Does not sync the device."""

    def mla_decode(self, q_latent_BQHC: Tensor, q_rope_BQHR: Tensor, cache: DecodeCache, *, scale: float) -> Tensor:
        """Compute the absorbed attention of the last Q cached tokens of each sequence over its cached latents:
        softmax(scale * (q_latent . c + q_rope . k_rope)) . c -> [B, Q, H, C]. Query i sees the first `lens_B[b] - Q + 1
        + i` tokens: its own and all before. Lengths are at least Q. A query that is not live returns anything, and
        changes nothing for those before it."""

    def mla_sparse(
        self, q_latent_THC: Tensor, q_rope_THR: Tensor, cache: TokenCache, selected_TS: Tensor, *, scale: float
    ) -> Tensor:
        """Compute the absorbed attention of each token over the cached latents at `selected_TS` -> [T, H, C]. These are
        *logical* positions in its own sequence as `index_topk` returns them (-1 is none). The result is that of
        `mla_decode` over these positions alone, and NaN for a token without any."""

    def route(self, logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, (ids_TK int64, weights_TK float32), from float32 logits.

        Scores are sigmoid or softmax of the logits, computed in float64 and rounded to float32 once, so that they are
        equal wherever they are computed. `bias_E` (DeepSeek-V3's correction) is added, in float32, for choosing and
        never for weighing. A group is worth the sum of its two best biased scores when there is a bias, and its best
        score otherwise.

        The best expert comes first. Among equal experts the lowest id is better, and among equally good groups the
        first. When a logit or a bias is not finite, all weights of the token are NaN, and its ids are distinct experts
        without meaning."""

    def group_rows(self, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Assign a row to each of a token's experts: (counts_E, token_of_row_S, row_TK), int64 on the device of the
        ids, S = T * K. Rows of one expert are together and in the order of tokens. An id of -1 is no expert: it has
        no row, `row_TK` is -1 there, and the rows that are left over, which come last, name token 0. Syncs nothing."""

    def gather_rows(self, x_TD: Tensor, token_S: Tensor) -> Tensor:
        """Return x[token[s]] -> [S, D] in x's dtype. Tokens are int64. Does not sync the device."""

    def combine_rows(self, y_SD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return sum_k weights[t, k] * y[row[t, k]], summed in float32 -> float32 [T, D]. A row of -1 adds 0, whatever
        its weight."""

    def gated_silu(self, x_TJ: Tensor) -> Tensor:
        """Return silu(first half) * second half over the last axis, J = 2I -> I, computed in float32, in x's dtype."""

    @property
    def grouped_mlp(self) -> ByFormat[Callable[[Any, Tensor, Any, Any], Tensor]]:
        """grouped_mlp(x, counts_E, gate_up, down): run the gated MLP of each expert on its `counts_E[e]` rows
        (integers, on the device of the rows), with products as `linear` of the format that both stacks have: gate_up
        [E, 2I, D] in two parts, down [E, D, I]. x is [S, D] with rows sorted by expert, or [E, N, D] with room for N
        rows per expert, of which the first ones are present. Rows that no expert has may hold anything. So may their
        results, in the shape of x."""

    def grouped_mlp_int8_rows(
        self, x_SD: INT8Rows, counts_E: Tensor, gate_up: Int8Dynamic, down: Int8Dynamic
    ) -> Tensor:
        """Return what `grouped_mlp` of "w8a8_dynamic" makes of the floats that became these rows, sorted by expert ->
        [S, D] in the dtype of the floats."""

    def draw(self, logits_BV: Tensor, changed_BV: Tensor, controls: Controls, kind: DrawKind) -> Tensor:
        """Draw one token per row of `changed_BV`, which are the raw logits `logits_BV` or what a request made of them,
        both float32. `kind` is at least that of every row. Does not sync.

        Greedy rows take the largest logit, of equal ones the first. The others scale the distance of each logit to the
        largest by 1 / temperature, in float32, and keep: the `top_k` best; of these, best first, as many as it takes
        for a share of `top_p` of their softmax; and what is not below `min_logit`. Tokens tied with the last one that
        top_k or top_p keeps are kept too. To each is added the noise of its id, `draws.gumbel_noise`, and the
        largest sum wins.

        Returns int32 [3, B]: the tokens, and as the bits of float32 their log-probabilities and the logsumexp of the
        raw logits. The latter is not finite where a raw logit is NaN or +inf, or all are -inf. The token of such a row
        means nothing, but is a token."""

    def gather_pages(self, pool_NW: Tensor, rows_S: Tensor, into_SW: Tensor) -> None:
        """Copy row `rows[s]` of a pool, which is cut into N rows of equal size, to row s of `into_SW`. Rows are int64,
        numbers are integers of any one size. Mutates `into_SW` alone. Does not sync the device."""

    def scatter_pages(self, pool_NW: Tensor, rows_S: Tensor, from_SW: Tensor) -> None:
        """Copy row s of `from_SW` to row `rows[s]` of the pool. No row is named twice. Mutates `pool_NW` alone. Does
        not sync the device."""

    def __getitem__(self, name: str) -> Any:
        """Return the function of one of `OP_NAMES`."""

    def replace(self, **ops: Any) -> Ops:
        """Return the ops with others in place of those named. Ops that are `Composed` call the others too, and what
        takes the place of a `ByFormat` serves every format."""
        raise NotImplementedError

    def rounded(self, x_TI: Tensor, rounding: Rounding) -> Tensor:
        """Return the value of x after that rounding, in x's dtype."""
        if rounding is Rounding.INT8:
            return self.round_int8(x_TI)
        return self.round_fp8(x_TI, ue8m0=rounding is Rounding.FP8_UE8M0)


def _names() -> Iterator[tuple[str, tuple[str, type[Format] | None]]]:
    for op in (*vars(Ops), *vars(FusedOps)):
        if op in BY_FORMAT:
            yield from ((name, (op, kind)) for kind in WEIGHT_FORMATS for name in kind.ops() if name.startswith(op))
        elif not op.startswith("_") and op not in ("replace", "rounded"):
            yield op, (op, None)


OPS: Mapping[str, tuple[str, type[Format] | None]] = MappingProxyType(dict(_names()))
"""The name of each function: its op, and the format where that has a function for each."""
OP_NAMES: tuple[str, ...] = tuple(OPS)


class Declined(Exception):
    """Raised by the op of a provider, before it does anything, to leave a call to the next provider. Its text says
    why."""


class Composed(functools.partial[Any]):
    """An op that calls other ops: a function whose first argument are the Ops that it is one of."""

    def __repr__(self) -> str:
        return f"Composed({self.func.__name__})"


def ops_of(functions: Mapping[str, Any]) -> Ops:
    """Return the ops with a function for each of `OP_NAMES`."""
    return cast(Ops, _Chosen(functions))


@attrs.frozen(slots=False)
class _Chosen(Value):
    """An `Ops`, whose ops are attributes of the instance."""

    rounded = Ops.rounded

    functions: Mapping[str, Any]

    def __attrs_post_init__(self) -> None:
        by_format: dict[str, dict[type[Format], Any]] = {op: {} for op in BY_FORMAT}
        for name, (op, kind) in OPS.items():
            function = self.functions[name]
            if isinstance(function, Composed):
                function = Composed(function.func, self)
            if kind is None:
                vars(self)[op] = function
            else:
                by_format[op][kind] = function
        vars(self).update({op: ByFormat(functions) for op, functions in by_format.items()})

    def __getitem__(self, name: str) -> Any:
        op, kind = OPS[name]
        found = vars(self)[op]
        return found if kind is None else found.functions[kind]

    def replace(self, **ops: Any) -> Ops:
        if unknown := sorted(ops.keys() - {op for op, _ in OPS.values()}):
            raise TypeError(f"no op is called {unknown[0]}")
        return ops_of({name: ops.get(op, self.functions[name]) for name, (op, _) in OPS.items()})


def function_of(provider: object, op: str) -> Any:
    """Return a provider's function of an op, `linear_fp8` for "linear[fp8]", or None where it has none. It stands in
    one of the `MODULES` of the provider, or in itself."""
    name, modules = name_of(op), getattr(provider, "MODULES", (provider,))
    return next((getattr(each, name) for each in modules if hasattr(each, name)), None)


def name_of(op: str) -> str:
    """Return what the function of an op is called."""
    return op.replace("[", "_").removesuffix("]")
