"""Bounds on values that come from a peer, as part of the types of every message, and how a peer's text is shown.

msgspec checks them when it decodes, and names the field that breaks one: `Expected `int` >= 0 - at `$.load.kv.…`. They
keep out values that cannot be right in any message: a count below zero, a time that is not a number, text that moves a
terminal's cursor. Whether a value is right here and now (a grant's pages, a token of this vocabulary) is for the object
that knows to check."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_COUNT = 2**53
MAX_INDEX = 2**31 - 1
MAX_SECONDS = 1e9
MAX_NAME_CHARACTERS = 256
MAX_TEXT_CHARACTERS = 4096
MAX_PACKED_BYTES = 1 << 26
MAX_LOGPROBS = 20
"""The most alternatives that a request may ask for with each token."""
SHOWN_CHARACTERS = 200
LOGPROB_ROUNDING = 1e-6
"""How far above 0 the logprobs of others may end up by rounding. Ours never do: a logsumexp is at least the greatest
logit."""
PRINTABLE = (
    r"\A[^\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    r"\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]*\Z"
)
"""Text without control characters, line separators, and characters that are invisible or turn the direction of
writing."""

FEW = Meta(max_length=1024)
"""Items of a list: peers, ranks, names."""
SOME = Meta(min_length=1, max_length=1024)
MANY = Meta(max_length=1 << 16)
"""Pages of a request, requests of a step."""
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""Tokens, pages, bytes, requests: exact as a float too."""
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Index = Annotated[int, Meta(ge=0, le=MAX_INDEX)]
"""An id or a position that fits in 32 bits: of a token, a layer, a rank."""
Indexes = Annotated[tuple[Index, ...], MANY]
PageSize = Annotated[int, Meta(ge=1, le=1 << 20)]
Epoch = Annotated[int, Meta(ge=0)]
"""Up to 64 bits."""
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
"""A duration, up to 30 years. NaN is refused."""
Rate = Annotated[float, Meta(ge=0.0, le=1e15)]
Score = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""A part of what a policy computed. NaN is refused."""
Logprob = Annotated[float, Meta(ge=-3.5e38, le=LOGPROB_ROUNDING)]
"""A float32. Minus infinity is refused: it would be a token that cannot occur."""
TopLogprobs = Annotated[tuple[tuple[Index, Logprob], ...], Meta(max_length=MAX_LOGPROBS)]
"""(token id, log-probability) pairs, the best first."""
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS, pattern=PRINTABLE)]
"""The name of a request, an op, a dtype or an endpoint. It may be empty."""
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS, pattern=PRINTABLE)]
Digest = Annotated[bytes, Meta(max_length=64)]
Room = Annotated[bytes, Meta(min_length=1, max_length=16)]
"""Bounded because a peer's rooms are remembered."""
EngineId = Annotated[bytes, Meta(min_length=1, max_length=16)]
Packed = Annotated[bytes, Meta(max_length=MAX_PACKED_BYTES)]
"""A list of ints, see `kv.channel.wire.pack_ints`."""
Differences = Annotated[tuple[tuple[Name, Text, Text], ...], FEW]
"""(name, ours, theirs) of each field in which two layouts differ."""


def escaped(text: str) -> str:
    """Return `text` as it may stand in a log, an event or an error: at most MAX_TEXT_CHARACTERS, with unprintable
    characters spelled out (a line feed as backslash and n)."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return text[:MAX_TEXT_CHARACTERS]


def cause(error: BaseException) -> str:
    """Return the class of an error and what it says, cut to 200 characters, as another error quotes it."""
    text = escaped(str(error))[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def broken_bound(error: Exception) -> str:
    """Return, shortened, what msgspec says of a message that it refuses. msgspec quotes values (and for text the whole
    pattern), and names the field at the end."""
    text = str(error).replace(f"matching regex {PRINTABLE!r}", "of printable characters")
    half = SHOWN_CHARACTERS // 2
    return escaped(text) if len(text) <= half else f"{escaped(text[:half])[:half]} … {escaped(text[-half:])[-half:]}"
