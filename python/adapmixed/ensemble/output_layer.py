"""The output layer: the public model's logits, and the members' on the active vocabulary.

The public row comes first. Its K likeliest tokens are the columns about which members speak
(docs/theory/numerics.md), so nothing of size N × V exists if K is given. The layer returns the
columns of all members behind the public row of their position. What a model does to its logits
afterwards, such as a cap, it thus does to both.

A member that adapts the output layer adds scale_i (h A_i) B_i. Its columns come from one tensor of
all B, read by our own operator (`adapmixed_ext.low_rank`), in which a member's bits depend on that
member alone. Members of decoder blocks have hidden states of their own, of which the columns are a
product with the rows of these tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adapmixed.ensemble.lora import Update
from adapmixed.ranks import ALONE, Ranks
from adapmixed_ext.inputs import likeliest
from adapmixed_ext.low_rank import BLOCK, add_low_rank, blocks_of, pack_codes, pack_factors

_GAP = (
    16  # numbers between the columns of two members: a power of two apart, they share a cache set
)


class Logits(NamedTuple):
    """The logits of some positions.

    Attributes:
        private: (N, ..., K), of the members of this process.
        public: (..., V).
        tokens: (..., K) int64, the ids of the private columns, ascending; None if K = V.
    """

    private: Tensor
    public: Tensor
    tokens: Tensor | None


def row_width(vocab_size: int, active: int | None) -> int:
    """Return the numbers from one member's columns to the next: V, or K and a few."""
    return vocab_size if active is None else active + _GAP


class LogitsRoom:
    """One block of memory for logits, used again once nobody else refers to it.

    Fresh pages cost more time than computing the numbers in them.

    While a caller holds the tensor, a view or an array over it, its numbers stay valid and the next
    call gets new memory. A storage (`Tensor.untyped_storage()`) held alone does not protect them.
    """

    def __init__(self) -> None:
        self._block: Tensor | None = None

    def release(self, size: int) -> None:
        """Free the block if it holds more than `size` numbers."""
        if self._block is not None and len(self._block) > size:
            self._block = None

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return uninitialised memory of this shape, with the dtype and device of `like`."""
        size = math.prod(shape)
        block = self._block
        fits = block is not None and block.dtype == like.dtype and block.device == like.device
        if block is None or not fits or len(block) < size or not _users(block) <= _OURS < math.inf:
            self._block = block = None  # free the old block before allocating the new one
            self._block = block = like.new_empty(size)
        return block[:size].view(*shape)


def _users(block: Tensor) -> float:
    """Return the reference count of a tensor's storage."""
    return _use_count(block.untyped_storage()._cdata)


_use_count: Callable[[int], float] = getattr(torch._C, "_storage_Use_Count", lambda _: math.inf)
_OURS = _users(torch.empty(1))  # that of a storage that nobody else holds


class HeadAdapters(nn.Module):
    """The adapters of the output layer of N members.

    They take 4 d r N' + s V r N' bytes, for N' members with the padding to whole blocks of 16, and
    s = 2 bytes if the model is in bfloat16 or all B are exact in it, else 4.

    Args:
        updates: for each member (A, scale * B), of shapes (d, r_i) and (r_i, V), or None.
        shape: (d, V).
        rank: the largest rank that a member may have.
        short: whether the model is in bfloat16.
    """

    codes: Tensor
    factors: Tensor

    def __init__(
        self,
        updates: Sequence[Update | None],
        shape: tuple[int, int],
        rank: int,
        short: bool = False,
    ) -> None:
        super().__init__()
        ups = [None if one is None else one[1] for one in updates]
        short = short or all(one is None or torch.equal(one.bfloat16().float(), one) for one in ups)
        dtype = torch.bfloat16 if short else torch.float32
        self.rank, self.blocks = rank, blocks_of(len(updates))
        self.register_buffer("factors", pack_factors(ups, rank, shape[1], dtype))
        downs = [None if one is None else one[0] for one in updates]
        self.register_buffer("codes", pack_codes(downs, rank, shape[0]))

    def write(self, start: Tensor, hidden: Tensor, tokens: Tensor | None, columns: Tensor) -> None:
        """Write the members' columns.

        Args:
            start: (P, K), or (N, P, K) if members have their own hidden states.
            hidden: (P, d) or (N, P, d).
            tokens: (P, K), or None for all V tokens.
            columns: (N, P, K), the result.
        """
        if hidden.dim() == 2:
            coefficients = hidden.float() @ self.codes
        else:
            models, positions, width = hidden.shape
            padded = hidden.new_zeros((self.blocks * BLOCK, positions, width), dtype=torch.float32)
            padded[:models] = hidden
            codes = self.codes.view(width, self.blocks, self.rank, BLOCK).permute(1, 3, 0, 2)
            own = torch.bmm(padded, codes.reshape(-1, width, self.rank))
            own = own.view(self.blocks, BLOCK, positions, self.rank).permute(2, 0, 3, 1)
            coefficients = own.contiguous()
        shape = (-1, self.blocks, self.rank, BLOCK)
        exact = columns if columns.dtype == torch.float32 else columns.float()
        add_low_rank(start.float(), coefficients.view(shape), self.factors, exact, tokens)
        if exact is not columns:
            columns.copy_(exact)


