"""The files of published deployments. A setting has our fields with their values, variables to set, or a reason."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from pdinfer.errors import ConfigError

SettingValue = bool | int | float | str | list[int | str]
Role = Literal["prefill", "decode", "both", "host", "measuring"]
"""Of which engines a setting is: "host" is the router and the Pairing, "measuring" a run of its own."""

FILES = ("deepseek-v3-h800.json", "deepseek-v3.2-ascend-a3.json")


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A setting of a deployment. `ours` are fields such as "CacheConfig.page_size" with their values; `environment` are
    variables that pdinfer's processes should have too; `why` says what to do instead where there is neither, or what
    differs."""

    name: str
    role: Role
    value: str
    ours: dict[str, SettingValue] = {}
    environment: dict[str, str] = {}
    why: str = ""

    def __post_init__(self) -> None:
        if not (self.ours or self.environment or self.why):
            raise ValueError(f"setting {self.name} has no field, no variable and no reason")


class OpCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a provider of an op would call, by full names, how, and the conformance suites that it would have
    to pass."""

    op: str
    calls: tuple[str, ...]
    how: str
    suites: tuple[str, ...]


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file. `clusters` are the names of sizes that were run, as `engine_nodes` reads them."""

    name: str
    source: str
    remark: str
    clusters: tuple[str, ...]
    ranks_per_node: int
    device: str
    device_bytes: int
    stored: str
    weights: str
    settings: tuple[Setting, ...]
    ops: tuple[OpCall, ...] = ()


def decoded(data: bytes, name: str) -> Deployment:
    """Return the deployment in a file. Raise ConfigError for what does not belong there."""
    try:
        return msgspec.json.decode(data, type=Deployment)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name} is no deployment: {error}") from None


@cache
def deployments() -> tuple[Deployment, ...]:
    """Return the deployments that come with pdinfer."""
    folder = files("pdinfer.planning.profiles")
    return tuple(decoded((folder / name).read_bytes(), name) for name in FILES)
