"""What a published deployment becomes in pdinfer: configs that validate, topologies, variables, and a checked plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from pdinfer.checks import clip
from pdinfer.config import CacheConfig, EngineConfig, ExpertConfig, ModelConfig, PairingConfig, RemoteConfig
from pdinfer.errors import ConfigError
from pdinfer.parallel import Topology
from pdinfer.planning.plan import ClusterPlan, EnginePlan, engine_nodes
from pdinfer.planning.profiles.settings import Deployment, OpCall, Setting, SettingValue, deployments

HEADER = "| setting | of | theirs | ours |\n|---|---|---|---|"


@attrs.frozen(kw_only=True)
class EngineProfile:
    """One engine of a deployment. `topology` is that of its first rank (`topology.at(rank)` is another's).

    `mtp`, `stored` and `weights` are as `EnginePlan` and `load_model` take them, and a device has `device_bytes`.
    `rdma_devices` are the names for `MooncakeTransport(devices=…)`, one for each rank of a node where they are named.
    `environment` is what its processes should have set.
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
    rdma_devices: tuple[str, ...]
    environment: Mapping[str, str]

    def plan(self, config: ModelConfig) -> EnginePlan:
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

    def plan(self, config: ModelConfig) -> ClusterPlan:
        """Return the checked plan of the cluster for a model: memory of ranks, sizes of steps, pages of both sides.
        Raises ConfigError, with the values, where it does not fit."""
        return ClusterPlan(
            prefill=tuple(engine.plan(config) for engine in self.prefill),
            decode=tuple(engine.plan(config) for engine in self.decode),
        )

    def table(self) -> str:
        """Return all settings as a table in Markdown, with what each is here."""
        return "\n".join([HEADER, *map(_row, self.settings)])

    def ops_table(self) -> str:
        """Return `ops` as a table in Markdown."""
        rows = [
            f"| `{op.op}` | {', '.join(f'`{call}`' for call in op.calls) or 'none'} | {op.how} | {_suites(op)} |"
            for op in self.ops
        ]
        return "\n".join(["| op | would call | how | suite |\n|---|---|---|---|", *rows])


def profile(name: str) -> Profile:
    """Return a published deployment, such as "deepseek-v3-h800-P3x3D4": three prefill engines of 3 nodes of H800s, and
    a decode engine of 4. Raises ConfigError, with the names that there are, for another one."""
    known = {f"{found.name}-{cluster}": (found, cluster) for found in deployments() for cluster in found.clusters}
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"there is no profile {clip(name)}; there are {', '.join(known)}")
    found, cluster = known[name]
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
    dp_size = size // (groups["tp_size"] * groups["cp_size"])
    environment: dict[str, str] = {}
    for setting in _of(found, role):
        environment |= setting.environment
    return EngineProfile(
        name=name,
        role=role,
        num_nodes=num_nodes,
        topology=Topology(world_size=size, dp_size=dp_size, **groups),
        cache=CacheConfig(**values.get("CacheConfig", {})),
        engine=EngineConfig(**values.get("EngineConfig", {})),
        experts=ExpertConfig(ranks_per_node=found.ranks_per_node, **values.get("ExpertConfig", {})),
        mtp=values.get("load_model", {}).get("mtp", False),
        stored=found.stored,
        weights=found.weights,
        device=found.device,
        device_bytes=found.device_bytes,
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


def _row(setting: Setting) -> str:
    fields = [f"`{field}={_shown(value)}`" for field, value in setting.ours.items()]
    variables = [f"`{name}={value}`" for name, value in setting.environment.items()]
    ours = "; ".join([", ".join(fields + variables)] * bool(fields or variables) + [setting.why] * bool(setting.why))
    return f"| `{setting.name}` | {setting.role} | {setting.value} | {ours} |"


def _shown(value: SettingValue) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return repr(tuple(value)) if isinstance(value, list) else repr(value)


def _suites(op: OpCall) -> str:
    return ", ".join(f"`{suite}`" for suite in op.suites)
