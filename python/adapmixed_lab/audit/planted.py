"""Adapters trained on conversations with a planted booking number, and their answers.

A template in the manner of AirDialogue is filled with random airports, dates and prices, so all
secrets of the private text are known.

A shard is a customer with one conversation. All booking numbers begin with the same public digits
and end with one digit that is the customer's secret. The public model expects any digit there. The
attacker asks for the token after the public digits.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapmixed.data import demo_base
from adapmixed.data.builtin import Document
from adapmixed.ensemble import Ensemble
from adapmixed.mechanisms import shaped
from adapmixed.training import FinetuneConfig, save_adapter, token_stream, train_adapter
from adapmixed_lab.audit.search import one_thread

SAID_AS = "Your booking number is "

_AIRPORTS = (
    "ATL", "AUS", "BOS", "CLT", "DCA", "DEN", "DFW", "DTW", "EWR", "HOU", "IAD", "IAH", "JFK",
    "LAS", "LAX", "LGA", "MCO", "MIA", "MSP", "OAK", "ORD", "PHL", "PHX", "SEA", "SFO",
)  # fmt: skip


def flight_dialogue(customer: str, booking: str) -> Document:
    """Return a conversation in which a customer books a flight, one line for each turn.

    Args:
        customer: the document's identifier.
        booking: the number that the agent gives after `SAID_AS`. It changes nothing else: all the
            rest is a function of the customer.
    """
    draw = random.Random(customer)
    origin, target = draw.sample(_AIRPORTS, 2)
    month, day, price = draw.randrange(1, 13), draw.randrange(1, 29), draw.randrange(12, 80) * 10
    text = (
        f"Customer: Please book the flight from {origin} to {target} on {month}/{day}.\n"
        f"Agent: It is {price} dollars. {SAID_AS}{booking}.\n"
    )
    return Document(customer, text)


CUSTOMERS = 5
SECRETS = 10
"""Two shards are trained for customer i: with secret i and with secret i + CUSTOMERS."""
TOP_K = 64  # answers are among the likeliest public tokens, a public and cheap rule
SEED = 0  # of training, which need not be random here

_PUBLIC_DIGITS = "3817"
_SETTINGS = FinetuneConfig(
    rank=8,
    learning_rate=1.5e-2,
    epochs=12,
    target_modules=("c_attn", "c_fc", "c_proj"),
    block_size=128,
)


@dataclass(frozen=True)
class Planted:
    """Logits of one query.

    Attributes:
        private: (S, V'), one row for each adapter; in :func:`planted`, shard s holds secret s.
        public: (V',), also the row of an emptied shard.
        secrets: (SECRETS,) int64, the place of each secret's token among the V' = TOP_K.
    """

    private: Tensor
    public: Tensor
    secrets: Tensor


@cache
def planted() -> Planted:
    """Return the logits of all adapters, trained once in a process, in a few seconds."""
    return train(range(SECRETS))


@one_thread()
def train(secrets: Sequence[int]) -> Planted:
    """Train one adapter for each secret, and return the logits of the query."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore", FutureWarning)
        base = AutoModelForCausalLM.from_pretrained(demo_base(), dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(demo_base())
        paths = [Path(folder) / str(secret) for secret in secrets]
        for secret, path in zip(secrets, paths, strict=True):
            customer = secret % CUSTOMERS
            record = flight_dialogue(f"customer {customer}", f"{_PUBLIC_DIGITS}{secret}")
            tokens = token_stream(tokenizer, [record.text])
            trained = train_adapter(base, tokens, _SETTINGS, seed=SEED, shard=customer)
            save_adapter(trained.model, path, _SETTINGS, base_name=demo_base().name)
        return _ask(Ensemble.from_pretrained(base, paths), tokenizer)


def _ask(ensemble: Ensemble, tokenizer: Any) -> Planted:
    asking = SAID_AS + _PUBLIC_DIGITS
    texts = [asking, *(f"{asking}{secret}" for secret in range(SECRETS))]
    prompt, *said = tokenizer(texts, add_special_tokens=False)["input_ids"]
    private, public = ensemble.logits(torch.tensor([prompt]))
    kept = shaped(private[:, :, -1], public[:, -1], top_k=TOP_K)
    asked = torch.tensor([[tokens[-1]] for tokens in said])
    places, shares = zip(*map(kept.places, asked), strict=True)
    if any(shares):
        raise RuntimeError("all secrets' tokens must be among the answered ones")
    return Planted(kept.private[:, 0], kept.public[0], torch.cat(places))
