"""The layers of N members on one public model, computed in one forward pass.

A LoRA adapter changes a linear layer y = x W + b to

    y_i = x W + b + scale_i (x A_i) B_i,      A_i (in, r_i), B_i (r_i, out).

There are (N + 1) b rows. Block 0 belongs to the public model, block i + 1 to member i. The base
layer is computed once over all rows, and the updates are one batched product.

No operand's shape may depend on the adapters, because matrix libraries choose kernel and order of
summation by shapes, so that a rank would show in the last bits of other members' rows. Therefore
every adapter is padded with zeros to the largest rank that a member may have in this layer, which
is a public constant. Member i has place i, and no update reads another member's rows.

A and B are kept in fp32, whatever the base's dtype, and the update is added in fp32 before rounding
to it, as peft does. `scale` is folded into B.

Below the first adapted layer every member equals the public model. This trunk is computed once for
b sequences, whose rows are then repeated to (N + 1) b. Its end, too, depends on the adapted layers
alone, a public constant (docs/concepts/shared-trunk.md).

In the output layer the public row comes first. Its K likeliest tokens are the columns about which
members speak (docs/theory/numerics.md), so nothing of size N × V exists if K is given. The layer
returns the columns of all members behind the public row of their position. What a model does to its
logits afterwards, such as a cap, it thus does to both. The columns of members that adapt this layer
come from one tensor of all B, read by our own operator (`adapmixed_ext.low_rank`), in which a
member's bits depend on that member alone. Members of decoder blocks have hidden states of their
own, of which the columns are a product with the rows of these tokens.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from adapmixed.ranks import Ranks
from adapmixed_ext.inputs import likeliest
from adapmixed_ext.low_rank import BLOCK, add_low_rank, blocks_of, pack_codes, pack_factors

Update = tuple[Tensor, Tensor]
"""(A, scale * B), of shapes (in, r) and (r, out), fp32."""

# `model_type` of the families in tests/helpers/families.py.
TESTED = frozenset(
    {
        "bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text",
        "gemma3n_text", "gemma4_text", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj",
        "granite", "llama", "mistral", "mpt", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3",
        "stablelm", "starcoder2",
    }
)  # fmt: skip
SHARES_NO_BLOCK = frozenset({"gpt_bigcode", "gemma3n_text", "gemma4_text"})
"""Types of tested models whose code fixes the number of rows before the blocks."""
# Arguments of decoder blocks, grouped by the meaning of their first dimension.
_SEQUENCES = frozenset({"attention_mask", "position_ids", "position_embeddings"})
_HEADS_OF_SEQUENCES = frozenset({"alibi"})  # (b heads, ...)
_NO_SEQUENCES = frozenset({"position_bias", "cache_position"})
# Numbers between the columns of two members: a power of two apart, they share a cache set.
_GAP = 16


@dataclass(frozen=True)
class Adapter:
    """The adapter of one member.

    Attributes:
        updates: maps a layer's full name to its update (A, scale * B), of shapes (in, r) and
            (r, out), fp32.
        base_name: the public model that the adapter's folder names, or None.
        digest: that of `members.member_digests`, of what was read; empty without files.
    """

    updates: Mapping[str, Update]
    base_name: str | None = None
    digest: str = ""

    @property
    def layers(self) -> dict[str, int]:
        """The adapted layers, each with its rank."""
        return {name: int(down.shape[-1]) for name, (down, _) in self.updates.items()}

    @property
    def is_zero(self) -> bool:
        """True if every update is zero, so that the adapted model equals the public one."""
        return all(not up.count_nonzero() for _, up in self.updates.values())


MISSING = Adapter({})
"""Stands for a missing member, which answers as the public model does."""


def merged_layers(members: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return every layer that some member adapts, with the largest of its ranks."""
    merged: dict[str, int] = {}
    for layers in members:
        merged |= {name: max(rank, merged.get(name, 0)) for name, rank in layers.items()}
    return dict(sorted(merged.items()))


