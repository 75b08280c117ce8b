"""Run an asyncio program around a Pairing: one task steps it in a thread, others await their tokens.

python examples/05_asyncio_host.py [CHECKPOINT]
"""

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import attrs
from tiny_tasks import BOS, decode, encode

import pdinfer as pd

CHECKPOINT = Path(__file__).parent / "tiny"


class AsyncHost:
    """A host that streams requests of one Pairing to any number of coroutines; when a coroutine goes away, its request
    is cancelled."""

    def __init__(self, pairing: pd.Pairing) -> None:
        self.pairing = pairing
        self.queues: dict[str, asyncio.Queue[pd.TokenEvent]] = {}

    async def run(self) -> None:
        """Step the Pairing until cancelled; blocking work happens in a thread."""
        while True:
            if await asyncio.to_thread(self.pairing.wait, 0.2):
                for event in await asyncio.to_thread(self.pairing.step):
                    if event.request_id in self.queues:
                        self.queues[event.request_id].put_nowait(event)

    async def stream(self, request: pd.Request) -> AsyncIterator[pd.TokenEvent]:
        request_id = request.request_id or uuid.uuid4().hex
        queue = self.queues[request_id] = asyncio.Queue[pd.TokenEvent]()  # before the first event can come
        try:
            self.pairing.submit(attrs.evolve(request, request_id=request_id))
            while True:
                event = await queue.get()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            del self.queues[request_id]
            self.pairing.cancel(request_id)


async def ask(host: AsyncHost, prompt: str) -> str:
    sampling = pd.SamplingParams(temperature=0, max_new_tokens=12, stop_token_ids=(ord(";"),))
    request = pd.Request(prompt=(BOS, *encode(prompt)), sampling=sampling)
    tokens = [event.token async for event in host.stream(request) if event.token is not None]
    return f"{prompt}{decode(tokens)}"


async def main(checkpoint: Path) -> None:
    with pd.Pairing.local(checkpoint) as pairing:
        host = AsyncHost(pairing)
        stepping = asyncio.create_task(host.run())
        for answer in await asyncio.gather(*(ask(host, f"calc {a}+{a}=") for a in range(1, 9))):
            print(answer)
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKPOINT))
