"""The sampler, which draws private tokens for the rows that the scheduler has granted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.outputs import SamplerOutput

from adapmixed.mechanisms import Allowance, ClippedLogPool, Origin
from adapmixed.mechanisms.rows import shaped
from adapmixed.rng import SecureRandom
from adapmixed.vllm.heads import Heads
from adapmixed.vllm.till import Grants

Shape = tuple[float, int | None]


@dataclass(frozen=True, eq=False)
class Step:
    """The rows of one step.

    Attributes:
        hidden: (B, d) hidden states, one row for each request.
        names: the requests of the rows.
        positions: number of tokens that each request has so far.
        drawing: False for a request whose prompt is not read to its end.
        shapes: temperature and top-k of each request.
        grants: the tokens that may be drawn.
    """

    hidden: Tensor
    names: Sequence[str]
    positions: Sequence[int]
    drawing: Sequence[bool]
    shapes: Sequence[Shape]
    grants: Grants


class PrivateSampler(nn.Module):
    """Stands in the place of vLLM's `Sampler`.

    Before `start` it answers vLLM's warm-up from public logits, with vLLM's own sampler. After it,
    every call needs a `Step`, and draws for granted rows alone.

    Args:
        public: vLLM's sampler.
        heads: the members' output layers; None in a process that does not draw.
        mechanism: how tokens are drawn.
        num_models: N.
        origin: the ensemble.
        group: vLLM's group of tensor parallel processes; None for one process.
    """

    def __init__(
        self,
        public: Any,
        heads: Heads | None,
        mechanism: ClippedLogPool,
        num_models: int,
        origin: Origin,
        group: Any,
    ) -> None:
        super().__init__()
        self.logprobs_mode = public.logprobs_mode
        self.topk_topp_sampler = public.topk_topp_sampler
        self._public, self._heads, self._group = [public], heads, group
        self._mechanism, self._origin = mechanism, origin
        self._allowance = Allowance(mechanism, num_models, origin)
        self._rng = SecureRandom()
        self._started = False
        self._step: Step | None = None
        self._drawn: dict[str, int] = {}

    def start(self) -> None:
        """End the warm-up."""
        self._started = True

    def expect(self, step: Step) -> None:
        """Take what the next call needs.

        Raises:
            RuntimeError: a row draws without a grant, or for a position that it has drawn before.
        """
        grants = step.grants
        if grants.origin != self._origin:
            raise RuntimeError("another ensemble was charged: its files have changed")
        granted = dict(grants.positions)
        for name, position, drawing in zip(step.names, step.positions, step.drawing, strict=True):
            if not drawing:
                continue
            if granted.pop(name, None) != position:
                raise RuntimeError("a row has no grant for its next token")
            if position != self._drawn.get(name, 0):
                raise RuntimeError("a row draws another token than the next one")
        if granted:
            raise RuntimeError("a grant has no row")
        self._allowance.add(grants.paid)
        self._step = step

    def forget(self, names: Any) -> None:
        """Forget requests that have ended."""
        for name in names:
            self._drawn.pop(name, None)

    def forward(self, logits: Tensor, sampling_metadata: Any, *others: Any, **more: Any) -> Any:
        """Return one token for each row, as vLLM's `Sampler` does.

        Rows of prompts that are not read to their end get token 0, which vLLM drops.

        Raises:
            RuntimeError: there is no `Step` for these rows, or an option was not refused before.
        """
        step, self._step = self._step, None
        if not self._started:
            return self._public[0](logits, sampling_metadata, *others, **more)
        if step is None or len(step.names) != len(logits) or len(step.hidden) != len(logits):
            raise RuntimeError("rows without a step")
        if sampling_metadata.max_num_logprobs is not None or sampling_metadata.logprob_token_ids:
            raise RuntimeError("log-probabilities are not told")
        # Torch counts no changes of inference tensors, so the mechanism would copy them.
        with torch.inference_mode(False), torch.no_grad():
            tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
            if self._heads is not None:
                for shape, rows in _rows_by_shape(step).items():
                    self._draw(tokens, rows, logits, step.hidden, shape)
        for name, drawing in zip(step.names, step.drawing, strict=True):
            if drawing:
                self._drawn[name] = self._drawn.get(name, 0) + 1
        if self._group is not None:
            tokens = self._group.broadcast(tokens, src=0)
        return SamplerOutput(tokens.to(torch.int32).unsqueeze(-1), logprobs_tensors=None)

    def _draw(
        self, tokens: Tensor, rows: list[int], logits: Tensor, hidden: Tensor, shape: Shape
    ) -> None:
        """Draw the tokens of these rows, which have one temperature and one top-k."""
        assert self._heads is not None
        at = None
        if len(rows) < len(logits):
            at = torch.tensor(rows, device=logits.device)
            hidden, logits = hidden.index_select(0, at), logits.index_select(0, at)
        private, public, chosen = self._heads.rows(hidden, logits)
        temperature, top_k = shape
        ticket = self._mechanism.propose_rows(
            shaped(
                private,
                public,
                temperature=temperature,
                top_k=top_k,
                active=self._origin.active_tokens,
                tokens=chosen,
                spare=True,
            ).answerable(),
            rng=self._rng,
            origin=self._origin,
        )
        self._allowance.charge(ticket)
        drawn = ticket.release().tokens
        assert drawn is not None
        if at is None:
            tokens.copy_(drawn)
        else:
            tokens.index_copy_(0, at, drawn)


def _rows_by_shape(step: Step) -> dict[Shape, list[int]]:
    """Return the rows that draw, by their temperature and top-k."""
    found: dict[Shape, list[int]] = {}
    for row, drawing in enumerate(step.drawing):
        if drawing:
            found.setdefault(step.shapes[row], []).append(row)
    return found
