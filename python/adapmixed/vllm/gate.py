"""The application in front of vLLM's HTTP server: the first check of every request.

All checks come before a response starts and before a charge. Their order is 401 for a missing key,
400 for a field, 503 for a server that stops or has a full queue, 429 for a spent plan, 503 if
running answers have reserved what is left of it, and 429 for a spent key. A forwarded request holds
checked fields alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from adapmixed.ensemble.vocabulary import check_prompt
from adapmixed.errors import BudgetSpentError
from adapmixed.serving.app import PATHS, _body
from adapmixed.serving.bodies import parsed
from adapmixed.serving.clients import Client, Clients
from adapmixed.serving.errors import (
    JsonResponse,
    RequestError,
    bad_request,
    internal,
    no_model,
    plan_spent,
    queue_full,
    reserved,
    stopping,
)
from adapmixed.serving.fields import Asked, Defaults, asked_of
from adapmixed.serving.guard import Guard
from adapmixed.serving.keys import read_keys
from adapmixed.serving.metrics import Metrics
from adapmixed.serving.query import ReservedError
from adapmixed.serving.usage import Usage, usage_path
from adapmixed.vllm.arguments import check_arguments
from adapmixed.vllm.forward import forwarded, with_body
from adapmixed.vllm.malformed import answer_malformed
from adapmixed.vllm.mark import read_mark
from adapmixed.vllm.options import Options
from adapmixed.vllm.reserved import Reserved, charged_so_far
from adapmixed.vllm.stopping import Stopping
from adapmixed.vllm.used import UsedTokens

_COLDEST, _HOTTEST = 0.01, 2.0
"""The temperatures that vLLM takes as they are. It raises a lower one, and logs that."""
_CHAT = {"/v1/completions": False, "/v1/chat/completions": True}


@dataclass(frozen=True)
class Front:
    """The server behind the gate.

    Attributes:
        options: the plugin's options.
        defaults: the served model's name, and what requests leave out.
        tokenizer: the public model's tokenizer.
        window: largest number of tokens of a prompt and its answer.
        sequences: number of answers that run at the same time.
        mark: the secret that the scheduler asks for.
        clients: the keys; None if callers of this machine need none.
        created: time of the start, in seconds.
    """

    options: Options
    defaults: Defaults
    tokenizer: Any
    window: int
    sequences: int
    mark: str
    clients: Clients | None
    created: int = field(default_factory=lambda: int(time.time()))

    @staticmethod
    def of(state: Any) -> Front:
        """Return the front of a vLLM server.

        Args:
            state: the state of its application.

        Raises:
            ValueError: the server is not one that `adapmixed vllm-config` describes.
        """
        from transformers import AutoTokenizer

        from adapmixed.vllm.checking import check_config

        config, arguments = getattr(state, "vllm_config", None), getattr(state, "args", None)
        if config is None or arguments is None:
            raise ValueError("the gate must stand before a server of vLLM")
        options = check_config(config)
        check_arguments(arguments, options)
        model = config.model_config
        name = model.served_model_name
        defaults = Defaults(
            name if isinstance(name, str) else name[0],
            options.tokens,
            options.max_tokens,
            vocab=int(model.get_vocab_size()),
        )
        return Front(
            options,
            defaults,
            AutoTokenizer.from_pretrained(model.tokenizer),
            int(model.max_model_len),
            int(config.scheduler_config.max_num_seqs),
            read_mark(options.ledger),
            clients_of(options),
        )


def clients_of(options: Options) -> Clients | None:
    """Return the keys in use, with the file of their used tokens; None if there are no keys.

    The file is open although no key may have a limit, for later keys can have one.
    """
    if options.keys is None:
        return None
    return Clients(read_keys(options.keys), Usage(usage_path(options.ledger)))


class Gate:
    """An ASGI application that forwards to vLLM what may be answered, and nothing else.

    Args:
        app: vLLM's application.
        front: returns what the gate knows of it; by default `Front.of` its state.
    """

    def __init__(self, app: ASGIApp, front: Callable[[Any], Front] = Front.of) -> None:
        self._app, self._front = app, front
        self._guard: Guard | None = None
        self._reread: Callable[[], None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Other protocols than HTTP are not served."""
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
        elif scope["type"] == "http":
            await self._opened(scope)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start vLLM's application, or end the server if it cannot be served."""
        try:
            self._opened(scope)
        except Exception as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        if self._reread is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reread)
        answer_malformed(scope["app"].state)
        await self._app(scope, receive, send)

    def _opened(self, scope: Scope) -> Guard:
        """Return what answers. A server that cannot be checked answers nothing: this raises."""
        if self._guard is None:
            state = scope["app"].state
            front = self._front(state)
            if front.clients is not None and front.options.keys is not None:
                self._reread = partial(_reread, front.options.keys, front.clients)
            door = _Door(self._app, front, Stopping(state))
            metrics = cast(Metrics, _Uncounted())  # vLLM has its own figures
            self._guard = Guard(door, front.clients, metrics, PATHS)
        return self._guard


def _reread(path: str, clients: Clients) -> None:
    """Read the file of keys again. If it is bad, the old keys stay."""
    try:
        keys = read_keys(path)
        clients.replace(keys)
    except (ValueError, OSError) as error:
        print(f"The old keys stay: {error}", file=sys.stderr, flush=True)
    else:
        print(f"Keys of {path} were read again: {len(keys)}.", file=sys.stderr, flush=True)


