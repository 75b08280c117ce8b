"""The front end of a group: it follows a directory, and answers the lines on stdin until there are no more.

    python examples/group_front.py --key-file KEY --folder FOLDER
    python examples/group_front.py --key-file KEY --service prefill:7000-7007 --service decode:7000-7007

A server in its place is yours: `examples/serve_openai` is one. A thread steps all the time, so engines come, drain and
go whether anybody asks or not. `--ready-file` is there while the group takes requests, for a probe.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tiny_tasks import BOS, decode, encode

import pdinfer as pd
from pdinfer.remote.directory import Directory, Folder, HeadlessService

SAMPLING = pd.SamplingParams(temperature=0, max_new_tokens=16, stop_token_ids=(ord(";"),))


def directories(options: argparse.Namespace) -> Iterator[Directory]:
    key = bytes.fromhex(options.key_file.read_text().strip())
    if options.folder is not None:
        yield Directory(Folder(options.folder), key=key)
    for service in options.service:
        host, _, ports = service.rpartition(":")
        first, _, last = ports.partition("-")
        num_ports = int(last or first) - int(first) + 1
        yield Directory(HeadlessService(host, int(first), num_ports=num_ports), key=key)


async def show_readiness(host: pd.aio.AsyncPairing, file: Path) -> None:
    while True:
        show = file.touch if host.health().takes_requests else partial(file.unlink, missing_ok=True)
        await asyncio.to_thread(show)
        await asyncio.sleep(0.5)


async def answer(host: pd.aio.AsyncPairing, line: str) -> str:
    tokens: list[int] = []
    async for event in host.stream(pd.Request(prompt=(BOS, *encode(line)), sampling=SAMPLING)):
        tokens += [] if event.token is None else [event.token]
        if event.error is not None:
            return f" failed: {event.error}"
    return decode(tokens)


async def main(options: argparse.Namespace) -> None:
    first, *more = directories(options)
    pairing = pd.Pairing(directory=first, config=pd.PairingConfig(port_wait_s=options.wait_s))
    for directory in more:
        pairing.follow(directory, drain_s=options.drain_s)
    async with pd.aio.AsyncPairing(pairing) as host, asyncio.TaskGroup() as tasks:
        shown = options.ready_file and tasks.create_task(show_readiness(host, options.ready_file))
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            print(line + await answer(host, line), flush=True)
        if shown:
            shown.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--service", action="append", default=[], metavar="NAME:PORT[-LAST]")
    parser.add_argument("--drain-s", type=float, default=20.0)
    parser.add_argument("--wait-s", type=float, default=600.0, help="how long requests wait for engines that load")
    parser.add_argument("--ready-file", type=Path)
    asyncio.run(main(parser.parse_args()))