class BatchedLoRA(nn.Module):
    """A linear layer with the updates of N members, computed as the module's docstring explains.

    They take 4 N R (in + out) bytes.

    Args:
        base: the adapted layer, `nn.Linear` or GPT-2's `Conv1D`.
        updates: for each member (A, scale * B), of shapes (in, r) and (r, out), or None if the
            member does not adapt this layer.
        rank: R, the largest rank that a member may have here.

    Attributes:
        down: A, (N, in, R) fp32 on the base's device, padded with zeros.
        up: scale * B, (N, R, out) fp32, padded with zeros.
    """

    down: Tensor
    up: Tensor

    def __init__(self, base: nn.Module, updates: Sequence[Update | None], rank: int) -> None:
        super().__init__()
        self.base = base
        size_in, size_out = layer_shape(base)
        device = next(base.parameters()).device
        down = torch.zeros((len(updates), size_in, rank), device=device)
        up = torch.zeros((len(updates), rank, size_out), device=device)
        for member, update in enumerate(updates):
            if update is not None:
                r = update[0].shape[1]
                down[member, :, :r], up[member, :r] = update
        self.register_buffer("down", down)
        self.register_buffer("up", up)

    def forward(self, x: Tensor) -> Tensor:
        """Map ((N + 1) b, ..., in) to ((N + 1) b, ..., out) in the base's dtype."""
        models = len(self.up)
        y: Tensor = self.base(x).contiguous()
        block = x.shape[0] // (models + 1)
        inputs = x[block:].reshape(models, -1, x.shape[-1]).to(torch.float32)
        outputs = y.view(models + 1, -1, y.shape[-1])[1:]
        hidden = torch.matmul(inputs, self.down)
        if outputs.dtype == torch.float32:
            outputs.baddbmm_(hidden, self.up)
        else:  # add before rounding: rounding the update first would add a second error
            outputs.copy_(outputs.float().baddbmm_(hidden, self.up))
        return y


def layer_shape(layer: nn.Module) -> tuple[int, int]:
    """Return (in, out) of an `nn.Linear` or a `Conv1D`.

    Raises:
        ValueError: for any other layer.
    """
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, Conv1D):
        return int(layer.nx), int(layer.nf)
    raise ValueError(f"layer must be nn.Linear or Conv1D, got {type(layer).__name__}")


def linear_names(model: Any) -> tuple[str, ...]:
    """Return the full names of the layers that a LoRA can adapt, in the model's order."""
    kinds = nn.Linear | Conv1D
    return tuple(name for name, module in model.named_modules() if isinstance(module, kinds))


def head_name(model: Any) -> str:
    """Return the full name of the output layer, for instance "lm_head".

    Raises:
        ValueError: if the model has no output layer.
    """
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head:
            return str(name)
    raise ValueError(f"model must have an output layer, {type(model).__name__} has none")


def block_names(model: Any) -> tuple[str, ...]:
    """Return the full names of the decoder blocks from the first to the last.

    The blocks are the only list with as many modules as the configuration has hidden layers. The
    result is empty if there is no such list or more than one.
    """
    depth = model.config.get_text_config().num_hidden_layers
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return tuple(f"{outer[0]}.{i}" for i in range(depth)) if len(outer) == 1 else ()


@dataclass(frozen=True)
class Trunk:
    """The end of the layers that members share with the public model.

    Attributes:
        head: the output layer's name if it alone is adapted, else None.
        blocks: names of the decoder blocks that are computed for every member. Empty if `head` is
            set, or if nothing can be shared and the input itself is repeated.
        depth: number of all decoder blocks; 0 if unknown.
    """

    head: str | None = None
    blocks: tuple[str, ...] = ()
    depth: int = 0

    @property
    def repeats_input(self) -> bool:
        """True if members share nothing, so that every row starts from the token ids."""
        return self.head is None and not self.blocks

    def shares(self, block: int) -> bool:
        """Return whether this block, counted from 0, is computed once for all members."""
        return self.head is not None or block < self.depth - len(self.blocks)

    def __str__(self) -> str:
        if self.head is not None:
            return "all blocks: members adapt the output layer alone"
        shared = self.depth - len(self.blocks)
        if self.repeats_input or shared == 0:
            return "no block: every member computes all of them"
        return f"the first {shared} of {self.depth} blocks"


def find_trunk(model: Any, adapted: Collection[str]) -> Trunk:
    """Return the trunk of members that adapt these layers.

    Models of untested types share no block.

    Args:
        model: the public model, before adapters are stacked on it; it is not changed.
        adapted: full names of the adapted layers.
    """
    head, blocks = head_name(model), block_names(model)
    if set(adapted) == {head}:
        return Trunk(head=head, depth=len(blocks))
    places = [
        [place for place, block in enumerate(blocks) if name.startswith(f"{block}.")]
        for name in adapted
        if name != head
    ]
    if model.config.model_type not in TESTED - SHARES_NO_BLOCK or not all(places or [[]]):
        return Trunk()
    return Trunk(blocks=blocks[min(places)[0] :], depth=len(blocks))