class OutputLayer(nn.Module):
    """The output layer of an ensemble.

    Args:
        base: the public model's output layer.
        num_models: N of this process.
        vocab_size: V.
        adapters: those of its members; None if they do not adapt this layer.
        shared: whether members share the hidden states with the public model.
        masked: (m,) ids that stand for no token; None if there are none.
        ranks: the processes that hold the other members. All take the main process's public row.

    Attributes:
        active: K, or None for all V tokens; set for each pass, as are the next two.
        room: the memory that results are written to; None for new memory in every pass.
        tokens: the tokens of the last pass, (P, K), until it is `split`; None for all.
    """

    def __init__(
        self,
        base: nn.Module,
        num_models: int,
        vocab_size: int,
        adapters: HeadAdapters | None,
        *,
        shared: bool,
        masked: Tensor | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.base, self.adapters = base, adapters
        self.num_models, self.vocab_size, self.shared = num_models, vocab_size, shared
        self.masked, self.ranks = masked, ranks
        self.active: int | None = None
        self.room: LogitsRoom | None = None
        self.tokens: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, t, d), or ((N + 1) b, t, d) if nothing is shared, to (b, t, V + N columns)."""
        if self.shared:
            return self.behind(self.base(x), x)
        whole = x.view(self.num_models + 1, -1, *x.shape[1:])
        return self.behind(self.base(whole[0]), whole[1:])

    def behind(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Return the public logits and behind them the members' columns, (b, t, V + N columns).

        Args:
            logits: (b, t, V), of the public model.
            hidden: the members' hidden states, (b, t, d) if they share them, else (N, b, t, d).
        """
        vocab = logits.shape[-1]
        public = logits.reshape(-1, vocab)
        if not self.ranks.alone:
            public = self.ranks.same(public)
        self.tokens = tokens = self._chosen(public)
        width = row_width(vocab, None if tokens is None else tokens.shape[1])
        shape = (len(public), vocab + self.num_models * width)
        found = public.new_empty(shape) if self.room is None else self.room.take(shape, public)
        found[:, :vocab] = public
        columns = found[:, vocab:].view(len(public), self.num_models, width).transpose(0, 1)
        columns = columns if tokens is None else columns[..., : tokens.shape[1]]
        hidden = hidden.flatten(-3, -2)
        if self.shared:
            start = public if tokens is None else public.gather(1, tokens)
        else:
            start = self._own(hidden, tokens)
        if self.adapters is None:
            columns.copy_(start)
        else:
            self.adapters.write(start, hidden, tokens, columns)
        return found.view(*logits.shape[:-1], -1)

    def split(self, found: Tensor, zero_members: Sequence[int]) -> Logits:
        """Return the logits in the last pass's result, as views of it.

        Args:
            found: the result, which the model may have capped or scaled.
            zero_members: members whose logits are copied from the public ones.
        """
        tokens, self.tokens = self.tokens, None
        public, rest = found[..., : self.vocab_size], found[..., self.vocab_size :]
        private = rest.view(*rest.shape[:-1], self.num_models, -1).movedim(-2, 0)
        if tokens is not None:
            tokens = tokens.view(*found.shape[:-1], -1)
            private = private[..., : tokens.shape[-1]]
        if self.masked is not None:
            public.index_fill_(-1, self.masked, -torch.inf)
            if tokens is None:
                private.index_fill_(-1, self.masked, -torch.inf)
            elif tokens.shape[-1] > self.vocab_size - len(self.masked):
                private.masked_fill_(torch.isin(tokens, self.masked), -torch.inf)
        columns = public if tokens is None else public.gather(-1, tokens)
        for member in zero_members:
            private[member].copy_(columns)
        return Logits(private, public, tokens)

    def _chosen(self, public: Tensor) -> Tensor | None:
        """Return the active vocabulary of these rows; None if it is all tokens."""
        if self.active is None:
            return None
        if self.masked is not None:
            public = public.index_fill(1, self.masked, -torch.inf)
        return likeliest(public, self.active)

    def _own(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        """Return the base's logits of the members' own hidden states, (N, P, d)."""
        if tokens is None or not isinstance(self.base, nn.Linear):
            every: Tensor = self.base(hidden)
            return every if tokens is None else every.gather(2, tokens.expand(len(every), -1, -1))
        weight, bias = self.base.weight, self.base.bias
        found = hidden.new_empty((*hidden.shape[:2], tokens.shape[1]))
        for position, chosen in enumerate(tokens):
            torch.matmul(hidden[:, position], weight[chosen].T, out=found[:, position])
            if bias is not None:
                found[:, position] += bias[chosen]
        return found
