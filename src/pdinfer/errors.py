"""Every error pdinfer raises on purpose.

    PDInferError              code             who made the mistake
    ├── ConfigError           CONFIG           a config.json, a size or a setting
    ├── CheckpointError       CHECKPOINT       the files of a model folder
    ├── RequestError          REQUEST          one request; the others go on
    ├── Overloaded            OVERLOADED       no one: try again after `retry_after_s`
    ├── TransferError         TRANSFER         a peer, a connection, or bytes that did not verify
    │   └── LayoutMismatch    LAYOUT_MISMATCH  two ends whose pages mean different things
    ├── BackendUnavailable    BACKEND          an optional library or device that is not there
    ├── RankLost              RANK_LOST        another rank of the same engine: it died, hangs, or failed in a step
    └── Forked                FORKED           a host that forked, and goes on using what belongs to its parent

A message says what was asked, what is so and what to do. `code` is stable across releases, crosses process
borders, and is what programs should look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar


class PDInferError(Exception):
    """The base of all errors. `code` names the kind of error in a form that never changes."""

    code: ClassVar[str] = "INTERNAL"


class ConfigError(PDInferError):
    """A configuration that cannot be used: a field of config.json, a size, or an equation that does not hold."""

    code = "CONFIG"


class CheckpointError(PDInferError):
    """A model folder whose files are missing, malformed, or disagree with the configuration."""

    code = "CHECKPOINT"


class RequestError(PDInferError):
    """A request that can never be served: a token or parameter out of range, too many tokens, or an id in use."""

    code = "REQUEST"


class Overloaded(PDInferError):
    """No room now. `retry_after_s` (seconds) estimates when to try again, and the text says it too. It is None when
    nothing was measured yet from which to estimate it."""

    code = "OVERLOADED"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message if retry_after_s is None else f"{message}; try again in {retry_after_s:.2g} s")
        self.retry_after_s = retry_after_s


class TransferError(PDInferError):
    """KV did not arrive: a peer was lost, a connection broke, a room was aborted, or bytes did not verify."""

    code = "TRANSFER"


_OF = {
    "model_id": " (a digest of the model's config)",
    "weights_id": " (a digest of all weights)",
    "mtp_weights_id": " (a digest of the MTP layer's weights)",
    "sampled_weights_id": " (a digest of a sample of the weights)",
}
"""What fields of a KVLayout are digests of."""


class LayoutMismatch(TransferError):
    """Two ends whose pages have different meanings. `fields` holds (name, ours, theirs) for every difference."""

    code = "LAYOUT_MISMATCH"

    def __init__(self, message: str, *, fields: tuple[tuple[str, str, str], ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields

    @classmethod
    def of(cls, fields: tuple[tuple[str, str, str], ...], *, said_by: str = "") -> LayoutMismatch:
        """Return the error whose text begins with `said_by` and lists `fields`."""
        listing = "; ".join(f"{name}{_OF.get(name, '')}: ours {ours}, theirs {theirs}" for name, ours, theirs in fields)
        return cls(f"{said_by}the two ends' KV layouts differ and cannot exchange pages: {listing}", fields=fields)


class BackendUnavailable(PDInferError):
    """A forced choice of provider, transport or device that this machine does not have."""

    code = "BACKEND"


class RankLost(PDInferError):
    """A collective did not end, because another rank of this engine died, hangs, or left the common sequence of calls.
    The ranks cannot go on. Restart all of them. Inside a step on GPUs a process that waits for a lost rank is ended
    instead (docs/howto/cluster.md)."""

    code = "RANK_LOST"


class Forked(PDInferError):
    """A forked child used an engine, a pool, a channel or a Pairing of its parent. Start processes with "spawn"."""

    code = "FORKED"


def _kinds(base: type[PDInferError]) -> Iterator[type[PDInferError]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


BY_CODE = {kind.code: kind for kind in _kinds(PDInferError)}


def error_from_code(code: str, message: str, retry_after_s: float | None = None) -> PDInferError:
    """Return the error that a peer described as (code, message). An unknown code gives the base class. `retry_after_s`
    is set on an Overloaded, whose message includes it already."""
    error = BY_CODE.get(code, PDInferError)(message)
    if isinstance(error, Overloaded):
        error.retry_after_s = retry_after_s
    return error
