"""Train the tiny DeepSeek-V3-architecture model and write it as a Hugging Face checkpoint.

    python train_tiny.py --out tiny                                       # the real run
    python train_tiny.py --out /tmp/smoke --steps 20 --eval-rows 2 --min-recall 0 --no-compile

Every step sees 4096 fresh tokens of the tasks in `tiny_tasks`, in rows that grow from 128 to 2048 tokens. Random gaps
between positions teach distances up to 4096 (PoSE, arXiv 2309.10400). After an interruption, the same command resumes
from the training checkpoint beside the output folder; a step's data depend only on the seed and the step.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_export import evaluate, write_checkpoint
from tiny_model import SHAPE, TinyModel, rope_tables
from tiny_tasks import Mix, training_rows
from torch import Tensor

TOKENS_PER_STEP: Final = 4096
PEAK_LR: Final = 4e-3
MTP_LOSS_WEIGHT: Final = 0.3
BIAS_STEP: Final = 1e-3
MTP_STARTS: Final = 0.25  # of all steps: it learns quickly once the main model can recall
LARGE_NUMBERS_START: Final = 0.12
DECAY_STARTS: Final = 0.7


class Phase(NamedTuple):
    """A stretch of training: its share of all steps, the row length, and how often each task comes."""

    steps: int
    length: int
    mix: Mix


PHASES: Final = (
    Phase(400, 128, Mix(fact=0.18, query=0.27, copy=0.20, calc=0.25, text=0.10)),
    Phase(900, 256, Mix(fact=0.13, query=0.27, copy=0.10, calc=0.30, text=0.20)),
    Phase(1200, 512, Mix(fact=0.10, query=0.25, copy=0.10, calc=0.30, text=0.25)),
    Phase(1000, 1024, Mix(fact=0.08, query=0.25, copy=0.08, calc=0.30, text=0.29)),
    Phase(700, 2048, Mix(fact=0.07, query=0.25, copy=0.08, calc=0.25, text=0.35)),
)
FULL_STEPS: Final = sum(phase.steps for phase in PHASES)


def phase_at(progress: float) -> Phase:
    """Return the phase at `progress`, a share of all steps in [0, 1)."""
    done = 0
    for phase in PHASES:
        done += phase.steps
        if progress * FULL_STEPS < done:
            break
    return phase


def learning_rate(step: int, num_steps: int) -> float:
    """Warm-up, constant, then linear to zero: exact recall comes only in the decay."""
    warm_up = min(1.0, (step + 1) / min(50, max(1, num_steps // 10)))
    return PEAK_LR * min(warm_up, (1 - step / num_steps) / (1 - DECAY_STARTS))


# --- optimizer ---------------------------------------------------------------------------------------------------


@dataclass
class Parameter:
    """A weight and its optimizer state. `value` is the float32 master; the model computes with `leaf`."""

    name: str
    leaf: Tensor
    value: Tensor
    momentum: Tensor
    variance: Tensor | None  # of Adam; None means Muon


def make_parameters(model: TinyModel) -> list[Parameter]:
    """Turn the model's weights into leaves that collect gradients: bf16 where a large product reads them."""
    parameters = []
    for name, holder, key in model.named_weights():
        value = holder[key].float()
        adam = value.ndim == 1 or key in ("embed", "head", "router")
        wide = value.ndim == 1 or key in ("embed", "router")
        leaf = holder[key] = value.clone() if wide else value.bfloat16()
        leaf.requires_grad_()
        variance = torch.zeros_like(value) if adam else None
        parameters.append(Parameter(name, leaf, value, torch.zeros_like(value), variance))
    return parameters


def orthogonalize(x: Tensor) -> Tensor:
    """Push the singular values of matrices `[n, rows, columns]` (rows <= columns) towards one.

    Five Newton-Schulz steps in bf16, with the coefficients of Muon (kellerjordan.github.io/posts/muon).
    """
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.float()


