"""``adapmixed compare``: PRIVATE: show public, private and unprotected continuations side by side.

Continue a prompt with the public model, the mechanism, and the unprotected ensemble, each with the
same random numbers, side by side. (AdaPMixED's screening draws further ones.) Nothing is charged,
and no guarantee covers the output: it is for the operator's eyes alone.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from adapmixed.commands.generate import AnswerOptions
from adapmixed.commands.options import (
    MechanismOptions,
    SharedOptions,
    add_options,
    check_alone,
    load_ensemble,
    mechanism_for,
)

if TYPE_CHECKING:
    from adapmixed.mechanisms import Mechanism

WARNING = (
    "PRIVATE, for your eyes alone. These answers read the private members and are charged to no "
    "ledger: no guarantee covers them. Do not publish them, and choose no settings by them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser, SharedOptions, "base ensemble max_new_tokens temperature top_k active")
    add_options(parser, AnswerOptions, "prompt", required=True)
    add_options(parser, AnswerOptions, "seed")
    add_options(parser, MechanismOptions, title="mechanism and guarantee")
    add_options(parser, SharedOptions, "device dtype")


def run(arguments: argparse.Namespace) -> int:
    """Print the continuations of every prompt in three columns."""
    mechanism = mechanism_for(arguments, max(arguments.max_new_tokens, 1))
    check_alone("compare")
    from adapmixed.evaluation.report import aligned
    from adapmixed.generation import PrivateGenerator
    from adapmixed.mechanisms import PublicOnly, Unprotected
    from adapmixed.privacy import Accountant
    from adapmixed.ranks import SINGLE
    from adapmixed.rng import SeededRandom

    ensemble = load_ensemble(arguments, SINGLE)
    seed = int.from_bytes(os.urandom(8)) if arguments.seed is None else arguments.seed

    def answer(method: Mechanism, prompt: str) -> str:
        budget = arguments.epsilon if method is mechanism else None
        accountant = Accountant(arguments.delta, epsilon=budget, adjacency=arguments.adjacency)
        rng, active = SeededRandom(seed, prompt), arguments.active
        generator = PrivateGenerator(ensemble, method, accountant, rng=rng, active=active)
        (text,) = generator.generate(
            prompt, max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature, top_k=arguments.top_k,
        )  # fmt: skip
        return text

    print(textwrap.fill(WARNING, 88))
    for prompt in arguments.prompt:
        texts = {m.name: answer(m, prompt) for m in (PublicOnly(), mechanism, Unprotected())}
        print(f"\n{prompt!r}\n")
        print(*aligned(_columns(texts), [False] * len(texts)), sep="\n")
    return 0


def _columns(texts: Mapping[str, str]) -> list[Sequence[str]]:
    """Return the titles, and the wrapped lines of the texts next to each other."""
    width = max(20, shutil.get_terminal_size().columns // len(texts) - 2)
    wrapped = [
        [line for part in text.split("\n") for line in textwrap.wrap(part, width) or [""]]
        for text in texts.values()
    ]
    return [tuple(texts), *itertools.zip_longest(*wrapped, fillvalue="")]
