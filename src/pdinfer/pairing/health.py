"""How a Pairing does, for probes: does it serve, and with all that it was given?"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs

from pdinfer.pairing.port import Port
from pdinfer.stats import PairingStats

STILL_S = 10.0
"""A port that has work and has not stepped for so long stands still."""


class HealthState(enum.Enum):
    """See `Health`."""

    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    DOWN = "down"


@attrs.frozen
class Health:
    """READY: it serves with all that it was given. DEGRADED: it serves, with less. DRAINING: it serves what it has and
    should get nothing new. DOWN: it cannot serve. `reasons` say why, for people."""

    state: HealthState
    reasons: tuple[str, ...] = ()

    @property
    def takes_requests(self) -> bool:
        """What a probe of readiness asks."""
        return self.state in (HealthState.READY, HealthState.DEGRADED)


def health_of(ports: Sequence[Port], stats: PairingStats) -> Health:
    """Return the health of a Pairing with these ports."""
    missing = {"prefill", "decode"} - {port.role for port in ports}
    if missing:
        return Health(HealthState.DOWN, tuple(f"there is no {role}" for role in sorted(missing)))
    ages = {port: port.load().step_age_s or 0.0 for port in ports} if stats.num_unfinished_requests else {}
    still = {port: age for port, age in ages.items() if age > STILL_S}
    reasons = (
        *(f"{address} is lost, and may come back" for address in stats.ports_away),
        *(f"{prefill} and {decode} do not reach each other" for prefill, decode in stats.links_down),
        *(f"the {port.role} {port.address} has not stepped for {age:.0f} s" for port, age in still.items()),
    )
    return Health(HealthState.DEGRADED if reasons else HealthState.READY, reasons)
