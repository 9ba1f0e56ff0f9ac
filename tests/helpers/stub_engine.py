"""An engine without models: it recites a text, and a real accountant is charged for every token."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence

import torch

from adapmixed.mechanisms import ClippedLogPool, PublicOnly
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom
from adapmixed.serving.engine import Prompt

END = 256
VOCAB = 257
MODELS = 2
TEXT = "Grüße: the naïve fox jumps over 3 € and the lazy dog. "


class ByteTokenizer:
    """Bytes as tokens, so that a character may take several. 256 ends a text."""

    chat_template: str | None = "there is one"
    bos_token_id = eos_token_id = None

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode("utf-8"))}

    def __len__(self) -> int:
        return VOCAB

    def decode(self, ids: Sequence[int], **options: object) -> str:
        return bytes(token for token in ids if token != END).decode("utf-8", errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], **options: object) -> str:
        return "".join(f"<{m['role']}> {m['content']}\n" for m in messages)


class StubEngine:
    """Recites `text` after every prompt, and charges for it.

    Args:
        text: recited again and again; every sequence begins with its first byte.
        queries: tokens of the mechanism's plan.
        ends: whether the text ends once it was recited.
        seconds: how long a step takes.
        window: positions of the window.
        batch: largest number of sequences in the batch.

    Attributes:
        go: cleared, it makes steps wait.
        fail: an exception that the next step raises.
        released: number of released tokens.
        clients: names of the keys whose prompts were admitted.
    """

    def __init__(
        self,
        text: str = TEXT,
        queries: int = 100_000,
        *,
        ends: bool = False,
        seconds: float = 0.0,
        window: int = 4096,
        batch: int = 64,
    ) -> None:
        self.mechanism = ClippedLogPool(-0.5, 0.5, queries=queries)
        self.accountant = Accountant(1e-5)
        self.accountant.bind(self.mechanism, MODELS)
        tokens = list(text.encode("utf-8")) + ([END] if ends else [])
        # One token has a probability of almost 1, whatever the members say.
        self._rows = torch.full((len(tokens), VOCAB), -60.0)
        self._rows[torch.arange(len(tokens)), torch.tensor(tokens)] = 0.0
        self._seconds, self._batch, self.window = seconds, batch, window
        self._running: dict[Prompt, int] = {}
        self._rng = SeededRandom(1)
        self.go = threading.Event()
        self.go.set()
        self.fail: BaseException | None = None
        self.released, self.clients = 0, set[str]()

    def room(self, waiting: Sequence[Prompt]) -> int:
        return min(len(waiting), self._batch - len(self._running))

    def admit(self, joining: Sequence[Prompt]) -> None:
        self._running.update((prompt, 0) for prompt in joining)
        assert len(self._running) <= self._batch
        self.clients |= {prompt.client for prompt in joining}

    def step(self) -> list[tuple[Prompt, int]]:
        self.go.wait()
        time.sleep(self._seconds)
        if self.fail is not None:
            raise self.fail
        places = torch.tensor([count % len(self._rows) for count in self._running.values()])
        public = self._rows[places]
        private = public.expand(MODELS, -1, -1)
        from_public = torch.tensor([prompt.public for prompt in self._running])
        tokens = torch.empty(len(from_public), dtype=torch.int64)
        for here, mechanism, payer in (
            (~from_public, self.mechanism, self.accountant),
            (from_public, PublicOnly(), Accountant(1e-5)),
        ):
            if here.any():
                proposal = mechanism.propose(private[:, here], public[here], rng=self._rng)
                payer.charge(proposal)
                tokens[here] = proposal.release().tokens
        self.released += len(tokens)
        for prompt in self._running:
            self._running[prompt] += 1
        return list(zip(self._running, tokens.tolist(), strict=True))

    def leave(self, ended: Collection[Prompt]) -> None:
        for prompt in ended:
            self._running.pop(prompt, None)
