"""The process of one request of `SolverProcess`: it reads a load from its input and writes a placement to its
output."""

from __future__ import annotations

import os
import sys

import msgspec

from pdinfer.errors import ConfigError
from pdinfer.moe.balance.messages import PackedPlacement, SolveAnswer, SolveRequest
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


if __name__ == "__main__":
    os.nice(10)
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # nothing that is printed may come into the answer
        request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=SolveRequest)
        answer.write(msgspec.msgpack.encode(answer_to(request)))
