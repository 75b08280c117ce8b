"""Prompts made up from lengths and prefix hashes. Two prompts share exactly the blocks whose hashes they share."""

from __future__ import annotations

import numpy as np

from pdinfer.bench.traces import Arrival
from pdinfer.checks import check_int, typed

_ROOT = -1


class PromptMaker:
    """Makes the prompts of a load, with tokens below `vocab_size`, the same ones for the same seed and order.

    A block's tokens are drawn from its hash. Its first token is another one than that of every block after the same
    prefix, so that prompts differ right where their hashes do, until a prefix has been followed by as many blocks as
    there are tokens. A prompt without hashes is a block of its own.
    """

    @typed
    def __init__(self, vocab_size: int, *, block_tokens: int = 512, seed: int = 0) -> None:
        check_int("vocab_size", vocab_size, 2, 2**31)
        self._vocab_size = vocab_size
        self._block_tokens = block_tokens
        self._seed = seed
        self._first: dict[int, int] = {}
        self._num_children: dict[int, int] = {}
        self._num_made = 0

    def prompt(self, arrival: Arrival) -> tuple[int, ...]:
        """Return the prompt of a request: `arrival.prompt_tokens` token ids."""
        self._num_made += 1
        if not arrival.hash_ids:
            return self._block(_ROOT, -1 - self._num_made, arrival.prompt_tokens)
        tokens: list[int] = []
        parent = _ROOT
        for hash_id in arrival.hash_ids:
            left = min(self._block_tokens, arrival.prompt_tokens - len(tokens))
            tokens += self._block(parent, hash_id, left)
            parent = hash_id
        return tuple(tokens)

    def _block(self, parent: int, block: int, count: int) -> tuple[int, ...]:
        first = self._first.get(block)
        if first is None:
            child = self._num_children.get(parent, 0)
            self._num_children[parent] = child + 1
            first = self._first[block] = child % self._vocab_size
        rng = np.random.default_rng([self._seed, block < 0, abs(block)])
        rest = rng.integers(0, self._vocab_size, self._block_tokens if block >= 0 else count)
        return (first, *rest[1:count].tolist())
