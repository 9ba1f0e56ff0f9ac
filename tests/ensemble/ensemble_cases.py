"""Helpers for tests of ensembles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import POSITIONS, VOCAB
from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.decoder import written_layers
from adapmixed.text import left_padded

Make = Callable[..., list[Path]]
TOKENS = torch.randint(1, VOCAB, (6, POSITIONS), generator=torch.Generator().manual_seed(11))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Change the weights of an adapter in place."""
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    return folder


class Sequences:
    """A decoder of the first tokens of some rows of `TOKENS`, given as lengths by row."""

    def __init__(self, ensemble: Ensemble, lengths: Mapping[int, int], **settings: Any) -> None:
        ids, mask = left_padded([TOKENS[row, :n].tolist() for row, n in lengths.items()])
        self.decoder = ensemble.decoder(ids, attention_mask=mask, **settings)
        self.ensemble, self.lengths = ensemble, dict(lengths)

    def append(self) -> None:
        self.decoder.append(torch.stack([TOKENS[row, n] for row, n in self.lengths.items()]))
        self.lengths = {row: n + 1 for row, n in self.lengths.items()}

    def drop(self, *rows: int) -> None:
        self.decoder.drop(torch.tensor([row in rows for row in self.lengths]))
        self.lengths = {row: n for row, n in self.lengths.items() if row not in rows}

    def join(self, lengths: Mapping[int, int], new: int) -> None:
        joining = Sequences(self.ensemble, lengths, new_tokens=new).decoder
        self.decoder.join(joining)
        assert not written_layers(joining._cache)  # its memory is free
        self.lengths |= lengths

    def check(self, rtol: float) -> None:
        """Check that the logits are those of every sequence alone."""
        for place, (row, n) in enumerate(self.lengths.items()):
            single = self.ensemble.decoder(TOKENS[row : row + 1, :n]).logits[:2]
            for batch, expected in zip(self.decoder.logits[:2], single, strict=True):
                atol = rtol * float(expected.abs().max())
                logits = batch[..., place, :]
                torch.testing.assert_close(logits, expected[..., 0, :], rtol=0, atol=atol)
