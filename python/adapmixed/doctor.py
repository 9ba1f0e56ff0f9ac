"""``adapmixed doctor``: installed versions, the build, the hardware, and what a model can share."""

import platform
from importlib import metadata

TESTED_TRANSFORMERS = ("5.23", "5.24")
"""Minor versions of transformers that the library was tested with; constraints.txt has one."""


def report_lines() -> list[str]:
    """Return one ``name: value`` line per fact, without changing or sending anything."""
    import torch

    import adapmixed
    import adapmixed_ext

    build = adapmixed_ext.build_info()
    lines = [
        f"adapmixed: {adapmixed.__version__}",
        f"python: {platform.python_version()} on {platform.system()} {platform.machine()}",
    ]
    for name in ("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy"):
        lines.append(f"{name}: {metadata.version(name)}{_tested(name)}")
    lines += [
        f"compiler: {build['compiler']}",
        f"instruction set: {build['instruction_set']}",
        f"threads: {torch.get_num_threads()}",
        f"CUDA kernels: {'built' if build['cuda'] else 'not built'}",
        f"GPU: {_gpu()}",
        "randomness: ChaCha20, key from the operating system (os.urandom); "
        "--seed replaces it in evaluations",
    ]
    return lines


def sharing_lines(base: str) -> list[str]:
    """Return one line for each kind of member with what it shares with this public model.

    Args:
        base: folder or hub name. The model is loaded and tried on a few tokens.

    Raises:
        ValueError: no ensemble can be built on the model.
        OSError: there is no such model.
    """
    from adapmixed.ensemble.ensemble import try_members
    from adapmixed.ensemble.layers import block_names, head_name, linear_names
    from adapmixed.ensemble.public_model import load_base
    from adapmixed.ensemble.support import TESTED, check_model
    from adapmixed.ensemble.trunk import find_trunk
    from adapmixed.ensemble.vocabulary import end_of_text

    model, tokenizer = load_base(base, None)
    end_of_text(tokenizer, model.config.get_text_config().vocab_size)
    check_model(model, tokenizer)
    kind = model.config.model_type
    lines = [f"base: {base} ({kind}, {'tested' if kind in TESTED else 'not tested, tried here'})"]
    lines.append(f"head members share {find_trunk(model, [head_name(model)])}")
    blocks = block_names(model)
    last = [name for name in linear_names(model) if blocks and name.startswith(f"{blocks[-1]}.")]
    lines.append(f"members of the last block share {find_trunk(model, last)}")
    try_members(model, tokenizer, [head_name(model)])  # raises if the model does not fit
    return lines


def _tested(name: str) -> str:
    """Return a phrase that says whether the transformers found is tested; "" for the others."""
    if name != "transformers":
        return ""
    minor = ".".join(metadata.version(name).split(".")[:2])
    found = "tested" if minor in TESTED_TRANSFORMERS else "not tested"
    return f" ({found}; tested versions: {', '.join(TESTED_TRANSFORMERS)})"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none reachable by torch"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
