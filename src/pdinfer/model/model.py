"""A model, or a rank's part of one: embedding, blocks, head. It reads and writes a `KVView`, and knows of no channel,
pool or request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from pdinfer.checks import IntArray, check_fits, check_int, ints_of, typed
from pdinfer.config import CacheConfig, ModelConfig
from pdinfer.errors import ConfigError, RequestError
from pdinfer.identity import TensorDigests, WeightsIdentity
from pdinfer.kernels.resolve import ResolvedOps
from pdinfer.kernels.spec import DeviceSpec, OpSpec
from pdinfer.kv.layout import MTP_PREFIX, WEIGHTS_IDS, KVLayout
from pdinfer.kv.view import PAGE_DTYPES, KVView, PageMemory
from pdinfer.layers import RMSNorm, Rotary, WeightSource
from pdinfer.model.activations import Activations, Observer
from pdinfer.model.attention import attention_of
from pdinfer.model.batch import Batch, Row, Step
from pdinfer.model.block import Block, stream_halves
from pdinfer.model.cache import FP8
from pdinfer.model.mtp import MTP, Tied
from pdinfer.moe.layer import MoE
from pdinfer.moe.parallel import ExpertParallel
from pdinfer.parallel.groups import Groups
from pdinfer.parallel.topology import Topology
from pdinfer.process.memory import device_memory, device_memory_bytes
from pdinfer.process.modes import own_modes
from pdinfer.process.untraced import untraced
from pdinfer.trace import Trace, mark

AUTO_POOL_SEQUENCES = 64
"""Without `num_pages` and `mem_fraction_static` a pool holds this many sequences of full length, if they fit."""
AUTO_POOL_FRACTION = 0.5


@attrs.frozen(kw_only=True, eq=False)
class Model:
    """The weights and ops of one model on one device. Build it with `load_model`.

    Token ids are not checked here. An id outside the vocabulary is an error of the caller; engines check their
    requests."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    topology: Topology
    groups: Groups
    experts: ExpertParallel
    resolved: ResolvedOps
    embed_VD: Tensor
    blocks: tuple[Block, ...]
    norm: RMSNorm
    lm_head_VD: Tensor
    rotary: Rotary
    identity: WeightsIdentity
    mtp: MTP | None = None
    _linear: Callable[[Any, Any], Tensor] = attrs.field(init=False)

    @_linear.default
    def _linear_of_head(self) -> Callable[[Any, Any], Tensor]:
        return self.resolved.ops.linear.of(self.lm_head_VD)

    def __repr__(self) -> str:
        config, dtype = self.config, str(self.dtype).removeprefix("torch.")
        rank = f", rank {self.topology.rank} of {self.topology.world_size}" if self.topology.world_size > 1 else ""
        return (
            f"Model({config.model_type}, {config.num_hidden_layers} layers, {config.num_parameters / 1e6:,.1f} M "
            f"parameters{'' if self.mtp is None else ' and an MTP layer'}, {dtype} on {self.device}{rank})"
        )

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        source: WeightSource,
        resolved: ResolvedOps,
        *,
        device: torch.device,
        dtype: torch.dtype,
        topology: Topology,
        groups: Groups,
        experts: ExpertParallel | None = None,
        weights_id: bytes = b"",
        mtp: bool = False,
        mtp_copies: Collection[str] = (),
    ) -> Model:
        """Ask `source` for every tensor of the main model, and with `mtp` for those of its MTP layer (see `MTP.build`).
        Without `experts` this rank has all experts."""
        ops = resolved.ops
        parallel = experts or ExpertParallel.apart(config, ops, mtp=mtp)
        embed_VD = source.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        lm_head_VD = embed_VD
        if not config.tie_word_embeddings:
            lm_head_VD = source.take("lm_head.weight", config.vocab_size, config.hidden_size)
        tied = Tied(embed_VD, lm_head_VD, Rotary.build(config, device))
        return cls(
            config=config,
            device=device,
            dtype=dtype,
            topology=topology,
            groups=groups,
            experts=parallel,
            resolved=resolved,
            embed_VD=embed_VD,
            blocks=tuple(
                Block.build(source, layer, config, ops, parallel, groups) for layer in range(config.num_hidden_layers)
            ),
            norm=RMSNorm.build(source, "model.norm", config.hidden_size, config.rms_norm_eps, ops),
            lm_head_VD=lm_head_VD,
            rotary=tied.rotary,
            identity=WeightsIdentity(weights_id=weights_id),
            mtp=MTP.build(source, config, ops, parallel, groups, tied, mtp_copies) if mtp else None,
        )

    @property
    def weights_id(self) -> bytes:
        """A digest of all weights of the main model."""
        return self.identity.weights_id

    @property
    def tensors(self) -> TensorDigests:
        """The digests of the tensors that were read, none where no files were."""
        return self.identity.tensors

    @property
    def remarks(self) -> tuple[str, ...]:
        """What `explain_backends` adds about the experts."""
        return self.experts.remarks

    def moe_layers(self) -> list[MoE]:
        """Return the layers that route to experts, in the order of the rows of `experts.placement`."""
        blocks = self.blocks if self.mtp is None else (*self.blocks, self.mtp.block)
        return [block.mlp for block in blocks if isinstance(block.mlp, MoE)]

    def stream_layers(self, batch: Batch, view: KVView, trace: Trace | None = None) -> Iterator[tuple[int, Tensor]]:
        """Run the blocks one by one, and yield (layer, hidden [T, D]) once that layer's cache is written. `trace` is
        told which part of the model runs. With two-batch overlap the tokens go through the blocks in two halves."""
        mark(trace, "embed", num_tokens=batch.tokens_T.shape[0])
        hidden_TD = self.resolved.ops.gather_rows(self.embed_VD, batch.tokens_T)
        if self.experts.two_batch_overlap and batch.cp.size == 1:
            halves = batch.halves()
            parts = hidden_TD.tensor_split((len(halves[0].tokens_T),))
            steps = [Step(half, view, self.rotary(half.positions_T), trace, half.live_T) for half in halves]
            yield from stream_halves(self.blocks, [*zip(parts, steps, strict=True)])
            return
        step = Step(batch, view, self.rotary(batch.positions_T), trace, batch.live_T)
        for layer, block in enumerate(self.blocks):
            hidden_TD = block(hidden_TD, step)
            yield layer, hidden_TD

    def forward(self, batch: Batch, view: KVView, trace: Trace | None = None) -> Tensor:
        """Run all blocks and return the last hidden state [T, D], before the final norm."""
        hidden_TD = self.embed_VD.new_empty(0, self.config.hidden_size)
        for _, layer_TD in self.stream_layers(batch, view, trace):
            hidden_TD = layer_TD
        return hidden_TD

    def head(self, state_TD: Tensor) -> Tensor:
        """Return the logits of hidden states after the final norm: float32 [T, vocab]."""
        return self._linear(state_TD, self.lm_head_VD).float()

    @untraced
    def logits(self, tokens: Sequence[int] | IntArray) -> Tensor:
        """Run the model in one piece, without engines or a pool. Returns float32 [len(tokens), vocab] on the model's
        device.

        For scoring, and as the oracle of tests. A collective: ranks that have the same requests call it with the same
        tokens and get the same logits. Raises ConfigError for what are no ints (see `tokens.ints_of`), and RequestError
        for an empty list or a token that the model does not have."""
        with own_modes(self.device):
            batch, view = self._whole(self._checked(tokens))
            return self.head(batch.in_order(self.norm(self.forward(batch, view))))

    @untraced
    @typed
    def activations(
        self,
        tokens: Sequence[int] | IntArray,
        *,
        layers: Iterable[int] | None = None,
        routing: bool = False,
        chunk_size: int = 512,
    ) -> Activations:
        """Return the hidden states after `layers`, of which None are all, and with `routing` what the routers of those
        that are MoE chose. The model runs in chunks, and only as far as the last of the layers; what is returned, and
        the latents of the tokens, is all that grows with their number. A collective, as `logits` is.

        Raises what `logits` raises, and ConfigError for layers that the model does not have or a chunk of no tokens."""
        check_int("chunk_size", chunk_size, 1)
        ints = self._checked(tokens)
        with own_modes(self.device):
            like_TD = self.embed_VD.new_empty(1, 1, dtype=self.dtype).expand(len(ints), self.config.hidden_size)
            observer = Observer(self.blocks, layers, like_TD, routing=routing)
            one_batch = attrs.evolve(self.experts, two_batch_overlap=False)  # two are at different layers
            observed = attrs.evolve(self, blocks=observer.blocks, experts=one_batch)
            memory = self._pages_for(ints)
            for start in range(0, len(ints), chunk_size):
                chunk, after = ints[start : start + chunk_size], ints[start + chunk_size : start + chunk_size + 1]
                row = Row(chunk, start, range(memory.num_pages), after[0] if len(after) else None)
                batch = self._batch(row, memory)
                for layer, layer_TD in observed.stream_layers(batch, KVView.of(memory)):
                    observer.note(layer, layer_TD, batch, row)
            return observer.result()

    @untraced
    @typed
    def mtp_logits(self, tokens: Sequence[int] | IntArray, next_token: int) -> Tensor:
        """Run the model and its MTP layer in one piece. Returns float32 [len(tokens), vocab]. Row i is for token i + 2,
        and is computed from the state of token i and the token after it, which for the last row is `next_token`.

        Raises RequestError as `logits` does, and ConfigError for a model without its MTP layer."""
        if self.mtp is None:
            raise ConfigError("the model was loaded without its MTP layer; load it with mtp=True")
        (*checked, next_token) = self._checked([*ints_of(tokens), next_token], more=1)
        with own_modes(self.device):
            batch, view = self._whole(checked, next_token)
            state_TD = self.norm(self.forward(batch, view))
            return self.mtp.logits(batch.in_order(self.mtp(state_TD, batch.shifted(), view)))

    def _checked(self, tokens: Sequence[int] | IntArray, *, more: int = 0) -> Sequence[int]:
        """Return tokens that the model has, and not too many of them; `more` of them do not take a position."""
        ints, most = ints_of(tokens), self.config.max_position_embeddings
        for index, token in enumerate(ints):
            if not 0 <= token < self.config.vocab_size:
                raise RequestError(
                    f"token {token} at index {index} is outside the vocabulary 0..{self.config.vocab_size - 1}"
                )
        if not 0 < len(ints) - more <= most:
            raise RequestError(f"{len(ints) - more} tokens asked for, the model takes 1 to {most}")
        return ints

    def _whole(self, tokens: Sequence[int], next_token: int | None = None) -> tuple[Batch, KVView]:
        """Return a batch of these tokens alone, and just the pages for them, in order."""
        memory = self._pages_for(tokens)
        return self._batch(Row(tokens, 0, range(memory.num_pages), next_token), memory), KVView.of(memory)

    def _pages_for(self, tokens: Sequence[int]) -> PageMemory:
        layout = self.kv_layout(self._cache_for(len(tokens)))
        return self.allocate_pages(layout, layout.num_pages(len(tokens)))

    def _cache_for(self, num_tokens: int) -> CacheConfig:
        """Return a cache of the pages that the ops were chosen for. Where they take any size, one page may hold all."""
        spec = self.resolved.spec
        return CacheConfig(
            page_size=spec.page_size or min(num_tokens, 256),
            kv_format=spec.kv_format or "auto",
            rope_apart=spec.rope_apart,
            index_format=spec.index_format,
        )

    def _batch(self, row: Row, memory: PageMemory) -> Batch:
        page_size = memory.layout.page_size
        return Batch.build([row], page_size=page_size, device=self.device, decode=False, cp=self.groups.cp)

    @typed
    def kv_layout(self, cache: CacheConfig) -> KVLayout:
        """Return the layout of a page of this model, see `kv_layout_of`. Raises ConfigError when the model was loaded
        for another cache."""
        layout = kv_layout_of(self.config, self.dtype, cache, mtp=self.mtp is not None)
        spec, asked = self.resolved.spec, (cache.page_size, kv_format_of(self.dtype, cache))
        if (cache.rope_apart, cache.index_format) != (spec.rope_apart, spec.index_format):
            raise ConfigError(
                f'a pool with rope_apart = {cache.rope_apart} and index_format "{cache.index_format}" was asked for, '
                f'and the model\'s ops were chosen for {spec.rope_apart} and "{spec.index_format}": load it with the '
                "`cache` of its pools"
            )
        if spec.page_size is not None and asked != (spec.page_size, spec.kv_format):
            raise ConfigError(
                f"a pool with page_size {asked[0]} and {asked[1]} latents was asked for, and the model's ops were "
                f"chosen for page_size {spec.page_size} and {spec.kv_format}: load it with the `cache` of its pools"
            )
        ids = {name: getattr(self.identity, name) for name in WEIGHTS_IDS}
        return attrs.evolve(layout, **ids)

    def allocate_pages(self, layout: KVLayout, num_pages: int, memory: str = "auto") -> PageMemory:
        """Allocate zeroed memory for `num_pages` pages on this model's device. Raises ConfigError when it cannot
        fit."""
        check_fits(num_pages * layout.page_bytes, device_memory_bytes(self.device), f"a pool of {num_pages} pages")
        return PageMemory(layout, num_pages, device=self.device, memory=memory, ops=self.resolved.ops)

    def auto_num_pages(self, layout: KVLayout, mem_fraction_static: float | None) -> int:
        """Return the number of pages of a pool whose size was not given.

        With `mem_fraction_static` the pages bring the device's used memory, weights included and the dispatcher's
        buffer not, to that fraction of the whole. Without it they hold AUTO_POOL_SEQUENCES sequences of full length,
        within AUTO_POOL_FRACTION of the free memory.

        A collective: all ranks get the number that the rank with the least memory can have, and ranks on one machine's
        CPU share its memory evenly. Raises ConfigError, with the bytes, when not even one page fits."""
        here, fraction = device_memory(self.device), mem_fraction_static
        free = here.total - here.in_use
        static = here.in_use - self.experts.buffer_bytes
        ours = int(free * AUTO_POOL_FRACTION if fraction is None else min(free, here.total * fraction - static))
        room = self._least_room(here.shared_by, ours)
        if room < layout.page_bytes:
            raise ConfigError(
                f"{'a pool of automatic size' if fraction is None else f'mem_fraction_static {fraction}'} leaves "
                f"{room / 2**30:.2f} GiB for pages of {layout.page_bytes} bytes: {here.in_use / 2**30:.2f} of "
                f"{here.total / 2**30:.2f} GiB of {self.device} are in use, weights included; allow a higher fraction, "
                "or use more ranks or a device with more memory"
            )
        pages = room // layout.page_bytes
        if fraction is not None:
            return pages
        return min(pages, AUTO_POOL_SEQUENCES * layout.num_pages(self.config.max_position_embeddings))

    def _least_room(self, shared_by: int, room: int) -> int:
        """Return the least number of bytes that any rank has for a pool: its own `room`, or its part of one that it
        shares."""
        ours = torch.tensor([[shared_by, room]], device=self.device, dtype=torch.int64)
        rooms: list[tuple[int, int]] = self.groups.world.all_gather(ours).tolist()
        ranks = Counter(shared for shared, _ in rooms)
        return min(each // (ranks[shared] if shared else 1) for shared, each in rooms)


def kv_format_of(dtype: torch.dtype, cache: CacheConfig) -> str:
    """Return what a page of a model in `dtype` holds: "fp8", or the name of the dtype, which is what "auto" means.
    Raises ConfigError for another dtype."""
    name = str(dtype).removeprefix("torch.")
    kv_format = name if cache.kv_format == "auto" else cache.kv_format
    if kv_format not in (name, FP8):
        raise ConfigError(
            f'kv_format "{cache.kv_format}" was asked for and the model runs in {dtype}: load the model with that '
            'dtype, or leave kv_format "auto"'
        )
    return kv_format


def kv_layout_of(config: ModelConfig, dtype: torch.dtype, cache: CacheConfig, *, mtp: bool) -> KVLayout:
    """Return the layout of a page of a model in `dtype`, of weights without an id. Raises ConfigError as `kv_format_of`
    does, and for sizes that "fp8" cannot pack."""
    layers = config.num_hidden_layers
    components_of = partial(
        attention_of(config).cache_components,
        config,
        kv_format_of(dtype, cache),
        rope_apart=cache.rope_apart,
        index_format=cache.index_format,
    )
    components = components_of(range(layers))
    if mtp:
        components += components_of((layers,), prefix=MTP_PREFIX)
    # a region begins where the one before it ends, and has to be aligned for its own numbers
    components = tuple(sorted(components, key=lambda part: -PAGE_DTYPES[part.dtype].itemsize))
    return KVLayout(model_id=config.fingerprint, weights_id=b"", page_size=cache.page_size, components=components)


def op_spec_of(
    config: ModelConfig,
    topology: Topology,
    device: str | torch.device | DeviceSpec,
    dtype: torch.dtype,
    weight_formats: Iterable[str] = (),
    cache: CacheConfig | None = None,
) -> OpSpec:
    """Return what the ops of a rank must run. Without a `cache` the size and format of pages are not known."""
    return OpSpec(
        device=device,
        dtype=dtype,
        num_heads=config.num_attention_heads // topology.tp_size,
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_head_dim=config.qk_rope_head_dim,
        weight_formats=weight_formats,
        page_size=None if cache is None else cache.page_size,
        kv_format=None if cache is None else kv_format_of(dtype, cache),
        rope_apart=cache is not None and cache.rope_apart,
        index_format="auto" if cache is None else cache.index_format,
    )


def check_divides(config: ModelConfig, topology: Topology) -> None:
    """Check that ranks can have equal parts of the model. Raises ConfigError with the values when they cannot."""
    for count, what, size, name in (
        (config.num_attention_heads, "num_attention_heads", topology.tp_size, "tp_size"),
        (config.intermediate_size, "intermediate_size", topology.moe_dense_tp_size, "moe_dense_tp_size"),
    ):
        if count % size:
            raise ConfigError(f"{name} {size} does not divide {what} = {count}; choose a divisor of it")
