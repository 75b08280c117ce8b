"""Small models: configurations for any machine, random weights, checkpoints of them; and the folder of a trained
one."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from pdinfer.checks import clip, typed
from pdinfer.config import ExpertConfig, ModelConfig
from pdinfer.errors import BackendUnavailable, ConfigError
from pdinfer.kernels.formats.floats import Plain
from pdinfer.kernels.formats.format import WHOLE, Format, Shape, Shard, Weight
from pdinfer.kernels.formats.weights import assign, expert, places, tensors_of
from pdinfer.kernels.resolve import resolve_ops
from pdinfer.kernels.torch.products import sum_in_float32
from pdinfer.kv.view import DTYPES
from pdinfer.model.load import named_device
from pdinfer.model.model import Model, op_spec_of
from pdinfer.moe.parallel import ExpertParallel, checked_placement
from pdinfer.moe.placement.placement import ExpertPlacement
from pdinfer.parallel.topology import Topology
from pdinfer.process.modes import own_modes
from pdinfer.process.streams import make_current
from pdinfer.values import Value

_TINY: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
_YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "n_shared_experts": 2,
}
# with fewer heads, two tokens on which all of them are silent tie, and implementations may choose either
_SPARSE = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 11}
_FAMILIES: dict[str, dict[str, Any]] = {
    "v3": {},
    "v3-yarn": {"rope_scaling": _YARN},
    "v3-ungrouped": {"n_group": 1, "topk_group": 1, "n_routed_experts": 10, "num_experts_per_tok": 2},
    "v32": {**_SPARSE, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    "glm": {
        **_SPARSE,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "indexer_rope_interleave": True,
        "indexer_types": ["full", "shared", "full"],
    },
    "v2": {**_V2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    "v2-lite": {
        **_V2,
        "topk_method": "greedy",
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
"""Names that `tiny_config` knows. They cover every routing rule, with and without a query latent, with and without
YaRN, with sparse attention in each layer and with choices shared between layers."""


def tiny_config_dict(family: str = "v3", **overrides: Any) -> dict[str, Any]:
    """Return the config.json of a model small enough for any machine. `overrides` replace fields. Raises ConfigError
    for a family that is not in FAMILIES."""
    if family not in FAMILIES:
        raise ConfigError(f"the families of tiny models are {', '.join(FAMILIES)}, got {clip(family)}")
    return {**_TINY, **_FAMILIES[family], **overrides}


def tiny_config(family: str = "v3", **overrides: Any) -> ModelConfig:
    """Return the same as a ModelConfig."""
    return ModelConfig.from_dict(tiny_config_dict(family, **overrides))


@attrs.define
class RandomWeights(Value):
    """A WeightSource that draws every tensor from its name and a seed, scaled so that activations stay near one and
    routing, norms and biases all matter. `tensors` holds the tensors that were asked for, by checkpoint name."""

    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    tensors: dict[str, Tensor] = attrs.field(factory=dict)

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None, shard: Shard = WHOLE) -> Tensor:
        tensor = _kept(self._draw(name, shape), shard).to(self.device, dtype or self.dtype)
        self.tensors[name] = tensor
        return tensor

    def find(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor | None:
        return None

    def weight(self, names: Sequence[str], rows: int, columns: int, shard: Shard = WHOLE) -> Weight:
        return expert(self.stack([names], rows, columns, shard), 0)

    def format(self, name: str) -> type[Format]:
        return Plain

    def stack(self, names: Sequence[Sequence[str]], rows: int, columns: int, shard: Shard = WHOLE) -> Weight:
        kept_rows, kept_columns = shard.shape((rows, columns))
        shape = Shape(len(names), len(names[0]), kept_rows, kept_columns)
        stack: Weight = Plain.empty(shape, dtype=self.dtype, device=self.device)
        for name, place in places(stack, names):
            assign(place, _kept(self._draw(name, (rows, columns)), shard))
            self.tensors[name] = tensors_of(place)[0]
        return stack

    def _draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        if name.endswith("norm.weight"):
            return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") * 0.8 + 0.6
        if name.endswith("e_score_correction_bias"):
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * 0.15
        gain = 3.0 if name == "lm_head.weight" else 1.3
        scale = 1.0 if "embed" in name else gain * shape[-1] ** -0.5
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * scale


def _kept(tensor: Tensor, shard: Shard) -> Tensor:
    return tensor.tensor_split(shard.size, shard.axis)[shard.index]


@typed
@own_modes()
def random_model(
    config: ModelConfig | None = None,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    providers: str | None = None,
    mtp: bool = False,
    topology: Topology | None = None,
    experts: ExpertConfig | None = None,
    placement: ExpertPlacement | None = None,
) -> Model:
    """Return a model of random weights. Equal arguments give equal models, and `mtp` adds a layer and changes no other.
    With a `topology` of several ranks, each rank calls this and gets its part of the same weights. `experts` and
    `placement` are as for `load_model`."""
    topology = topology or Topology()
    config = config or tiny_config()
    options = experts or ExpertConfig()
    placement = checked_placement(config, topology.ep_size, placement, options, mtp=mtp)
    target = named_device(device)
    resolved = resolve_ops(op_spec_of(config, topology, target, dtype), forced=providers)
    sum_in_float32(target)
    make_current(target)
    groups = topology.connect(target)
    parallel = ExpertParallel.connect(
        config, resolved.ops, groups.ep, device=target, dtype=dtype, mtp=mtp, options=options, placement=placement
    )
    digest = hashlib.sha256(f"random/{seed}".encode()).digest()
    return Model.build(
        config,
        RandomWeights(seed, dtype, target),
        resolved,
        device=target,
        dtype=dtype,
        topology=topology,
        groups=groups,
        experts=parallel,
        weights_id=digest,
        mtp=mtp,
    )


@typed
def write_checkpoint(
    folder: str | os.PathLike[str], config: dict[str, Any], *, seed: int = 0, num_shards: int = 2, mtp: bool = False
) -> dict[str, Tensor]:
    """Write random weights for a config.json in Hugging Face layout, cut into shards anywhere. Return the tensors.
    Those of an MTP layer are only written with `mtp`."""
    from safetensors.torch import save_file  # a writer is only needed here

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    path.joinpath("config.json").write_text(json.dumps(config, indent=2))
    parsed = ModelConfig.from_dict(config)
    source = RandomWeights(seed, DTYPES[parsed.dtype])
    cpu = torch.device("cpu")
    Model.build(
        parsed,
        source,
        resolve_ops(op_spec_of(parsed, Topology(), cpu, source.dtype)),
        device=cpu,
        dtype=source.dtype,
        topology=Topology(),
        groups=Topology().apart(),
        mtp=mtp,
    )
    names = sorted(source.tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: source.tensors[name].contiguous() for name in names[shard::num_shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(t.nbytes for t in source.tensors.values())}, "weight_map": weight_map}
    path.joinpath("model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return source.tensors


def tiny() -> Path:
    """Return the folder of the small trained model that examples and pages use; its README.md says what it answers.

    It is examples/tiny of the checkout that this is, or else the package `pdinfer_tiny`: 4 MB that the distribution of
    pdinfer does without. Raises BackendUnavailable when there is neither."""
    found = importlib.util.find_spec("pdinfer_tiny")
    packages = () if found is None else found.submodule_search_locations or ()
    for folder in (Path(__file__).parents[3] / "examples" / "tiny", *map(Path, packages)):
        if (folder / "config.json").is_file():
            return folder
    raise BackendUnavailable(
        "the tiny model is not installed: it is a package of its own in pdinfer's checkout, pip install ./examples/tiny"
    )
