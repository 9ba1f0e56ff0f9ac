"""The HTTP application: OpenAI's paths for one model, and nothing else."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from adapmixed.serving.admission import Admission
from adapmixed.serving.answers import Stream, Whole, Writer
from adapmixed.serving.clients import Client, Clients
from adapmixed.serving.engine import Query
from adapmixed.serving.errors import (
    JsonResponse,
    RequestError,
    internal,
    no_model,
    of_starlette,
    queue_full,
    stopping,
    too_large,
)
from adapmixed.serving.fields import MAX_BODY, Defaults, parsed, query_of, window_error
from adapmixed.serving.guard import Guard
from adapmixed.serving.metrics import Metrics
from adapmixed.serving.running import Desk
from adapmixed.serving.scheduler import Scheduler

BODY_SECONDS = 60.0
"""Seconds that a client may take to send its body."""

READERS, UNREAD = 2, 64
"""Number of requests that are tokenized at the same time, and that may wait for it."""

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health")


@dataclass(frozen=True)
class Service:
    """The parts that the application answers with.

    Attributes:
        scheduler: answers queries.
        admission: the tokens of the mechanism's plan.
        tokenizer: the public model's tokenizer.
        defaults: the served model's name, and what requests leave out.
        metrics: the operator's figures.
        clients: the keys; None if callers of this machine need none.
        created: time of the start, in seconds.
    """

    scheduler: Scheduler
    admission: Admission
    tokenizer: Any
    defaults: Defaults
    metrics: Metrics
    clients: Clients | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def query(self, body: bytes, client: Client, *, chat: bool) -> Query:
        """Return what a body asks for; this may take long, so not in the event loop's thread.

        Raises:
            RequestError: 404 or 400: the request cannot be answered.
        """
        query = query_of(parsed(body), self.defaults, self.tokenizer, client.key, chat=chat)
        try:
            self.scheduler.check(query)
        except ValueError as error:
            raise window_error(error, chat=chat) from None
        return query

    def model(self) -> dict[str, Any]:
        """Return OpenAI's description of the served model."""
        return {
            "id": self.defaults.model,
            "object": "model",
            "created": self.created,
            "owned_by": "adapmixed",
        }


def application(service: Service) -> ASGIApp:
    """Return the ASGI application of a service. It runs in one event loop."""
    endpoints = _Endpoints(service)
    app = Starlette(
        routes=[
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
            Route("/health", endpoints.health, methods=["GET"]),
        ],
        exception_handlers={
            RequestError: _own_error,
            HTTPException: _starlette_error,
            Exception: _fault,  # and it is raised again, for the guard to log
        },
    )
    app.router.redirect_slashes = False
    return Guard(app, service.clients, service.metrics, PATHS)


class _Endpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._desk = Desk(service.scheduler, service.admission, service.metrics)
        self._readers, self._unread = asyncio.Semaphore(READERS), 0

    async def completions(self, request: Request) -> Any:
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Any:
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, *, chat: bool) -> Any:
        """Return the response to a query, which is an ASGI application."""
        client: Client = request.scope["state"]["client"]
        try:
            body = await _body(request)
        except ClientDisconnect:
            return Response(status_code=499)
        if self._unread >= UNREAD:
            raise queue_full()
        self._unread += 1
        try:
            async with self._readers:
                query = await asyncio.to_thread(self._service.query, body, client, chat=chat)
        finally:
            self._unread -= 1
        running = await self._desk.begin(query, client)
        writer = Writer(running.query, self._service.defaults.model)
        return Stream(running, writer) if query.stream else Whole(running, writer)

    async def models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._service.model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._service.defaults.model:
            raise no_model(name)
        return JsonResponse(self._service.model())

    async def health(self, request: Request) -> Response:
        if self._service.scheduler.stopped:
            raise stopping()
        told: dict[str, Any] = {"status": "ok"}
        admission = self._service.admission
        if admission.then_public:
            left = max(admission.unspent or 0, 0)
            told |= {"answers": "ensemble" if left else "public model", "plan_tokens_left": left}
        return JsonResponse(told)


async def _body(request: Request) -> bytes:
    """Return the whole body.

    Raises:
        RequestError: 413: it is too large; 408: it did not come in time.
        ClientDisconnect: the client has left.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 12 or int(length) > MAX_BODY):
        raise too_large(MAX_BODY)
    parts = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                parts += part
                if len(parts) > MAX_BODY:
                    raise too_large(MAX_BODY)
    except TimeoutError:
        message = f"the body must come within {BODY_SECONDS:g} seconds"
        raise RequestError(408, message, headers={"connection": "close"}) from None
    return bytes(parts)


async def _own_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error.response()


async def _starlette_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return of_starlette(error).response()


async def _fault(request: Request, error: Exception) -> Response:
    return internal().response()
