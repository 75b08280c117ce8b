"""The number of this rank, and the division of ranks into groups: frozen plain ints, until `connect`."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Self

import attrs
import torch
import torch.distributed as dist

from pdinfer.checks import clip, int_in, is_int, typed
from pdinfer.errors import BackendUnavailable, ConfigError, RankLost
from pdinfer.parallel.groups import Group, Groups, Lookout, timeout_of

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store
import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdinfer.log import log

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


MISSING_S = 10.0
"""How long ranks wait for each other before the log says for whom."""
SHOWN_RANKS = 16


class RollCall:
    """The ranks of a world that have said in a store that they are here. It has a client of its own, since another one
    may be waiting in a call of it."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # which torch's stub lacks
        self._rank, self._world_size = rank, world_size
        self._store.set(_key(rank), "here")

    def missing(self) -> str:
        """Return a sentence that names the ranks which have not come, or an empty text when all have, or nobody can
        tell."""
        try:
            ranks = [rank for rank in range(self._world_size) if not self._store.check([_key(rank)])]
        except RuntimeError:  # the store is gone
            return ""
        if not ranks:
            return ""
        more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
        names = ", ".join(map(str, ranks[:SHOWN_RANKS])) + more
        return f"of {self._world_size} ranks {len(ranks)} have not come: {names}"

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Log once who is missing, when the block has waited for MISSING_S."""
        met = threading.Event()

        def watch() -> None:
            if not met.wait(MISSING_S) and (missing := self.missing()):
                log.warning("rank %d still waits after %g s: %s", self._rank, MISSING_S, missing)

        threading.Thread(target=watch, name="pdinfer-roll-call", daemon=True).start()
        try:
            yield
        finally:
            met.set()  # the thread may be waiting for a store that is gone


def _key(rank: int) -> str:
    return f"pdinfer.here/{rank}"


SIZES = ("world_size", "tp_size", "dp_size", "cp_size", "ep_size", "moe_dense_tp_size")


@attrs.frozen(kw_only=True)
class Topology:
    """Sizes of one engine's parallel groups and the place of this rank in them.

    Attention ranks form a grid `world_size = dp_size * cp_size * tp_size`, tensor-parallel ranks adjacent; experts are
    spread over `ep_size` adjacent ranks, which divides `world_size`; dense MLPs are divided between `moe_dense_tp_size`
    adjacent ranks, which divides `tp_size`. Raises ConfigError with the values where they do not fit."""

    rank: int = 0
    world_size: int = attrs.field(default=1, validator=int_in(1, 65536))
    tp_size: int = attrs.field(default=1, validator=int_in(1, 65536))
    dp_size: int = attrs.field(default=1, validator=int_in(1, 65536))
    cp_size: int = attrs.field(default=1, validator=int_in(1, 65536))
    ep_size: int = attrs.field(default=1, validator=int_in(1, 65536))
    moe_dense_tp_size: int = attrs.field(default=1, validator=int_in(1, 65536))

    def __attrs_post_init__(self) -> None:
        if not is_int(self.rank) or not 0 <= self.rank < self.world_size:
            size = self.world_size
            raise ConfigError(f"rank {clip(self.rank)} is outside 0..{size - 1} (world_size={size})")
        if self.dp_size * self.cp_size * self.tp_size != self.world_size:
            raise ConfigError(
                f"dp_size * cp_size * tp_size = {self.dp_size} * {self.cp_size} * {self.tp_size} = "
                f"{self.dp_size * self.cp_size * self.tp_size}, but world_size is {self.world_size}"
            )
        if self.world_size % self.ep_size:
            raise ConfigError(f"ep_size {self.ep_size} does not divide world_size {self.world_size}")
        if self.tp_size % self.moe_dense_tp_size:
            raise ConfigError(f"moe_dense_tp_size {self.moe_dense_tp_size} does not divide tp_size {self.tp_size}")

    @classmethod
    @typed
    def from_env(
        cls, *, tp_size: int = 1, cp_size: int = 1, ep_size: int | None = None, moe_dense_tp_size: int = 1
    ) -> Self:
        """Return the topology that torchrun describes in RANK and WORLD_SIZE; one rank when they are unset.

        What `tp_size` and `cp_size` leave of the world is data parallel. Experts are spread over the whole world unless
        `ep_size` says otherwise. Raises ConfigError for values that do not fit."""
        values = {}
        for field, name, default in (("rank", "RANK", "0"), ("world_size", "WORLD_SIZE", "1")):
            text = os.environ.get(name, default)
            if not text.isascii() or not text.isdecimal() or len(text) > 9:
                raise ConfigError(f"environment variable {name} must be a plain number, got {clip(text)}")
            values[field] = int(text)
        size, of_attention = values["world_size"], max(1, tp_size * cp_size)  # the class refuses sizes below 1
        if size % of_attention:
            raise ConfigError(f"cp_size * tp_size = {cp_size} * {tp_size} does not divide WORLD_SIZE {size}")
        return cls(
            rank=values["rank"],
            world_size=size,
            tp_size=tp_size,
            dp_size=size // of_attention,
            cp_size=cp_size,
            ep_size=size if ep_size is None else ep_size,
            moe_dense_tp_size=moe_dense_tp_size,
        )

    @property
    def _attention_size(self) -> int:
        """The number of ranks that have the same requests: cp_size * tp_size."""
        return self.cp_size * self.tp_size

    @property
    def is_leader(self) -> bool:
        """True if hosts talk to this rank, the first of the ranks that have the same requests."""
        return self.rank % self._attention_size == 0

    def at(self, rank: int) -> Topology:
        """Return the same sizes as another rank sees them."""
        return attrs.evolve(self, rank=rank)

    def apart(self) -> Groups:
        """Return the groups of this rank without connections to the others: enough for plans."""
        return Groups(
            world=Group("world", tuple(range(self.world_size)), self.rank),
            attention=self._alone("attention", self._attention_size),
            tp=self._alone("tp", self.tp_size),
            cp=self._alone("cp", self.cp_size, stride=self.tp_size),
            dense_tp=self._alone("dense_tp", self.moe_dense_tp_size),
            ep=self._alone("ep", self.ep_size),
        )

    def connect(
        self, device: str | torch.device = "cpu", *, timeout_s: float = 60.0, store: Store | None = None
    ) -> Groups:
        """Meet the other ranks and return the groups of this one. A collective: every rank calls it.

        Where the host has initialized torch.distributed for these ranks, the groups are new ones beside its own, with
        its backends and deadlines; a backend that it lacks, or all of it where it has not: gloo for host tensors, and
        for those on a device the one that torch has for it, NCCL on "cuda", whose watchdog must not be off. Ranks
        meet in `store`, or where torchrun's variables say: a store may live in a process that is not a rank, so that it
        outlives them all (docs/howto/cluster.md). `timeout_s` is how long any collective may take. With a store, the
        log says after 10 s which ranks have not come. Raises ConfigError when the ranks do not agree on sizes, are not
        those of the host, or for a store when a backend was initialized without it; BackendUnavailable for a device
        without a backend; RankLost when a rank does not come, which with a store it names."""
        if self.world_size == 1:
            return self.apart()
        try:
            return self._connect(torch.device(device).type, timeout_s, store)
        except ValueError as error:
            raise ConfigError(
                f"{self.world_size} ranks have no rendezvous address: {error}; start them with torchrun, or "
                "initialize torch.distributed before"
            ) from error
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise RankLost(f"rank {self.rank} of {self.world_size} could not meet the others: {reason}") from error

    def _connect(self, kind: str, timeout_s: float, store: Store | None) -> Groups:
        if kind == "cuda":
            _check_watchdog()
        owns_backend, timeout = not dist.is_initialized(), timedelta(seconds=timeout_s)
        if not owns_backend:
            self._check_host(store)
            meeting = _beside(kind, timeout)
        else:
            if store is None:
                dist.init_process_group(_backend_of(kind), timeout=timeout)
            else:
                self._meet(store, _backend_of(kind), timeout)
            meeting = dist.group.WORLD
        apart, lookout, ends = self.apart(), Lookout(), list[Callable[[], None]]()
        world = attrs.evolve(apart.world, process_group=meeting, lookout=lookout, ends=ends)
        self._compare(world)
        others = {
            name: self._connected(attrs.evolve(getattr(apart, name), lookout=lookout, ends=ends), world, kind)
            for name in ("attention", "tp", "cp", "dense_tp", "ep")
        }
        return attrs.evolve(apart, world=world, owns_backend=owns_backend, **others)

    def _check_host(self, store: Store | None) -> None:
        """Refuse to meet beside a world of the host that is not these ranks."""
        if store is not None:
            raise ConfigError(
                "a store was given, but torch.distributed was initialized before: give it to init_process_group"
            )
        if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.world_size):
            raise ConfigError(
                f"the topology is rank {self.rank} of {self.world_size}, torch.distributed was initialized as rank "
                f"{dist.get_rank()} of {dist.get_world_size()}; start an engine whose ranks are not the host's in "
                "processes of its own (pdinfer.remote), where nothing is initialized"
            )

    def _meet(self, store: Store, backend: str, timeout: timedelta) -> None:
        roll_call = RollCall(store, self.rank, self.world_size)
        try:
            with roll_call.taken():
                dist.init_process_group(
                    backend, timeout=timeout, store=store, rank=self.rank, world_size=self.world_size
                )
        except RuntimeError as error:
            if missing := roll_call.missing():
                raise RuntimeError(missing) from error
            raise

    def _alone(self, name: str, size: int, *, stride: int = 1) -> Group:
        """Return this rank's group of `size` ranks that are `stride` apart, without connections."""
        at = self.rank // stride % size
        first = self.rank - at * stride
        return Group(name, tuple(range(first, first + size * stride, stride)), at)

    def _connected(self, alone: Group, world: Group, kind: str) -> Group:
        """Return one of this rank's groups with connections to its other ranks."""
        if alone.size == 1:
            return alone
        # the world has connections already
        if alone.size == self.world_size:
            return attrs.evolve(alone, process_group=world.process_group)
        stride = alone.ranks[1] - alone.ranks[0]
        block = alone.size * stride
        # every rank names the groups of all ranks: making groups is a collective of the world
        every = [
            [*range(at, at + block, stride)]
            for first in range(0, self.world_size, block)
            for at in range(first, first + stride)
        ]
        # by default groups get torch's timeout, which is half an hour, and the backends of the host
        timeout, backend = timeout_of(world.process_group, kind), dist.get_backend_config(world.process_group)
        ours, _ = dist.new_subgroups_by_enumeration(every, timeout=timeout, backend=backend)  # type: ignore[no-untyped-call]
        return attrs.evolve(alone, process_group=ours)

    def _compare(self, world: Group) -> None:
        """Raise ConfigError where ranks were started with different sizes: they would wait for each other forever."""
        ours = torch.tensor([[getattr(self, name) for name in SIZES]], dtype=torch.int64, device="cpu")
        for rank, theirs in enumerate(world.all_gather(ours).tolist()):
            for name, value, other in zip(SIZES, ours[0].tolist(), theirs, strict=True):
                if value != other:
                    raise ConfigError(f"{name} is {value} on rank {self.rank} and {other} on rank {rank}")


def _backend_of(kind: str) -> str:
    """Return the backend of torch.distributed for host tensors, and for those on such a device. Raises
    BackendUnavailable for a device that torch has none for."""
    if kind == "cpu":
        return "gloo"
    try:
        return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    except ValueError as error:
        raise BackendUnavailable(
            f"ranks are to meet with tensors on {kind}, and torch.distributed has no backend for these; import the "
            "package that brings one, or initialize torch.distributed before"
        ) from error


def _beside(kind: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """Return a new group of the ranks of the host's world, whose collectives may come in any order beside ours: with
    its backends and its deadline, or with ours where it cannot carry both host tensors and those on such a device."""
    backend = None
    try:
        timeout = min(timeout_of(dist.group.WORLD, each) for each in ("cpu", kind))
    except RuntimeError:
        backend = _backend_of(kind)
    made: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timeout)
    return made


def _check_watchdog() -> None:
    """Refuse an environment in which nothing ends a process whose NCCL waits for a rank that is lost."""
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if os.environ.get(name) == "0":
            raise ConfigError(f"{name}=0 lets ranks wait for ever for one that is lost; unset it")
