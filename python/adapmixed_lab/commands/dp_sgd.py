"""``adapmixed-lab dp-sgd``: train one adapter on a private corpus with DP-SGD, the baseline.

Train one adapter on the whole corpus with DP-SGD (opacus), and write its guarantee to
guarantee.json in the same folder. There is no seed, because whoever knows it could subtract the
noise.
"""

import argparse

from adapmixed.commands.options import check_alone, progress_bar
from adapmixed.commands.train import add_training_options, config_of, corpus_of, training_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_training_options(parser, help="new folder for the adapter")
    group = parser.add_argument_group("guarantee")
    group.add_argument("--epsilon", type=float, required=True, help="largest ε of the adapter")
    group.add_argument("--delta", type=float, required=True, help="δ of the guarantee")
    group.add_argument(
        "--clipping-norm",
        type=float,
        default=1.0,
        help="norm to which each block's gradient is clipped (default: 1.0)",
    )
    group.add_argument(
        "--blocks-per-id",
        type=int,
        help="most blocks used of one name, for which as a whole ε then holds (default: all are "
        "used, and ε is for a block)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train and print the guarantee."""
    import torch

    from adapmixed.training.settings import PRESETS, base_facts, documents_of
    from adapmixed_lab.dp_sgd import BATCH_SIZE, EPOCHS, PrivacyTarget, train_dp

    check_alone("dp-sgd")  # each rank would train an adapter, and the guarantee covers one
    corpus = corpus_of(arguments)
    unused = ("steps", "shared_a", "early_stopping", "validation_fraction")
    training = training_of(arguments, *unused)
    facts = base_facts(arguments.base, arguments.revision)
    documents = documents_of(corpus, arguments.base, facts.revision)
    settings: dict[str, object] = {}
    if name := arguments.preset:
        settings = PRESETS[name].settings | {"epochs": EPOCHS[name], "batch_size": BATCH_SIZE}
    config = config_of(facts, facts.adapt(arguments.adapt), settings, training)
    guarantee = train_dp(
        arguments.base,
        documents,
        arguments.output,
        config,
        PrivacyTarget(
            arguments.epsilon, arguments.delta, arguments.clipping_norm, arguments.blocks_per_id
        ),
        unit=corpus.unit,
        base_name=facts.name,
        revision=facts.revision,
        device=arguments.device,
        dtype=getattr(torch, arguments.dtype),
        progress=progress_bar("step"),
    )
    print(f"wrote {arguments.output}")
    print(str(guarantee))
    return 0
