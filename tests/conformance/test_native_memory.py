"""Native kernels that cannot have their memory say so, instead of writing where there is none."""

from __future__ import annotations

import pytest
import torch

from pdinfer.errors import BackendUnavailable, PDInferError
from pdinfer.kernels.native import ops as native


@pytest.mark.parametrize("tokens", [2**61, 2**62], ids=["more-than-there-is", "more-than-can-be-counted"])
def test_attention_over_more_than_fits_into_memory_is_a_typed_error(tokens: int) -> None:
    """No byte of such a context is read: the sums of its parts come first."""
    try:
        native.library()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    latent, rope = torch.zeros(1, 1, 16, 32, dtype=torch.bfloat16), torch.zeros(1, 1, 16, 32, dtype=torch.bfloat16)
    pages, table = torch.zeros(1, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(PDInferError, match=rf"attention over \[{tokens}\] tokens lacks \d+ bytes"):
        native.mla_decode(latent, rope, pages, table, torch.tensor([tokens]), scale=1.0)
