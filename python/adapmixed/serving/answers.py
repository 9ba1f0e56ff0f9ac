"""Answers: one thread draws their tokens, and the event loop sends them in OpenAI's form.

Answers join and leave the engine's batch between two tokens.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adapmixed.serving.admission import Admission
from adapmixed.serving.engine import MOST_WAITING, Engine, Prompt
from adapmixed.serving.errors import (
    RequestError,
    encoded,
    internal,
    json_response,
    loggable,
    queue_full,
    stopping,
)
from adapmixed.serving.fields import Query, ServedModel
from adapmixed.serving.metrics import Metrics
from adapmixed.text import AnswerText

_LOG = logging.getLogger(__name__)
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


class Reply:
    """The answer to a query, whole or as server-sent events, as an ASGI application.

    It takes tokens in the engine's thread. The rest is the event loop's.

    Args:
        query: the request, which says whether the public model answers it alone.
        admission: has reserved its tokens. What is left of them is free after the last token.
        metrics: the operator's figures.
        model: the served model.

    Attributes:
        query: as given.
        cancelled: whether no more tokens are drawn or delivered.
    """

    def __init__(
        self, query: Query, admission: Admission, metrics: Metrics, model: ServedModel
    ) -> None:
        self.query, self._admission, self._metrics = query, admission, metrics
        ends = query.stop, model.end_tokens | query.stop_tokens
        self._texts = {
            prompt: AnswerText(model.tokenizer, prompt.tokens, *ends, prompt.max_tokens)
            for prompt in query.prompts
        }
        self.cancelled, self._released, self._reserved = False, 0, query.tokens
        self._loop = asyncio.get_running_loop()
        # The index of a prompt, text, and "stop" or "length" at its end; None: the engine stopped.
        self._pieces: asyncio.Queue[tuple[int, str, str | None] | None] = asyncio.Queue()
        kind = "chat.completion.chunk" if query.stream else "chat.completion"
        self._head = {
            "id": f"{'chatcmpl' if query.chat else 'cmpl'}-{secrets.token_hex(16)}",
            "object": kind if query.chat else "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        if query.public:
            self._head["system_fingerprint"] = "public-model"

    def add(self, prompt: Prompt, token: int) -> bool:
        """Take a token that was released; return whether it ends the answer to its prompt."""
        if not prompt.public:
            self._admission.charged()
            self._reserved -= 1
        self._released += 1
        text, finish = self._texts[prompt].add(token)
        if finish is not None:  # a client that sees it may ask for what is free again
            self.end(prompt)
        if not self.cancelled:
            self._metrics.released.inc()
            self._deliver((self.query.prompts.index(prompt), text, finish))
        return finish is not None

    def end(self, prompt: Prompt) -> None:
        """Take no more tokens for a prompt."""
        del self._texts[prompt]
        if not self._texts:
            self._free()

    def stopped(self) -> None:
        """Take no more tokens, because the engine has stopped."""
        self._free()
        if not self.cancelled:
            self._deliver(None)

    def _free(self) -> None:
        unused, self._reserved = self._reserved, 0
        self._admission.free(unused, self.query.prompts[0].client)

    def _deliver(self, piece: tuple[int, str, str | None] | None) -> None:
        with suppress(RuntimeError):  # the event loop has ended, so nobody waits for this piece
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def _delivered(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """Yield the pieces of all prompts as they are released.

        Raises:
            RequestError: 503: the engine has stopped. All released tokens were charged.
        """
        left = len(self.query.prompts)
        while left:
            piece = await self._pieces.get()
            if piece is None:
                raise stopping(charged=self._released > 0)
            left -= piece[2] is not None
            yield piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, and end it if the client leaves or stops reading.

        Raises:
            RequestError: the engine has stopped before a whole answer was complete.
        """

        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        answer = self._stream(send) if self.query.stream else self._whole()
        answering, leaving = asyncio.create_task(answer), asyncio.create_task(left())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.cancelled = True
            leaving.cancel()
            gone = answering.cancel()
        if not gone and (whole := answering.result()) is not None:
            await whole(scope, receive, send)

    async def _whole(self) -> Response:
        """Wait for the whole answer and return it."""
        texts = [""] * len(self.query.prompts)
        finishes: list[str | None] = [None] * len(texts)
        async for index, text, finish in self._delivered():
            texts[index] += text
            finishes[index] = finish
        choices = []
        for index, text in enumerate(texts):
            message = {"role": "assistant", "content": text, "refusal": None}
            body = {"message": message} if self.query.chat else {"text": text}
            choices.append(_choice(index, body, finishes[index]))
        return json_response({**self._head, "choices": choices, "usage": self._usage()})

    async def _stream(self, send: Send) -> None:
        """Send every piece as it is released.

        An error is an event, too, and the stream then ends without "[DONE]".
        """
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        async for part in self._events():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            if self.query.chat:
                yield self._event(0, {"delta": {"role": "assistant", "content": ""}}, None)
            async for index, text, finish in self._delivered():
                for body, end in self._bodies(text, finish):
                    yield self._event(index, body, end)
            if self.query.include_usage:
                yield _event({**self._head, "choices": [], "usage": self._usage()})
            yield b"data: [DONE]\n\n"
        except RequestError as error:
            yield _event(error.body)
        except Exception as error:
            _LOG.error("a stream has failed: %s", loggable(error))
            yield _event(internal().body)

    def _bodies(self, text: str, finish: str | None) -> list[tuple[dict[str, Any], str | None]]:
        """Return what the events for a piece tell; none if it has no text and ends nothing.

        It has none if its token ends inside a character, or may begin a stop string.
        """
        if not self.query.chat:
            return [({"text": text}, finish)] if text or finish else []
        bodies: list[tuple[dict[str, Any], str | None]] = []
        if text:
            bodies.append(({"delta": {"content": text}}, None))
        return [*bodies, ({"delta": {}}, finish)] if finish else bodies

    def _event(self, index: int, body: dict[str, Any], finish: str | None) -> bytes:
        usage = {"usage": None} if self.query.include_usage else {}
        return _event({**self._head, "choices": [_choice(index, body, finish)], **usage})

    def _usage(self) -> dict[str, int]:
        tokens, released = sum(len(prompt.tokens) for prompt in self.query.prompts), self._released
        return {
            "prompt_tokens": tokens,
            "completion_tokens": released,
            "total_tokens": tokens + released,
        }