class _Uncounted:
    def requested(self, path: str, status: int) -> None:
        """Do nothing."""


class _Door:
    """Answers requests whose key is known."""

    def __init__(self, app: ASGIApp, front: Front, stop: Stopping) -> None:
        self._app, self._front, self._stop = app, front, stop
        options = front.options
        self._reserved = Reserved(options.queries, partial(charged_so_far, options.ledger))
        self._places = front.sequences + options.waiting
        self._running = 0
        self._turn = asyncio.Lock()
        self._salt = secrets.token_bytes(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in _CHAT and method == "POST":
            await self._answer(scope, receive, send, chat=_CHAT[path])
        elif method in ("GET", "HEAD") and path == "/health":
            await self._app({**with_body(scope, b""), "method": "GET"}, _no_body, send)
        elif method in ("GET", "HEAD") and path.startswith("/v1/models"):
            await JsonResponse(self._models(path))(scope, receive, send)
        elif path in PATHS:
            raise RequestError(405, "this path does not take this method")
        else:
            raise RequestError(404, "this path is not served")

    def _models(self, path: str) -> dict[str, Any]:
        name = self._front.defaults.model
        model = {
            "id": name, "object": "model", "created": self._front.created, "owned_by": "adapmixed",
        }  # fmt: skip
        if path == "/v1/models":
            return {"object": "list", "data": [model]}
        asked = path.removeprefix("/v1/models/")
        if path.startswith("/v1/models/") and asked == name:
            return model
        raise no_model(asked)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, *, chat: bool) -> None:
        client: Client = scope["state"]["client"]
        try:
            body = await _body(Request(scope, receive))
        except ClientDisconnect:
            await Response(status_code=499)(scope, receive, send)
            return
        given, asked = await asyncio.to_thread(self._asked, body, client, chat)
        sequences = len(asked.query.prompts)
        async with self._turn:
            if self._stop.begun:
                raise stopping()
            if self._running + sequences > self._places:
                raise queue_full()
            client.check_rate()
            try:
                end = await asyncio.to_thread(self._reserved.reserve, asked.tokens)
            except BudgetSpentError:
                raise plan_spent(self._reserved.unspent) from None
            except ReservedError:
                raise reserved() from None
            try:
                grant = await asyncio.to_thread(client.admit, asked.tokens)
            except OSError:  # no later answer could be counted either
                end()
                self._stop.fail("the tokens of a key could not be counted durably")
                raise stopping() from None
            except BaseException:
                end()
                raise
            self._running += sequences
        used = UsedTokens(send, asked, self._front.options.block, self._fault)
        left = False

        def leave() -> None:
            nonlocal left
            left = True

        try:
            again = forwarded(asked, given, self._front, self._salted(client), chat=chat)
            await self._app(with_body(scope, again), _once(again, receive, leave), used.send)
        finally:
            self._running -= sequences
            end()
            nothing = not left and (used.status >= 400 or not used.status)
            await asyncio.to_thread(grant.end, 0 if nothing else used.most)
        if used.status >= 400:
            raise self._fault(used.status)

    def _fault(self, status: int = 500) -> RequestError:
        """Return the error in the place of vLLM's own, whose form and text are not OpenAI's."""
        if self._stop.begun:
            return stopping()
        return internal() if status >= 500 else RequestError(status, "vLLM refuses the request")

    def _asked(self, body: bytes, client: Client, chat: bool) -> tuple[dict[str, Any], Asked]:
        front, fields = self._front, parsed(body)
        limit = client.key.max_tokens
        asked = asked_of(fields, front.defaults, front.tokenizer, chat=chat, max_tokens=limit)
        if not _COLDEST <= asked.query.temperature <= _HOTTEST:
            message = (
                f"temperature must be in [{_COLDEST:g}, {_HOTTEST:g}] inside vLLM, got "
                f"{asked.query.temperature:g}"
            )
            raise bad_request("temperature", message)
        for prompt in asked.query.prompts:
            try:
                check_prompt(prompt, front.defaults.vocab, front.tokenizer)
            except ValueError as error:
                raise bad_request("messages" if chat else "prompt", str(error)) from None
            if len(prompt) + asked.query.max_tokens > front.window:
                message = (
                    f"prompt and max_tokens must have at most {front.window} tokens together, got "
                    f"{len(prompt)} and {asked.query.max_tokens}"
                )
                raise bad_request("max_tokens", message, "context_length_exceeded")
        return fields, asked

    def _salted(self, client: Client) -> str:
        """Return the salt of a client's cached prefixes, so that no other one can time them."""
        name = client.key.name.encode("utf-8")
        return hmac.new(self._salt, name, hashlib.sha256).hexdigest()


async def _no_body() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


def _once(body: bytes, receive: Receive, leave: Callable[[], None]) -> Receive:
    """Return a receiver of this body; then it waits for the client to leave, and tells it."""
    told = False

    async def receiver() -> Any:
        nonlocal told
        if not told:
            told = True
            return {"type": "http.request", "body": body, "more_body": False}
        while (message := await receive())["type"] != "http.disconnect":
            pass
        leave()
        return message

    return receiver
