"""The request that vLLM gets in the place of the client's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from adapmixed.serving.errors import encoded
from adapmixed.serving.fields import Asked
from adapmixed.serving.prompts import messages_of

if TYPE_CHECKING:
    from adapmixed.vllm.gate import Front


def forwarded(asked: Asked, given: dict[str, Any], front: Front, salt: str, *, chat: bool) -> bytes:
    """Return the body for vLLM. Each of its fields was checked or is the gate's own.

    Args:
        asked: the checked request.
        given: the client's fields; of a chat its messages are taken.
        front: what the gate knows of the server.
        salt: salt of the client's cached prefixes.
        chat: whether the request is a chat completion.
    """
    query = asked.query
    fields: dict[str, Any] = {
        "model": front.defaults.model,
        "temperature": query.temperature,
        "top_k": min(query.top_k or 0, front.defaults.vocab),
        "stop": list(query.stop),
        "stop_token_ids": sorted(query.stop_tokens),
        "stream": asked.stream,
        "cache_salt": front.mark + salt,  # the scheduler looks for the mark
    }
    if asked.stream:
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if chat:
        messages = messages_of(given["messages"])  # as they were checked
        fields["messages"] = messages
        # vLLM must put BOS unless the template has written it.
        plain = front.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        fields["add_special_tokens"] = [list(prompt) for prompt in query.prompts] != [plain]
        fields["max_completion_tokens"] = query.max_tokens
    else:
        fields["prompt"] = [list(prompt) for prompt in query.prompts]
        fields["max_tokens"] = query.max_tokens
    return encoded(fields)


def with_body(scope: Scope, body: bytes) -> Scope:
    """Return a request's scope for another body, without the client's own headers and query."""
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode("ascii")),
    ]
    return {**scope, "headers": headers, "query_string": b"", "state": {}}
