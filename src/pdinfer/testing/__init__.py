"""For tests of pdinfer and of what is built on it: tiny models, virtual time, and a network that fails on demand.

`Simulation` runs any number of nodes in one thread and in virtual time. `SimNetwork` joins their channels and injects
faults. Everything that happens is drawn from one seed, so a run that went wrong can be repeated.

    models.py       tiny configurations, random weights, checkpoints of them; the folder of a trained model
    simulation.py   virtual time, the order in which nodes run, and what can go wrong
    network.py      transports between the nodes
    links.py        one side of a simulated link

Tested by tests/unit/testing and, with whole engines, by tests/sim.

May import: config, kernels, kv, model, moe, parallel, process, the ground."""

from __future__ import annotations

from pdinfer.testing.models import FAMILIES, random_model, tiny, tiny_config, tiny_config_dict, write_checkpoint
from pdinfer.testing.network import SimChannel, SimNetwork
from pdinfer.testing.simulation import NetworkFaults, Placement, Simulation, VirtualClock

__all__ = [
    "FAMILIES",
    "NetworkFaults",
    "Placement",
    "SimChannel",
    "SimNetwork",
    "Simulation",
    "VirtualClock",
    "random_model",
    "tiny",
    "tiny_config",
    "tiny_config_dict",
    "write_checkpoint",
]
