"""A prompt that both engines compute before they serve one, so that a kernel which is wrong in one of them is found.

Layouts say that both engines mean the same bytes. Only the bytes show that they compute the same: the prompt's latents
come from vLLM's prefill over a link of their own, and are compared with those of the model here, layer by layer, the
latent and its rotated key apart."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from pdinfer.adapters.vllm.memory import EnginePages
from pdinfer.adapters.vllm.messages import proof_of
from pdinfer.adapters.vllm.prompts import Complete, body_of
from pdinfer.errors import ConfigError, LayoutMismatch, TransferError
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.rooms import first_error
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.transports.shm.transport import SCHEME, ShmTransport
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.kv.view import KVView, PageMemory
from pdinfer.model.batch import Batch, Row
from pdinfer.model.model import Model
from pdinfer.types import HandoffStatus, PageGrant, PeerAddress, Request, SamplingParams

NUM_TOKENS = 272
"""More than two of vLLM's largest pages on a CPU, so that a wrong page table is seen too."""
PROBE_S = 120.0
"""Seconds that vLLM may take to compute the prompt: the first one may compile kernels."""
LATENT, ROPE = "latent", "rope"


@attrs.frozen
class Tolerance:
    """The error that a token's vector may have, as a share of its length, and the number of tokens of a layer that may
    have more: a near tie of the router gives a token other experts. The first layer comes before every router."""

    error: float
    strays: float


TOLERANCES = {
    "float32": Tolerance(0.005, 0.02),
    "float16": Tolerance(0.05, 0.15),
    "bfloat16": Tolerance(0.15, 0.25),
}
"""By the dtype of the cache. Engines that are right are 3e-6 apart in float32 and 0.03 in bfloat16, keys that are
rotated wrongly 0.5 and more."""


@attrs.frozen(eq=False)
class Probe:
    """A prompt, and its latents as `model` computes them in pages of `layout`."""

    model: Model
    layout: KVLayout
    prompt: tuple[int, ...]
    expected: PageMemory

    @classmethod
    def of(cls, model: Model, layout: KVLayout, max_tokens: int) -> Probe:
        """Compute the prompt, of at most `max_tokens` tokens. Raises ConfigError for pages whose dtype has no
        tolerance."""
        dtype = layout.components[0].dtype
        if dtype not in TOLERANCES:
            raise ConfigError(
                f"vLLM hands over latents in {', '.join(TOLERANCES)}, and this pool has them in {dtype}: give it "
                'kv_format="auto"'
            )
        length = min(NUM_TOKENS, max_tokens - 1)
        # a prime step: neighbours differ, so that a token out of its place shows
        prompt = tuple((7919 * at + 13) % model.config.vocab_size for at in range(length))
        memory = model.allocate_pages(layout, layout.num_pages(len(prompt)))
        row = Row(prompt, 0, range(memory.num_pages))
        batch = Batch.build([row], page_size=layout.page_size, device=model.device, decode=False, cp=model.groups.cp)
        for _ in model.stream_layers(batch, KVView.of(memory)):
            pass
        return cls(model, layout, prompt, memory)

    def check(self, kv: str, complete: Complete, key: bytes | None) -> PeerAddress:
        """Have the vLLM whose connector listens at `kv` compute the prompt, compare, and return its address. Raises
        LayoutMismatch, which names the layer and the component, when its latents are not those of the model here;
        TransferError when it cannot be reached or does not compute the prompt in PROBE_S."""
        memory = self.model.allocate_pages(self.layout, self.expected.num_pages)
        transport = ShmTransport() if kv.startswith(SCHEME) else SocketTransport()
        with KVChannel(EnginePages(self.layout, memory, memory.num_pages), transport, key=key) as with_key:
            peer = with_key.links.dial(kv)
            self._fetch(with_key, peer, complete)
        self._compare(memory, kv)
        return peer

    def _compare(self, there: PageMemory, kv: str) -> None:
        """Raise LayoutMismatch at the first layer and component in which the latents are other ones than expected."""
        first_layer, tolerance = self.layout.layers.start, TOLERANCES[self.layout.components[0].dtype]
        for layer, name, ours, theirs in self._parts(there):
            errors = (ours - theirs).norm(dim=1) / ours.norm(dim=1).clamp_min(1e-9)
            strays = float((~(errors <= tolerance.error)).double().mean())  # NaN and infinity are strays, too
            if strays <= (tolerance.strays if layer > first_layer else 0.0):
                continue
            most = float(errors.nan_to_num(torch.inf).max())
            what, advice = f"component {name!r}", ""
            if name == ROPE:
                what = "the rotated keys (rope)"
                advice = (
                    "; vLLM 0.32 on a CPU rotates wrongly for MLA models without rope_scaling "
                    "(tests/vllm/rope_report.md)"
                )
            raise LayoutMismatch(
                f"the vLLM at {kv} computes another KV than the model here, from layer {layer} on, in {what}: "
                f"{strays:.0%} of the tokens are off by more than {tolerance.error:.1%} of their length, one by "
                f"{most:.0%}, so the two are not paired{advice}",
                fields=((f"layer {layer} {name}", f"off by up to {tolerance.error:.1%}", f"{most:.0%}"),),
            )

    def _parts(self, there: PageMemory) -> Iterator[tuple[int, str, Tensor, Tensor]]:
        """Yield (layer, component, our rows, their rows), float32 [tokens, width], layer by layer."""
        count, rank = len(self.prompt), self.model.config.kv_lora_rank
        for layer in self.layout.layers:
            for component in self.layout.components:
                if layer not in component.layers:
                    continue
                ours, theirs = (
                    memory.pages(component.name, layer).flatten(0, 1)[:count].float()
                    for memory in (self.expected, there)
                )
                if component.name == LATENT:
                    yield layer, LATENT, ours[:, :rank], theirs[:, :rank]
                    yield layer, ROPE, ours[:, rank:], theirs[:, rank:]
                else:
                    yield layer, component.name, ours, theirs

    def _fetch(self, channel: KVChannel, peer: PeerAddress, complete: Complete) -> None:
        """Fill the pages of a channel with what a peer computes."""
        pages, room = range(channel.pool.num_pages), os.urandom(16)
        grant = PageGrant(
            room=room,
            request_id=proof_of(self.prompt),
            writers=(peer,),
            destinations=(channel.address,),
            tokens=range(len(self.prompt)),
            pages=tuple(pages),
            generations=channel.pool.generations(pages),
            layout_id=self.layout.layout_id,
        )
        channel.expect(grant)
        channel.receiver.offer(grant)
        greedy = SamplingParams(temperature=0.0, max_new_tokens=1)
        sends = {"do_remote_decode": True, "room": room.hex()}
        complete(body_of(Request(prompt=self.prompt, sampling=greedy), sends))
        ends = time.monotonic() + PROBE_S
        while not (handoffs := channel.poll()):
            left = ends - time.monotonic()
            if left <= 0:
                raise TransferError(f"vLLM did not hand the first prompt over within {PROBE_S:g} s")
            channel.wait(left)
        if any(handoff.status is not HandoffStatus.LANDED for handoff in handoffs):
            raise TransferError(f"vLLM did not hand the first prompt over: {first_error(handoffs)}")
