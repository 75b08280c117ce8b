"""Published deployments as data: each of their settings with ours, or the reason why there is none.

    *.json                a deployment per file, and what a provider for Ascend would call

May import: config, diagnosis, parallel, planning.cluster_plan, planning.plan, planning.shapes, the ground.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import attrs
import msgspec

from pdinfer.checks import clip
from pdinfer.config import CacheConfig, EngineConfig, ExpertConfig, ModelConfig, PairingConfig, RemoteConfig
from pdinfer.diagnosis.affinity import CpuAffinity
from pdinfer.errors import ConfigError
from pdinfer.files import naming
from pdinfer.parallel.topology import Topology
from pdinfer.planning.cluster_plan import ClusterPlan
from pdinfer.planning.plan import EnginePlan
from pdinfer.planning.shapes import engine_nodes

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
    """What a provider of an op would call, as expressions with full names and arguments, how, and the conformance
    suites that it would have to pass."""

    op: str
    calls: tuple[str, ...]
    how: str
    suites: tuple[str, ...]


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file. `clusters` are the names of sizes that were run, as `engine_nodes` reads them, with prompts of up to
    `prompt_tokens`. `beside_ops` are calls for what is no op: a dispatcher's, or one in place of several."""

    name: str
    source: str
    remark: str
    clusters: tuple[str, ...]
    ranks_per_node: int
    device: str
    device_bytes: int
    prompt_tokens: int
    stored: str
    weights: str
    settings: tuple[Setting, ...]
    ops: tuple[OpCall, ...] = ()
    beside_ops: tuple[OpCall, ...] = ()


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


@attrs.frozen(kw_only=True)
class EngineProfile:
    """One engine of a deployment. `topology` is that of its first rank (`topology.at(rank)` is another's).

    `mtp`, `stored` and `weights` are as `EnginePlan` and `load_model` take them, and a device has `device_bytes`.
    Prompts have up to `prompt_tokens`. `rdma_devices` are the names for `MooncakeTransport(devices=…)`, one for each
    rank of a node where they are named. `environment` is what its processes should have set.
    """

    name: str
    role: str
    num_nodes: int
    topology: Topology
    cache: CacheConfig
    engine: EngineConfig
    experts: ExpertConfig
    mtp: bool
    stored: str
    weights: str
    device: str
    device_bytes: int
    prompt_tokens: int
    rdma_devices: tuple[str, ...]
    environment: Mapping[str, str]

    def plan(self, config: ModelConfig, *, cpu_affinity: tuple[CpuAffinity | None, ...] = ()) -> EnginePlan:
        """Return the checked plan of this engine for a model. Raises ConfigError as `EnginePlan` does."""
        return EnginePlan(
            name=self.name,
            config=config,
            topology=self.topology,
            cache=self.cache,
            engine=self.engine,
            experts=self.experts,
            mtp=self.mtp,
            stored=self.stored,
            weights=self.weights,
            device=self.device,
            device_bytes=self.device_bytes,
            prompt_tokens=self.prompt_tokens,
            cpu_affinity=cpu_affinity,
        )


@attrs.frozen(kw_only=True)
class Profile:
    """A published deployment in pdinfer's values.

    `policy` is the name of one of `pd.policy`. `settings` are all of theirs; `ops`, where pdinfer has no provider for
    the device, what one would call. `source` and `remark` are sentences.
    """

    name: str
    source: str
    remark: str
    prefill: tuple[EngineProfile, ...]
    decode: tuple[EngineProfile, ...]
    pairing: PairingConfig
    remote: RemoteConfig
    policy: str
    settings: tuple[Setting, ...]
    ops: tuple[OpCall, ...]

    def plan(self, config: ModelConfig, *, cpu_affinity: tuple[CpuAffinity | None, ...] = ()) -> ClusterPlan:
        """Return the checked plan of the cluster for a model: memory of ranks, sizes of steps, pages of both sides, and
        where ranks run on hosts with such a `cpu_affinity`. Raises ConfigError, with the values, where it does not
        fit."""
        return ClusterPlan(
            prefill=tuple(engine.plan(config, cpu_affinity=cpu_affinity) for engine in self.prefill),
            decode=tuple(engine.plan(config, cpu_affinity=cpu_affinity) for engine in self.decode),
        )


def profile(name: str) -> Profile:
    """Return a published deployment, such as "deepseek-v3-h800-P3x3D4": three prefill engines of 3 nodes of H800s, and
    a decode engine of 4. Other sizes are made of the same settings. Raises ConfigError, with the names of what was run,
    for another deployment, and for text that is no size."""
    deployment, _, cluster = name.rpartition("-") if isinstance(name, str) else ("", "", "")
    found = next((one for one in deployments() if one.name == deployment), None)
    if found is None:
        known = ", ".join(f"{one.name}-{cluster}" for one in deployments() for cluster in one.clusters)
        raise ConfigError(f"there is no profile {clip(name)}; there are {known}")
    prefill_nodes, decode_nodes = engine_nodes(cluster)
    host = _values(found, "host")
    return Profile(
        name=name,
        source=found.source,
        remark=found.remark,
        prefill=tuple(_engine(found, "prefill", f"P{at}", nodes) for at, nodes in enumerate(prefill_nodes)),
        decode=tuple(_engine(found, "decode", f"D{at}", nodes) for at, nodes in enumerate(decode_nodes)),
        pairing=PairingConfig(**host.get("PairingConfig", {})),
        remote=RemoteConfig(**host.get("RemoteConfig", {})),
        policy=host["Pairing"]["policy"],
        settings=found.settings,
        ops=found.ops,
    )


def _engine(found: Deployment, role: str, name: str, num_nodes: int) -> EngineProfile:
    values, size = _values(found, role), num_nodes * found.ranks_per_node
    groups = {"tp_size": 1, "cp_size": 1, "ep_size": size} | values.get("Topology", {})
    dp_size = max(1, size // (groups["tp_size"] * groups["cp_size"]))
    with naming(f"{name} of {num_nodes} x {found.ranks_per_node} ranks"):
        topology = Topology(world_size=size, dp_size=dp_size, **groups)
    environment: dict[str, str] = {}
    for setting in _of(found, role):
        environment |= setting.environment
    return EngineProfile(
        name=name,
        role=role,
        num_nodes=num_nodes,
        topology=topology,
        cache=CacheConfig(**values.get("CacheConfig", {})),
        engine=EngineConfig(**values.get("EngineConfig", {})),
        experts=ExpertConfig(ranks_per_node=found.ranks_per_node, **values.get("ExpertConfig", {})),
        mtp=values.get("load_model", {}).get("mtp", False),
        stored=found.stored,
        weights=found.weights,
        device=found.device,
        device_bytes=found.device_bytes,
        prompt_tokens=found.prompt_tokens,
        rdma_devices=tuple(values.get("MooncakeTransport", {}).get("devices", ())),
        environment=environment,
    )


def _of(found: Deployment, role: str) -> Iterator[Setting]:
    """Yield the settings of a role; those of both engines are of each."""
    for setting in found.settings:
        if setting.role == role or (setting.role == "both" and role in ("prefill", "decode")):
            yield setting


def _values(found: Deployment, role: str) -> dict[str, dict[str, Any]]:
    """Return the values of our fields, by class or function."""
    values: dict[str, dict[str, SettingValue]] = {}
    for setting in _of(found, role):
        for field, value in setting.ours.items():
            owner, _, name = field.partition(".")
            values.setdefault(owner, {})[name] = value
    return values