def muon_step(parameters: list[Parameter], lr: float, beta: float = 0.95, decay: float = 0.05) -> None:
    """Do one Muon update with Nesterov momentum; every head's and every expert's matrix counts by itself."""
    groups: dict[tuple[int, int], list[tuple[Parameter, Tensor]]] = {}
    for p in parameters:
        gradient = p.leaf.grad.float() if p.leaf.grad is not None else torch.zeros_like(p.value)
        p.momentum.mul_(beta).add_(gradient)
        blocks = (gradient + beta * p.momentum).view(-1, *p.value.shape[-2:])
        blocks = blocks if blocks.shape[1] <= blocks.shape[2] else blocks.transpose(1, 2)
        groups.setdefault((blocks.shape[1], blocks.shape[2]), []).append((p, blocks))
    for (_, columns), members in groups.items():  # one batch of products per shape
        updates = orthogonalize(torch.cat([blocks for _, blocks in members])) * 0.2 * columns**0.5
        for (p, _), update in zip(members, updates.split([len(blocks) for _, blocks in members]), strict=True):
            transposed = p.value.shape[-2] > p.value.shape[-1]
            update = (update.transpose(1, 2) if transposed else update).reshape(p.value.shape)
            p.value.mul_(1 - lr * decay).sub_(lr * update)
            p.leaf.data.copy_(p.value)


def adam_step(parameters: list[Parameter], lr: float, step: int, decay: float = 0.01) -> None:
    """Do one Adam update (0.9, 0.98) of embedding, head, routers and norms; only matrices decay."""
    for p in parameters:
        gradient = p.leaf.grad.float() if p.leaf.grad is not None else torch.zeros_like(p.value)
        assert p.variance is not None
        p.momentum.lerp_(gradient, 0.1)
        p.variance.lerp_(gradient.square(), 0.02)
        mean = p.momentum / (1 - 0.9 ** (step + 1))
        deviation = (p.variance / (1 - 0.98 ** (step + 1))).sqrt()
        p.value.mul_(1 - lr * decay * (p.value.ndim > 1)).sub_(lr * mean / (deviation + 1e-8))
        p.leaf.data.copy_(p.value)


# --- one step ----------------------------------------------------------------------------------------------------


def positions(rng: Generator, num_rows: int, length: int) -> Tensor:
    """Return positions `[num_rows * length]`: three rows of four from length 256 on have one to three random gaps."""
    result = np.tile(np.arange(length), (num_rows, 1))
    if length >= 256:
        for row in result:
            if rng.random() < 0.75:
                num_gaps = int(rng.integers(1, 4))
                total = int(rng.integers(SHAPE.max_position_embeddings - length + 1))
                gaps = np.diff(np.sort(rng.integers(total + 1, size=num_gaps)), prepend=0)
                for start, gap in zip(rng.integers(length, size=num_gaps), gaps, strict=True):
                    row[start:] += gap
    return torch.from_numpy(result.reshape(-1))


def train_step(model: TinyModel, parameters: list[Parameter], seed: int, step: int, num_steps: int) -> dict[str, float]:
    """Do one optimizer step; return the losses. Changes weights, optimizer state and router biases in place."""
    progress = step / num_steps
    _, length, mix = phase_at(progress)
    rng = np.random.default_rng((seed, step))
    rows = training_rows(
        rng, TOKENS_PER_STEP // length, length + 2, mix, largest=99 if progress >= LARGE_NUMBERS_START else 20
    )
    tokens, weights = (torch.from_numpy(array) for array in rows)
    rope = rope_tables(positions(rng, TOKENS_PER_STEP // length, length))
    model.loads.zero_()

    normed = model.hidden(tokens[:, :-2], rope)
    head = model.shared["head"]
    loss = model.loss(normed, head, tokens[:, 1:-1].flatten(), weights[:, 1:-1].flatten())
    losses = {"loss": float(loss.detach())}
    if progress >= MTP_STARTS:
        drafted = model.mtp_hidden(normed, tokens[:, 1:-1], rope)
        mtp_loss = model.loss(drafted, head, tokens[:, 2:].flatten(), weights[:, 2:].flatten())
        losses["mtp_loss"] = float(mtp_loss.detach())
        loss = loss + MTP_LOSS_WEIGHT * mtp_loss
    torch.autograd.backward(loss)

    torch.nn.utils.clip_grad_norm_([p.leaf for p in parameters], 1.0)
    lr = learning_rate(step, num_steps)
    muon_step([p for p in parameters if p.variance is None], lr)
    adam_step([p for p in parameters if p.variance is not None], lr, step)
    for p in parameters:
        p.leaf.grad = None
    # Experts that got less than the mean become a little easier to choose (auxiliary-loss-free balancing).
    model.biases += BIAS_STEP * (model.loads.mean(1, keepdim=True) - model.loads).sign()
    return losses


# --- training checkpoint -----------------------------------------------------------------------------------------


def save_training(path: Path, model: TinyModel, parameters: list[Parameter], state: dict[str, int]) -> None:
    """Write master weights, optimizer state and biases; a crash leaves the previous file whole."""
    tensors = {"biases": model.biases}
    for p in parameters:
        tensors |= {f"value.{p.name}": p.value, f"momentum.{p.name}": p.momentum}
        if p.variance is not None:
            tensors[f"variance.{p.name}"] = p.variance
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"state": json.dumps(state)})
    unfinished.replace(path)


