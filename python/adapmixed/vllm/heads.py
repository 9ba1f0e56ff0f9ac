"""The private rows of members that adapt the output layer alone, from the last hidden states.

The ensemble's output layer computes them, behind the logits of vLLM's public model. Before anything
is served, they are compared once with those of our own engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.ensemble import LOGIT_SCALES
from adapmixed.ensemble.lora import Logits, LogitsRoom
from adapmixed.limits import active_tokens

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference of two logits, as a part of the row's range."""


class Heads:
    """The output layers of N members.

    Args:
        ensemble: the members and the public model.
        active: K of the active vocabulary; None, or V and more, for all tokens.

    Raises:
        ValueError: members adapt more than the output layer, or the public model caps or scales its
            logits.
    """

    def __init__(self, ensemble: Ensemble, active: int | None) -> None:
        if ensemble.trunk.head is None:
            raise ValueError(
                "ensemble must have members that adapt the output layer alone inside vLLM: train "
                "them with --adapt head, or leave out --device vllm"
            )
        config = ensemble.config.get_text_config()
        scales = {name: getattr(config, name, None) for name in LOGIT_SCALES}
        if not set(scales.values()) <= {None, 1}:
            raise ValueError(f"base must not cap or scale its logits inside vLLM, got {scales}")
        self._ensemble = ensemble
        self._layer, self._zero = ensemble.output_layer, ensemble.zero_members
        self._active = active_tokens(active, ensemble.vocab_size)
        self._room = LogitsRoom()

    def rows(self, hidden: Tensor, public: Tensor) -> Logits:
        """Return the logits of B positions. Their memory is used again once they are dropped.

        Args:
            hidden: (B, d) hidden states, as the output layer gets them.
            public: (B, V) logits of the public model.
        """
        self._layer.active, self._layer.room = self._active, self._room
        result = self._layer.behind(public[None], hidden[None])[0]
        return self._layer.split(result, self._zero)

    def checked_rows(self, hidden: Tensor, public: Tensor, tokens: Sequence[int]) -> Logits:
        """Return `rows` of one position, compared with the ensemble's own after these tokens.

        Raises:
            RuntimeError: rows differ by more than `TOLERANCE`. By how much is private.
        """
        rows = self.rows(hidden, public)
        wanted = self._ensemble.decoder(torch.tensor([tokens]), active=self._active).logits
        private = rows.private, wanted.private
        if rows.tokens is not None and wanted.tokens is not None:  # they may differ in near ties
            here, there = rows.tokens[0], wanted.tokens[0]
            both = here[torch.isin(here, there)]
            private = (
                rows.private[..., torch.searchsorted(here, both)],
                wanted.private[..., torch.searchsorted(there, both)],
            )
        pairs = (rows.public, wanted.public), private
        tolerance = TOLERANCE[public.dtype]
        if not all(_same(first, second, tolerance) for first, second in pairs):
            raise RuntimeError(
                "vLLM must compute the rows of adapmixed's own engine, but they differ: this model "
                "or this setting of vLLM cannot be served: leave out --device vllm"
            )
        return rows


def _same(rows: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Return whether rows are equal; one that overflows is, whatever is in it, as in a query."""
    usable = [~(logits.isnan() | logits.isposinf()).any(-1) for logits in (rows, wanted)]
    if not torch.equal(*usable):
        return False
    rows, wanted = rows[usable[0]], wanted[usable[0]]
    masked = torch.isneginf(wanted)
    if not torch.equal(torch.isneginf(rows), masked):
        return False
    least = wanted.masked_fill(masked, torch.inf).amin(-1, keepdim=True)
    allowed = tolerance * (wanted.amax(-1, keepdim=True) - least)
    difference = (rows.double() - wanted.double()).masked_fill(masked, 0.0).abs()
    return bool((difference <= allowed).all())
