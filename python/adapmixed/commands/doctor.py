"""``adapmixed doctor``: print versions, build facts and hardware.

Print the installed versions, how the extension was built, and the hardware in use. Nothing is
changed or sent anywhere.
"""

import argparse
import copy
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--base",
        help="public model (folder or hub name): also print which layers members could share",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the facts of a report's environment, and those of the GPUs, as JSON."""
    import torch

    from adapmixed.evaluation.report import environment

    facts: dict[str, object] = {**environment()}
    facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts |= {} if arguments.base is None else sharing(arguments.base)
    print(json.dumps(facts, indent=2, ensure_ascii=False, default=str))
    return 0


def sharing(base: str) -> dict[str, object]:
    """Return what each kind of member shares with this public model.

    Args:
        base: folder or hub name. The model is loaded and tried on a few tokens.

    Raises:
        ValueError: no ensemble can be built on the model.
        OSError: there is no such model.
    """
    from adapmixed.ensemble.ensemble import try_members
    from adapmixed.ensemble.lora import TESTED, block_names, find_trunk, head_name, linear_names
    from adapmixed.ensemble.public_model import check_model, load_base
    from adapmixed.text import end_of_text

    model, tokenizer = load_base(base, None)
    end_of_text(tokenizer, model.config.get_text_config().vocab_size)
    check_model(model, tokenizer)
    kind, blocks = model.config.model_type, block_names(model)
    last = [name for name in linear_names(model) if blocks and name.startswith(f"{blocks[-1]}.")]

    def shared(layers: list[str]) -> object:
        if kind in TESTED:
            return find_trunk(model, layers)
        return try_members(copy.deepcopy(model), tokenizer, layers)  # which the trial changes

    return {
        "base": f"{base} ({kind}, {'tested' if kind in TESTED else 'not tested, tried here'})",
        "head_members_share": shared([head_name(model)]),
        "members_of_the_last_block_share": shared(last),
    }
