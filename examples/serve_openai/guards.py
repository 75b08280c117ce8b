"""What keeps clients that mean no good, or have gone, from costing anything: bounds on time and bytes, one origin."""

import asyncio
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

import pdinfer as pd

READ_S = 30.0


class Protocol(H11Protocol):
    """uvicorn's own, which waits for ever for the headers of a first request."""

    def connection_made(self, transport: Any) -> None:
        """Give the client until its headers must be there."""
        super().connection_made(transport)
        self.loop.call_later(READ_S, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if not hasattr(self.cycle, "scope"):  # a request that has begun
            self.transport.close()


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
        return JSONResponse({"error": {"message": f"calls from {origin} are not served here"}}, 403)
    return await go_on(http)
