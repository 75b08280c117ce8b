"""Run the CPU race with llama.cpp, through the C bindings of llama-cpp-python. One JSON line per case; see common.py.

    python benchmarks/cpu_race/run_llamacpp.py MODEL.gguf [--cases prefill:512,decode:8] [--ubatch 512]

Prefill: `llama_decode` of a prompt in batches of 2048, with the logits of the last token. Decode: the context is run
once and copied to every sequence with a stream of its own (`kv_unified` off; otherwise all sequences would read one
copy), then fed different tokens. The type of the file is the dtype (see make_gguf.py).
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import llama_cpp as llama
import numpy as np
from common import MOST_STEPS, Best, parser, prompt_ids, run_cases

BATCH_TOKENS = 2048


class Entry(NamedTuple):
    """One token of a batch."""

    token: int
    position: int
    sequence: int
    wants_logits: bool


class LlamaCpp:
    """One loaded model, and a context for each case."""

    def __init__(self, path: str, dtype: str, threads: int, ubatch: int) -> None:
        self.quiet = llama.llama_log_callback(lambda _level, _text, _data: None)
        llama.llama_log_set(self.quiet, None)
        llama.llama_backend_init()
        settings = llama.llama_model_default_params()
        settings.use_mmap = False
        settings.n_gpu_layers = 0
        self.model = llama.llama_model_load_from_file(path.encode(), settings)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.threads, self.ubatch = threads, ubatch
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        described = ctypes.create_string_buffer(256)
        llama.llama_model_desc(self.model, described, 256)
        self.batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.tag: dict[str, object] = {
            "engine": "llama.cpp",
            "dtype": dtype,
            "threads": threads,
            "file": described.value.decode(),
        }

    @contextmanager
    def context(self, num_sequences: int, num_tokens: int) -> Iterator[Any]:
        settings = llama.llama_context_default_params()
        settings.n_ctx = num_sequences * (-(-num_tokens // 256) * 256)
        settings.n_batch = BATCH_TOKENS
        settings.n_ubatch = self.ubatch
        settings.n_seq_max = num_sequences
        settings.n_threads = settings.n_threads_batch = self.threads
        settings.kv_unified = False
        settings.no_perf = True
        context = llama.llama_init_from_model(self.model, settings)
        if not context:
            raise SystemExit(f"llama.cpp has no context for {num_sequences} sequences of {num_tokens} tokens")
        yield context
        llama.llama_free(context)

    def run(self, context: Any, entries: Sequence[Entry]) -> None:
        batch = self.batch
        batch.n_tokens = len(entries)
        for index, entry in enumerate(entries):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = entry.token, entry.position, 1
            batch.seq_id[index][0], batch.logits[index] = entry.sequence, entry.wants_logits
        code = llama.llama_decode(context, batch)
        assert code == 0, f"llama_decode returned {code}"

    def run_prompt(self, context: Any, tokens: Sequence[int]) -> None:
        last = len(tokens) - 1
        entries = [Entry(token, at, 0, at == last) for at, token in enumerate(tokens)]
        for start in range(0, len(entries), BATCH_TOKENS):
            self.run(context, entries[start : start + BATCH_TOKENS])

    def logits(self, context: Any, index: int) -> np.ndarray:
        return np.ctypeslib.as_array(llama.llama_get_logits_ith(context, index), (self.vocab_size,))

    @contextmanager
    def prefill(self, count: int) -> Iterator[Callable[[], None]]:
        tokens = prompt_ids(count, self.vocab_size)
        with self.context(1, count + 8) as context:
            memory = llama.llama_get_memory(context)

            def run() -> None:
                llama.llama_memory_clear(memory, True)
                self.run_prompt(context, tokens)
                self.logits(context, -1).argmax()

            yield run

    @contextmanager
    def decode(self, batch: int, context: int) -> Iterator[Callable[[], None]]:
        with self.context(batch, context + MOST_STEPS) as room:
            memory = llama.llama_get_memory(room)
            self.run_prompt(room, prompt_ids(context, self.vocab_size))
            for sequence in range(1, batch):
                llama.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
            tokens = [prompt_ids(MOST_STEPS, self.vocab_size, sequence + 7) for sequence in range(batch)]
            columns = iter(range(MOST_STEPS))

            def step() -> None:
                at = next(columns)
                self.run(room, [Entry(tokens[index][at], context + at, index, True) for index in range(batch)])
                for index in range(batch):
                    self.logits(room, index).argmax()

            yield step

    def notes(self) -> dict[str, object]:
        return {}

    def best(self, count: int) -> Best:
        with self.context(1, count + 8) as context:
            self.run_prompt(context, prompt_ids(count, self.vocab_size))
            found = self.logits(context, -1)
            tokens = np.argsort(-found)[:5]
            return Best(tokens.tolist(), found[tokens].tolist())


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--ubatch", type=int, default=512)
    arguments = flags.parse_args()
    run_cases(LlamaCpp(str(arguments.model), arguments.dtype, arguments.threads, arguments.ubatch), arguments)


if __name__ == "__main__":
    main()
