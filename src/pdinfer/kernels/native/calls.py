"""What calls of the kernels share: a look at dtypes before, and at memory behind."""

from __future__ import annotations

import torch
from torch import Tensor

from pdinfer.errors import PDInferError


def are(dtype: torch.dtype, *tensors: Tensor | None) -> bool:
    """Return whether all tensors that are there have this dtype. C would read the bits of another dtype as they are."""
    return all(tensor is None or tensor.dtype == dtype for tensor in tensors)


def check_memory(lacking: int | None, work: str) -> None:
    """Raise PDInferError if a kernel says how many bytes of memory it could not have."""
    if lacking:
        raise PDInferError(f"{work} lacks {lacking} bytes of memory")
