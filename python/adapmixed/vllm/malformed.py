"""Answers malformed HTTP, which no application sees, with an error in OpenAI's form."""

from __future__ import annotations

from typing import Any

from adapmixed.serving.errors import bad_request, encoded


def answer_malformed(state: Any) -> None:
    """Replace the text that uvicorn sends for what is no HTTP.

    Args:
        state: the state of vLLM's application, whose server does not listen yet.
    """
    server = getattr(state, "server", None)
    if server is not None:
        protocol = server.config.http_protocol_class
        changed = {"send_400_response": _send_400_response}
        server.config.http_protocol_class = type(protocol.__name__, (protocol,), changed)


def _send_400_response(self: Any, msg: str) -> None:
    body = encoded(bad_request(None, "the request must be valid HTTP/1.1").body)
    head = (
        b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\nconnection: close\r\n\r\n"
    )
    self.transport.write(head % len(body) + body)
    self.transport.close()
