"""What travels of a request: every field, whoever added it, and the names of those that the other end has to know."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec
import pytest

import pdinfer as pd
from pdinfer.remote import messages
from pdinfer.values import changed_fields

OTHERS: dict[Any, Any] = {bool: True, int: 3, float: 0.5, str: "a", bytes: b"a", tuple: (7,)}
"""Another value than the default, for a field whose default is of that type."""


def with_all(value: Any, **known: Any) -> Any:
    """Return the value with every field changed: those that are `known` so, others by the type of their default."""
    others = {
        field.name: known[field.name] if field.name in known else _another(getattr(value, field.name))
        for field in attrs.fields(type(value))
    }
    return attrs.evolve(value, **others)


def _another(default: Any) -> Any:
    return 3 if default is None else default + OTHERS[type(default)] if default else OTHERS[type(default)]


SAMPLING = with_all(pd.SamplingParams(), logit_bias=((1, 0.5),), ignore_eos=True, logits_processor="json")
REQUEST = with_all(pd.Request(prompt=(1, 2)), request_id="a", sampling=SAMPLING, stop=(), deadline_s=1.5)


def sent(message: messages.Command) -> Any:
    return messages.decode_command(messages.encode(message))


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(pd.Request)])
def test_every_field_of_a_request_arrives(name: str) -> None:
    assert name in changed_fields(REQUEST) or name in messages.PAIRING_FIELDS
    one = (
        pd.Request(prompt=(1,))
        if name == "prompt"
        else attrs.evolve(pd.Request(prompt=(1,)), **{name: getattr(REQUEST, name)})
    )
    for request in (one, REQUEST):
        assert sent(messages.SubmitDecodeMessage(messages.PackedRequest.of(request), ())).request.unpack() == request


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(pd.SamplingParams)])
def test_every_sampling_parameter_arrives(name: str) -> None:
    assert name in changed_fields(SAMPLING)
    request = pd.Request(prompt=(1,), sampling=pd.SamplingParams(**{name: getattr(SAMPLING, name)}))
    packed = messages.PackedRequest.of(request)
    assert f"sampling.{name}" in packed.required
    assert sent(messages.SubmitDecodeMessage(packed, ())).request.unpack() == request


def test_a_field_that_is_at_its_default_does_not_travel() -> None:
    body = messages.encode(messages.SubmitDecodeMessage(messages.PackedRequest.of(pd.Request(prompt=(1,))), ()))
    told = msgspec.msgpack.decode(body[: -messages.DIGEST_BYTES])["request"]
    assert told == {"request": {"prompt": b"\1\0\0\0", "sampling": {}}, "required": ["prompt"]}


def test_a_field_that_a_class_gets_travels_without_an_edit_here() -> None:
    """As if `SamplingParams` had another one: what travels is made of the class."""

    @attrs.frozen(kw_only=True)
    class Sampling(pd.SamplingParams):
        colour: int = 0

    made = messages._travelling(Sampling)
    packed = msgspec.msgpack.encode(made(**changed_fields(Sampling(colour=3, top_k=2))))
    assert msgspec.msgpack.decode(packed) == {"colour": 3, "top_k": 2}
    assert msgspec.msgpack.decode(packed, type=made) == made(colour=3, top_k=2)
    with pytest.raises(msgspec.ValidationError, match="colour"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"colour": "green"}), type=made)


def test_a_request_that_requires_what_is_unknown_here_is_refused_by_name() -> None:
    packed = messages.PackedRequest.of(pd.Request(prompt=(1,)))
    packed.required += "colour", "sampling.taste"
    with pytest.raises(pd.RequestError, match=r"sets colour, sampling\.taste, which this engine does not know"):
        sent(messages.SubmitDecodeMessage(packed, ())).request.unpack()
