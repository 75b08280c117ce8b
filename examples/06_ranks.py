"""Run a prefill engine of two ranks and a decode engine of two ranks, with experts that move while requests run.

    python examples/06_ranks.py [--checkpoint FOLDER]                     all of it on this machine

Or run each part by itself, in any order. HOST:PORT is where the last command listens:

    torchrun --nproc-per-node 2 examples/06_ranks.py --role prefill --at HOST:PORT
    torchrun --nproc-per-node 2 --master-port 29501 examples/06_ranks.py --role decode --at HOST:PORT
    python examples/06_ranks.py --at HOST:PORT --ranks 2

Attention is data parallel: every rank has requests of its own, and is a port of the Pairing. Experts are spread over
both ranks of an engine with two redundant copies, and every 10 steps they are placed anew for the load of these steps.
"""

import argparse
import multiprocessing
import os
import socket
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch
from tiny_tasks import BOS, decode, encode

import pdinfer as pd

CHECKPOINT = Path(__file__).parent / "tiny"
KEY = b"06_ranks"  # anyone who knows it may serve, or be asked: choose your own
EXPERTS = pd.moe.ExpertConfig(num_redundant_experts=2, expert_distribution_recorder_mode="stat")
ENGINE = pd.EngineConfig(eplb_rebalance_num_iterations=10, rebalance_bytes_per_step=1 << 20)


def serve_rank(role: str, checkpoint: Path, address: tuple[str, int]) -> None:
    """Run one rank; torchrun's variables say which one it is."""
    torch.set_num_threads(1)
    topology = pd.Topology.from_env()
    model = pd.load_model(checkpoint, topology=topology, experts=EXPERTS)
    channel = pd.KVChannel(pd.PagePool(model, pd.CacheConfig(page_size=16, num_pages=256)), pd.kv.SocketTransport())
    engine = (pd.PrefillEngine if role == "prefill" else pd.DecodeEngine)(model, channel, ENGINE)
    connection = None
    if topology.is_leader:  # here every rank; with tp_size > 1 the first of each attention group
        connection = knock(address)
        connection.send_bytes(role.encode())
    pd.remote.serve(engine, connection)
    model.groups.close()


def knock(address: tuple[str, int]) -> multiprocessing.connection.Connection:
    """Connect to the host, which may not be listening yet."""
    end = time.monotonic() + 60
    while True:
        try:
            return Client(address, authkey=KEY)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def host(listener: Listener, num_ranks: int) -> None:
    """Run the Pairing: it takes a port from every rank of both engines, and holds no tensor."""
    ports: dict[str, list[Any]] = {"prefill": [], "decode": []}
    for _ in range(2 * num_ranks):
        connection = listener.accept()
        role = connection.recv_bytes().decode()
        client = pd.remote.PrefillClient if role == "prefill" else pd.remote.DecodeClient
        ports[role].append(client(connection))
    sampling = pd.SamplingParams(temperature=0, max_new_tokens=12, stop_token_ids=(ord(";"),))
    with pd.Pairing(ports["prefill"], ports["decode"]) as pairing:
        end, rounds = time.monotonic() + 60, 0
        while min(port.load().placement_epoch for port in ports["decode"]) < 1 and time.monotonic() < end:
            rounds += 1
            requests = [
                pd.Request(
                    request_id=f"calc {n}+{rounds}=", prompt=(BOS, *encode(f"calc {n}+{rounds}=")), sampling=sampling
                )
                for n in range(8)
            ]
            answers: dict[str, list[int]] = {}
            for event in pairing.generate(requests):
                answers.setdefault(event.request_id, []).extend([] if event.token is None else [event.token])
            if rounds == 1:
                for question, tokens in sorted(answers.items()):
                    print(question + decode(tokens))
            time.sleep(0.2)  # leave a small machine to the solver
        for role, of_role in ports.items():
            for number, port in enumerate(of_role):
                load = port.load()
                print(f"{role} {number}: {load.num_tokens} tokens, experts placed anew {load.placement_epoch} times")
        if min(port.load().placement_epoch for port in ports["decode"]) < 1:
            raise SystemExit("no experts were placed anew")
        print("done: experts were placed anew while requests ran")


def start_rank(role: str, rank: int, num_ranks: int, port: int, checkpoint: Path, address: tuple[str, int]) -> None:
    """Start a rank as torchrun would."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    serve_rank(role, checkpoint, address)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--role", choices=["prefill", "decode"])
    parser.add_argument("--at", default="127.0.0.1:0")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    name, _, port = options.at.rpartition(":")
    if options.role is not None:
        serve_rank(options.role, options.checkpoint, (name, int(port)))
        return
    with Listener((name, int(port)), backlog=2 * options.ranks, authkey=KEY) as listener:
        if port == "0":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch", "torch.distributed", "pdinfer"])
            for role in ("prefill", "decode"):
                meeting = free_port()
                for rank in range(options.ranks):
                    arguments = (role, rank, options.ranks, meeting, options.checkpoint, listener.address)
                    context.Process(target=start_rank, args=arguments).start()
        host(listener, options.ranks)


if __name__ == "__main__":
    main()
