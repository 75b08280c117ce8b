"""The host's choices and what a checkpoint says of its model, checked and frozen.

    options.py    the host's choices: cache, engine, experts, Pairing, remote engines, and what it promises
    model.py      `ModelConfig`, the architecture of a model
    packed.py     what a config.json says of weights in four bits
    hf.py         the fields of a Hugging Face config.json as plain values
    fields.py     which fields are read, and which change nothing; all others are refused by name
    families.py   a row for each family of models
    rope.py       rotary frequencies, with and without YaRN

May import: process, the ground."""

from __future__ import annotations

from pdinfer.config.families import ScoringFunc, TopkMethod
from pdinfer.config.hf import IndexerType
from pdinfer.config.model import ModelConfig
from pdinfer.config.options import SLO, CacheConfig, EngineConfig, ExpertConfig, PairingConfig, RemoteConfig
from pdinfer.config.rope import YarnScaling

__all__ = [
    "SLO",
    "CacheConfig",
    "EngineConfig",
    "ExpertConfig",
    "IndexerType",
    "ModelConfig",
    "PairingConfig",
    "RemoteConfig",
    "ScoringFunc",
    "TopkMethod",
    "YarnScaling",
]
