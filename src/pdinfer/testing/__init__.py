"""For tests of pdinfer and of what is built on it: tiny models, virtual time, and a network that fails on demand.

`Simulation` runs any number of nodes in one thread and in virtual time. `SimNetwork` joins their channels and injects
faults. Everything that happens is drawn from one seed, so a run that went wrong can be repeated.

    models.py       tiny configurations, random weights, checkpoints of them; the folder of a trained model
    simulation.py   virtual time, and the order in which nodes run
    network.py      transports between the nodes
    links.py        one side of a simulated link
    faults.py       what can go wrong, as plain values

Tested by tests/unit/testing and, with whole engines, by tests/sim.

May import: config, kernels, kv, model, moe, parallel, process, the ground.
"""

from __future__ import annotations

from pdinfer.testing.faults import NetworkFaults, Placement
from pdinfer.testing.models import FAMILIES, random_model, tiny, tiny_config, tiny_config_dict, write_checkpoint
from pdinfer.testing.network import SimChannel, SimNetwork
from pdinfer.testing.simulation import Simulation, VirtualClock

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
