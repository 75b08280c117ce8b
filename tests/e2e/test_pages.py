"""After a hand-off decode's pages hold, byte for byte, what prefill computed: what the model alone computes."""

from __future__ import annotations

import functools

import attrs
import pytest
import torch
from torch import Tensor

import pdinfer as pd
from pdinfer.kv.view import KVView, PageMemory
from pdinfer.model.batch import Batch, Row
from tests.e2e.setups import TRANSPORTS, Setup, greedy, join, model_of, pool_of, prompt_of, step_until
from tests.slices import one_in

PAGE_SIZES = ((1, 1), (16, 16), (64, 64), (1, 16), (16, 5), (5, 64))
CHUNK_SIZES = (3, 23, 50, -1)
LENGTHS = (1, 4, 15, 16, 17, 40, 70)


def latents(pool: pd.PagePool, pages: tuple[int, ...], num_tokens: int) -> Tensor:
    """[layers, tokens, width] of a sequence, gathered token by token from its pages."""
    size = pool.layout.page_size
    where = [(pages[token // size], token % size) for token in range(num_tokens)]
    rows, offsets = torch.tensor(where, device="cpu").T
    return torch.stack([pool.memory.pages("latent", layer)[rows, offsets] for layer in pool.layout.layers])


def differences(ours: Tensor, theirs: Tensor) -> list[tuple[int, int]]:
    """(layer, token) of every latent whose bytes are not the same."""
    assert ours.shape == theirs.shape
    return (ours.view(torch.uint8) != theirs.view(torch.uint8)).any(-1).nonzero().tolist()


@functools.cache
def latents_of_the_model(prompt: tuple[int, ...]) -> Tensor:
    """What the model writes when it runs the prompt in one piece on memory of its own."""
    model = model_of()
    layout = model.kv_layout(pd.CacheConfig(page_size=len(prompt)))
    memory = model.allocate_pages(layout, 1)
    view = KVView.of(memory)
    model.forward(Batch.build([Row(prompt, 0, [0])], page_size=len(prompt), device=model.device, decode=False), view)
    return torch.stack([layer[0] for layer in view.latents.values()])


class WatchedChannel(pd.KVChannel):
    """Keeps the pages each room was pushed from, and the latents in them when the hand-off is sent."""

    sent: dict[str, Tensor]
    grants: dict[str, pd.PageGrant]

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.sent, self.grants, self._sources = {}, {}, {}

    def push(self, grant, *, pages, **more):  # type: ignore[no-untyped-def]
        self._sources[grant.request_id] = tuple(pages)
        return super().push(grant, pages=pages, **more)

    def finish(self, grant: pd.PageGrant, handoff: pd.Handoff) -> None:
        pages = self._sources[grant.request_id]
        self.sent[grant.request_id] = latents(self.pool, pages, len(grant.tokens)).clone()
        self.grants[grant.request_id] = grant
        super().finish(grant, handoff)


@attrs.frozen
class HandedOff:
    """Requests that all run at decode, their prompts' pages still in place."""

    setup: Setup
    prompts: dict[str, tuple[int, ...]]
    sent: dict[str, Tensor]
    grants: dict[str, pd.PageGrant]

    @property
    def pool(self) -> pd.PagePool:
        return self.setup.decodes[0].channel.pool

    def arrived(self, request_id: str) -> Tensor:
        """The latents that decode reads for this request."""
        return latents(self.pool, self.grants[request_id].pages, len(self.prompts[request_id]))


def hand_off(transport: str, page_sizes: tuple[int, int], chunk_size: int) -> HandedOff:
    """Submits several prompts at once and steps until each has a token; none ends meanwhile."""
    model = model_of()
    # with pages of one token even these prompts begin alike, and what decode has is not handed off
    pools = [pool_of(model, page_size=size, num_pages=2048 // size, prefix_cache=False) for size in page_sizes]
    engine = pd.EngineConfig(chunked_prefill_size=chunk_size)
    setup = join(
        model, transport, prefill_pools=pools[:1], decode_pools=pools[1:], engine=engine, channel=WatchedChannel
    )
    prompts = {str(length): prompt_of(length) for length in LENGTHS}
    for name, prompt in prompts.items():
        setup.pairing.submit(pd.Request(request_id=name, prompt=prompt, sampling=greedy(400, ignore_eos=True)))
    step_until(setup.pairing, lambda events: {event.request_id for event in events} == set(prompts))
    channel = setup.prefills[0].channel
    assert isinstance(channel, WatchedChannel)
    return HandedOff(setup, prompts, channel.sent, channel.grants)


CASES = [
    (transport, page_sizes, chunk_size)
    for transport in TRANSPORTS
    for page_sizes in PAGE_SIZES
    for chunk_size in CHUNK_SIZES
    if transport != "shared" or page_sizes[0] == page_sizes[1]
]


@pytest.mark.parametrize(("transport", "page_sizes", "chunk_size"), one_in(9, CASES))
def test_decode_holds_the_bytes_that_prefill_computed(
    transport: str, page_sizes: tuple[int, int], chunk_size: int
) -> None:
    state = hand_off(transport, page_sizes, chunk_size)
    with state.setup:
        for name, prompt in state.prompts.items():
            arrived = state.arrived(name)
            assert differences(state.sent[name], arrived) == []
            torch.testing.assert_close(arrived, latents_of_the_model(prompt), rtol=1e-4, atol=1e-5)


def test_pages_of_one_pool_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_from(*_: object) -> None:
        raise AssertionError("a page was copied")

    monkeypatch.setattr(PageMemory, "copy_from", copy_from)
    state = hand_off("shared", (16, 16), 23)
    with state.setup:
        # prefill took no page of its own: all that is held is decode's
        running = state.setup.decodes[0].snapshot().running
        assert state.pool.num_owned == sum(len(sequence.pages) + len(sequence.spare) for sequence in running)


# -- the comparison itself can fail -------------------------------------------------------------------------------


def test_two_swapped_pages_are_noticed() -> None:
    state = hand_off("tcp", (16, 16), 23)
    with state.setup:
        first, second = state.grants["70"].pages[:2]
        for layer in state.pool.layout.layers:
            region = state.pool.memory.pages("latent", layer)
            region[[first, second]] = region[[second, first]]
        found = differences(state.sent["70"], state.arrived("70"))
        assert found == [[layer, token] for layer in state.pool.layout.layers for token in range(32)]


def test_one_flipped_byte_is_noticed() -> None:
    state = hand_off("tcp", (16, 16), 23)
    with state.setup:
        page = state.grants["70"].pages[2]
        latent = state.pool.memory.pages("latent", 1)[page, 5].view(torch.uint8)
        latent[40] ^= 1
        assert differences(state.sent["70"], state.arrived("70")) == [[1, 37]]
        latent[40] ^= 1
        assert differences(state.sent["70"], state.arrived("70")) == []


def test_a_changed_latent_is_not_what_the_model_computes() -> None:
    state = hand_off("loopback", (16, 5), 23)
    with state.setup:
        state.pool.memory.pages("latent", 1)[state.grants["40"].pages[3], 1, 0] += 1e-3
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            torch.testing.assert_close(
                state.arrived("40"), latents_of_the_model(state.prompts["40"]), rtol=1e-4, atol=1e-5
            )
