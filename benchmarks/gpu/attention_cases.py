"""Attention: decode over pages of bfloat16 and of 656-byte rows, sparse decode, and prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch
import torch.nn.functional as F
from case import LATENT, PAGE_SIZE, ROPE, Case, Goal, Work, draw, generator
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pdinfer.kernels import OpSpec
from pdinfer.kernels.arguments import DecodeCache, PrefillCache, TokenCache
from pdinfer.kernels.formats.cache_rows import index_rows, latent_rows

NOPE, VALUE, INDEX_KEY = 128, 128, 128
SCALE = (NOPE + ROPE) ** -0.5
ROWS_AT_ONCE = 1 << 18


@attrs.frozen
class Pool:
    """Pages, and where those of each sequence are."""

    pages_PGW: Tensor
    table_BM: Tensor
    lens_B: Tensor


def pool_of(device: torch.device, seed: int, contexts: tuple[int, ...], widths: tuple[int, int], packed: bool) -> Pool:
    """Return random pages that belong to sequences of these lengths in no order."""
    latent, rope = widths
    columns = -(-max(contexts) // PAGE_SIZE)
    num_pages = columns * len(contexts)
    dtype = torch.uint8 if packed else torch.bfloat16
    rows_SW = torch.cat(
        [
            latent_rows(draw(device, seed + first, count, latent), draw(device, seed + first + 1, count, rope), dtype)
            for first in range(0, num_pages * PAGE_SIZE, ROWS_AT_ONCE)
            for count in [min(ROWS_AT_ONCE, num_pages * PAGE_SIZE - first)]
        ]
    )
    order = torch.randperm(num_pages, generator=generator(device, seed), device=device, dtype=torch.int32)
    lens = torch.tensor(contexts, device=device)
    return Pool(rows_SW.view(num_pages, PAGE_SIZE, -1), order.view(len(contexts), columns), lens)


@attrs.frozen(kw_only=True)
class AttentionCase(Case):
    """Heads that attend to the latents of a batch of sequences. `ragged` shortens each sequence by another number of
    tokens."""

    heads: int
    batch: int
    context: int
    packed: bool = False
    ragged: bool = False
    widths: tuple[int, int] = (LATENT, ROPE)

    @property
    def contexts(self) -> tuple[int, ...]:
        return tuple(self.context - 37 * index * self.ragged for index in range(self.batch))

    @property
    def row_bytes(self) -> int:
        latent, rope = self.widths
        return latent + 4 * latent // 128 + 2 * rope if self.packed else 2 * (latent + rope)

    def spec(self, device: torch.device | str) -> OpSpec:
        return OpSpec(
            device=device,
            num_heads=self.heads,
            kv_lora_rank=self.widths[0],
            qk_rope_head_dim=self.widths[1],
            page_size=PAGE_SIZE,
            kv_format="fp8" if self.packed else "bfloat16",
        )

    def work_of(self, num_tokens: int, num_read: int) -> Work:
        """Return the work of absorbed attention of `num_tokens` queries, of which each reads `num_read` rows that
        `num_read * batch` are read in all."""
        latent, rope = self.widths
        queries = 2 * num_tokens * self.heads * (2 * latent + rope)
        return Work(
            num_bytes=self.batch * num_read * self.row_bytes + queries,
            flops=2 * num_tokens * self.heads * num_read * (2 * latent + rope),
        )


@attrs.frozen(kw_only=True)
class Decode(AttentionCase):
    """Absorbed attention of a decode step."""

    family: ClassVar[str] = "decode"
    op: ClassVar[str] = "mla_decode"
    num_queries: int = 1

    @property
    def name(self) -> str:
        rows = "656-byte rows" if self.packed else "bf16"
        return f"MLA decode {rows}, {self.heads} heads, {self.batch} x {self.context}, Q {self.num_queries}"

    @property
    def work(self) -> Work:
        return self.work_of(self.batch * self.num_queries, self.context)

    def small(self) -> Case:
        return attrs.evolve(self, batch=3, context=300, ragged=True)

    def tiny(self) -> Case:
        widths = self.widths if self.packed else (128, 16)
        return attrs.evolve(self, batch=2, context=100, heads=min(self.heads, 16), widths=widths, ragged=True)

    def inputs(self, device: torch.device, seed: int) -> Any:
        shape = (self.batch, self.num_queries, self.heads)
        queries = [draw(device, seed + width, *shape, width) for width in self.widths]
        return *queries, pool_of(device, seed, self.contexts, self.widths, self.packed)

    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        q_latent, q_rope, pool = inputs
        return op(q_latent, q_rope, DecodeCache(pool.pages_PGW, pool.table_BM, pool.lens_B), scale=SCALE)


@attrs.frozen(kw_only=True)
class SparseDecode(AttentionCase):
    """Absorbed attention to chosen tokens, one query of each sequence."""

    family: ClassVar[str] = "sparse"
    op: ClassVar[str] = "mla_sparse"
    chosen: int = 2048

    @property
    def name(self) -> str:
        return f"sparse decode {self.chosen} of {self.context}, {self.heads} heads, B {self.batch}"

    @property
    def work(self) -> Work:
        return self.work_of(self.batch, self.chosen)

    def small(self) -> Case:
        return attrs.evolve(self, batch=2, context=500, chosen=256)

    def tiny(self) -> Case:
        return attrs.evolve(self, batch=2, context=100, chosen=32, heads=4)

    def inputs(self, device: torch.device, seed: int) -> Any:
        pool = pool_of(device, seed, self.contexts, self.widths, self.packed)
        chance = torch.rand(self.batch, self.context, generator=generator(device, seed), device=device)
        selected_TS = chance.topk(self.chosen).indices.sort().values
        queries = [draw(device, seed + width, self.batch, self.heads, width) for width in self.widths]
        cache = TokenCache(pool.pages_PGW, pool.table_BM, torch.arange(self.batch, device=device))
        return *queries, cache, selected_TS

    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        return op(*inputs, scale=SCALE)


@attrs.frozen(kw_only=True)
class IndexTopK(AttentionCase):
    """What an indexer chooses in a decode step: scores of all packed index keys, and the best of them."""

    family: ClassVar[str] = "index"
    op: ClassVar[str] = "index_topk_decode"
    tolerance: ClassVar[float] = 0.15
    """One choice in a hundred may fall to the other side of a near tie: each is two in the square of the error."""
    chosen: int = 2048
    heads: int = 64
    packed: bool = True
    widths: tuple[int, int] = (INDEX_KEY, 0)

    def spec(self, device: torch.device | str) -> OpSpec:
        return OpSpec(device=device, page_size=PAGE_SIZE, kv_format="fp8")

    @property
    def name(self) -> str:
        return f"index top {self.chosen} of {self.context}, {self.heads} heads, B {self.batch}"

    @property
    def work(self) -> Work:
        width = self.widths[0]
        pairs = self.batch * self.context
        moved = pairs * (width + 4) + self.batch * (2 * self.heads * (width + 1) + 8 * self.chosen)
        return Work(num_bytes=moved, flops=2 * pairs * self.heads * (width + 1))

    def small(self) -> Case:
        return attrs.evolve(self, batch=2, context=500, chosen=256)

    def tiny(self) -> Case:
        return attrs.evolve(self, batch=2, context=100, chosen=32, heads=4)

    def inputs(self, device: torch.device, seed: int) -> Any:
        columns = -(-self.context // PAGE_SIZE)
        width = self.widths[0]
        keys_SY = draw(device, seed, self.batch * columns * PAGE_SIZE, width)
        pages_PGY = index_rows(keys_SY, torch.uint8).view(self.batch * columns, PAGE_SIZE, -1)
        order = torch.randperm(len(pages_PGY), generator=generator(device, seed), device=device, dtype=torch.int32)
        weights_BQX = draw(device, seed + 2, self.batch, 1, self.heads).float().abs()
        lens_B = torch.full((self.batch,), self.context, device=device)
        q_BQXY = draw(device, seed + 1, self.batch, 1, self.heads, width)
        return q_BQXY, weights_BQX, DecodeCache(pages_PGY, order.view(self.batch, columns), lens_B)

    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        return op(*inputs, top_k=self.chosen)

    def compared(self, result: Any) -> Any:
        """Return which positions were chosen: one that is chosen instead of another is two errors, wherever it is."""
        chosen_BS = result[:, 0]
        flags = torch.zeros(len(chosen_BS), self.context, device=chosen_BS.device)
        return flags.scatter_(1, chosen_BS.clamp_min(0), (chosen_BS >= 0).float())


@attrs.frozen(kw_only=True)
class Prefill(AttentionCase):
    """Expanded causal attention of one prompt, with the products that expand its latents."""

    family: ClassVar[str] = "prefill"
    op: ClassVar[str] = "mla_prefill"

    @property
    def name(self) -> str:
        return f"MLA prefill, {self.heads} heads, {self.context} causal"

    @property
    def work(self) -> Work:
        latent, rope = self.widths
        pairs = self.context * (self.context + 1) // 2
        attended = 2 * pairs * self.heads * (NOPE + rope + VALUE)
        expanded = 2 * self.context * self.heads * (NOPE + VALUE) * latent
        rows = 2 * self.context * self.heads * (NOPE + rope + VALUE) + self.context * self.row_bytes
        return Work(num_bytes=rows + 2 * self.heads * (NOPE + VALUE) * latent, flops=attended + expanded)

    def small(self) -> Case:
        return attrs.evolve(self, heads=min(self.heads, 16), context=300)

    def tiny(self) -> Case:
        return attrs.evolve(self, heads=2, context=70, widths=(128, 16))

    def inputs(self, device: torch.device, seed: int) -> Any:
        latent, rope = self.widths
        pool = pool_of(device, seed, self.contexts, self.widths, self.packed)
        kv_b_OC = draw(device, seed + 3, self.heads * (NOPE + VALUE), latent) * latent**-0.5
        return draw(device, seed + 4, self.context, self.heads, NOPE + rope), pool, kv_b_OC

    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        q_THQ, pool, kv_b_OC = inputs
        cache = PrefillCache(pool.pages_PGW, pool.table_BM, self.contexts, self.contexts)
        return op(q_THQ, kv_b_OC, cache, v_head_dim=VALUE, scale=SCALE)

    def rivals(self, inputs: Any) -> dict[str, Callable[[], Any]]:
        """Return SDPA by each of its kernels, which gets the latents in one piece and expands them too. Flash attention
        needs values as wide as keys."""
        q_THQ, pool, kv_b_OC = inputs
        latent = self.widths[0]
        rows_SW = pool.pages_PGW[pool.table_BM[0].long()].flatten(0, 1)[: self.context].contiguous()
        c_SC, k_rope_SR = rows_SW.split(self.widths, -1)
        q_1HTQ = q_THQ.transpose(0, 1)[None].contiguous()

        def attend(backend: SDPBackend) -> Tensor:
            kv_SHN = F.linear(c_SC, kv_b_OC.view(-1, latent)).view(self.context, self.heads, NOPE + VALUE)
            k_SHN, v_SHV = kv_SHN.split((NOPE, VALUE), -1)
            k_SHQ = torch.cat((k_SHN, k_rope_SR[:, None].expand(-1, self.heads, -1)), -1)
            wide = k_SHQ.shape[-1] - VALUE if backend == SDPBackend.FLASH_ATTENTION else 0
            k_1HSQ, v_1HSV = (part.transpose(0, 1)[None] for part in (k_SHQ, F.pad(v_SHV, (0, wide))))
            with sdpa_kernel(backend):
                out_1HTV = F.scaled_dot_product_attention(q_1HTQ, k_1HSQ, v_1HSV, is_causal=True, scale=SCALE)
            return out_1HTV[..., :VALUE]

        backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        return {f"sdpa {name}": lambda backend=backend: attend(backend) for name, backend in backends.items()}


MEMORY, COMPUTE, INDEX = Goal("copy", 0.70, 0.85), Goal("bf16", 0.40, 0.60), Goal("copy", 0.30, 0.50)
BATCHES = (64, 128)
CASES: tuple[Case, ...] = (
    *(Decode(heads=16, batch=64, context=8192, num_queries=queries, goal=MEMORY) for queries in (1, 2)),
    *(Decode(heads=128, batch=batch, context=context, goal=COMPUTE) for batch in BATCHES for context in (4096, 16384)),
    *(Decode(heads=16, batch=batch, context=8192, packed=True, goal=Goal("copy", 0.50, 0.70)) for batch in BATCHES),
    Decode(heads=128, batch=64, context=8192, packed=True, goal=COMPUTE),
    *(
        IndexTopK(batch=batch, context=context, goal=Goal("copy", 0.30, 0.50))
        for batch, context in ((64, 32768), (16, 131072))
    ),
    *(
        SparseDecode(heads=128, batch=batch, context=32768, packed=True, goal=Goal("bf16", 0.20, 0.35))
        for batch in BATCHES
    ),
    *(Prefill(heads=128, batch=1, context=context, goal=Goal("sdpa", 0.90, 1.0)) for context in (1024, 4096, 16384)),
)