def _choice(index: int, body: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": index, **body, "logprobs": None, "finish_reason": finish}


def _event(content: Any) -> bytes:
    """Return a server-sent event with a value as JSON."""
    return b"data: " + encoded(content) + b"\n\n"


class Scheduler:
    """A queue of prompts, and the thread that runs the engine.

    Args:
        engine: used by this thread alone.

    Attributes:
        ended: True if nothing more is answered.
        failed: True if that is because of an error.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._waiting: dict[Prompt, Reply] = {}
        self._running: dict[Prompt, Reply] = {}
        self._deadline: float | None = None  # set by `finish`
        self.ended = self.failed = False
        self._thread = threading.Thread(target=self._run, name="adapmixed-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Number of sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of sequences in the queue."""
        return len(self._waiting)

    @property
    def stopped(self) -> bool:
        """True if no more queries are taken."""
        return self.ended or self._deadline is not None

    def check_room(self, sequences: int) -> None:
        """Check that so many more sequences may wait. Any thread may call this.

        Raises:
            RequestError: 503: too many wait already, or no more queries are taken.
        """
        if self.stopped:
            raise stopping()
        if len(self._waiting) + sequences > MOST_WAITING:
            raise queue_full()

    def submit(self, answer: Reply) -> None:
        """Queue the prompts of a query that passed `check_room`. Any thread may call this.

        Tokens are added until every prompt is answered, or the answer is told that the engine has
        stopped.

        Raises:
            RequestError: 503: no more queries are taken. The tokens are still reserved.
        """
        with self._changed:
            if self.stopped:
                raise stopping()
            self._waiting |= dict.fromkeys(answer.query.prompts, answer)
            self._changed.notify()

    def finish(self, seconds: float) -> None:
        """Take no more queries, and finish those that were taken for up to so many seconds.

        This returns at once. Of several deadlines the earliest holds.
        """
        at = time.monotonic() + seconds
        with self._changed:
            self._deadline = at if self._deadline is None else min(at, self._deadline)
            self._changed.notify()

    def stop(self) -> None:
        """End every answer, and wait until the engine's thread has ended."""
        self.finish(0.0)
        self._thread.join()

    def fail(self, reason: str) -> None:
        """End the engine because something else has failed; every answer ends with an error."""
        _LOG.error("the server answers no more: %s", reason)
        self.failed = True
        self.finish(0.0)

    def _run(self) -> None:
        """Run the engine until it is stopped or fails; then end every answer."""
        try:
            while self._wait():
                self._drop_cancelled()
                self._admit()
                if self._running:
                    self._step()
        except BaseException as error:  # also what would end the thread alone, without a word
            self.failed = True
            _LOG.error("the engine has failed and answers no more: %s", loggable(error))
        finally:
            with self._changed:
                self.ended = True
                left = [*self._running.values(), *self._waiting.values()]
                self._waiting.clear()
            self._running.clear()
            for answer in dict.fromkeys(left):
                answer.stopped()

    def _wait(self) -> bool:
        """Wait until there is something to do. Return False once the engine must stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._running or self._waiting or self.stopped)
            if self._deadline is None:
                return True
            return bool(self._running or self._waiting) and time.monotonic() < self._deadline

    def _drop_cancelled(self) -> None:
        """Let the sequences of clients that have left leave the queue and the batch."""
        with self._changed:
            held = self._running | self._waiting
            gone = {prompt: answer for prompt, answer in held.items() if answer.cancelled}
            for prompt in gone:
                self._waiting.pop(prompt, None)
        for prompt, answer in gone.items():
            answer.end(prompt)
        self._leave([prompt for prompt in gone if prompt in self._running])

    def _admit(self) -> None:
        """Let waiting sequences join the batch, as many as the engine has room for."""
        with self._changed:
            waiting = list(self._waiting)
        room = self._engine.room(waiting) if waiting else 0
        if waiting and not room and not self._running:
            raise RuntimeError("the engine has no room for a sequence that it could answer alone")
        if room:
            with self._changed:
                self._running |= {prompt: self._waiting.pop(prompt) for prompt in waiting[:room]}
            self._engine.admit(waiting[:room])

    def _step(self) -> None:
        """Release one token of every sequence, and let those leave that end with it."""
        released = self._engine.step()
        self._leave([prompt for prompt, t in released if self._running[prompt].add(prompt, t)])

    def _leave(self, prompts: Collection[Prompt]) -> None:
        """Let sequences leave the batch."""
        if prompts:
            self._engine.leave(prompts)
            for prompt in prompts:
                del self._running[prompt]
