"""Run a prompt to its first token through prefill and decode in two processes over shared memory, and through one
process, in turns. This is part of the CPU race. One JSON line for each of the two; see common.py.

    python benchmarks/cpu_race/run_split.py DIR [--cases split:512] [--reps 3]

On the CPU clock this counts the CPU seconds of all participating processes, in all their threads, from `Pairing.submit`
to the event.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from common import CLOCK, Samples, cases_of, emit, parser, probe, prompt_ids, sample

import pdinfer as pd

CPUCLOCK_SCHED = 2
"""The id of the Linux clock that counts how long a process has run, in nanoseconds; see clock_getcpuclockid."""


def host(role: str, folder: Path, dtype: str, threads: int, cache: pd.CacheConfig, connection: Connection) -> None:
    """Run one of the two processes."""
    torch.set_num_threads(threads)
    model = pd.load_model(folder, dtype=getattr(torch, dtype))
    channel = pd.KVChannel(pd.PagePool(model, cache), pd.kv.same_host_transport())
    kind = pd.PrefillEngine if role == "prefill" else pd.DecodeEngine
    pd.remote.serve(kind(model, channel), connection)


def clock_of(pids: Sequence[int]) -> Callable[[], float]:
    """Return the seconds of the chosen clock, for a case in which these processes take part."""

    def process_s(pid: int) -> float:
        return time.clock_gettime(~pid << 3 | CPUCLOCK_SCHED)

    return (lambda: sum(map(process_s, pids))) if CLOCK == "cpu" else time.perf_counter


def first_token(pairing: pd.Pairing, prompt: tuple[int, ...]) -> None:
    sampling = pd.SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    pairing.submit(pd.Request(prompt=prompt, sampling=sampling))
    while not (events := pairing.step()):
        pairing.wait(1.0)
    assert events[0].error is None, events[0].error


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(arguments.threads)
    cases = cases_of(arguments)
    size = pd.CacheConfig().page_size
    longest = max(case.count for case in cases)
    cache = pd.CacheConfig(num_pages=2 * (-(-longest // size) + 1), prefix_cache=False)
    context = multiprocessing.get_context("spawn")
    ends, pids = {}, [os.getpid()]
    for role in ("prefill", "decode"):
        ends[role], theirs = context.Pipe()
        given = (role, arguments.model, arguments.dtype, arguments.threads, cache, theirs)
        process = context.Process(target=host, args=given, name=role, daemon=True)
        process.start()
        pids.append(process.pid or 0)
    model = pd.load_model(arguments.model, dtype=getattr(torch, arguments.dtype))
    two = pd.Pairing(pd.remote.PrefillClient(ends["prefill"]), pd.remote.DecodeClient(ends["decode"]))
    with two, pd.Pairing.local(model, cache=cache) as one:
        for case in cases:
            prompt = tuple(prompt_ids(case.count, model.config.vocab_size))
            before = probe()
            found: dict[str, list[Samples]] = {"two processes": [], "one process": []}
            for turn in range(arguments.reps + 1):
                for name, pairing, who in (("two processes", two, pids), ("one process", one, pids[:1])):

                    def run(pairing: pd.Pairing = pairing, prompt: tuple[int, ...] = prompt) -> None:
                        first_token(pairing, prompt)

                    taken = sample(run, 1, max_s=arguments.max_s, clock=clock_of(who), pids=who)
                    if turn:  # the first is not warm
                        found[name].append(taken)
            for name, samples in found.items():
                clean = [sum(counts) for counts in zip(*(taken.clean for taken in samples), strict=True)]
                whole = Samples([seconds for taken in samples for seconds in taken.seconds], (clean[0], clean[1]), 0.0)
                tag = {"engine": name, "dtype": arguments.dtype, "threads": arguments.threads, "clock": CLOCK}
                emit(case=str(case), **tag, ttft_ms=whole.ms(), clean=whole.clean, probe=before)


if __name__ == "__main__":
    main()
