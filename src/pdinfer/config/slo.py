"""The limits that a service promises for each request."""

from __future__ import annotations

import attrs

from pdinfer.checks import as_float, float_in
from pdinfer.errors import ConfigError
from pdinfer.values import Value

_limit = attrs.validators.optional(float_in(0.0, 1e6))


def _number(value: float | None) -> float | None:
    return None if value is None else as_float(value)


def _field() -> float | None:
    return attrs.field(default=None, converter=_number, validator=_limit)


@attrs.frozen(kw_only=True)
class SLO(Value):
    """Limits in seconds that a request has to keep, all of them. None means no limit.

    TTFT may take max(`ttft_s`, `ttft_per_token_s` * prompt tokens), so that long prompts get more time. TPOT is
    (E2E - TTFT) / (output tokens - 1), and a request of one token has none. `itl_p99_s` bounds the 99th percentile of
    the gaps between the tokens of one request, `e2e_s` its whole time. Raises ConfigError when there is no limit.
    """

    ttft_s: float | None = _field()
    tpot_s: float | None = _field()
    ttft_per_token_s: float | None = _field()
    itl_p99_s: float | None = _field()
    e2e_s: float | None = _field()

    def __attrs_post_init__(self) -> None:
        """Refuse an SLO that every request meets."""
        if all(limit is None for limit in attrs.astuple(self)):
            raise ConfigError("an SLO needs a limit: give ttft_s, tpot_s, ttft_per_token_s, itl_p99_s or e2e_s")

    def ttft_limit_s(self, prompt_tokens: int) -> float | None:
        """Return the longest TTFT of a prompt of that length, in seconds, or None."""
        if self.ttft_per_token_s is None:
            return self.ttft_s
        return max(self.ttft_s or 0.0, self.ttft_per_token_s * prompt_tokens)
