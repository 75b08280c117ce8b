"""The process behind `SolverProcess`: it reads loads from its standard input and writes placements to its output."""

from __future__ import annotations

import os
from typing import BinaryIO

import msgspec

from pdinfer.errors import ConfigError
from pdinfer.moe.balance.process import FRAME, PackedPlacement, SolveAnswer, SolveRequest
from pdinfer.moe.balance.solver import solve_placement


def answer_to(request: SolveRequest) -> SolveAnswer:
    """Return the answer to a request, an error included."""
    try:
        previous = request.previous.unpack()
        placement = solve_placement(
            request.load,
            num_ranks=previous.num_ranks,
            num_redundant=previous.num_slots - previous.num_logical_experts,
            previous=previous,
            max_moves=request.max_moves,
        )
    except ConfigError as error:
        return SolveAnswer(error=str(error))
    return SolveAnswer(PackedPlacement.of(placement))


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer one request after the other until there are no more."""
    while len(head := requests.read(FRAME.size)) == FRAME.size:
        request = msgspec.msgpack.decode(requests.read(*FRAME.unpack(head)), type=SolveRequest)
        body = msgspec.msgpack.encode(answer_to(request))
        answers.write(FRAME.pack(len(body)) + body)
        answers.flush()


if __name__ == "__main__":
    os.nice(10)
    with os.fdopen(0, "rb") as requests, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # nothing that is printed may come between frames
        serve(requests, answers)
