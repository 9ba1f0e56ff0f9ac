"""The HTTP application: OpenAI's paths for one model, and nothing else."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from adapmixed.errors import BudgetSpentError, LedgerError
from adapmixed.serving.admission import Admission, Reservation
from adapmixed.serving.answers import Reply, Writer
from adapmixed.serving.clients import Client, Clients
from adapmixed.serving.engine import Query
from adapmixed.serving.errors import (
    JsonResponse,
    RequestError,
    internal,
    no_model,
    of_starlette,
    plan_spent,
    queue_full,
    stopping,
    too_large,
)
from adapmixed.serving.fields import MAX_BODY, Defaults, parsed, query_of, window_error
from adapmixed.serving.guard import Guard
from adapmixed.serving.metrics import Metrics
from adapmixed.serving.running import Running
from adapmixed.serving.scheduler import Scheduler

BODY_SECONDS = 60.0
"""Seconds that a client may take to send its body."""

READERS, UNREAD = 2, 64
"""Number of requests that are tokenized at the same time, and that may wait for it."""

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health")


@dataclass(eq=False)
class Service:
    """The parts that the application answers with, and its endpoints.

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

    def __post_init__(self) -> None:
        self._readers, self._unread = asyncio.Semaphore(READERS), 0
        self._turn = asyncio.Lock()

    async def completions(self, request: Request) -> Any:
        """Answer /v1/completions."""
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Any:
        """Answer /v1/chat/completions."""
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
                query = await asyncio.to_thread(self._query, body, client, chat=chat)
        finally:
            self._unread -= 1
        running = await self._begin(query, client)
        return Reply(running, Writer(running.query, self.defaults.model))

    def _query(self, body: bytes, client: Client, *, chat: bool) -> Query:
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

    async def _begin(self, query: Query, client: Client) -> Running:
        """Reserve, count and submit a request; one at a time, so that what was checked holds.

        Raises:
            RequestError: 503 if the queue is full, the server stops, or others have reserved the
                tokens that are left; 429 if the client asks too often, or if the plan or the key
                has too few tokens left. Nothing is reserved then.
        """
        async with self._turn:
            self.scheduler.check_room(len(query.prompts))
            client.check_rate()
            with ExitStack() as undo:
                try:
                    reservation = self.admission.reserve(query.tokens)
                except BudgetSpentError:
                    if not self.admission.then_public:
                        raise plan_spent(self.admission.unspent) from None
                    query, reservation = query.of_public(), Reservation(self.admission, 0)
                undo.callback(reservation.close)
                counted = 0 if query.public else query.tokens
                try:
                    if counted:
                        await asyncio.to_thread(client.admit, counted)
                        undo.callback(client.give_back, counted)
                except LedgerError:  # no later answer could be counted either
                    self.scheduler.fail("the tokens of a key could not be counted durably")
                    raise stopping() from None
                running = Running(query, client, counted, self.metrics)
                running.answer = self.scheduler.submit(query, reservation, running.deliver)
                undo.pop_all()
        # The server may have stopped meanwhile; then no response has started yet.
        if running.stopped_before_start:
            running.end()
            raise stopping()
        return running

    async def models(self, request: Request) -> Response:
        """Answer /v1/models."""
        return JsonResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Answer /v1/models/NAME."""
        name = request.path_params["name"]
        if name != self.defaults.model:
            raise no_model(name)
        return JsonResponse(self._model())

    def _model(self) -> dict[str, Any]:
        """Return OpenAI's description of the served model."""
        return {
            "id": self.defaults.model,
            "object": "model",
            "created": self.created,
            "owned_by": "adapmixed",
        }

    async def health(self, request: Request) -> Response:
        """Answer /health."""
        if self.scheduler.stopped:
            raise stopping()
        told: dict[str, Any] = {"status": "ok"}
        if self.admission.then_public:
            left = max(self.admission.unspent or 0, 0)
            told |= {"answers": "ensemble" if left else "public model", "plan_tokens_left": left}
        return JsonResponse(told)


def application(service: Service) -> ASGIApp:
    """Return the ASGI application of a service. It runs in one event loop."""
    app = Starlette(
        routes=[
            Route("/v1/completions", service.completions, methods=["POST"]),
            Route("/v1/chat/completions", service.chat, methods=["POST"]),
            Route("/v1/models", service.models, methods=["GET"]),
            Route("/v1/models/{name:path}", service.model, methods=["GET"]),
            Route("/health", service.health, methods=["GET"]),
        ],
        exception_handlers=dict.fromkeys((RequestError, HTTPException, Exception), _failed),
    )
    app.router.redirect_slashes = False
    return Guard(app, service.clients, service.metrics, PATHS)


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


async def _failed(request: Request, error: Exception) -> Response:
    """Return the response to an error. An unknown one is raised again, for the guard to log."""
    if isinstance(error, HTTPException):
        error = of_starlette(error)
    return (error if isinstance(error, RequestError) else internal()).response()
