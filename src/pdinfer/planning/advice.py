"""When an engine should change its role: which side is late, and whether the other one can spare an engine."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from pdinfer.checks import clip, typed
from pdinfer.config import SLO
from pdinfer.errors import ConfigError
from pdinfer.planning.calibration import Cost
from pdinfer.planning.simulation import StepRows
from pdinfer.planning.simulation.deployment import seconds
from pdinfer.stats import DecodeLoad, PairingStats, PrefillLoad
from pdinfer.types import PeerAddress
from pdinfer.values import Value

LATE = 1.0
"""The pressure of a side that is about to miss its limits."""
SPARE = 0.6
"""A side gives an engine away if its pressure is still below this without it. What lies between both keeps an advice
from being taken back: a side that gave an engine is not late, and one that got one has none to spare."""


@attrs.frozen(kw_only=True)
class Advice(Value):
    """The port to move, whose engine's other ports move with it, its new role, and the pressures that say so: 1 is at
    the limit."""

    port: PeerAddress
    role: str
    prefill_pressure: float
    decode_pressure: float

    def __str__(self) -> str:
        """Return one line for people."""
        return (
            f"move {self.port} to {self.role}: pressure is {self.prefill_pressure:.2f} at prefill and "
            f"{self.decode_pressure:.2f} at decode, 1 is at the limit"
        )


@typed
def advise(stats: PairingStats, cost: Cost, slo: SLO) -> Advice | None:
    """Return which port of a Pairing should change its role now, or None.

    Prefill's pressure is the time in which its queues empty over the limit of TTFT, decode's the greatest of the
    step's seconds over the limit of TPOT and the shares of pages and of slots in use, waiting requests included. Both
    are means over a side's ports. A side at LATE or more gets the least loaded engine of the other, with all its ports
    (`PairingStats.together`), if that stays below SPARE without it: prefill with its queues over fewer ports, decode
    with what runs, since others that hold pages there wait for a prefill. No side gives its last engine. Raises
    ConfigError for stats without loads, for an SLO without limits of TTFT and TPOT, and for a cost that is no seconds.
    """
    prefills = [load for load in stats.loads if isinstance(load, PrefillLoad)]
    decodes = [load for load in stats.loads if isinstance(load, DecodeLoad)]
    if not prefills or not decodes:
        raise ConfigError(f"advise needs loads of both sides, got {len(prefills)} prefill and {len(decodes)} decode")
    ttft_s = slo.ttft_s
    if ttft_s is None or slo.tpot_s is None:
        raise ConfigError(f"advise needs an SLO with ttft_s and tpot_s, got {clip(slo)}")
    at_prefill = [_prefill_pressure(load, cost, ttft_s) for load in prefills]
    at_decode = [_decode_pressure(load, cost, slo.tpot_s) for load in decodes]
    pressures = {"prefill": _mean(at_prefill), "decode": _mean(at_decode)}
    for role, loads, of_ports in (("decode", prefills, at_prefill), ("prefill", decodes, at_decode)):
        of_engines = _by_engine([load.address for load in loads], of_ports, stats.together)
        if pressures[role] < LATE or len(of_engines) < 2:
            continue
        idlest, of_idlest = min(of_engines.items(), key=lambda engine: _mean(engine[1]))
        more = len(loads) / (len(loads) - len(of_idlest))
        if role == "decode":
            rest = pressures["prefill"] * more
        else:
            rest = _mean([_running_pressure(load, cost, slo.tpot_s, more) for load in decodes])
        if rest < SPARE:
            return Advice(
                port=idlest,
                role=role,
                prefill_pressure=pressures["prefill"],
                decode_pressure=pressures["decode"],
            )
    return None


def _by_engine(
    ports: Sequence[PeerAddress], pressures: Sequence[float], together: Sequence[Sequence[PeerAddress]]
) -> dict[PeerAddress, list[float]]:
    """Return the pressures at the ports of each engine, by its first port."""
    first = {port: group[0] for group in together for port in group}
    engines: dict[PeerAddress, list[float]] = {}
    for port, pressure in zip(ports, pressures, strict=True):
        engines.setdefault(first.get(port, port), []).append(pressure)
    return engines


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _prefill_pressure(load: PrefillLoad, cost: Cost, ttft_s: float) -> float:
    """Return the share of the limit that the queue takes, prompt by prompt of its mean size."""
    if not load.num_queued_requests or not load.num_queued_tokens:
        return 0.0
    size = max(1, load.num_queued_tokens // load.num_queued_requests)
    step_s = seconds("cost.prefill", cost.prefill, StepRows(1, size, size, size * (size + 1) // 2))
    return load.num_queued_requests * step_s / ttft_s


def _decode_pressure(load: DecodeLoad, cost: Cost, tpot_s: float) -> float:
    """Return the greatest of the step's share of its limit, and of what would be in use if nobody had to wait."""
    holding = load.num_granted_requests + load.num_running_requests
    pages = _used(load) + load.num_waiting_tokens / (load.page_size * load.num_total_pages)
    return _greatest(load, cost, tpot_s, holding, holding + load.num_waiting_requests, pages)


def _running_pressure(load: DecodeLoad, cost: Cost, tpot_s: float, times: float) -> float:
    """Return the same of so many times those that run."""
    running = load.num_running_requests
    pages = _used(load) * running / max(1, load.num_granted_requests + running)
    return _greatest(load, cost, tpot_s, round(running * times), running * times, pages * times)


def _used(load: DecodeLoad) -> float:
    return 1.0 - load.num_available_pages / load.num_total_pages


def _greatest(load: DecodeLoad, cost: Cost, tpot_s: float, in_step: int, in_slots: float, pages: float) -> float:
    holding = load.num_granted_requests + load.num_running_requests
    context = max(in_step, load.num_running_tokens * in_step // max(1, holding))
    step_s = seconds("cost.decode", cost.decode, StepRows(in_step, in_step, context, context)) if in_step else 0.0
    slots = in_slots / load.max_running_requests if load.max_running_requests else 0.0
    return max(step_s / tpot_s, pages, slots)
