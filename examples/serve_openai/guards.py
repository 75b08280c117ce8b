"""What keeps clients that mean no good, or have gone, from costing anything: bounds on time and bytes, one origin."""

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

import pdinfer as pd

READ_S = 30.0


class Protocol(H11Protocol):
    """uvicorn's own, which waits for ever for headers, and for what is left of a body that nobody reads any more."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.set_deadline()

    def set_deadline(self) -> None:
        """Give the client READ_S from its first byte until there is a request to be answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self.deadline is not None:
                self.deadline.cancel()
            self.deadline = None
        elif self.deadline is None:
            self.deadline = self.loop.call_later(READ_S, self.transport.close)


def must_be_free(host: str, port: int) -> None:
    """Exit where nobody can listen: uvicorn would say it when the engines have loaded the model."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        sys.exit(f"the server cannot listen: {error}")


def before_uvicorn(end: Callable[[], Awaitable[None]]) -> None:
    """Have SIGTERM end the streams before uvicorn hears of it. It would take no more connections, so that no probe sees
    a host that drains, and break off the streams that last longer than it waits."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        return
    loop, uvicorn_ends, ending = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM), set()

    async def end_both() -> None:
        try:
            await end()
        finally:
            uvicorn_ends(signal.SIGTERM, None)  # type: ignore[operator, misc]

    def told(*_: object) -> None:
        signal.signal(signal.SIGTERM, uvicorn_ends)  # for who tells it twice
        loop.call_soon_threadsafe(lambda: ending.add(loop.create_task(end_both())))

    signal.signal(signal.SIGTERM, told)


async def body_of(http: Request, most: int) -> bytes:
    """Read a body of at most so many bytes, in JSON: a page of another site cannot send that without being asked."""
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise pd.RequestError("the content-type of a call must be application/json")
    data = bytearray()
    try:
        async with asyncio.timeout(READ_S):
            async for part in http.stream():
                data += part
                if len(data) > most:
                    raise pd.RequestError(f"the body of a call has at most {most} bytes here")
    except (TimeoutError, ClientDisconnect):
        raise pd.RequestError(f"the body of the call did not come whole within {READ_S:g} s") from None
    return bytes(data)


async def unless_gone(http: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """Do the work, or give it up when the client has gone."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(http.receive())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.wait((working, gone))


async def keep_out(http: Request, go_on: Any) -> Any:
    """Refuse what a page of another site sends."""
    origin = http.headers.get("origin")
    if origin and urlsplit(origin).netloc != http.headers.get("host"):
        return refusal(403, f"calls from {origin} are not served here")
    return await go_on(http)


async def not_served(http: Request, error: HTTPException) -> JSONResponse:
    """Say which calls are served, to who asks for others, such as /v1/responses."""
    said = f"{http.method} {http.url.path} is not served here; POST /v1/chat/completions and /v1/completions are"
    return refusal(error.status_code, said, error.headers)


def refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an error as OpenAI's clients read it."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)
