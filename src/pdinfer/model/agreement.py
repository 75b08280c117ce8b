"""Which weights the ranks of an engine have read: what each read adds up to digests of whole tensors, which all agree
on."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator

import numpy as np
import torch
from msgspec import UNSET

from pdinfer.checkpoint.reader import ABSENT, Checkpoint, TensorInfo, Words, num_blocks
from pdinfer.checks import clip
from pdinfer.config import ModelConfig
from pdinfer.errors import CheckpointError
from pdinfer.identity import TensorDigest, TensorDigests, WeightsIdentity
from pdinfer.parallel.groups import Group


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
