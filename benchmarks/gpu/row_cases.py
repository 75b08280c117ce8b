"""What moves bytes: pages that are gathered and scattered, and the fused ops between two products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch
from case import HIDDEN, LATENT, PAGE_SIZE, ROPE, Case, Goal, Work, draw, generator
from product_cases import row_bytes

EPS = 1e-6
COPY_PAGES, COPY_ROWS = Goal("copy", 0.85, 0.92), Goal("copy", 0.75, 0.85)


@attrs.frozen(kw_only=True)
class Pages(Case):
    """`rows` pages out of a pool of twice as many, in no order."""

    family: ClassVar[str] = "pages"
    exact: ClassVar[bool] = True
    rows: int = 61 * 128
    page_bytes: int = PAGE_SIZE * 2 * (LATENT + ROPE)
    goal: Goal = COPY_PAGES

    @property
    def name(self) -> str:
        return f"{self.op}, {self.rows} of {self.page_bytes / 1e3:.1f} KB"

    @property
    def work(self) -> Work:
        return Work(num_bytes=2 * self.rows * self.page_bytes)

    def small(self) -> Case:
        return attrs.evolve(self, rows=100)

    def tiny(self) -> Case:
        return attrs.evolve(self, rows=5, page_bytes=256)

    def inputs(self, device: torch.device, seed: int) -> Any:
        chance = generator(device, seed)
        pool_NW, other_SW = (
            torch.randint(1 << 62, (rows, self.page_bytes // 8), generator=chance, device=device)
            for rows in (2 * self.rows, self.rows)
        )
        return pool_NW, torch.randperm(2 * self.rows, generator=chance, device=device)[: self.rows], other_SW


@attrs.frozen(kw_only=True)
class Gather(Pages):
    """Pages of a pool into one piece."""

    op: ClassVar[str] = "gather_pages"

    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        op(*inputs)
        return inputs[2]


@attrs.frozen(kw_only=True)
class Scatter(Pages):
    """One piece into pages of a pool."""

    op: ClassVar[str] = "scatter_pages"

    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        op(*inputs)
        return inputs[0]


@attrs.frozen(kw_only=True)
class Rows(Case):
    """A fused op on the tokens of a chunk."""

    family: ClassVar[str] = "rows"
    tokens: int = 4096
    hidden: int = HIDDEN
    goal: Goal = COPY_ROWS
    title: ClassVar[str]

    @property
    def name(self) -> str:
        return f"{self.title}, {self.tokens} tokens"

    def small(self) -> Case:
        return attrs.evolve(self, tokens=70)

    def tiny(self) -> Case:
        return attrs.evolve(self, tokens=6, hidden=256)


@attrs.frozen(kw_only=True)
class Norm(Rows):
    """The norm of rows alone."""

    op: ClassVar[str] = "rms_norm"
    title: ClassVar[str] = "norm"

    @property
    def work(self) -> Work:
        return Work(num_bytes=self.tokens * 2 * 2 * self.hidden)

    def inputs(self, device: torch.device, seed: int) -> Any:
        return draw(device, seed, self.tokens, self.hidden), draw(device, seed + 1, self.hidden)

    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        return op(*inputs, EPS)


@attrs.frozen(kw_only=True)
class NormAndQuantize(Rows):
    """The sum of a residual stream, its norm, and the norm in FP8."""

    op: ClassVar[str] = "add_rms_norm_fp8"
    title: ClassVar[str] = "add, norm and quantize"

    @property
    def work(self) -> Work:
        return Work(num_bytes=self.tokens * (4 * 2 * self.hidden + row_bytes(self.hidden)))

    def inputs(self, device: torch.device, seed: int) -> Any:
        x, residual = (draw(device, seed + at, self.tokens, self.hidden) for at in range(2))
        return x, residual, draw(device, seed + 2, self.hidden)

    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        return op(*inputs, EPS, ue8m0=False)


@attrs.frozen(kw_only=True)
class RotateAndStore(Rows):
    """The norm of latents and the rotation of keys, written to pages."""

    op: ClassVar[str] = "norm_rotate_store"
    title: ClassVar[str] = "norm, rotate and store"

    @property
    def work(self) -> Work:
        return Work(num_bytes=self.tokens * (2 * 2 * (LATENT + ROPE) + 4 * ROPE + 8))

    def inputs(self, device: torch.device, seed: int) -> Any:
        num_pages = 2 * -(-self.tokens // PAGE_SIZE)
        kv_TW = draw(device, seed, self.tokens, LATENT + ROPE)
        c_TC, k_TR = kv_TW.split((LATENT, ROPE), -1)
        angle_TF = torch.rand(self.tokens, ROPE // 2, generator=generator(device, seed), device=device)
        pages = torch.zeros(num_pages, PAGE_SIZE, LATENT + ROPE, dtype=torch.bfloat16, device=device)
        slots = torch.randperm(num_pages * PAGE_SIZE, generator=generator(device, seed), device=device)[: self.tokens]
        return c_TC, k_TR, draw(device, seed + 1, LATENT), EPS, angle_TF.cos(), angle_TF.sin(), pages, slots

    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        op(*inputs, rounding=None)
        return inputs[6]


@attrs.frozen(kw_only=True)
class Combine(Rows):
    """The weighted sum of what a token's experts returned, the shared expert and the residual stream."""

    op: ClassVar[str] = "combine_experts"
    title: ClassVar[str] = "combine experts"
    chosen: int = 8

    @property
    def work(self) -> Work:
        return Work(num_bytes=self.tokens * ((self.chosen + 3) * 2 * self.hidden + self.chosen * 12))

    def inputs(self, device: torch.device, seed: int) -> Any:
        chance = generator(device, seed)
        num_rows = self.tokens * self.chosen
        row_TK = torch.randperm(num_rows, generator=chance, device=device).view(self.tokens, self.chosen)
        weights_TK = torch.rand(self.tokens, self.chosen, generator=chance, device=device)
        shared, residual = (draw(device, seed + at, self.tokens, self.hidden) for at in (1, 2))
        return draw(device, seed, num_rows, self.hidden), row_TK, weights_TK, shared, residual

    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        return op(*inputs)


CASES: tuple[Case, ...] = (Gather(), Scatter(), Norm(), NormAndQuantize(), RotateAndStore(), Combine())
