"""Parts of matrices, read from every format they are stored in, add up to the whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from pdinfer.checkpoint import reader
from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.checkpoint.schemes import QUANTIZED, StoredWeights
from pdinfer.config import ModelConfig
from pdinfer.errors import ConfigError
from pdinfer.kernels.formats.format import WHOLE, Shard
from pdinfer.kernels.formats.int8 import Int8Dynamic, Int8Static
from pdinfer.kernels.formats.weights import dequantize, tensors_of
from pdinfer.kernels.resolve import resolve_ops
from pdinfer.kernels.spec import OpSpec
from pdinfer.layers import Linear
from pdinfer.model.destinations import Destinations
from pdinfer.model.load_plan import read_all
from pdinfer.parallel.groups import ALONE, InTouch
from pdinfer.progress import nobody
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.packed import SCHEMES, with_twin
from tests.rounding import error_of_products, gamma

CPU = torch.device("cpu")
OPS = resolve_ops(OpSpec(device=CPU, dtype=torch.float32), forced="reference").ops
NAME, SHAPE = "model.layers.0.mlp.down_proj", (256, 512)
FORMATS = ("float", "fp8", "w8a8_dynamic", "w8a8", *SCHEMES)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of one model per format. Static INT8 has an offset and a bias."""
    folder = tmp_path_factory.mktemp("shards")
    sizes = {"hidden_size": SHAPE[0], "intermediate_size": SHAPE[1], "moe_intermediate_size": 32}
    write_checkpoint(folder / "float", tiny_config_dict(**sizes))
    for scheme in ("fp8", "w8a8_dynamic"):
        quantize_checkpoint(folder / "float", folder / scheme, scheme=scheme)
    for scheme in SCHEMES:
        with_twin(folder / "float", scheme, every_linear=True)[0].rename(folder / scheme)
    (folder / "w8a8").mkdir()
    for file in (folder / "w8a8_dynamic").iterdir():
        (folder / "w8a8" / file.name).write_bytes(file.read_bytes())
    (file,) = (folder / "w8a8").glob("*.safetensors")
    tensors = load(file.read_bytes())
    tensors |= static(tensors[f"{NAME}.weight"], tensors[f"{NAME}.weight_scale"])
    save_file(tensors, file)
    index = folder / "w8a8" / next((folder / "w8a8").glob("*.index.json")).name
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file.name)}))
    description = folder / "w8a8" / "quant_model_description.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {f"{NAME}.weight": "W8A8"}))
    return folder


def static(numbers: Tensor, weight_scale: Tensor) -> dict[str, Tensor]:
    scale, offset = 0.03, 7
    bias = torch.linspace(-2, 2, len(numbers)) / (scale * weight_scale.view(-1))
    return {
        f"{NAME}.input_scale": torch.tensor([scale]),
        f"{NAME}.input_offset": torch.tensor([offset], dtype=torch.int8),
        f"{NAME}.deq_scale": scale * weight_scale.view(-1),
        f"{NAME}.quant_bias": (bias.round() - offset * numbers.int().sum(1)).to(torch.int32),
    }


def linear_of(folder: Path, shard: Shard, *, stored: bool) -> Linear:
    """Read the part of the matrix, held as it is stored or as floats."""
    with Checkpoint.open(folder) as files:
        weights = StoredWeights.survey(files, ModelConfig.from_checkpoint(folder))
        source = Destinations(CPU, torch.float32, weights, frozenset(QUANTIZED) if stored else frozenset())
        linear = Linear.build(source, NAME, *SHAPE, OPS, shard)
        read_all(weights, source, nobody, InTouch(ALONE, CPU))
    return linear


