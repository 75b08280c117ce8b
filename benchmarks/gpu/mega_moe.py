"""Try DeepGEMM's kernel that dispatches, runs experts and combines in one, with a group of one rank: JSON lines.

    python benchmarks/gpu/mega_moe.py [--tokens 1,32,128,512]
    python benchmarks/gpu/mega_moe.py --tiny       what pdinfer does for the same, at small sizes, on a CPU too

It needs a Hopper card and a DeepGEMM that has `fp8_mega_moe`; where it cannot run, the lines say why. Its result is
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
from functools import partial
from typing import Any

import card
import torch
from case import HIDDEN, MOE_INTERMEDIATE, draw, draw_blocks
from timing import Missing, Times, numbers, race, sentence
from torch import Tensor

from pdinfer.kernels import OpSpec, resolve_ops
from pdinfer.kernels.formats.fp8 import FP8Blocks

EXPERTS, TOP_K = 32, 8
SIZES, TINY_SIZES = (HIDDEN, MOE_INTERMEDIATE), (256, 128)
TINY_TOKENS = [1, 3]
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
        parts = torch.empty_like(y_SD).index_copy_(0, order_S, y_SD).view(-1, TOP_K, x_TD.shape[1])
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
            dist.group.WORLD, EXPERTS, most_tokens, TOP_K, *down.numbers.shape[1:]
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


def run(device: torch.device, tokens: Sequence[int], sizes: tuple[int, int]) -> Iterator[Line]:
    yield {"bench": "gpu-mega-moe", "case": "card", "value": card.facts(device)}
    hidden, inner = sizes
    gate_up = draw_blocks(device, 1, EXPERTS, 2 * inner, hidden, parts=2)
    down = draw_blocks(device, 3, EXPERTS, hidden, inner)
    ours, mega, reason = Ours(device, gate_up, down), None, ""
    try:
        mega = Mega(max(tokens), gate_up, down)
    except Exception as error:  # noqa: BLE001 why it cannot be had is a result
        reason = sentence(error)
    for count in tokens:
        line = {"bench": "gpu-mega-moe", "case": f"{EXPERTS} experts, top {TOP_K}, {count} tokens", "unit": "us"}
        inputs = inputs_of(device, count, hidden)
        contenders = {"ours": [partial(ours.run, *inputs)]}
        if mega is not None:
            contenders["mega"] = [partial(mega.run, *inputs)]
        times = race(contenders, device)
        each = {name: round(t.median * 1e6, 1) if isinstance(t, Times) else t.reason for name, t in times.items()}
        line |= {"baseline": "grouped products", "baseline_value": each["ours"]}
        if mega is None or isinstance(times["mega"], Missing):
            yield {**line, "missing": reason or each["mega"]}
            continue
        wanted, got = ours.run(*inputs).double(), mega.run(*inputs).double()
        error = ((got - wanted).norm() / wanted.norm()).item()
        captured = {name: isinstance(t, Times) and t.captured for name, t in times.items()}
        yield {**line, "value": each["mega"], "captured": captured, "relative_error": round(error, 4)}


def inputs_of(device: torch.device, count: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return so many tokens, the experts that each chose, and their weights."""
    chance = torch.rand(count, EXPERTS, device=device, generator=torch.Generator(device).manual_seed(count))
    weights_TK, ids_TK = chance.topk(TOP_K)
    return draw(device, count, count, hidden), ids_TK, weights_TK / weights_TK.sum(-1, keepdim=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=numbers, default=[1, 32, 128, 512])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        raise SystemExit("torch sees no card here; --tiny runs on a CPU")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    tokens, sizes = (TINY_TOKENS, TINY_SIZES) if options.tiny else (options.tokens, SIZES)
    for line in run(device, tokens, sizes):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
