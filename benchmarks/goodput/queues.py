"""The simulator against the formulas of queues: one million requests through one server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.unit.planning.simulation.queues import CV2, waited_s

LOADS = {0.3: 0.02, 0.5: 0.02, 0.8: 0.02, 0.9: 0.03}
"""The share of its time that the server is busy, and how far the mean may be off."""


def queues() -> Iterator[dict[str, Any]]:
    """Mean TTFT over that of Pollaczek and Khinchine's formula, for five seeds of 200,000 requests."""
    for kind in CV2:
        for rho, within in LOADS.items():
            found_s, expected_s = waited_s(kind, rho, num_requests=200_000, num_seeds=5)
            ratio = found_s / expected_s
            yield {
                "queue": kind,
                "rho": rho,
                "ratio": round(ratio, 4),
                "within": within,
                "met": abs(ratio - 1) <= within,
            }
