"""When running sequences need their next pages: each one in every `page_size` steps."""

from __future__ import annotations


class Growth:
    """The sequences that take pages as they grow. In step s, the sequence of offset o has o + s tokens, and it needs a
    page when one more than a multiple of `page_size` of them are there."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._at = [0] * page_size  # how many need a page in step s, by s % page_size
        self._num_sequences = 0

    def add(self, offset: int) -> None:
        """Count a sequence."""
        self._at[(1 - offset) % self._page_size] += 1
        self._num_sequences += 1

    def remove(self, offset: int) -> None:
        """Count it no more."""
        self._at[(1 - offset) % self._page_size] -= 1
        self._num_sequences -= 1

    def num_pages(self, first: int, count: int) -> int:
        """Return how many pages `count` steps need, from step `first` on."""
        rounds, rest = divmod(count, self._page_size)
        begin = first % self._page_size
        end = begin + rest
        part = sum(self._at[begin:end]) + sum(self._at[: max(0, end - self._page_size)])
        return rounds * self._num_sequences + part

    def affordable(self, first: int, count: int, available: int) -> int:
        """Return how many of `count` steps the available pages are enough for; at least 1."""
        if available >= self._num_sequences * (count // self._page_size + 1):
            return count
        low, high = 1, count
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.num_pages(first, middle) <= available else (low, middle - 1)
        return low
