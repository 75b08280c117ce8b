"""What FP8 numbers are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pdinfer.kernels.formats.fp8 import any_nan

EVERY = torch.arange(256, dtype=torch.int16).to(torch.uint8)


class Written(TorchDispatchMode):
    """Counts the bytes of what ops write."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {x.data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(result, Tensor) and result.data_ptr() not in read:
            self.num_bytes += result.nbytes
        return result


def test_nan_is_found_among_all_numbers() -> None:
    found = [any_nan(each.view(torch.float8_e4m3fn)) for each in EVERY.split(1)]
    assert found == EVERY.view(torch.float8_e4m3fn).float().isnan().tolist()
    assert sum(found) == 2
    numbers = EVERY[[0, 126, 128, 254]]
    assert not any_nan(numbers.view(torch.float8_e4m3fn))
    assert not any_nan(numbers[:0].view(torch.float8_e4m3fn))


def test_a_search_for_nan_writes_one_copy() -> None:
    """To compare each number, and look for one that is true, takes twelve times as long."""
    numbers = torch.zeros(1 << 12, dtype=torch.float8_e4m3fn)
    with Written() as written:
        assert not any_nan(numbers)
    assert written.num_bytes <= len(numbers) + 8
