"""A query to the server, and the pieces of text that answer it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from adapmixed.serving.engine import Prompt


class StoppedError(RuntimeError):
    """The engine has stopped, so this answer has no more tokens. All released ones were charged."""


@dataclass(frozen=True)
class Query:
    """The question of a client, checked by `serving.fields` and read by a tokenizer.

    Attributes:
        prompts: every prompt becomes a sequence of its own. All have the same settings.
        stop: strings that end an answer. They are charged, but not part of its text.
        stop_tokens: tokens that end an answer, as such strings do.
        chat: whether it is a chat completion.
        stream: whether every piece of text is sent at once.
        include_usage: whether a stream ends with the number of tokens.
    """

    prompts: tuple[Prompt, ...]
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    chat: bool = False
    stream: bool = False
    include_usage: bool = False

    @property
    def tokens(self) -> int:
        """The largest number of tokens of all answers together."""
        return sum(prompt.max_tokens for prompt in self.prompts)

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts together."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    @property
    def public(self) -> bool:
        """Whether the public model answers alone, which costs nothing."""
        return all(prompt.public for prompt in self.prompts)

    def of_public(self) -> Query:
        """Return this question to the public model alone."""
        return replace(self, prompts=tuple(replace(one, public=True) for one in self.prompts))


@dataclass(frozen=True)
class Piece:
    """Text that one released token adds to an answer.

    Attributes:
        index: number of the prompt that is answered.
        text: the text; "" if the token ends inside a character, or may begin a stop string.
        finish: "stop" or "length" with the last piece of this prompt, else None.
    """

    index: int
    text: str
    finish: str | None = None
