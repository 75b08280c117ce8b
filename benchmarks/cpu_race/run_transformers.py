"""Run the CPU race with transformers' DeepseekV3ForCausalLM, with the fastest settings that were found. One JSON line
per case; see common.py.

    python benchmarks/cpu_race/run_transformers.py DIR [--cases prefill:512,decode:8] [--attn eager]

Prefill: one forward, with the logits of the last token alone. Decode: one forward of one token per sequence, over a
cache that was filled with random latents. `--experts batched_mm` is not offered: it copies the weights of every (token,
expert) pair, 13 GB for 512 tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from common import MOST_STEPS, Best, parser, prompt_ids, run_cases
from transformers import AutoModelForCausalLM, DynamicCache


class Transformers:
    """One loaded model."""

    def __init__(self, folder: str, dtype: str, threads: int, attn: str, experts: str) -> None:
        torch.set_num_threads(threads)
        self.dtype = getattr(torch, dtype)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=self.dtype, attn_implementation=attn, experts_implementation=experts
        )
        self.model.train(False)
        self.vocab_size = self.model.config.vocab_size
        self.tag: dict[str, object] = {
            "engine": "transformers",
            "dtype": dtype,
            "threads": threads,
            "attn": attn,
            "experts": experts,
        }

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Run tokens [B, n] behind the cached ones; return the logits of the last one, [B, vocab]."""
        found: torch.Tensor = self.model(
            input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        return found

    @contextmanager
    def prefill(self, count: int) -> Iterator[Callable[[], None]]:
        tokens = torch.tensor([prompt_ids(count, self.vocab_size)])

        def run() -> None:
            self.forward(tokens, DynamicCache(config=self.model.config)).argmax(-1).tolist()

        yield run

    @contextmanager
    def decode(self, batch: int, context: int) -> Iterator[Callable[[], None]]:
        cache = self.filled(batch, context)
        tokens = torch.tensor([prompt_ids(MOST_STEPS, self.vocab_size, index + 7) for index in range(batch)])
        columns = iter(range(MOST_STEPS))

        def step() -> None:
            column = next(columns)
            self.forward(tokens[:, column : column + 1], cache).argmax(-1).tolist()

        yield step

    def filled(self, batch: int, context: int) -> DynamicCache:
        """Make a cache with random latents of `context` tokens."""
        config = self.model.config
        cache = DynamicCache(config=config)
        torch.manual_seed(1)
        for layer in range(config.num_hidden_layers):
            latent = torch.randn(batch, 1, context, config.kv_lora_rank).to(self.dtype)
            rotary = torch.randn(batch, 1, context, config.qk_rope_head_dim).to(self.dtype)
            cache.update(latent, rotary, layer)
        return cache

    def notes(self) -> dict[str, object]:
        return {}

    def best(self, count: int) -> Best:
        tokens = torch.tensor([prompt_ids(count, self.vocab_size)])
        values, indices = self.forward(tokens, DynamicCache(config=self.model.config))[0].float().topk(5)
        return Best(indices.tolist(), values.tolist())


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--attn", default="eager", choices=("eager", "sdpa"))
    flags.add_argument("--experts", default="grouped_mm", choices=("eager", "grouped_mm"))
    arguments = flags.parse_args()
    engine = Transformers(str(arguments.model), arguments.dtype, arguments.threads, arguments.attn, arguments.experts)
    run_cases(engine, arguments)


if __name__ == "__main__":
    main()
