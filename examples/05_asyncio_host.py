"""Run an asyncio program around a Pairing: a thread steps it, coroutines await their tokens.

python examples/05_asyncio_host.py [CHECKPOINT]
"""

import asyncio
import sys
from pathlib import Path

from tiny_tasks import BOS, decode, encode

import pdinfer as pd

CHECKPOINT = Path(__file__).parent / "tiny"


def request_of(prompt: str, max_new_tokens: int = 12) -> pd.Request:
    sampling = pd.SamplingParams(temperature=0, max_new_tokens=max_new_tokens, stop_token_ids=(ord(";"),))
    return pd.Request(prompt=(BOS, *encode(prompt)), sampling=sampling)


async def ask(host: pd.aio.AsyncPairing, prompt: str) -> str:
    tokens = [event.token async for event in host.stream(request_of(prompt)) if event.token is not None]
    return f"{prompt}{decode(tokens)}"


async def main(checkpoint: Path) -> None:
    async with pd.aio.AsyncPairing(pd.Pairing.local(checkpoint)) as host:
        for answer in await asyncio.gather(*(ask(host, f"calc {a}+{a}=") for a in range(1, 9))):
            print(answer)
        async for event in host.stream(request_of("One morning Tom ", max_new_tokens=200)):
            if event.index == 10:
                break  # whoever stops reading cancels the request
        assert await host.drain(10.0)
        print({reason.value: count for reason, count in host.pairing.stats.ended})


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKPOINT))