def load_training(path: Path, model: TinyModel, parameters: list[Parameter]) -> dict[str, int]:
    """Restore what `save_training` wrote, in place, and return its `state`."""
    with safe_open(path, framework="pt") as file:
        model.biases.copy_(file.get_tensor("biases"))
        for p in parameters:
            p.value.copy_(file.get_tensor(f"value.{p.name}"))
            p.momentum.copy_(file.get_tensor(f"momentum.{p.name}"))
            if p.variance is not None:
                p.variance.copy_(file.get_tensor(f"variance.{p.name}"))
            p.leaf.data.copy_(p.value)
        state: dict[str, int] = json.loads(file.metadata()["state"])
    return state


def train(model: TinyModel, args: argparse.Namespace) -> float:
    """Run or resume training, print a JSON line now and then, and return the seconds spent in all."""
    parameters = make_parameters(model)
    checkpoint = args.out.with_name(args.out.name + ".training.safetensors")
    identity = {"seed": args.seed, "num_steps": args.steps}
    first, spent = 0, 0
    if checkpoint.exists():
        state = load_training(checkpoint, model, parameters)
        if any(state[key] != value for key, value in identity.items()):
            sys.exit(f"{checkpoint} belongs to another run ({state}); delete it or choose another --out")
        first, spent = state["step"], state["seconds"]
    started = time.monotonic()
    for step in range(first, args.steps):
        losses = train_step(model, parameters, args.seed, step, args.steps)
        seconds = spent + time.monotonic() - started
        if step % args.log_every == 0 or step == args.steps - 1:
            length = phase_at(step / args.steps).length
            line = {"step": step, "seconds": round(seconds), "length": length}
            print(json.dumps(line | {name: round(loss, 4) for name, loss in losses.items()}), flush=True)
        if (step + 1) % args.save_every == 0 or step == args.steps - 1:
            save_training(checkpoint, model, parameters, identity | {"step": step + 1, "seconds": round(seconds)})
    return spent + time.monotonic() - started


def main() -> None:
    """Train, measure, write; exit with an error if recall misses the floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=FULL_STEPS, help="total; all phases shrink or grow with it")
    parser.add_argument("--eval-rows", type=int, default=200, help="rows per measurement at the end")
    parser.add_argument("--min-recall", type=float, default=0.95, help="fail if recall at 1000-1200 tokens is lower")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--no-compile", action="store_true", help="plain torch; needs no C++ compiler")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    model = TinyModel(args.seed)
    if not args.no_compile:
        model.compile()
    seconds = train(model, args)
    exported = model.rounded()
    scores = evaluate(exported, args.eval_rows)
    scores |= {"training_seconds": round(seconds), "training_steps": args.steps, "seed": args.seed}
    write_checkpoint(exported, args.out, scores)
    recall = scores["recall_1000_1200"]
    if recall < args.min_recall:
        sys.exit(f"recall at 1000-1200 tokens is {recall:.3f}, below {args.min_recall}; try another --seed")


if __name__ == "__main__":
    main()
