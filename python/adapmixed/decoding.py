"""The loop that answers queries: logits, proposal, charge, then release."""

import logging
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Never

import torch
from torch import Tensor

from adapmixed.arguments import check_parties, check_query
from adapmixed.charging import Charge, answered_before, check_budget, check_unseeded
from adapmixed.mechanisms import Mechanism
from adapmixed.mechanisms.checks import check_count
from adapmixed.misuse import refuse
from adapmixed.privacy import Accountant, Ledger, PerModelFilter
from adapmixed.ranks import Ranks
from adapmixed_ext import RandomSource

if TYPE_CHECKING:
    from adapmixed.models import Decoder, Ensemble

_LOG = logging.getLogger(__name__)
DEFAULT_MEMORY_BYTES = 1 << 30

StopRule = Callable[[Tensor], Tensor]
"""(b, s) int64 released tokens, −1 after an end, to (b,) bool: the sequences that end here."""


def check_window(ensemble: "Ensemble", length: int, max_new_tokens: int, overflow: str) -> None:
    """Refuses prompts of this length whose answers would not fit the model's window."""
    limit = ensemble.max_positions if overflow == "refuse" else None
    # The last token is released but never read back.
    if limit is not None and length + max_new_tokens - 1 > limit:
        raise ValueError(
            f"max_new_tokens must be <= {limit - length + 1} after a prompt of {length} tokens "
            f"(the model's window is {limit}), got {max_new_tokens}"
        )


def stream(
    ensemble: "Ensemble",
    mechanism: Mechanism,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    rng: RandomSource,
    accountant: Accountant,
    ledger: Ledger | None = None,
    model_filter: PerModelFilter | None = None,
    attention_mask: Tensor | None = None,
    stop_token: int | Collection[int] | None = None,
    stop: StopRule | None = None,
    overflow: str = "refuse",
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    **refused: Never,
) -> Iterator[Tensor]:
    """Answers queries one position at a time; every answer is charged before it is yielded.

    Each sequence in the batch is a separate query at every step, so a batch of b costs b queries a
    step. A sequence that has ended is neither charged nor sampled again; its stop token is charged.

    Args:
        ensemble: the models.
        mechanism: how a query is answered.
        input_ids: (b, t) int64 prompts, padded on the left where lengths differ.
        max_new_tokens: ≥ 1.
        rng: source of all randomness.
        accountant: charged with every event.
        ledger: charged with every event besides, durably before the token is drawn; then rng must
            not be seeded. Of several ranks only the one that leads has one.
        model_filter: decides which slots contribute; the accountant then is one for its budget.
        attention_mask: (b, t), 0 at padding.
        stop_token: one token, or several, that end a sequence once released.
        stop: ends sequences by what was released, stop strings for instance; it sees nothing else.
        overflow: "refuse" what does not fit the model's window, or "slide": a sequence that fills
            it forgets its older half, and the rest is read anew.
        memory_bytes: bound on the logits, activations, keys and values that are held until the last
            token; weights and adapters come on top.
        refused: nothing: what other libraries take and would void the guarantee (`misuse.REASONS`).

    Returns:
        iterator of (b,) int64, the next token of each sequence; −1 for those that have ended. The
        arguments are checked and the prompt is read at the call.

    Raises:
        ValueError: an argument of another kind, max_new_tokens < 1, prompt and new tokens exceed
            the model's window or memory_bytes (the message names the bytes needed), a seeded rng
            with a ledger, or greedy decoding, beams, log-probabilities, a temperature ...
        BudgetSpentError: (a ValueError) b max_new_tokens is more than what accountant and ledger
            leave of the mechanism's budget, though answers may end early.
        LedgerError: while iterating: the charge could not be made durable; its token is not drawn.
    """
    refuse(refused)
    check_parties(
        ensemble, mechanism, accountant=accountant, rng=rng, ledger=ledger,
        model_filter=model_filter, overflow=overflow, memory_bytes=memory_bytes,
    )  # fmt: skip
    check_query(input_ids, attention_mask, stop_token, stop)
    check_count("max_new_tokens", max_new_tokens)
    asked = len(input_ids) * max_new_tokens
    check_budget(mechanism, asked)
    if ledger is not None:
        check_unseeded(rng)
    check_window(ensemble, input_ids.shape[-1], max_new_tokens, overflow)
    ensemble.ranks.agree(
        {
            "the mechanism": mechanism,
            "the filter": None if model_filter is None else model_filter.budget,
            "the prompt": (
                input_ids.tolist(),
                None if attention_mask is None else attention_mask.tolist(),
            ),
            "the settings of decoding": (max_new_tokens, stop_token, overflow, memory_bytes),
        }
    )
    if mechanism.budget is not None:
        check_budget(mechanism, asked, answered_before(ensemble.ranks, accountant, ledger))
    decoder = ensemble.decoder(
        input_ids,
        memory_bytes=memory_bytes,
        attention_mask=attention_mask,
        overflow=overflow,
        new_tokens=max_new_tokens - 1,
        beside=mechanism.held_bytes,
    )
    _LOG.info(
        "read %d prompts of %d tokens; %r answers up to %d more of each",
        *input_ids.shape,
        mechanism,
        max_new_tokens,
    )
    return _steps(
        decoder,
        ensemble.ranks,
        mechanism,
        len(input_ids),
        max_new_tokens,
        rng,
        Charge(accountant, ledger, model_filter, ensemble.unverified),
        _stop_rules(stop_token, stop),
    )


