"""How an engine changes its role: another engine takes its place, over the same model, pages and end of the channel.

Weights and cached pages stay where they are, and so does the address. Links and requests do not: a `Pairing` that
switches a port drains it first, and links it anew to the ports of what is then the other side."""

from __future__ import annotations

from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import ConfigError
from pdinfer.types import PeerAddress

ENGINES: dict[str, type[PrefillEngine | DecodeEngine]] = {"prefill": PrefillEngine, "decode": DecodeEngine}


def check_role(engine: PrefillEngine | DecodeEngine, role: str) -> tuple[PeerAddress, ...]:
    """Return the addresses of all leaders of an engine's ranks, which can only take this role together. Raise
    ConfigError when it cannot take it. Nothing has changed then."""
    if role not in ENGINES:
        raise ConfigError(f'a role is "prefill" or "decode", got {role!r}')
    if role == engine.role:
        raise ConfigError(f"{engine.address} is a {role} engine already: name the other role")
    if engine.closed:
        raise ConfigError(f"{engine.address} is closed and has no role to change: make a new engine")
    ENGINES[role]._check_steps(engine.model, engine._other_config)  # noqa: SLF001 - hosts have no use for them
    return engine.ranks.leaders


def roles_of(engine: PrefillEngine | DecodeEngine) -> tuple[str, ...]:
    """Return the roles that an engine can take instead of its own."""
    found = []
    for role in ENGINES:
        try:
            check_role(engine, role)
        except ConfigError:
            continue
        found.append(role)
    return tuple(found)


def become(engine: PrefillEngine | DecodeEngine, role: str) -> PrefillEngine | DecodeEngine | None:
    """Close an engine, and return one of the other role with its model, channel, clock and logits processors, which
    runs with its `other_config`. While anything is unfinished, cancel it and return None: step the engine, which may
    still have to wait for peers that write its pages or read them, and call again. So do leaders of other ranks until
    all leaders were asked and all ranks have agreed; from then on each has to `become` what it is to be before its next
    step, or the ranks are lost. Raise ConfigError as `check_role` does, and RankLost when a rank does not come."""
    check_role(engine, role)
    if not engine.ranks.are_changing:
        is_idle = not engine.num_unfinished
        for request_id in () if is_idle else engine.request_ids:
            engine.cancel(request_id)
        if not engine.ranks.may_change(asked=is_idle):
            return None
    return _changed(engine, role)


def stay(engine: PrefillEngine | DecodeEngine) -> None:
    """Let an engine keep its role that was asked to change it, and has not."""
    engine.ranks.may_change(asked=False)


def followed(engine: PrefillEngine | DecodeEngine) -> PrefillEngine | DecodeEngine:
    """Return the engine to go on with on a rank that takes no requests: one of the other role once its ranks have
    agreed to change it. Raise RankLost when another rank does not come."""
    if not engine.ranks.are_changing:
        return engine
    return _changed(engine, next(role for role in ENGINES if role != engine.role))


def _changed(engine: PrefillEngine | DecodeEngine, role: str) -> PrefillEngine | DecodeEngine:
    try:
        return engine._become(ENGINES[role])  # noqa: SLF001 - as above
    except BaseException:
        if engine.closed:
            engine.channel.close()  # nobody else has it any more
        raise
