"""Tiny models on the simulated device and on the CPU."""

from __future__ import annotations

import functools
import tempfile

import attrs
import torch

import pdinfer as pd
from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.kernels.ops import OP_NAMES, function_of
from pdinfer.kernels.torch import provider as torch_provider
from pdinfer.kv.view import DTYPES
from pdinfer.testing import random_model, tiny_config, tiny_config_dict, write_checkpoint

PACKED = (("kv_lora_rank", 128),)
WIDE = (("hidden_size", 128), ("moe_intermediate_size", 128), *PACKED)
"""Sizes that pages in FP8 need, and quantized weights with whole blocks."""

INTEGERS = ("round_int8", "linear[w8a8_dynamic]", "linear[w8a8]", "grouped_mlp[w8a8_dynamic]")
SAME = {
    op: "reference" if op in INTEGERS else "torch" for op in OP_NAMES if function_of(torch_provider, op) is not None
}
"""The providers of ops for models of quantized weights, on every device: where others round the last bit otherwise,
activations move to the next step of their format. Torch sums INT8 products in integers on a CPU and in float64
elsewhere, which round otherwise when they are scaled."""


@attrs.frozen
class ModelKind:
    """A model, and what its engines do with it. `scheme` is that of weights that stay quantized. Their products are
    those of the CPU, unless `own_products`."""

    family: str = "v3"
    sizes: tuple[tuple[str, int], ...] = ()
    num_drafts: int = 0
    kv_format: str = "auto"
    scheme: str | None = None
    dtype: str = "float32"
    own_products: bool = False
    num_layers: int = 2
    """One with experts and one without."""


@functools.cache
def model_of(kind: ModelKind, device: torch.device) -> pd.Model:
    """One model of each kind for the whole run."""
    mtp = kind.num_drafts > 0
    sizes = {**dict(kind.sizes), "num_hidden_layers": kind.num_layers, "num_nextn_predict_layers": int(mtp)}
    if kind.scheme is None:
        return random_model(tiny_config(kind.family, **sizes), device=device, dtype=DTYPES[kind.dtype], mtp=mtp)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(f"{folder}/floats", tiny_config_dict(kind.family, **sizes), mtp=mtp)
        quantize_checkpoint(f"{folder}/floats", f"{folder}/quantized", scheme=kind.scheme)
        return pd.load_model(
            f"{folder}/quantized",
            device=device,
            dtype=kind.dtype,
            mtp=mtp,
            weights="stored",
            providers="torch" if kind.own_products else SAME,
        )
