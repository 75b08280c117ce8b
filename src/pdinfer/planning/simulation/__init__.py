"""A cluster's load, event by event, with the runtime's own decisions and step times that the host gives.

    simulate.py     the call that makes a summary
    simulator.py    the loop, and the host's side
    view.py         what a policy is shown
    device.py       one device on which two engines take turns
    decode.py       a decode engine
    prefill.py      a prefill engine
    world.py        what engines ask of the loop, and tell of themselves
    records.py      the record of one request
    job.py          one request
    growth.py       when running sequences need pages
    chance.py       what is drawn by the seed of a run
    links.py        bytes on their way
    pages.py        the pages of a pool
    deployment.py   the cluster that is simulated

May import: bench, config, pairing, scheduling, the ground.
"""

from __future__ import annotations

from pdinfer.planning.simulation.deployment import Change, Cluster, Stall, StepRows, cluster
from pdinfer.planning.simulation.simulate import simulate
from pdinfer.planning.simulation.simulator import Simulator

__all__ = ["Change", "Cluster", "Simulator", "Stall", "StepRows", "cluster", "simulate"]