def assert_same(got_TO: Tensor, whole: Linear, x_TI: Tensor) -> None:
    """Assert equality but for the order of sums, and in static INT8 for what is added to them and taken away again."""
    expected_TO = whole(x_TI)
    worth_OI = torch.empty(SHAPE)
    dequantize(whole.weight, worth_OI)
    error_TO = 4 * error_of_products(x_TI.double(), worth_OI.double())  # of both; quantized factors are no larger than
    if isinstance(whole.weight, Int8Static):  # twice the exact ones
        error_TO = error_TO + gamma(8) * (whole.weight.output_offset.abs() * whole.weight.output_scale).view(-1)
    assert ((got_TO - expected_TO).abs() <= error_TO).all()


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("scheme", FORMATS)
def test_rows_of_all_parts_are_the_whole(made: Path, scheme: str, *, stored: bool) -> None:
    x_TI = torch.randn(5, SHAPE[1], generator=torch.Generator().manual_seed(0))
    whole = linear_of(made / scheme, WHOLE, stored=stored)
    parts = [linear_of(made / scheme, Shard(index, 2), stored=stored) for index in range(2)]
    assert_same(torch.cat([part(x_TI) for part in parts], -1), whole, x_TI)
    sizes = [sum(tensor.nbytes for tensor in tensors_of(linear.weight)) for linear in (whole, parts[0])]
    assert sizes[0] / 2 <= sizes[1] <= sizes[0] / 2 + 8  # the two numbers that static INT8 has per matrix


@pytest.mark.parametrize(("scheme", "num_columns"), [("fp8", 8), *((scheme, 32) for scheme in SCHEMES)])
def test_floats_are_divided_inside_blocks(made: Path, scheme: str, num_columns: int) -> None:
    whole = linear_of(made / scheme, WHOLE, stored=False).weight
    assert isinstance(whole, Tensor)
    for size, axis in ((4, 0), (num_columns, 1)):
        parts = [linear_of(made / scheme, Shard(index, size, axis), stored=False).weight for index in range(size)]
        assert torch.equal(torch.cat(parts, axis), whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("scheme", FORMATS)
def test_products_of_columns_add_up_to_the_whole(made: Path, scheme: str, *, stored: bool) -> None:
    x_TI = torch.randn(5, SHAPE[1], generator=torch.Generator().manual_seed(0))
    whole = linear_of(made / scheme, WHOLE, stored=stored)
    if isinstance(whole.weight, Int8Dynamic):  # scales a token by all of its channels: its columns are never divided
        x_TI = torch.cat([x_TI[:, :128].clamp(-1, 1).index_fill(1, torch.tensor([0]), 1.0)] * 4, -1)
    total = sum(
        linear_of(made / scheme, Shard(index, 4, axis=1), stored=stored)(x_TI[:, 128 * index : 128 * (index + 1)])
        for index in range(4)
    )
    assert isinstance(total, Tensor)
    assert_same(total, whole, x_TI)


def test_of_rows_no_others_are_read_but_those_in_their_blocks(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, preadv = [], os.preadv
    monkeypatch.setattr(reader, "BLOCK_BYTES", 64 * SHAPE[1] * 4)

    def counting(*arguments: object) -> int:
        read.append(preadv(*arguments))  # type: ignore[arg-type]
        return read[-1]

    with Checkpoint.open(made / "float") as files:
        info = files.tensors[f"{NAME}.weight"]
        whole = files.read(info)
        monkeypatch.setattr(os, "preadv", counting)
        for rows in (range(64, 192), range(0), range(255, 256)):
            assert torch.equal(files.read(info, rows), whole[rows.start : rows.stop])
    assert sum(read) == (128 + 64) * SHAPE[1] * 4


@pytest.mark.parametrize(
    ("scheme", "shard", "told"),
    [
        ("float", Shard(0, 3), "[256, 512] cannot be divided between 3 ranks: 256 rows are not a multiple of 3; use"),
        ("float", Shard(1, 3, axis=1), "between 3 ranks: 512 columns are not a multiple of 3; use"),
        (
            "fp8",
            Shard(0, 4),
            "between 4 ranks in whole blocks of 128 that share a scale: 256 rows are not a multiple of 512; use",
        ),
        (
            "fp8",
            Shard(0, 8, axis=1),
            "whole blocks of 128 that share a scale: 512 columns are not a multiple of 1024; use a smaller tp",
        ),
        *(
            (
                scheme,
                Shard(0, 32, axis=1),
                "in whole blocks of 32 that share a scale: 512 columns are not a multiple of 1024; use a smaller tp",
            )
            for scheme in SCHEMES
        ),
    ],
)
def test_parts_that_are_not_equal_or_not_of_whole_blocks_are_refused(
    made: Path, scheme: str, shard: Shard, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        linear_of(made / scheme, shard, stored=True)
    assert told in str(caught.value)
    assert f"{NAME}.weight" in str(caught.value)
