"""The DP-SGD baseline: an adapter under its own (ε, δ), evaluated as an ordinary model.

Its guarantee differs from that of an ensemble's mechanism. Training fixes ε for any number of
answers. The unit is one *record*, a block of tokens, as in the paper, or all blocks of one name.
With shards for names, that is the unit of the ensemble's mechanisms.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

from adapmixed.data import Corpus
from adapmixed.limits import check_epsilon
from adapmixed.training.demo import NUM_MODELS
from adapmixed.training.settings import FinetuneConfig, base_facts
from adapmixed.training.shards import assign_shards, load_key
from adapmixed_lab.dp_sgd import (
    FORMAT_VERSION,
    GUARANTEE_FILE,
    AdapterGuarantee,
    PrivacyTarget,
    train_dp,
)
from adapmixed_lab.reproduce.measure import Reference
from adapmixed_lab.reproduce.paper import DELTA, DP_SGD

BUILTIN_CONFIG = FinetuneConfig(
    learning_rate=3e-3, epochs=2, batch_size=64, block_size=64, target_modules=("c_attn",)
)
"""For the built-in corpus: a minute of training, which is not DP-SGD at its best."""
EPSILON = 8.0  # the paper's
SHARD_BLOCKS = 64
"""Blocks of a built-in shard that DP-SGD uses where ε is for the whole shard."""
WHOLE_NAME = f"{DP_SGD}, whole name"


def read_dp_adapter(folder: Path) -> tuple[AdapterGuarantee, object]:
    """Return the guarantee and the settings of an adapter that ``adapmixed-lab dp-sgd`` wrote.

    Raises:
        ValueError: if the folder holds no readable guarantee of this format.
    """
    try:
        content = json.loads((folder / GUARANTEE_FILE).read_text(encoding="utf-8"))
        if content["format_version"] != FORMAT_VERSION:
            version = content["format_version"]
            raise ValueError(f"format_version must be {FORMAT_VERSION}, got {version!r}")
        check_epsilon(content["epsilon"])
        stated = {one.name: content[one.name] for one in fields(AdapterGuarantee)}
        return AdapterGuarantee(**stated), content["training"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"folder must be one that 'adapmixed-lab dp-sgd' wrote, got {folder}: {error}"
        ) from error


def dp_line(folder: Path) -> tuple[str, Reference]:
    """Return an adapter's line: its name, the folder, and the fields of its own guarantee.

    Raises:
        ValueError: as `read_dp_adapter`, and for another δ than the tables'.
    """
    said, _ = read_dp_adapter(folder)
    if said.delta != DELTA:
        raise ValueError(f"{folder} must have its ε at δ = {DELTA:g}, got one at {said.delta:g}")
    promise = dict.fromkeys(("epsilon_deviation", "mixing", "screening", "conversion")) | {
        "epsilon": said.epsilon,
        "delta": said.delta,
        "kind": "fixed",
        "guarantee": str(said),
        "unit": said.protected,
        "adjacency": "add/remove",
        "screened": 0.0,
        "total": said.epsilon,
        "mechanism": "one adapter trained by DP-SGD",
    }
    name = DP_SGD if said.blocks_per_identifier is None else WHOLE_NAME
    return name, ([folder], promise)


def builtin_dp_adapter(
    folder: Path,
    base: str,
    *,
    key: Path | None = None,
    config: FinetuneConfig = BUILTIN_CONFIG,
    progress: Callable[[int, int], None] | None = None,
) -> AdapterGuarantee:
    """Train an adapter by DP-SGD on the built-in private text; an existing one is kept.

    ε and δ are the paper's.

    Args:
        folder: of the adapter.
        base: folder of the public model.
        key: file of the key that divides the text; ε is then for a whole shard, of which the first
            `SHARD_BLOCKS` blocks are used. None: for single blocks, as the paper's.
        config: settings of the training.
        progress: called after every step with (steps done, steps in all).

    Raises:
        ValueError: if the folder holds an adapter of other settings.
    """
    blocks = None if key is None else SHARD_BLOCKS
    if not folder.exists():
        corpus = Corpus("builtin")
        documents, unit = list(corpus.documents()), corpus.unit
        if key is not None:
            names = [document.identifier for document in documents]
            shards = assign_shards(names, NUM_MODELS, key=load_key(key))
            documents = [
                replace(document, identifier=str(shard))
                for document, shard in zip(documents, shards, strict=True)
            ]
            unit = "shard"
        target = PrivacyTarget(EPSILON, DELTA, blocks_per_identifier=blocks)
        train_dp(
            base, documents, folder, config, target, unit=unit, base_name=base_facts(base).name,
            progress=progress,
        )  # fmt: skip
    said, training = read_dp_adapter(folder)
    # For this target ε is at most the target, and lower only by the noise search's tolerance.
    near = 0.95 * EPSILON <= said.epsilon <= EPSILON and said.delta == DELTA
    same = training == json.loads(json.dumps(asdict(config)))
    if not (near and same and said.blocks_per_identifier == blocks):
        raise ValueError(
            f"{folder} must hold the DP-SGD adapter of this experiment, it holds one of other "
            "settings; remove it or give another --out"
        )
    return said
