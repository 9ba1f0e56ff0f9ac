"""An ensemble whose logits come from a table, so that chunks and batches cannot change them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from adapmixed.ranks import SINGLE, Ranks


class FakeDecoder:
    """A decoder that records the tokens it is given."""

    def __init__(self, ensemble: FakeEnsemble, ids: Tensor) -> None:
        self._ensemble = ensemble
        self.ids = ids

    @property
    def logits(self) -> tuple[Tensor, Tensor, None]:
        private, public = self._ensemble.logits(self.ids)
        return private[:, :, -1], public[:, -1], None

    def drop(self, ended: Tensor) -> None:
        self.ids = self.ids[~ended]

    def append(self, tokens: Tensor) -> None:
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=1)


class FakeEnsemble:
    """An ensemble whose logits depend on a position's token and index; it takes no padding.

    Attributes:
        chunk: positions of one step of `iter_logits`; a small memory limit is taken for it.
        decoders: all decoders that were made.
    """

    def __init__(
        self,
        models: int = 3,
        vocab: int = 7,
        max_positions: int | None = 512,
        *,
        spread: float = 1.0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_models, self.vocab_size, self.max_positions = models, vocab, max_positions
        self.longest_text, self.beginning = max_positions, ()
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.unverified: tuple[str, ...] = ()
        self.fingerprint: str | None = None
        self.unit: str | None = None
        self.ranks = SINGLE
        self.budgets: list[int] = []
        self.decoders: list[FakeDecoder] = []
        self._token = torch.randn(vocab, vocab, generator=generator)
        self._place = 0.5 * torch.randn(4096, vocab, generator=generator)
        self._members = spread * torch.randn(models, vocab, vocab, generator=generator)

    def logits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        public = self._token[ids] + self._place[: ids.shape[1]]
        return public + self._members[:, ids], public

    def iter_logits(
        self, ids: Tensor, *, memory_bytes: int, room: object = None, active: int | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor, None]]:
        """Yield chunks of ``memory_bytes`` positions."""
        self.budgets.append(memory_bytes)
        private, public = self.logits(ids)
        for start in range(0, ids.shape[1], memory_bytes):
            where = slice(start, min(start + memory_bytes, ids.shape[1]))
            yield where, private[:, :, where], public[:, where], None

    def decoder(
        self,
        ids: Tensor,
        *,
        memory_bytes: int,
        attention_mask: Tensor | None = None,
        new_tokens: int,
        answer_bytes: Any,
        active: int | None = None,
    ) -> FakeDecoder:
        assert attention_mask is None and memory_bytes > 0
        assert new_tokens >= 0
        self.decoders.append(FakeDecoder(self, ids))
        return self.decoders[-1]


class SpreadEnsemble(FakeEnsemble):
    """An ensemble over several processes, each of which answers for its own members."""

    def __init__(self, ranks: Ranks, **settings: Any) -> None:
        super().__init__(models=5, **settings)
        self.ranks = ranks.over(5)

    def logits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        private, public = super().logits(ids)
        return private[self.ranks.part(5)], public
