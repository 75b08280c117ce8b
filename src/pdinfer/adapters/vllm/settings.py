"""The host's settings of the connector, what a request asks of it, and the set-ups of vLLM that it refuses at start.

A host's settings are `kv_connector_extra_config`:

    listen      "tcp://host:port", or "shm:///path/of/a/socket" between processes of one host; of data-parallel ranks
                the first one listens there, and rank r at port + r, or at the path with ".r" after it
    advertise   the name or address that is reported to peers instead of the host listened on
    key_file    a file with the key of all ends, in hexadecimal (`openssl rand -hex 32`)
    prefills    the addresses of prefills that requests may name to a decode; without it, any with a key, and without a
                key those of this host
    hold_s      how long a prefill waits for decode's grant before it computes, and again while others have one
    lease_s     how long decode waits for its pages, and how long prefill keeps those that no grant has come for

A request's are `kv_transfer_params`, with a room of 16 random bytes in hexadecimal that is the same at both ends:

    at prefill  {"do_remote_decode": true, "room": "…"}, and "first_token": true for a decode that goes on from it
    at decode   {"do_remote_prefill": true, "room": "…", "prefill": "tcp://host:port"}
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs

from pdinfer.adapters.vllm.memory import has_heads
from pdinfer.adapters.vllm.messages import MAX_WORKERS
from pdinfer.adapters.vllm.overrides import overrides
from pdinfer.checks import clip, instance_of
from pdinfer.errors import ConfigError
from pdinfer.kv.transports.base import Transport
from pdinfer.kv.transports.shm.transport import SCHEME, ShmTransport
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.kv.transports.stream.endpoints import leads_here

ROOM_BYTES = 16
LONGEST_S = 3600.0


def _seconds(settings: Settings, attribute: attrs.Attribute[float], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST_S:
        raise ConfigError(f"{attribute.name} must be 0 to {LONGEST_S:g} seconds, got {clip(value)}")


def _file(settings: Settings, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{attribute.name} must be the path of a file, got {clip(value)}")


def _addresses(settings: Settings, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not (isinstance(value, list | tuple) and all(map(_is_address, value))):
        raise ConfigError(f'{attribute.name} must be a list of addresses such as "tcp://host:port", got {clip(value)}')


def _is_address(value: object) -> bool:
    return isinstance(value, str) and "://" in value


@attrs.frozen(kw_only=True)
class Settings:
    """The settings of a host. `sends` and `receives` say what its role lets an engine do."""

    sends: bool
    receives: bool
    listen: str = attrs.field(default="tcp://127.0.0.1:0", validator=instance_of(str))
    advertise: str | None = None
    key_file: str | None = attrs.field(default=None, validator=_file)
    prefills: Sequence[str] | None = attrs.field(default=None, validator=_addresses)
    hold_s: float = attrs.field(default=5.0, validator=_seconds)
    lease_s: float = attrs.field(default=30.0, validator=_seconds)

    @classmethod
    def of(cls, transfer: Any) -> Settings:
        """Read vLLM's KVTransferConfig. Raises ConfigError for names that are not known, and for a prefill without an
        address to listen on."""
        extra = transfer.kv_connector_extra_config or {}
        if not isinstance(extra, Mapping):
            raise ConfigError(f"kv_connector_extra_config must have names and values, got {clip(extra)}")
        known = [field.name for field in attrs.fields(cls) if field.name not in ("sends", "receives")]
        if unknown := sorted(map(str, extra.keys() - set(known))):
            raise ConfigError(f"kv_connector_extra_config has {', '.join(unknown)}; known are {', '.join(known)}")
        sends = transfer.kv_role in ("kv_producer", "kv_both")
        if sends and "listen" not in extra:
            raise ConfigError(
                'a prefill needs an address that decodes can dial: kv_connector_extra_config={"listen": "tcp://host:port"}'
            )
        return cls(sends=sends, receives=transfer.kv_role in ("kv_consumer", "kv_both"), **extra)

    def of_rank(self, rank: int) -> Settings:
        """Return the settings of a data-parallel rank. Each is an engine with an address of its own: rank r has the
        port of rank 0 plus r, or its path with ".r" after it. What is left to the system stays so."""
        if self.listen.startswith(SCHEME):
            is_given, listen = self.listen != SCHEME, f"{self.listen}.{rank}"
        else:
            base, _, port = self.listen.rpartition(":")
            is_given = port.isdecimal() and int(port) > 0
            listen = f"{base}:{int(port) + rank}" if is_given else ""
        return attrs.evolve(self, listen=listen) if rank and is_given else self

    def of_worker(self, rank: int) -> Settings:
        """Return the settings of a decode's worker: peers dial only the first one, so these listen at
        any free address."""
        scheme = SCHEME if self.listen.startswith(SCHEME) else self.listen.rpartition(":")[0] + ":0"
        return attrs.evolve(self, listen=scheme) if rank else self

    def key(self) -> bytes | None:
        """Return the key of all ends, or None. Raises ConfigError when its file cannot be read as one."""
        if self.key_file is None:
            return None
        try:
            return bytes.fromhex(Path(self.key_file).read_text("ascii").strip())
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else "it is not hexadecimal"
            raise ConfigError(f"no key can be read from {self.key_file}: {problem}") from None

    def may_dial(self, prefill: str) -> bool:
        """Return whether a request may have its KV written by the prefill at an address. Whoever sends requests names
        it, and what lands from there is reused for others. With a key a stranger at an address proves nothing and
        writes nothing. Without one, whoever listens there is a peer."""
        if self.prefills is not None:
            return prefill in self.prefills
        return self.key_file is not None or leads_here(prefill)

    def transport(self) -> Transport:
        """Return the transport that listens as asked. Raises ConfigError for another kind of address."""
        if self.listen.startswith(SCHEME):
            return ShmTransport(self.listen.removeprefix(SCHEME) or None)
        try:
            parts = urlsplit(self.listen)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not self.listen.startswith("tcp://") or not host or port is None:
            raise ConfigError(f'listen must be "tcp://host:port" or "{SCHEME}/path", got {clip(self.listen)}')
        return SocketTransport(host=host, port=port, advertise=self.advertise)


@attrs.frozen(kw_only=True)
class Ask:
    """The wish of a request: to be loaded from `prefill`, to be sent to whoever grants its room, there with its first
    token or without, or nothing of ours. `problem` is why that cannot be, in a sentence."""

    loads: bool = False
    sends: bool = False
    room: str = ""
    prefill: str = ""
    first_token: bool = False
    problem: str = ""


def asked(request: Any, settings: Settings) -> Ask:
    """Return what the `kv_transfer_params` of a request of vLLM ask for."""
    params: Mapping[str, Any] = request.kv_transfer_params or {}
    loads, sends = (bool(params.get(name)) for name in ("do_remote_prefill", "do_remote_decode"))
    if not (loads or sends):
        return Ask()
    room, prefill, problem = params.get("room", ""), params.get("prefill", ""), ""
    try:
        is_room = len(bytes.fromhex(room)) == ROOM_BYTES
        room = bytes.fromhex(room).hex()  # both ends compare text
    except (TypeError, ValueError):
        is_room = False
    if loads and sends:
        problem = "a request asks for do_remote_prefill and do_remote_decode; give one of them"
    elif not is_room:
        problem = f"a request's room must be {ROOM_BYTES} random bytes in hexadecimal, got {clip(room)}"
    elif loads and not settings.receives:
        problem = "a request asks for do_remote_prefill of an engine with kv_role kv_producer; send it to a decode"
    elif sends and not settings.sends:
        problem = "a request asks for do_remote_decode of an engine with kv_role kv_consumer; send it to a prefill"
    elif loads and not _is_address(prefill):
        problem = f'the prefill of a request must be an address such as "tcp://host:port", got {clip(prefill)}'
    elif loads and not settings.may_dial(prefill):
        problem = (
            f"a request names the prefill {clip(prefill)}, which this decode does not dial: "
            "set prefills to all that it may, or a key_file at all ends"
        )
    elif loads and getattr(request, "skip_reading_prefix_cache", False):
        problem = "it asks for what every token of a prompt is computed for, as prompt_logprobs; leave that out"
    elif request.prompt_token_ids is None or getattr(request, "mm_features", None):
        problem = "two ends cannot compare prompts of embeddings or images"
    return Ask(
        loads=loads,
        sends=not loads,
        room=str(room),
        prefill=str(prefill),
        first_token=params.get("first_token") is True,
        problem=problem,
    )


def check_setup(config: Any, kv_cache_config: Any) -> None:
    """Raise ConfigError, in a sentence, for set-ups of vLLM that the connector does not serve. Called in both halves,
    before anything is allocated."""
    parallel = config.parallel_config
    for kind in ("pipeline", "prefill_context", "decode_context"):
        name = f"{kind}_parallel_size"
        if (size := getattr(parallel, name, 1)) != 1:
            raise ConfigError(f"PDInferConnector serves engines of one worker, and {name} is {size}")
    if (size := getattr(parallel, "tensor_parallel_size", 1)) != 1:
        role, model = config.kv_transfer_config.kv_role, str(config.model_config.model)
        if role == "kv_both" or size > MAX_WORKERS or has_heads(model):
            kind = "keys and values per head" if has_heads(model) else "latents"
            raise ConfigError(
                f"PDInferConnector serves up to {MAX_WORKERS} workers where each has all of a cache: those of an MLA "
                "model with kv_role kv_producer or kv_consumer. Here tensor_parallel_size is "
                f"{size} and kv_role is {role}, and the model has {kind}"
            )
    if getattr(config, "speculative_config", None) is not None:
        raise ConfigError("PDInferConnector does not hand over the caches of draft models; leave speculation out")
    if getattr(config, "lora_config", None) is not None:
        raise ConfigError("PDInferConnector cannot distinguish the KV of LoRA adapters; leave enable_lora out")
    overrides(config)
    groups = getattr(kv_cache_config, "kv_cache_groups", ())
    kinds = {type(group.kv_cache_spec).__name__ for group in groups if group is not None}
    if len(groups) > 1:
        raise ConfigError(
            f"PDInferConnector serves models with one group of KV caches, and this one has {len(groups)}: models with "
            "Mamba layers or sliding windows are not served"
        )
    if other := sorted(kinds - {"FullAttentionSpec", "MLAAttentionSpec"}):
        raise ConfigError(f"PDInferConnector serves caches of all tokens of a prompt, and this model has {other[0]}")
