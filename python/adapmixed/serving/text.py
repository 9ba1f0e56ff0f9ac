"""The text of an answer while its tokens come, up to its first stop string."""

from __future__ import annotations

from typing import Any

from adapmixed.generation.text import Continuation


class AnswerText:
    """Decodes an answer token by token, and holds back text that may begin a stop string.

    Args:
        tokenizer: the public model's tokenizer.
        prompt: token ids of the prompt.
        stop: strings that end the answer. The text ends before the first of them.
    """

    def __init__(self, tokenizer: Any, prompt: tuple[int, ...], stop: tuple[str, ...]) -> None:
        self._decoded = Continuation(tokenizer, list(prompt))
        self._stop = stop
        self._held = ""

    def add(self, token: int) -> tuple[str, bool]:
        """Return the text that is certain now, and whether a stop string has ended the answer."""
        self._held += self._decoded.add(token)
        return self._certain()

    def rest(self) -> tuple[str, bool]:
        """Return the text that was held back, at the end of the answer, and as :meth:`add`."""
        self._held += self._decoded.rest()
        text, stopped = self._certain()
        return (text, True) if stopped else (text + self._held, False)

    def _certain(self) -> tuple[str, bool]:
        found = [place for one in self._stop if (place := self._held.find(one)) >= 0]
        if found:
            return self._held[: min(found)], True
        cut = len(self._held) - self._begun()
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False

    def _begun(self) -> int:
        """Return the length of the longest end of the text that a stop string begins with."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(one.startswith(self._held[-length:]) for one in self._stop):
                return length
        return 0