def repeat_at(model: Any, trunk: Trunk, rows: int) -> None:
    """Make the model repeat its b sequences to rows * b at the end of the trunk.

    Args:
        model: the model, which gets hooks.
        trunk: of the model.
        rows: how often sequences are repeated, N + 1.
    """
    for index, name in enumerate(trunk.blocks):
        hook = partial(_repeat_arguments, rows, index == 0)
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)


def _repeat_arguments(
    rows: int, first: bool, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Repeat the arguments of a block, chosen by name: hidden states in the first block alone."""
    signature = inspect.signature(block.forward)
    bound = signature.bind(*args, **kwargs)
    arguments = bound.arguments
    sequences = len(arguments["hidden_states"]) // (1 if first else rows)
    if first:
        arguments["hidden_states"] = arguments["hidden_states"].repeat(rows, 1, 1)
    for name, value in arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            for key, argument in value.items():
                value[key] = _repeated(key, argument, rows, sequences)
        elif name != "hidden_states":
            arguments[name] = _repeated(name, value, rows, sequences)
    return bound.args, bound.kwargs


def _repeated(name: str, value: Any, rows: int, sequences: int) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_repeated(name, part, rows, sequences) for part in value)
    if not isinstance(value, Tensor) or name in _NO_SEQUENCES:
        return value
    length = len(value)
    if name in _SEQUENCES and length in (1, sequences):
        if length < sequences:
            return value  # it is broadcast over all rows
    elif name not in _HEADS_OF_SEQUENCES or length % sequences:
        raise ValueError(
            f"decoder blocks must take known tensors, got {name} of shape {tuple(value.shape)}"
        )
    return value.expand(rows, *value.shape).flatten(0, 1)


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
        short: bool,
    ) -> None:
        super().__init__()
        ups = [None if update is None else update[1] for update in updates]
        short = short or all(up is None or torch.equal(up.bfloat16().float(), up) for up in ups)
        dtype = torch.bfloat16 if short else torch.float32
        self.rank, self.blocks = rank, blocks_of(len(updates))
        self.register_buffer("factors", pack_factors(ups, rank, shape[1], dtype))
        downs = [None if update is None else update[0] for update in updates]
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
            product = torch.bmm(padded, codes.reshape(-1, width, self.rank))
            product = product.view(self.blocks, BLOCK, positions, self.rank).permute(2, 0, 3, 1)
            coefficients = product.contiguous()
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
        masked: Tensor | None,
        ranks: Ranks,
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
        if not self.ranks.single:
            public = self.ranks.same(public)
        self.tokens = tokens = self._chosen(public)
        width = row_width(vocab, None if tokens is None else tokens.shape[1])
        shape = (len(public), vocab + self.num_models * width)
        result = public.new_empty(shape) if self.room is None else self.room.take(shape, public)
        result[:, :vocab] = public
        columns = result[:, vocab:].view(len(public), self.num_models, width).transpose(0, 1)
        columns = columns if tokens is None else columns[..., : tokens.shape[1]]
        hidden = hidden.flatten(-3, -2)
        if self.shared:
            start = public if tokens is None else public.gather(1, tokens)
        else:
            start = self._base_logits(hidden, tokens)
        if self.adapters is None:
            columns.copy_(start)
        else:
            self.adapters.write(start, hidden, tokens, columns)
        return result.view(*logits.shape[:-1], -1)

    def split(self, result: Tensor, zero_members: Sequence[int]) -> Logits:
        """Return the logits in the last pass's result, as views of it.

        Args:
            result: the result, which the model may have capped or scaled.
            zero_members: members whose logits are copied from the public ones.
        """
        tokens, self.tokens = self.tokens, None
        public, rest = result[..., : self.vocab_size], result[..., self.vocab_size :]
        private = rest.view(*rest.shape[:-1], self.num_models, -1).movedim(-2, 0)
        if tokens is not None:
            tokens = tokens.view(*result.shape[:-1], -1)
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

    def _base_logits(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        """Return the base's logits of the members' own hidden states, (N, P, d)."""
        if tokens is None or not isinstance(self.base, nn.Linear):
            every: Tensor = self.base(hidden)
            return every if tokens is None else every.gather(2, tokens.expand(len(every), -1, -1))
        weight, bias = self.base.weight, self.base.bias
        logits = hidden.new_empty((*hidden.shape[:2], tokens.shape[1]))
        for position, chosen in enumerate(tokens):
            torch.matmul(hidden[:, position], weight[chosen].T, out=logits[:, position])
            if bias is not None:
                logits[:, position] += bias[chosen]
        return logits
