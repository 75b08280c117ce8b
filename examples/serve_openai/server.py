"""An HTTP server in OpenAI's form around a Pairing whose engines run in processes of their own."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from guards import before_uvicorn, body_of, keep_out, not_served, unless_gone

import pdinfer as pd
from pdinfer.text.openai import Call, error_answer, max_bytes

DRAIN_S = 30.0
log = logging.getLogger("serve_openai")


class Engines:
    """The processes of the engines; one that died or stands still is replaced."""

    def __init__(self, checkpoint: Path, processors: Mapping[str, Any]) -> None:
        self.config: dict[str, Any] = {"checkpoint": checkpoint, "logits_processors": processors}
        self.config |= {"cache": pd.CacheConfig(page_size=16, num_pages=2048), "engine": pd.EngineConfig(num_threads=1)}
        self.ports: list[Any] = []
        self.is_closing = False

    async def start(self, role: str) -> Any:
        spawn: Any = pd.remote.spawn_prefill if role == "prefill" else pd.remote.spawn_decode
        port = await asyncio.to_thread(spawn, **self.config)
        self.ports.append(port)
        return port

    async def watch(self, host: pd.aio.AsyncPairing) -> None:
        while not self.is_closing:
            lost = [port for port in self.ports if port not in host.pairing.ports]
            await asyncio.gather(asyncio.sleep(0.2), *(self.replace(port, host) for port in lost))

    async def replace(self, lost: Any, host: pd.aio.AsyncPairing) -> None:
        log.warning("the %s of process %d is lost; another one is started", lost.role, lost.process.pid)
        lost.process.kill()  # one that stands still obeys nothing else
        try:
            new = await self.start(lost.role)
            self.ports.remove(lost)
            await host.add(new)  # where this fails, the next look finds it lost
        except pd.PDInferError as error:
            log.error("it was not replaced: %s", error)


async def chunks(host: pd.aio.AsyncPairing, call: Call) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(host.generate(call.requests)) as events:
        async for event in events:
            for chunk in call.push(event):
                yield chunk


async def lines(first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[str]:
    """Return server-sent events. The status was sent already, so an error comes as one of them."""
    async with aclosing(rest):
        try:
            yield f"data: {json.dumps(first)}\n\n"
            async for chunk in rest:
                yield f"data: {json.dumps(chunk)}\n\n"
        except pd.PDInferError as error:
            yield f"data: {json.dumps(error_answer(error)[2])}\n\n"
        yield "data: [DONE]\n\n"


def make_app(checkpoint: Path, num_prefills: int, num_decodes: int, config: pd.PairingConfig) -> FastAPI:
    tokenizer, metrics = pd.text.Tokenizer.load(checkpoint), pd.metrics.Recorder()
    processors = pd.text.schema_processors(checkpoint)  # for response_format; none without a library for it
    engines = Engines(checkpoint, processors)
    host: pd.aio.AsyncPairing

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal host
        await asyncio.gather(*map(engines.start, ["prefill"] * num_prefills + ["decode"] * num_decodes))
        sides = [[port for port in engines.ports if port.role == role] for role in ("prefill", "decode")]
        async with pd.aio.AsyncPairing(pd.Pairing(*sides, config=config), on_events=metrics.read) as host:
            watching = asyncio.create_task(engines.watch(host))

            async def end() -> None:
                await host.drain(DRAIN_S)
                engines.is_closing = True
                await watching
                await host.close()  # what has not ended by now ends with an error

            before_uvicorn(end)
            yield
            await end()

    app = FastAPI(lifespan=lifespan, exception_handlers={404: not_served, 405: not_served})
    app.middleware("http")(keep_out)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def serve(http: Request) -> Response:
        if engines.is_closing or host.health().state.value == "draining":
            raise pd.TransferError("the server is ending; ask another one")
        limit = host.pairing.max_tokens or tokenizer.max_tokens or 0  # while an engine is replaced
        parse = partial(Call.parse_async, model=checkpoint.name, has_schemas=bool(processors), limit=limit)
        call = await parse(await body_of(http, max_bytes(limit)), tokenizer, is_chat="chat" in http.url.path)
        made = chunks(host, call)
        first = await unless_gone(http, anext(made))  # so that an error has a status of its own
        if first is None or not call.streams:
            await made.aclose()
            return Response(status_code=499) if first is None else JSONResponse(first)
        return StreamingResponse(lines(first, made), media_type="text/event-stream")

    @app.exception_handler(pd.PDInferError)
    async def refuse(_: Request, error: pd.PDInferError) -> Response:
        metrics.refused(error)
        status, headers, body = error_answer(error)
        return JSONResponse(body, status, headers)

    @app.get("/v1/models")
    @app.get("/v1/models/" + checkpoint.name)
    def models(http: Request) -> dict[str, Any]:
        told: dict[str, Any] = {"created": int(checkpoint.stat().st_mtime), "max_model_len": host.pairing.max_tokens}
        told |= {"id": checkpoint.name, "object": "model", "owned_by": "pdinfer", "root": checkpoint.name}
        return {"object": "list", "data": [told]} if http.url.path == "/v1/models" else told

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.render(host.pairing), media_type=pd.metrics.CONTENT_TYPE)

    @app.api_route("/health", methods=["GET", "HEAD"])
    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def probe(http: Request) -> Response:
        health, ports = host.health(), host.pairing.ports
        lost = [f"another {port.role} is started" for port in engines.ports if port not in ports]
        state = "degraded" if lost and health.takes_requests else health.state.value
        used = [(port.role, port.process.pid) for port in engines.ports if port in ports]
        told = {"state": state, "reasons": [*health.reasons, *lost], "unfinished": host.num_unfinished, "engines": used}
        is_live = "health" in http.url.path and (lost or state != "down")
        return JSONResponse(told, 200 if health.takes_requests or is_live else 503)

    @app.get("/")
    async def page() -> Response:
        return FileResponse(Path(__file__).parent / "page.html")

    return app
