"""vLLM's cache tensors as the pages of a channel: they stay where vLLM puts them, and nothing is copied on the way.

Caches with keys and values per head are packed, as vLLM's attention on a CPU keeps them. A block of a layer is then in
a form of the kernel's own, which depends on the instruction set that it was chosen for: with AMX neither keys nor
values are stored row by row. So blocks move whole, between engines with blocks of one size, and the layout's format
names the form: kernel, instruction set, what this CPU computes with, and the vLLM that has made it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode

from pdinfer.adapters.vllm.overrides import folded
from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.config import CacheConfig, ModelConfig
from pdinfer.errors import ConfigError
from pdinfer.files import check_folder, read_json
from pdinfer.kv.layout import KVComponent, KVLayout, Spans
from pdinfer.kv.memfd import CAN_SHARE, Memfd
from pdinfer.kv.memory import Landing, Memory
from pdinfer.kv.shapes import AxisOrder, PageShape
from pdinfer.model.model import kv_layout_of

NAMES_ONLY = frozenset({"_name_or_path", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"})
"""The fields of a config.json that no cached value depends on."""


class SharedCache(TorchFunctionMode):
    """While it is active, the one tensor of zero bytes that vLLM makes for all layers comes from a memfd, so that peers
    of this host can map it. vLLM takes it as its memory pool."""

    def __init__(self) -> None:
        super().__init__()
        self.memfd: Memfd | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        more = dict(kwargs or {})
        is_cache = func is torch.zeros and more.get("dtype") is torch.int8 and args and type(args[0]) is int
        if is_cache and self.memfd is None and torch.device(more.get("device") or "cpu").type == "cpu":
            self.memfd = Memfd(args[0], "vllm")
            return torch.frombuffer(self.memfd.map, dtype=torch.int8)
        return func(*args, **more)


def cache_context(shared: bool) -> AbstractContextManager[object] | None:
    """Return what vLLM allocates its cache in, None for its own way."""
    return SharedCache() if shared and CAN_SHARE else None


class LayerTensors:
    """`pdinfer.kv.Memory` over one contiguous tensor per layer, all of one size and in the order of the layers. `memfd`
    is the one that holds exactly these bytes in this order, or None."""

    def __init__(self, tensors: Sequence[torch.Tensor], memfd: Memfd | None = None) -> None:
        self._views = [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in tensors]
        self._layer_bytes = len(self._views[0])
        self.num_bytes = self.block_bytes = self._layer_bytes * len(tensors)
        first = tensors[0].data_ptr()
        adjacent = all(tensor.data_ptr() == first + at * self._layer_bytes for at, tensor in enumerate(tensors))
        is_all = memfd is not None and memfd.num_bytes == self.num_bytes and adjacent
        self.memfd = memfd if is_all else None

    def read(self, spans: Spans) -> list[memoryview]:
        at_layer = ((*divmod(start, self._layer_bytes), length) for start, length in spans)
        return [self._views[layer][within : within + length] for layer, within, length in at_layer]

    def landing(self, spans: Spans) -> Landing:
        return Landing(self.read(spans))

    def copy_from(self, spans: Spans, source: Memory, source_spans: Spans) -> None:
        data = memoryview(b"".join(source.read(source_spans)))
        for view in self.read(spans):
            view[:], data = data[: len(view)], data[len(view) :]


@attrs.define(eq=False)
class EnginePages:
    """The pages of an engine that keeps its own accounts of them; see `pdinfer.kv.Pages`. A block gets a new generation
    whenever it is granted."""

    layout: KVLayout
    memory: Memory
    num_pages: int
    _generations: list[int] = attrs.field(init=False)

    @_generations.default
    def _first_generations(self) -> list[int]:
        return [0] * self.num_pages

    @property
    def memory_pages(self) -> int:
        return self.num_pages

    def generations(self, pages: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._generations[page] for page in pages)

    def renew(self, pages: Sequence[int]) -> None:
        """Give pages a new generation: what was granted of them before is void."""
        for page in pages:
            self._generations[page] += 1


def layer_of(name: str) -> int:
    """Return the layer in "model.layers.3.self_attn.attn". Raises ConfigError for a name with no layer or several."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ConfigError(f"PDInferConnector knows caches of one layer each, and this model has one for {name!r}")
    return numbers[0]


