"""A real model for simulated worlds, with two layers and one that drafts. Tokens must be those of the model in one
piece."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.kv.pool import PagePool
from pdinfer.kv.view import PageMemory
from pdinfer.model.model import Model
from pdinfer.parallel.groups import Groups
from pdinfer.testing import random_model, tiny_config
from pdinfer.types import Request
from tests.sim.fakes import Violation, check_landing
from tests.sim.plan import Focus

NEAR_TIE = 1e-4
"""When the two best logits are closer than this, rounding may swap them."""


class ModelBrain:
    """A real model for a simulated world. A token may differ from the reference only where the logits nearly tie; then
    the rest of its request is not compared. `excused` lists such requests."""

    prefill = PrefillEngine
    decode = DecodeEngine

    def __init__(self) -> None:
        self.model = random_model(tiny_config(num_hidden_layers=2, num_nextn_predict_layers=1), mtp=True)
        self.num_tokens = 0
        self.excused: list[str] = []

    def among(self, groups: Groups) -> Model:
        """Return the model of a rank: to its engine, the parts of all ranks add up to one model."""
        return attrs.evolve(self.model, groups=groups)

    def watch(self, pool: PagePool, accounts: PagePool, over: Callable[[], bool]) -> None:
        memory = pool.memory
        assert isinstance(memory, PageMemory)
        (token_bytes,) = {component.token_bytes for component in pool.layout.components}
        region = pool.memory_pages * pool.layout.page_size * token_bytes
        landing = memory.landing

        def watched(spans):
            if not over():
                check_landing(accounts, spans, region, token_bytes)
            return landing(spans)

        memory.landing = watched

    def check_token(self, request: Request, tokens: list[int]) -> None:
        """Compare all tokens of a request at once, when it ends."""

    def is_whole(self, request: Request, tokens: list[int]) -> bool:
        sampling, eos = request.sampling, self.model.config.eos_token_ids
        if tokens:
            self._compare(request, tokens)
        stopped = bool(tokens) and not sampling.ignore_eos and tokens[-1] in eos
        return stopped or len(tokens) == sampling.max_new_tokens

    def _compare(self, request: Request, tokens: list[int]) -> None:
        rows = self.model.logits([*request.prompt, *tokens[:-1]])[len(request.prompt) - 1 :]
        best = torch.topk(rows.double(), 2)
        for at, (token, first, values) in enumerate(
            zip(tokens, best.indices[:, 0].tolist(), best.values.tolist(), strict=True)
        ):
            self.num_tokens += 1
            if token != first:
                margin = values[0] - values[1]
                if margin >= NEAR_TIE:
                    raise Violation(f"{request.request_id}: token {at} is {token}, not {first} (margin {margin})")
                self.excused.append(f"{request.request_id} token {at} (margin {margin:.1e})")
                return


FOCUS = Focus(vocab_size=97)
