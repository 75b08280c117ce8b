"""Tensors of a checkpoint that its model does not read. They are known here with the reason, or refused.

A tensor that nobody asks for may change what the model computes, so it is never skipped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import torch

from pdinfer.checkpoint.schemes import StoredWeights
from pdinfer.checks import clip
from pdinfer.config import ModelConfig
from pdinfer.errors import CheckpointError
from pdinfer.model.model import Model
from pdinfer.model.mtp import copy_names

MAX_NAMED = 10

IMAGE_PARTS = ("vision_tower.", "mm_projector.")
HEAD = "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def refuse_unread(
    stored: StoredWeights, read: Collection[str], config: ModelConfig, *, mtp: bool
) -> Iterable[Collection[str]]:
    """Refuse tensors that nothing reads, whether or not the index lists them.

    A tensor is read when it belongs to one in `read`, or when a rank with other experts reads it. Return the names of
    those read, together where they differ in the number of an expert alone. Raises CheckpointError with the names of
    the others, except those that `_needs_no_reading` knows.
    """
    kinds: dict[str, list[str]] = {_kind(name): [] for name in read}
    used: set[str] = set()
    for name in map(stored.matrix, stored.files.tensors):
        expert = _EXPERT.search(name)
        elsewhere = expert is not None and int(expert[1]) < config.n_routed_experts and _kind(name) in kinds
        if elsewhere or name in read:
            kinds[_kind(name)].append(name)
            used.update(stored.parts(name))
    every = (*stored.files.tensors, *stored.files.unlisted)
    strange = [name for name in every if name not in used and not _needs_no_reading(name, config, mtp)]
    if strange:
        rest = f" and {len(strange) - MAX_NAMED} more" if len(strange) > MAX_NAMED else ""
        raise CheckpointError(
            f"{stored.files.folder}: {len(strange)} tensors are not those of a {config.model_type} with "
            f"num_hidden_layers = {config.num_hidden_layers} and num_nextn_predict_layers = "
            f"{config.num_nextn_predict_layers}, and nothing here computes what they are for: "
            f"{', '.join(clip(name) for name in strange[:MAX_NAMED])}{rest}; check that config.json is the model's own"
        )
    return kinds.values()


def check_tied(stored: StoredWeights, config: ModelConfig, model: Model) -> None:
    """Check that head and embedding are equal where the config ties them and the files hold both. Raises
    CheckpointError."""
    info = stored.files.tensors.get(HEAD)
    if config.tie_word_embeddings and info is not None:
        head = stored.files.read(info).to(model.device, model.dtype)
        if head.shape != model.embed_VD.shape or not torch.equal(head, model.embed_VD):
            raise CheckpointError(
                f"{info.file}: tie_word_embeddings is true but lm_head.weight differs from model.embed_tokens.weight"
            )


def _kind(name: str) -> str:
    return _EXPERT.sub(".experts.*.", name)


def _needs_no_reading(name: str, config: ModelConfig, mtp: bool) -> bool:
    match = _LAYER.fullmatch(name)
    layer, part = (-1, name) if match is None else (int(match[1]), match[2])
    first = config.num_hidden_layers
    # angles, which are computed from the config
    if re.fullmatch(r"(.+\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)", part):
        return True
    # the head of a model that uses its embedding; `check_tied` compares the two
    if part == HEAD and config.tie_word_embeddings:
        return True
    # the parts that read images, because only text is run
    if config.family.text_models and part.removeprefix("model.").startswith(IMAGE_PARTS):
        return True
    # copies of the main model's tensors for MTP, and MTP layers not asked for or after the first
    if mtp and layer == first:
        return name in copy_names(config)
    if first <= layer < first + config.num_nextn_predict_layers:
        return True
    # norms that A.X-K1 stores for its dense layers and does not use in its own code
    if config.family.moe_output_norm and part == "post_mlp_layernorm.weight" and not config.is_moe_layer(layer):
        return True
    # indexers of layers that share the choice of another layer
    is_indexer = 0 <= layer < first and config.is_sparse and part.startswith("self_attn.indexer.")
    return is_indexer and not config.has_indexer(layer)