def engine_pages(
    model: str,
    kv_caches: Mapping[str, torch.Tensor],
    block_size: int,
    shared: object,
    form: str = "",
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> EnginePages:
    """Return vLLM's caches as pages. `model` is the folder of the checkpoint, which gives the layout its ids, together
    with `changes`, the overrides of vLLM's settings; `shared` is the context in which the caches were allocated; `form`
    names how blocks with heads are packed. Raises ConfigError for caches that are not in the host's memory, one tensor
    per layer, or not those of the model."""
    named = sorted(kv_caches.items(), key=lambda item: layer_of(item[0]))
    tensors, layers = [tensor for _, tensor in named], [layer_of(name) for name, _ in named]
    if not tensors or layers != list(range(len(layers))):
        raise ConfigError(f"PDInferConnector serves models with one cache for each layer, got layers {layers}")
    first = tensors[0]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        raise ConfigError(f"PDInferConnector serves caches in the host's memory, and this one is on {first.device}")
    if any((tensor.shape, tensor.dtype) != (first.shape, first.dtype) for tensor in tensors):
        raise ConfigError("PDInferConnector serves models whose layers have caches of one shape")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ConfigError("PDInferConnector serves caches of one piece per layer, and these are interleaved")
    memory = LayerTensors(tensors, shared.memfd if isinstance(shared, SharedCache) else None)
    if has_heads(model):
        layout = packed_layout(model, first, len(layers), block_size, form)
    else:
        layout = _latent_layout(model, first, layers, block_size, is_changed="hf_overrides" in changes)
    with Checkpoint.open(model) as checkpoint:
        sampled = checkpoint.sample_digest()
    layout = attrs.evolve(layout, sampled_weights_id=sampled, model_id=folded(layout.model_id, changes))
    return EnginePages(layout, memory, first.shape[0])


def _latent_layout(
    model: str, cache: torch.Tensor, layers: Sequence[int], block_size: int, *, is_changed: bool
) -> KVLayout:
    """Return the layout of caches like `cache` of an MLA model, without an id of the weights. Overrides of its
    configuration, if it `is_changed`, may ask for another number of layers."""
    config = ModelConfig.from_checkpoint(model)
    layout = kv_layout_of(config, cache.dtype, CacheConfig(page_size=block_size), mtp=False)
    (latent, *others), width = layout.components, cache.shape[-1]
    if is_changed:
        latent = attrs.evolve(latent, layers=tuple(layers))
        layout = attrs.evolve(layout, components=(latent, *others))
    is_mla = latent.width == width and cache.numel() == cache.shape[0] * block_size * width
    if others or not is_mla or len(latent.layers) != len(layers):
        raise ConfigError(
            f"PDInferConnector serves MLA models, and vLLM has {len(layers)} caches of {tuple(cache.shape)} for one "
            f"whose blocks of {block_size} tokens hold latents of {latent.width}"
        )
    return layout


def form_of(config: Any, layer_name: str, version: str) -> str:
    """Return what names the form of packed blocks, "" where vLLM's attention layer does not say how it packs."""
    layers = getattr(getattr(config, "compilation_config", None), "static_forward_context", {})
    isa = getattr(layers.get(layer_name), "isa", None)
    return f"vllm {version} cpu_attn {isa} {torch.backends.cpu.get_cpu_capability()}" if isa else ""


def has_heads(model: str) -> bool:
    """Return whether the model of a checkpoint caches keys and values per head, and no latents."""
    return read_json(check_folder(model) / "config.json").get("kv_lora_rank") is None


def packed_layout(model: str, cache: torch.Tensor, num_layers: int, block_size: int, form: str) -> KVLayout:
    """Return the layout of `num_layers` caches like `cache` [blocks, heads, block_size, keys and values of a head],
    without an id of the weights. Raises ConfigError for another shape or an unknown form."""
    if cache.dim() != 4 or cache.shape[2] != block_size:
        raise ConfigError(
            f"PDInferConnector serves caches of (blocks, heads, {block_size}, keys and values), and this model has "
            f"some of {tuple(cache.shape)}"
        )
    if not form:
        raise ConfigError(
            "PDInferConnector serves keys and values per head as vLLM's CPU_ATTN packs them, and this model has "
            "another attention, which does not say how it does"
        )
    _, num_heads, _, width = cache.shape
    part = KVComponent(
        name="kv",
        format=form,
        dtype=str(cache.dtype).removeprefix("torch."),
        width=width,
        token_bytes=width * cache.itemsize,
        layers=tuple(range(num_layers)),
        shape=PageShape(heads=range(num_heads), num_heads=num_heads, order=AxisOrder.LBHNC, packed=True),
    )
    return KVLayout(model_id=_model_id(model), weights_id=b"", page_size=block_size, components=(part,))


def _model_id(model: str) -> bytes:
    """Return SHA-256 of a checkpoint's config.json without the fields that are only names."""
    config = read_json(check_folder(model) / "config.json")
    computed = {name: value for name, value in config.items() if name not in NAMES_ONLY}
    return hashlib.sha256(b"pdinfer config.json 1\n" + json.dumps(computed, sort_keys=True).encode()).digest()
