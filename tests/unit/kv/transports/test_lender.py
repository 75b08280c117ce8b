"""How a sender through shared memory cuts what it names."""

from __future__ import annotations

import pytest
import torch

from pdinfer.kv.layout import KVComponent, KVLayout
from pdinfer.kv.memfd import CAN_SHARE
from pdinfer.kv.transports.base import Transfer, WriteMessage
from pdinfer.kv.transports.shm.sender import Lender
from pdinfer.kv.view import PageMemory

MIB = 1 << 20
PAYLOAD_BYTES = 18 * MIB

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="needs memfds")


def sections(lender: Lender) -> list[int]:
    """Write a payload of PAYLOAD_BYTES in spans of 1 MiB. Return the MiB of its sections."""
    spans = [(start, MIB) for start in range(0, PAYLOAD_BYTES, MIB)]
    transfer = Transfer(PAYLOAD_BYTES)
    parts = lender.parts(WriteMessage(b"frame", transfer, spans, None))
    return [part.weight // MIB for part in parts if part is not None and part.weight]


def test_who_has_enough_to_copy_is_named_more_at_once() -> None:
    latent = KVComponent(name="l", format="f", dtype="float16", width=8192, token_bytes=16384, layers=(0,))
    layout = KVLayout(model_id=b"", weights_id=b"", page_size=64, components=(latent,))
    memory = PageMemory(layout, PAYLOAD_BYTES // (64 * 16384), device=torch.device("cpu"))
    lender = Lender(memory, memory.memfd, digest=True)
    assert sections(lender) == [4, 8, 6], "it waits for the first"
    assert sections(lender) == [16, 2], "it still copies the payload before"
    lender.copied(2 * PAYLOAD_BYTES - 5 * MIB)
    assert sections(lender) == [16, 2]
    lender.copied(3 * PAYLOAD_BYTES - 3 * MIB)
    assert sections(lender) == [4, 8, 6]
