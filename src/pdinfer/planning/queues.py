"""Closed forms of sizing: nodes for a day's tokens, waiting in front of one server, the three limits of a decode."""

from __future__ import annotations

import attrs

from pdinfer.checks import clip, is_number
from pdinfer.errors import ConfigError
from pdinfer.values import Value

DAY_S = 86_400.0
LEAST, MOST = 1e-30, 1e30
"""What is computed from numbers between these is a number, too."""


def _check(what: str, **values: float) -> None:
    """Raise ConfigError unless all values are numbers from LEAST to MOST."""
    for name, value in values.items():
        if not is_number(value) or not LEAST <= value <= MOST:
            raise ConfigError(f"{what}: {name} must be a number from {LEAST:g} to {MOST:g}, got {clip(value)}")


@attrs.frozen(kw_only=True)
class Nodes(Value):
    """How many nodes of each kind serve a load, as fractions: round up yourself, each side on its own."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.prefill + self.decode

    def __str__(self) -> str:
        """Return the sum as people check it."""
        return f"{self.prefill:.1f} prefill + {self.decode:.1f} decode = {self.total:.1f} nodes"


def nodes(*, input_per_day: float, output_per_day: float, prefill_rate: float, decode_rate: float) -> Nodes:
    """Return the nodes that a day's tokens need, if all of them are always busy. Rates are tokens per second and node.
    Raises ConfigError for what is no positive number."""
    _check(
        "nodes",
        input_per_day=input_per_day,
        output_per_day=output_per_day,
        prefill_rate=prefill_rate,
        decode_rate=decode_rate,
    )
    return Nodes(prefill=input_per_day / (DAY_S * prefill_rate), decode=output_per_day / (DAY_S * decode_rate))


def queue_s(service_s: float, utilization: float, *, cv: float = 0.0) -> float:
    """Return the mean seconds from arrival to end at one server with Poisson arrivals: Pollaczek and Khinchine's
    S + rho S (1 + cv²) / (2 (1 - rho)).

    `service_s` is the mean service time S, `cv` its coefficient of variation: 0 is M/D/1, 1 is M/M/1. `utilization` rho
    is the share of time that it serves, less than 1. Raises ConfigError for other values.
    """
    _check("queue_s", service_s=service_s)
    if not is_number(utilization) or not 0 < utilization < 1:
        raise ConfigError(
            f"queue_s: utilization must be a number greater than 0 and less than 1, got {clip(utilization)}"
        )
    if not is_number(cv) or not 0 <= cv <= MOST:
        raise ConfigError(f"queue_s: cv must be a number from 0 to {MOST:g}, got {clip(cv)}")
    return service_s + utilization * service_s * (1 + cv**2) / (2 * (1 - utilization))


def utilization(service_s: float, mean_s: float) -> float:
    """Return the share of time that a server may be busy so that M/D/1's mean time, service included, is `mean_s`: the
    inverse of `queue_s`, 2 (T - S) / (2 T - S). It is 0 where the service alone takes as long or longer."""
    _check("utilization", service_s=service_s, mean_s=mean_s)
    return 2 * (mean_s - service_s) / (2 * mean_s - service_s) if mean_s > service_s else 0.0


@attrs.frozen(kw_only=True)
class DecodeNeed(Value):
    """The decodes that a load needs by each limit, as fractions: tokens per second, sequences that run at once, and
    tokens of KV that these hold."""

    rate: float
    slots: float
    kv_tokens: float

    @property
    def most(self) -> float:
        """What is needed in all."""
        return max(self.rate, self.slots, self.kv_tokens)

    @property
    def binding(self) -> str:
        """Return the limit that decides: "rate", "slots" or "kv_tokens"."""
        return max(("rate", "slots", "kv_tokens"), key=lambda name: float(getattr(self, name)))


def decodes(
    request_rate: float,
    *,
    prompt_tokens: float,
    output_tokens: float,
    tpot_s: float,
    rate: float,
    slots: float,
    kv_tokens: float,
) -> DecodeNeed:
    """Return how many decodes serve `request_rate` requests per second of these mean lengths.

    One decode gives `rate` tokens per second at `tpot_s` seconds a token, runs `slots` sequences and holds `kv_tokens`
    tokens. By Little's law a request holds a slot for output_tokens * tpot_s, and on average its prompt and half of its
    answer. Raises ConfigError for what is no positive number.
    """
    _check(
        "decodes",
        request_rate=request_rate,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tpot_s=tpot_s,
        rate=rate,
        slots=slots,
        kv_tokens=kv_tokens,
    )
    running = request_rate * output_tokens * tpot_s
    return DecodeNeed(
        rate=request_rate * output_tokens / rate,
        slots=running / slots,
        kv_tokens=running * (prompt_tokens + output_tokens / 2) / kv_tokens,
    )
