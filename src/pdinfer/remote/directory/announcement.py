"""What an engine says of itself in a directory: JSON of bounded fields, sealed with the key of the group.

    {"endpoint":"10.42.0.7:7000","role":"decode",...}
    <HMAC-SHA256 of the line above, in hex>

So whoever can write to the medium and does not have the key can remove an entry or put an old one back, and nothing
else. Neither does harm: entries say whom to dial, and an engine proves on the connection who it is.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdinfer.bounds import Count, Digest, Index, Name, broken_bound
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import ConfigError, TransferError
from pdinfer.remote import messages
from pdinfer.remote.messages import LoadMessage
from pdinfer.stats import DecodeLoad, PrefillLoad
from pdinfer.types import PeerAddress, RequestLimits

MAX_BYTES = 1 << 14
"""The most that an announcement has, sealed. One with every field in use has less than 4 KiB."""
TTL_S = 3600.0
"""The longest time for which an announcement may ask to be believed."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, or one data-parallel rank of it, at `endpoint` ("host:port").

    `beat` grows with every refresh, by which readers tell that the engine lives: they compare no clocks of other hosts.
    An announcement whose `beat` has not grown for `ttl_s`, on the reader's own clock, has lapsed. `is_taken` says that
    the engine has as many clients as it may have. `load` is what policies are shown, without links. `version` and
    `minor` are those of the messages that the engine speaks."""

    endpoint: Name
    role: Literal["prefill", "decode"]
    engine: PeerAddress
    limits: RequestLimits
    load: LoadMessage
    model_id: Digest
    weights_id: Digest
    layout_id: Digest
    version: Index
    minor: Index
    ttl_s: Annotated[float, Meta(gt=0, le=TTL_S)]
    beat: Count
    is_taken: bool = False

    @classmethod
    def of(
        cls, engine: PrefillEngine | DecodeEngine, endpoint: str, *, ttl_s: float, beat: int, is_taken: bool
    ) -> Announcement:
        """Describe an engine as it is now."""
        layout, load = engine.pool.layout, engine.brief_load()
        return cls(
            endpoint=endpoint,
            role="prefill" if isinstance(engine, PrefillEngine) else "decode",
            engine=engine.address,
            limits=engine.limits,
            load=LoadMessage(
                prefill=load if isinstance(load, PrefillLoad) else None,
                decode=load if isinstance(load, DecodeLoad) else None,
            ),
            model_id=layout.model_id,
            weights_id=layout.weights_id,
            layout_id=layout.layout_id,
            version=messages.VERSION,
            minor=messages.MINOR,
            ttl_s=ttl_s,
            beat=beat,
            is_taken=is_taken,
        )

    @property
    def name(self) -> str:
        """The name of its entry: every life of an engine has another one."""
        return f"{self.engine.engine_id.hex()}-{self.engine.epoch}-{self.engine.rank}"

    def sealed(self, key: bytes) -> bytes:
        """Return its bytes. Raises ConfigError when there are more than MAX_BYTES."""
        body = msgspec.json.encode(self)
        data = body + b"\n" + _tag(key, body)
        if len(data) > MAX_BYTES:
            raise ConfigError(
                f"an announcement has at most {MAX_BYTES} bytes, and that of {self.engine} has {len(data)}: give the "
                "engine fewer or shorter names of logits processors"
            )
        return data

    @classmethod
    def opened(cls, name: str, data: bytes, key: bytes) -> Announcement:
        """Return the announcement in the bytes of the entry `name`. Raises TransferError for any others."""
        body, _, tag = data.rpartition(b"\n")
        if len(data) > MAX_BYTES:
            raise TransferError(f"it has {len(data)} bytes, more than {MAX_BYTES}")
        if not hmac.compare_digest(tag, _tag(key, body)):
            raise TransferError("it was not made with this key")
        try:
            announced = _decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise TransferError(f"it is none: {broken_bound(error)}") from error
        if announced.name != name:
            raise TransferError("it is that of another entry")
        if announced.version != messages.VERSION:
            raise TransferError(f"it speaks version {announced.version}, this end speaks {messages.VERSION}")
        return announced


_decoder = msgspec.json.Decoder(Announcement)


def _tag(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, b"pdinfer directory 1\n" + body, hashlib.sha256).hexdigest().encode()
