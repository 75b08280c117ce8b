"""How an engine changes its role: another engine takes its place, over the same model, pages and end of the channel.

Weights and cached pages stay where they are, and so does the address. Links and requests do not: a `Pairing` that
switches a port drains it first, and links it anew to the ports of what is then the other side."""

from __future__ import annotations

from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import ConfigError

ENGINES: dict[str, type[PrefillEngine | DecodeEngine]] = {"prefill": PrefillEngine, "decode": DecodeEngine}


def check_role(engine: PrefillEngine | DecodeEngine, role: str) -> None:
    """Raise ConfigError when an engine cannot take this role. Nothing has changed then."""
    if role not in ENGINES:
        raise ConfigError(f'a role is "prefill" or "decode", got {role!r}')
    if role == engine.role:
        raise ConfigError(f"{engine.address} is a {role} engine already: name the other role")
    if engine.closed:
        raise ConfigError(f"{engine.address} is closed and has no role to change: make a new engine")
    if (num_ranks := engine.model.groups.world.size) > 1:
        raise ConfigError(
            f"{engine.address} is one of {num_ranks} ranks, which keep their role: start them anew in the other one"
        )
    ENGINES[role]._check_steps(engine.model, engine._other_config)  # noqa: SLF001 - hosts have no use for them


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
    still have to wait for peers that write its pages or read them, and call again. Raise ConfigError as `check_role`
    does."""
    check_role(engine, role)
    if engine.num_unfinished:
        for request_id in engine.request_ids:
            engine.cancel(request_id)
        return None
    return engine._become(ENGINES[role])  # noqa: SLF001 - as above
