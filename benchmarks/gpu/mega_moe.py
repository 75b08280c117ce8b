"""Try DeepGEMM's kernel that dispatches, runs experts and combines in one, with a group of one rank: JSON lines.

    python benchmarks/gpu/mega_moe.py [--tokens 1,32,128,512]

It needs a Hopper card and a DeepGEMM that has `fp8_mega_moe`; where it cannot run, the line says why. Its result is
compared with that of plain products of the same FP8 weights; `baseline` is what pdinfer does for the same on one card:
rows gathered by expert, rounded, grouped products, and the sum by tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import card
import torch
from case import HIDDEN, MOE_INTERMEDIATE, draw, draw_blocks
from timing import Times, numbers, race, sentence
from torch import Tensor

from pdinfer.kernels import OpSpec, resolve_ops
from pdinfer.kernels.formats.fp8 import FP8Blocks

EXPERTS, TOP_K = 32, 8
Line = dict[str, Any]


class Ours:
    """The experts of one layer by pdinfer's ops, for tokens whose choices are known."""

    def __init__(self, device: torch.device, gate_up: FP8Blocks, down: FP8Blocks) -> None:
        self.ops = resolve_ops(OpSpec(device=device, weight_formats={"fp8"})).ops
        self.gate_up, self.down = gate_up, down

    def run(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        flat = ids_TK.flatten()
        order_S = flat.argsort(stable=True)
        counts_E = torch.zeros(EXPERTS, dtype=torch.int32, device=x_TD.device)
        counts_E.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        y_SD = self.ops.grouped_mlp(x_TD[order_S // TOP_K], counts_E, self.gate_up, self.down)
        parts = torch.empty_like(y_SD).index_copy_(0, order_S, y_SD).view(-1, TOP_K, HIDDEN)
        return (parts.float() * weights_TK[..., None]).sum(1).to(x_TD.dtype)


class Mega:
    """The same by one kernel."""

    def __init__(self, most_tokens: int, gate_up: FP8Blocks, down: FP8Blocks) -> None:
        import deep_gemm
        import torch.distributed as dist

        self.library = deep_gemm
        with tempfile.NamedTemporaryFile() as store:
            dist.init_process_group("nccl", init_method=f"file://{store.name}", rank=0, world_size=1)
        self.buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
            dist.group.WORLD, EXPERTS, most_tokens, TOP_K, HIDDEN, MOE_INTERMEDIATE
        )
        self.weights = deep_gemm.transform_weights_for_mega_moe_sm90(
            (gate_up.numbers, gate_up.scale.float()), (down.numbers, down.scale.float())
        )

    def run(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        buffer = self.buffer
        room = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
        self.library.mega_moe_pre_dispatch_sm90(x_TD, ids_TK, weights_TK, *room, len(x_TD))
        y_TD = torch.empty_like(x_TD)
        self.library.fp8_mega_moe(y_TD, *self.weights, buffer)
        return y_TD


def run(device: torch.device, tokens: Sequence[int]) -> Iterator[Line]:
    yield {"bench": "gpu-mega-moe", "case": "card", "value": card.facts(device)}
    gate_up = draw_blocks(device, 1, EXPERTS, 2 * MOE_INTERMEDIATE, HIDDEN, parts=2)
    down = draw_blocks(device, 3, EXPERTS, HIDDEN, MOE_INTERMEDIATE)
    ours = Ours(device, gate_up, down)
    head = {"bench": "gpu-mega-moe", "unit": "us", "baseline": "grouped products"}
    try:
        mega = Mega(max(tokens), gate_up, down)
    except Exception as error:  # noqa: BLE001 why it cannot be had is the result
        yield {**head, "case": "fp8_mega_moe", "missing": sentence(error)}
        return
    for count in tokens:
        case = {**head, "case": f"{EXPERTS} experts, top {TOP_K}, {count} tokens"}
        x_TD = draw(device, count, count, HIDDEN)
        chance = torch.rand(count, EXPERTS, device=device, generator=torch.Generator(device).manual_seed(count))
        weights_TK, ids_TK = chance.topk(TOP_K)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        inputs = x_TD, ids_TK, weights_TK
        try:
            wanted, got = ours.run(*inputs).double(), mega.run(*inputs).double()
            error = ((got - wanted).norm() / wanted.norm()).item()
            times = race({"mega": [lambda i=inputs: mega.run(*i)], "ours": [lambda i=inputs: ours.run(*i)]}, device)
        except Exception as raised:  # noqa: BLE001 other sizes may work
            yield {**case, "missing": sentence(raised)}
            continue
        each = {name: round(t.median * 1e6, 1) if isinstance(t, Times) else t.reason for name, t in times.items()}
        captured = {name: isinstance(t, Times) and t.captured for name, t in times.items()}
        line = {**case, "value": each["mega"], "baseline_value": each["ours"], "captured": captured}
        yield {**line, "relative_error": round(error, 4)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=numbers, default=[1, 32, 128, 512])
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(json.dumps({"bench": "gpu-mega-moe", "case": "fp8_mega_moe", "missing": "torch sees no card here"}))
        return 0
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    for line in run(torch.device("cuda"), options.tokens):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
