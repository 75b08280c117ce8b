"""Which tensors of a checkpoint a rank reads, and what they become: checked, then allocated, then read. Which of them
its model does not know, and which digests of those that were read all ranks agree on."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

import attrs
import numpy as np
import torch
from msgspec import UNSET

from pdinfer.checkpoint.reader import ABSENT, Checkpoint, TensorInfo, Words, num_blocks
from pdinfer.checkpoint.schemes import QUANTIZED, StoredWeights
from pdinfer.checks import check_fits, clip
from pdinfer.config import ModelConfig
from pdinfer.errors import CheckpointError
from pdinfer.identity import TensorDigest, TensorDigests, WeightsIdentity
from pdinfer.kernels.formats.floats import all_finite
from pdinfer.kernels.formats.format import Format, Weight
from pdinfer.kernels.formats.weights import as_format, assign, columns_of, dequantize, tensors_of
from pdinfer.kernels.resolve import ResolvedOps, slow_op
from pdinfer.layers import WeightSource
from pdinfer.log import log
from pdinfer.model.destinations import Destinations, Place
from pdinfer.model.model import Model
from pdinfer.model.mtp import copy_names
from pdinfer.parallel.groups import Group, InTouch
from pdinfer.parallel.topology import Topology
from pdinfer.process.memory import device_memory_bytes
from pdinfer.progress import Tell

Build = Callable[[WeightSource, ResolvedOps], Model]
"""A function that builds a model from a source of weights."""

MAX_NAMED = 10


@attrs.frozen(kw_only=True)
class Target:
    """The model to make, and the rank that makes its part of it."""

    config: ModelConfig
    topology: Topology
    device: torch.device
    dtype: torch.dtype
    mtp: bool


@attrs.frozen(kw_only=True)
class LoadPlan:
    """What a rank reads of a checkpoint. Its steps are `check`, `allocate` and `read`, in this order.

    Formats in `kept` are held as they are stored, and matrices of the formats in `strips` in strips. `weights` is what
    the caller asked for. `listed` holds every tensor of the model by name, and takes no memory."""

    target: Target
    build: Build
    stored: StoredWeights
    weights: str
    kept: frozenset[type[Format]]
    strips: frozenset[type[Format]]
    resolved: ResolvedOps
    listed: Destinations = attrs.field(init=False)

    @listed.default
    def _listed(self) -> Destinations:
        listed = self._destinations(torch.device("meta"))
        self.build(listed, self.resolved)
        return listed

    def check(self) -> None:
        """Log the bytes that this rank is about to allocate.

        Raises CheckpointError with the names of tensors that are missing, do not fit or are left over, and ConfigError
        when the device cannot hold the weights."""
        target = self.target
        self._check_names()
        for names in refuse_unread(self.stored, self.listed.places, target.config, mtp=target.mtp):
            # ranks give each other experts as they lie
            self.listed.common_format(names)
        num_bytes, available = self.listed.num_bytes, device_memory_bytes(target.device)
        log.info(
            "rank %d of %d loads %.2f GiB of weights onto %s, which has %.2f GiB",
            target.topology.rank,
            target.topology.world_size,
            num_bytes / 2**30,
            target.device,
            available / 2**30,
        )
        check_fits(num_bytes, available, f"the weights of {self.stored.files.folder} in {target.dtype}")

    def allocate(self) -> tuple[Model, Destinations]:
        """Return the model, its weights not read yet, and the places where they go."""
        destinations = self._destinations(self.target.device)
        resolved = attrs.evolve(self.resolved, weights=tuple(self._outcomes()))
        return self.build(destinations, resolved), destinations

    def _destinations(self, device: torch.device) -> Destinations:
        return Destinations(device, self.target.dtype, self.stored, self.kept, self.strips)

    def read(self, model: Model, destinations: Destinations, tell: Tell, sampled_id: bytes) -> Model:
        """Read every tensor into its places. Return the model, which knows what was read. A collective: ranks wait for
        each other at the end."""
        world, target = model.groups.world, self.target
        ranks = InTouch(world, target.device)
        read_all(self.stored, destinations, tell, ranks)
        check_tied(self.stored, target.config, model)
        ranks.done()
        names = {part for name in destinations.places for part in self.stored.parts(name)}
        identity = agreed_identity(self.stored.files, names, world, target.device, target.config, sampled_id)
        return attrs.evolve(model, identity=identity)

    def _check_names(self) -> None:
        expected, files = self.listed.places, self.stored.files
        missing = [name for name in expected if not self.stored.holds(name)]
        if missing:
            raise CheckpointError(
                f"{files.folder}: {len(missing)} tensors that the config asks for are missing: {_listing(missing)}"
                + _without_mtp(missing, self.target.config)
            )
        wrong = [
            complaint for name, held in expected.items() for complaint in self.stored.complaints(name, held[0].shape)
        ]
        if wrong:
            raise CheckpointError(f"{files.folder}: {len(wrong)} tensors do not fit the config: {_listing(wrong)}")

    def _outcomes(self) -> Iterator[str]:
        """Tell how many matrices lie in strips, and what becomes of quantized weights: a sentence for each format and
        outcome."""
        counts = Counter(
            (self.listed.stored_as(name), as_format(held[0].weight).holds_floats)
            for name, held in self.listed.places.items()
        )
        if in_strips := sum(as_format(held[0].weight).strips_of is not None for held in self.listed.places.values()):
            yield f"{in_strips} matrices lie in the order in which the kernels of this CPU multiply them"
        for kind in QUANTIZED:
            weights = f"{kind.name.upper()} weights"
            if counts[kind, False]:
                yield f"{counts[kind, False]} {weights} are held as they are stored"
            if counts[kind, True]:
                slow = slow_op(kind.name, self.resolved)
                why = f": {slow.op} of {slow.provider} {slow.slow}" if self.weights == "auto" and slow else ""
                dtype = str(self.target.dtype).removeprefix("torch.")
                yield f'{counts[kind, True]} {weights} became {dtype} (weights="{self.weights}"){why}'


def read_all(stored: StoredWeights, destinations: Destinations, tell: Tell, ranks: InTouch) -> None:
    """Read every tensor that has a place, in the order of the files, and keep in touch with other ranks."""
    where = destinations.places
    wanted = [(info, stored.matrix(info.name)) for info in stored.files.in_file_order(map(stored.numbers, where))]
    sizes = [sum(part.num_bytes for part in stored.infos(name)) for _, name in wanted]
    done, total = 0, sum(sizes)
    for (info, name), size in zip(wanted, sizes, strict=True):
        value = _part(stored, name, where[name][0])
        for place in where[name]:
            _put(value, place.weight, info, stored.check_finite)
        done += size
        tell(done, total)
        ranks.going_on()


def _part(stored: StoredWeights, name: str, place: Place) -> Weight:
    """Return the value for a place. Where the part ends inside a block of one scale, the whole becomes floats first and
    is cut then."""
    shard = place.shard
    unit = stored.stored_as(name).units[shard.axis]
    if shard.size == 1 or place.shape[shard.axis] % (shard.size * unit) == 0:
        return stored.read(name, shard)
    whole = torch.empty(place.shape, dtype=torch.float32, device="cpu")
    dequantize(stored.read(name), whole)
    rows = shard.of(place.shape[0])
    return columns_of(whole, shard) if shard.axis else whole[rows.start : rows.stop]


def _put(value: Weight, place: Weight, info: TensorInfo, check_finite: bool) -> None:
    into, bias = as_format(place), as_format(value).bias
    if into.holds_floats and into.bias is None and bias is not None and bool(bias.any()):
        raise CheckpointError(f"{info.file}: quant_bias of {info.name} holds a bias, which is not supported there")
    assign(place, value)
    numbers = tensors_of(place)[0]
    if check_finite and numbers.dtype in (torch.float16, torch.bfloat16) and not all_finite(numbers):
        raise CheckpointError(
            f"{info.file}: tensor {info.name} overflows {numbers.dtype}; load it in another dtype, such as float32"
        )


def _listing(items: list[str]) -> str:
    rest = len(items) - MAX_NAMED
    return "; ".join(items[:MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else "")


def _without_mtp(missing: list[str], config: ModelConfig) -> str:
    layer = f"model.layers.{config.num_hidden_layers}."
    if not all(name.startswith(layer) for name in missing):
        return ""
    return "; these are of the MTP layer that the config promises: add them, or load with mtp=False"


IMAGE_PARTS = ("vision_tower.", "mm_projector.")
HEAD = "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def refuse_unread(
    stored: StoredWeights, read: Collection[str], config: ModelConfig, *, mtp: bool
) -> Iterable[Collection[str]]:
    """Refuse tensors that nothing reads, whether or not the index lists them: what nobody asks for may change what the
    model computes, so it is never skipped in silence.

    A tensor is read when it belongs to one in `read`, or when a rank with other experts reads it. Return the names of
    those read, together where they differ in the number of an expert alone. Raises CheckpointError with the names of
    the others, except those that `_needs_no_reading` knows."""
    kinds: dict[str, list[str]] = {_kind(name): [] for name in read}
    used: set[str] = set()
    for name in map(stored.matrix, stored.files.tensors):
        expert = _EXPERT.search(name)
        elsewhere = expert is not None and int(expert[1]) < config.n_routed_experts and _kind(name) in kinds
        if elsewhere or name in read:
            kinds[_kind(name)].append(name)
            used.update(stored.parts(name))
    every = (*stored.files.tensors, *stored.files.unlisted)
    strange = [name for name in every if name not in used and not _needs_no_reading(name, config, mtp)]
    if strange:
        rest = f" and {len(strange) - MAX_NAMED} more" if len(strange) > MAX_NAMED else ""
        raise CheckpointError(
            f"{stored.files.folder}: {len(strange)} tensors are not those of a {config.model_type} with "
            f"num_hidden_layers = {config.num_hidden_layers} and num_nextn_predict_layers = "
            f"{config.num_nextn_predict_layers}, and nothing here computes what they are for: "
            f"{', '.join(clip(name) for name in strange[:MAX_NAMED])}{rest}; check that config.json is the model's own"
        )
    return kinds.values()


def check_tied(stored: StoredWeights, config: ModelConfig, model: Model) -> None:
    """Check that head and embedding are equal where the config ties them and the files hold both. Raises
    CheckpointError."""
    info = stored.files.tensors.get(HEAD)
    if config.tie_word_embeddings and info is not None:
        head = stored.files.read(info).to(model.device, model.dtype)
        if head.shape != model.embed_VD.shape or not torch.equal(head, model.embed_VD):
            raise CheckpointError(
                f"{info.file}: tie_word_embeddings is true but lm_head.weight differs from model.embed_tokens.weight"
            )


def _kind(name: str) -> str:
    return _EXPERT.sub(".experts.*.", name)


def _needs_no_reading(name: str, config: ModelConfig, mtp: bool) -> bool:
    match = _LAYER.fullmatch(name)
    layer, part = (-1, name) if match is None else (int(match[1]), match[2])
    first = config.num_hidden_layers
    # angles, which are computed from the config
    if re.fullmatch(r"(.+\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)", part):
        return True
    # the head of a model that uses its embedding; `check_tied` compares the two
    if part == HEAD and config.tie_word_embeddings:
        return True
    # the parts that read images, because only text is run
    if config.family.text_models and part.removeprefix("model.").startswith(IMAGE_PARTS):
        return True
    # copies of the main model's tensors for MTP, and MTP layers not asked for or after the first
    if mtp and layer == first:
        return name in copy_names(config)
    if first <= layer < first + config.num_nextn_predict_layers:
        return True
    # norms that A.X-K1 stores for its dense layers and does not use in its own code
    if config.family.moe_output_norm and part == "post_mlp_layernorm.weight" and not config.is_moe_layer(layer):
        return True
    # indexers of layers that share the choice of another layer
    is_indexer = 0 <= layer < first and config.is_sparse and part.startswith("self_attn.indexer.")
    return is_indexer and not config.has_indexer(layer)


def agreed_identity(
    files: Checkpoint, read: Collection[str], world: Group, device: torch.device, config: ModelConfig, sampled: bytes
) -> WeightsIdentity:
    """Return the identity of the weights that the ranks of `world` have. This one has `read` these tensors, and
    `sampled` is the digest of samples. A collective: ranks have opened folders with tensors of the same names and
    shapes. Raises CheckpointError on every rank when two have read other bytes of a tensor."""
    infos = [info for _, info in sorted(files.tensors.items())]
    borders = np.cumsum([0, *map(num_blocks, infos)])
    ours = np.full((borders[-1], 2), ABSENT, np.int64)
    for info, start in zip(infos, borders, strict=False):
        if info.name in read:
            ours[start : start + num_blocks(info)] = files.blocks[info.name]
    words = world.largest(torch.from_numpy(ours).to(device, copy=True)).cpu().numpy()
    different = ((ours != ABSENT) & (ours != words)).any(-1).nonzero()[0]
    firsts = torch.tensor([[*different[:1], len(ours)][0]], device=device, dtype=torch.int64)
    first_R = world.all_gather(firsts).tolist()
    if (first := min(first_R)) < len(ours):
        info = infos[int(np.searchsorted(borders, first, side="right")) - 1]
        ranks = ", ".join(str(rank) for rank, found in enumerate(first_R) if found == first)
        raise CheckpointError(
            f"{files.folder / info.file}: rank {ranks} has read other bytes of tensor {clip(info.name)} than another "
            "rank: give all ranks copies of one checkpoint"
        )
    tensors = list(_digests(infos, np.split(words, borders[1:-1])))
    layer = f"model.layers.{config.num_hidden_layers}."
    mtp = [tensor for tensor in tensors if tensor.name.startswith(layer)]
    main = [tensor for tensor in tensors if not tensor.name.startswith(layer)]
    return WeightsIdentity(
        weights_id=TensorDigests(main).digest(),
        mtp_weights_id=TensorDigests(mtp).digest() if mtp else UNSET,
        sampled_weights_id=sampled,
        tensors=TensorDigests(tensors),
    )


def _digests(infos: list[TensorInfo], blocks: list[Words]) -> Iterator[TensorDigest]:
    """Yield the digests of the tensors that any rank has read."""
    for info, words in zip(infos, blocks, strict=True):
        if (words != ABSENT).any():
            form = f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"
            yield TensorDigest(info.name, form, hashlib.sha256(words.astype("<i8").tobytes()).digest()[:16])
