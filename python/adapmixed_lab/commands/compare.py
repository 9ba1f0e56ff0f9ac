"""``adapmixed-lab compare``: compare the field's methods and ours at the same ε.

Answer the same tokens with every method, with settings from public numbers alone: the number of
members and of tokens, ε and δ. The table and the figure show probabilities of private models, so
they are for the operator only.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from adapmixed.commands.evaluate import EvaluateOptions
from adapmixed.commands.options import (
    SharedOptions,
    add_options,
    check_alone,
    check_output,
    load_ensemble,
    progress_bar,
    random_source,
)
from adapmixed.files import write_file

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble
    from adapmixed.evaluation import Evaluation
    from adapmixed.mechanisms import Mechanism


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser, SharedOptions, "base ensemble")
    add_options(parser, EvaluateOptions, "text block seed")
    parser.add_argument(
        "--queries", type=int, default=1024, help="tokens that are answered (default: 1024)"
    )
    parser.add_argument(
        "--epsilon", type=float, nargs="+", default=[1.0, 3.0, 10.0],
        help="ε for which settings are made (default: 1 3 10)",
    )  # fmt: skip
    parser.add_argument("--delta", type=float, default=1e-5, help="δ (default: 1e-05)")
    parser.add_argument(
        "--out", type=Path, default=Path("compare.svg"),
        help="PRIVATE: file for the figure, an SVG (default: compare.svg)",
    )  # fmt: skip
    parser.add_argument(
        "--dp-adapter", type=Path, nargs="+", default=[], metavar="FOLDER",
        help="adapters of 'adapmixed-lab dp-sgd' for this δ, on the text of the ensemble",
    )  # fmt: skip
    add_options(parser, SharedOptions, "memory device dtype")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate all methods, print the table and write the figure."""
    check_alone("compare")
    check_output("--out", arguments.out)
    from adapmixed.evaluation import evaluate
    from adapmixed.mechanisms import PublicOnly, Unprotected
    from adapmixed.ranks import SINGLE
    from adapmixed.text import read_text, token_stream
    from adapmixed_lab.baselines import draw, methods, text, trained
    from adapmixed_lab.dp_sgd import read_dp_adapter

    adapters = {folder: read_dp_adapter(folder)[0] for folder in arguments.dp_adapter}
    for stated in adapters.values():
        if stated.delta != arguments.delta:
            raise ValueError(
                f"--dp-adapter must have its ε at δ = {arguments.delta}, got {stated.delta}"
            )
    documents = read_text(arguments.text, name="--text")
    ensemble = load_ensemble(arguments, SINGLE)
    texts = [document.text for document in documents]
    tokens = token_stream(ensemble.tokenizer, texts, ensemble.vocab_size)
    queries = arguments.queries
    mechanisms = methods(arguments.epsilon, arguments.delta, ensemble.num_models, queries)
    update = progress_bar("token")

    def measured(models: Ensemble, group: dict[str, Mechanism]) -> list[Evaluation]:
        return evaluate(
            models,
            tokens,
            group,
            delta=arguments.delta,
            rng=random_source(arguments.seed),
            block=arguments.block,
            queries=queries,
            memory_bytes=arguments.memory,
            active=None,  # members speak about all tokens, as in the papers
            progress=update,
        )

    evaluations = measured(ensemble, mechanisms)
    for folder, stated in adapters.items():
        options = argparse.Namespace(**vars(arguments) | {"ensemble": [folder]})
        pair = {"public": PublicOnly(), "adapter": Unprotected()}
        evaluations += [trained(measured(load_ensemble(options, SINGLE), pair)[1], stated)]
    print(text(evaluations))
    figure = draw(evaluations)
    write_file(arguments.out, f"{figure.svg}\n".encode())
    print(f"wrote {arguments.out}: {figure.caption}")
    return 0