def _stop_rules(
    tokens: int | Collection[int] | None, stop: StopRule | None
) -> tuple[StopRule, ...]:
    rules: list[StopRule] = []
    if tokens is not None:
        ends = torch.tensor([tokens] if isinstance(tokens, int) else sorted(tokens))
        rules.append(lambda released: torch.isin(released[:, -1], ends))
    return (*rules, stop) if stop is not None else tuple(rules)


def _steps(
    decoder: "Decoder",
    ranks: Ranks,
    mechanism: Mechanism,
    sequences: int,
    max_new_tokens: int,
    rng: RandomSource,
    charge: Charge,
    stops: tuple[StopRule, ...],
) -> Iterator[Tensor]:
    going = torch.ones(sequences, dtype=torch.bool)
    released = torch.empty(sequences, 0, dtype=torch.int64)
    for step in range(max_new_tokens):
        tokens = torch.full((sequences,), -1, dtype=torch.int64)
        tokens[going] = _answer(decoder, ranks, mechanism, rng, charge)
        yield tokens.clone()
        released = torch.cat([released, tokens[:, None]], dim=1)
        before = going.clone()
        for stop in stops:
            going &= ~stop(released)
        if step + 1 == max_new_tokens or not bool(going.any()):
            _LOG.info("released %d tokens", int((released >= 0).sum()))
            return
        ended = ~going[before]
        if bool(ended.any()):
            decoder.drop(ended)
        decoder.append(tokens[going])


def _answer(
    decoder: "Decoder", ranks: Ranks, mechanism: Mechanism, rng: RandomSource, charge: Charge
) -> Tensor:
    """(b,) tokens. By its end nothing refers to the logits: the next ones take their place."""
    private, public = decoder.logits
    proposal = mechanism.propose(private, public, rng=rng, ranks=ranks)
    answer = proposal.release(charge(proposal)).tokens
    assert answer is not None  # no targets were given
    return answer.cpu()


def generate(
    ensemble: "Ensemble",
    mechanism: Mechanism,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    rng: RandomSource,
    accountant: Accountant,
    ledger: Ledger | None = None,
    model_filter: PerModelFilter | None = None,
    attention_mask: Tensor | None = None,
    stop_token: int | Collection[int] | None = None,
    stop: StopRule | None = None,
    overflow: str = "refuse",
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    **refused: Never,
) -> Tensor:
    """The released tokens of :func:`stream` at once: (b, ≤ max_new_tokens) int64, −1 after an end.

    Arguments and errors as :func:`stream`.
    """
    steps = list(
        stream(
            ensemble,
            mechanism,
            input_ids,
            max_new_tokens=max_new_tokens,
            rng=rng,
            accountant=accountant,
            ledger=ledger,
            model_filter=model_filter,
            attention_mask=attention_mask,
            stop_token=stop_token,
            stop=stop,
            overflow=overflow,
            memory_bytes=memory_bytes,
            **refused,
        )
    )
    return torch.stack(steps, dim=1)
