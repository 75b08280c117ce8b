"""Whether a model can run as the ranks of a topology, and whether engines made of ranks fit each other."""

from __future__ import annotations

from pdinfer.config import ModelConfig
from pdinfer.errors import ConfigError
from pdinfer.topology import Topology


def check_divides(config: ModelConfig, topology: Topology) -> None:
    """Raises ConfigError with the values when ranks cannot have equal parts of the model."""
    for count, what, size, name in (
        (config.num_attention_heads, "num_attention_heads", topology.tp_size, "tp_size"),
        (config.intermediate_size, "intermediate_size", topology.moe_dense_tp_size, "moe_dense_tp_size"),
    ):
        if count % size:
            raise ConfigError(f"{name} {size} does not divide {what} = {count}; choose a divisor of it")
