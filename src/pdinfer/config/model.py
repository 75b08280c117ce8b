"""The architecture of a model, as its Hugging Face config.json describes it (`ModelConfig`).

A value is frozen and checked when made, so one that exists can be used. Every violation raises ConfigError with the
field, its value and the range."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping

import attrs

from pdinfer.checks import a_bool, as_float, clip, float_in, instance_of, int_field, int_in, is_int, one_of, typed
from pdinfer.config import rope
from pdinfer.config.families import FAMILIES, Family, ScoringFunc, TopkMethod
from pdinfer.config.hf import (
    MAX_LAYERS,
    MAX_VOCAB,
    STORED_DTYPES,
    IndexerType,
    ending_ids,
    read_fields,
    sampling_defaults,
)
from pdinfer.config.packed import PackedWeights
from pdinfer.config.rope import MAX_POSITIONS, YarnScaling
from pdinfer.errors import ConfigError
from pdinfer.files import MAX_CONFIG_BYTES, AnyPath, check_folder, naming, read_json
from pdinfer.values import Value

MAX_WIDTH = 1 << 20
MAX_HEAD_DIM = 1024
MAX_LATENT_RANK = 1 << 16
MAX_EXPERTS = 1 << 14


@attrs.frozen(kw_only=True)
class ModelConfig(Value):
    """The architecture of a model of one of the `FAMILIES`: DeepSeek-V2, V3, V3.2, Kimi-K2, GLM-5 and relatives. Fields
    keep the names of the Hugging Face config.json.

    Make it with `from_checkpoint` or `from_dict`. Sizes are numbers of elements. `dtype` is the one that weights which
    are not quantized are stored in. `scale_fmt` "ue8m0" rounds the scales of FP8 activations to powers of two, and
    `packed` says of which format weights are that have four bits. Layers
    `first_k_dense_replace` and up are mixtures of experts; in a model without experts it equals `num_hidden_layers`,
    and the fields about experts are 0. The `index_*` fields are None in models without sparse attention, and
    `indexer_types` is empty."""

    model_type: str = attrs.field(validator=one_of(*FAMILIES))
    vocab_size: int = attrs.field(validator=int_in(1, MAX_VOCAB))
    hidden_size: int = attrs.field(validator=int_in(1, MAX_WIDTH))
    num_hidden_layers: int = attrs.field(validator=int_in(1, MAX_LAYERS))
    num_attention_heads: int = attrs.field(validator=int_in(1, 4096))
    q_lora_rank: int | None = attrs.field(validator=attrs.validators.optional(int_in(1, MAX_LATENT_RANK)))
    kv_lora_rank: int = attrs.field(validator=int_in(1, MAX_LATENT_RANK))
    qk_nope_head_dim: int = attrs.field(validator=int_in(1, MAX_HEAD_DIM))
    qk_rope_head_dim: int = attrs.field(validator=int_in(2, MAX_HEAD_DIM))
    v_head_dim: int = attrs.field(validator=int_in(1, MAX_HEAD_DIM))
    intermediate_size: int = attrs.field(validator=int_in(1, MAX_WIDTH))
    moe_intermediate_size: int = attrs.field(validator=int_in(0, MAX_WIDTH))
    first_k_dense_replace: int = attrs.field(validator=int_in(0, MAX_LAYERS))
    n_routed_experts: int = attrs.field(validator=int_in(0, MAX_EXPERTS))
    n_shared_experts: int = attrs.field(validator=int_in(0, 1024))
    num_experts_per_tok: int = attrs.field(validator=int_in(0, MAX_EXPERTS))
    n_group: int = int_field(1, MAX_EXPERTS, default=1)
    topk_group: int = int_field(1, MAX_EXPERTS, default=1)
    scoring_func: ScoringFunc = attrs.field(validator=instance_of(ScoringFunc))
    topk_method: TopkMethod = attrs.field(validator=instance_of(TopkMethod))
    norm_topk_prob: bool = attrs.field(validator=a_bool)
    routed_scaling_factor: float = attrs.field(converter=as_float, validator=float_in(0, 1e6))
    max_position_embeddings: int = attrs.field(validator=int_in(1, MAX_POSITIONS))
    rms_norm_eps: float = attrs.field(converter=as_float, validator=float_in(0, 1))
    rope_theta: float = attrs.field(converter=as_float, validator=float_in(1, 1e12))
    yarn: YarnScaling | None = attrs.field(default=None, validator=attrs.validators.optional(instance_of(YarnScaling)))
    tie_word_embeddings: bool = attrs.field(default=False, validator=a_bool)
    num_nextn_predict_layers: int = int_field(0, 16, default=0)
    index_n_heads: int | None = int_field(1, 4096, default=None)
    index_head_dim: int | None = int_field(2, MAX_HEAD_DIM, default=None)
    index_topk: int | None = int_field(1, MAX_POSITIONS, default=None)
    indexer_rope_interleave: bool = attrs.field(default=False, validator=a_bool)
    indexer_types: tuple[IndexerType, ...] = ()
    bos_token_id: int | None = int_field(0, MAX_VOCAB - 1, default=None)
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = attrs.field(default="bfloat16", validator=one_of(*STORED_DTYPES))
    scale_fmt: str | None = attrs.field(default=None, validator=attrs.validators.optional(one_of("ue8m0")))
    packed: PackedWeights | None = attrs.field(
        default=None, validator=attrs.validators.optional(instance_of(PackedWeights))
    )

    def __attrs_post_init__(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim must be even (rope turns pairs), got {self.qk_rope_head_dim}")
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ConfigError(
                f"first_k_dense_replace must be at most num_hidden_layers = {self.num_hidden_layers}, "
                f"got {self.first_k_dense_replace}"
            )
        self._check_router()
        self._check_experts()
        self._check_indexer()
        _check_token_ids("bos_token_id", () if self.bos_token_id is None else (self.bos_token_id,), self.vocab_size)
        _check_token_ids("eos_token_id", self.eos_token_ids, self.vocab_size)

    def _check_router(self) -> None:
        family = self.family
        if self.scoring_func is not family.scoring_func:
            raise ConfigError(
                f"scoring_func of a {self.model_type} must be {family.scoring_func.value}, "
                f"got {self.scoring_func.value}"
            )
        if self.topk_method not in family.topk_methods:
            supported = ", ".join(method.value for method in family.topk_methods)
            raise ConfigError(
                f"topk_method of a {self.model_type} must be one of {supported}, got {self.topk_method.value}"
            )
        if self.norm_topk_prob not in family.norm_topk_prob:
            raise ConfigError(
                f"norm_topk_prob of a {self.model_type} must be false, got true: implementations "
                f"disagree on what it does there"
            )

    def _check_experts(self) -> None:
        experts, groups = self.n_routed_experts, self.n_group
        dense = self.first_k_dense_replace == self.num_hidden_layers + self.num_nextn_predict_layers
        if experts == 0 and dense:
            return
        for name in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"):
            if getattr(self, name) == 0:
                raise ConfigError(f"{name} must be at least 1 in a model with experts, got 0")
        if experts % groups:
            raise ConfigError(f"n_group must divide n_routed_experts = {experts}, got {groups}")
        if self.topk_group > groups:
            raise ConfigError(f"topk_group must be at most n_group = {groups}, got {self.topk_group}")
        allowed = experts // groups * self.topk_group
        if self.num_experts_per_tok > allowed:
            raise ConfigError(
                f"num_experts_per_tok must be at most {allowed} (n_routed_experts / n_group * topk_group = "
                f"{experts} / {groups} * {self.topk_group}), got {self.num_experts_per_tok}"
            )
        if self.topk_method is TopkMethod.NOAUX_TC and groups > 1 and experts == groups:
            raise ConfigError(
                f"n_group must leave at least 2 experts per group for noaux_tc, got {groups} groups of "
                f"n_routed_experts = {experts}"
            )

    def _check_indexer(self) -> None:
        if self.family.indexer_rope_interleave is None:
            return
        for name in ("index_n_heads", "index_head_dim", "index_topk", "q_lora_rank"):
            if getattr(self, name) is None:
                raise ConfigError(f"{name} is missing; a {self.model_type} cannot be built without it")
        if self.index_head_dim is not None and self.index_head_dim < self.qk_rope_head_dim:
            raise ConfigError(
                f"index_head_dim must be at least qk_rope_head_dim = {self.qk_rope_head_dim} (its first elements are "
                f"turned), got {self.index_head_dim}"
            )
        if len(self.indexer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"indexer_types must name each of the {self.num_hidden_layers} layers, got {len(self.indexer_types)}"
            )
        if not self.has_indexer(0):
            raise ConfigError("indexer_types: layer 0 is shared, and no layer comes before it to share with")

    @classmethod
    @typed
    def from_checkpoint(cls, folder: AnyPath, *, trusted_roots: Iterable[AnyPath] = ()) -> ModelConfig:
        """Read the configuration of a model folder: its config.json, and the end-of-sequence ids of
        generation_config.json. `trusted_roots` is as for `load_model`.

        Raises ConfigError with the path of the file at fault, CheckpointError when there is no such folder."""
        folder, roots = check_folder(folder), tuple(trusted_roots)
        path, generation_path = folder / "config.json", folder / "generation_config.json"
        raw = read_json(path, max_bytes=MAX_CONFIG_BYTES, trusted_roots=roots)
        with naming(path):
            config = cls.from_dict(raw)
        if not os.path.lexists(generation_path):
            return config
        generation = read_json(generation_path, trusted_roots=roots)
        with naming(generation_path):
            sampling_defaults(generation)  # impossible ones say that the file is broken
            return attrs.evolve(config, eos_token_ids=ending_ids(raw, generation))

    @classmethod
    @typed
    def from_dict(cls, raw: Mapping[str, object]) -> ModelConfig:
        """Read the configuration from a parsed config.json, in the spelling of transformers 4 or 5. Raises ConfigError.

        Fields without effect on inference are ignored, and listed in `config.fields`. Other unknown fields raise."""
        values = read_fields(raw)
        names = {field.name for field in attrs.fields(cls)}
        for field in attrs.fields(cls):
            if field.default is attrs.NOTHING and field.name not in values:
                raise ConfigError(f"{field.name} is missing; a {values['model_type']} cannot be built without it")
        return cls(**{name: value for name, value in values.items() if name in names})

    @property
    def family(self) -> Family:
        """The family, which says what the `model_type` implies."""
        return FAMILIES[self.model_type]

    @property
    def qk_head_dim(self) -> int:
        """The elements of one head's query and key: the part without rope, then the part with it."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """The factor of scores: qk_head_dim^-0.5, times YaRN's m(mscale_all_dim)^2 where that is set."""
        scale = math.pow(self.qk_head_dim, -0.5)
        if self.yarn and self.yarn.mscale_all_dim:
            scale *= self.yarn.magnitude(self.yarn.mscale_all_dim) ** 2
        return scale

    @property
    def rope_attention_factor(self) -> float:
        """The factor of rope's cos and sin."""
        return 1.0 if self.yarn is None else self.yarn.attention_factor

    def inv_frequencies(self) -> tuple[float, ...]:
        """Return the radians per position of the qk_rope_head_dim / 2 pairs: see `rope.inv_frequencies`."""
        return rope.inv_frequencies(self.qk_rope_head_dim, self.rope_theta, self.yarn)

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether `layer` routes to experts. Next-token-prediction layers, numbered after the main ones, do
        too."""
        return layer >= self.first_k_dense_replace

    @property
    def is_sparse(self) -> bool:
        """True if attention reads only the `index_topk` tokens that an indexer chose (DeepSeek sparse attention)."""
        return self.index_topk is not None

    def has_indexer(self, layer: int) -> bool:
        """Return whether `layer` chooses tokens itself. Next-token-prediction layers of a sparse model do."""
        return self.is_sparse and (layer >= self.num_hidden_layers or self.indexer_types[layer] is IndexerType.FULL)

    @property
    def num_parameters(self) -> int:
        """The elements of the main model: embedding, layers, final norm and head, with norms, routers and correction
        biases."""
        hidden, heads, rank = self.hidden_size, self.num_attention_heads, self.kv_lora_rank
        query_width = heads * self.qk_head_dim
        query = hidden * query_width
        if self.q_lora_rank is not None:
            query = self.q_lora_rank * (hidden + 1 + query_width)
        latent = hidden * (rank + self.qk_rope_head_dim) + rank
        expanded = rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        layer = query + latent + expanded + heads * self.v_head_dim * hidden + 2 * hidden
        dense = 3 * hidden * self.intermediate_size
        experts = self.n_routed_experts
        moe = experts * hidden + 3 * hidden * self.moe_intermediate_size * (experts + self.n_shared_experts)
        moe += experts if self.topk_method is TopkMethod.NOAUX_TC else 0
        moe += hidden if self.family.moe_output_norm else 0
        index_heads, index_width = self.index_n_heads or 0, self.index_head_dim or 0
        indexer = (self.q_lora_rank or 0) * index_heads * index_width + hidden * (index_width + index_heads)
        return (
            self.num_hidden_layers * layer
            + self.first_k_dense_replace * dense
            + (self.num_hidden_layers - self.first_k_dense_replace) * moe
            + sum(map(self.has_indexer, range(self.num_hidden_layers))) * (indexer + 2 * index_width)
            + self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
            + hidden
        )

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that are equal where cached latents and outputs mean the same: SHA-256 of all fields but token ids
        and formats."""
        names = [field.name for field in attrs.fields(ModelConfig)]
        lines = [
            f"{name}={_canonical(getattr(self, name))}"
            for name in names
            if name not in ("bos_token_id", "eos_token_ids", "dtype", "scale_fmt", "packed")
        ]
        return hashlib.sha256("\n".join(["pdinfer ModelConfig 1", *lines]).encode()).digest()


def _check_token_ids(name: str, ids: object, vocab_size: int) -> None:
    for token in ids if isinstance(ids, tuple) else (ids,):
        if not is_int(token) or not 0 <= token < vocab_size:
            raise ConfigError(f"{name} must be an int from 0 to vocab_size - 1 = {vocab_size - 1}, got {clip(token)}")


def _canonical(value: object) -> str:
    """Return one spelling per value: floats exactly, in hexadecimal; enums by value; tuples by their items; a
    YarnScaling by its fields."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, ScoringFunc | TopkMethod | IndexerType):
        return str(value.value)
    if isinstance(value, tuple):
        return ",".join(map(_canonical, value))
    if isinstance(value, YarnScaling):
        return ";".join(f"{field.name}={_canonical(getattr(value, field.name))}" for field in attrs.fields(YarnScaling))
    return repr(value)
