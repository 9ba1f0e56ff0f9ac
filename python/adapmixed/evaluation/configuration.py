"""Describe an evaluation so that equal descriptions mean equal results."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from adapmixed.ensemble.vocabulary import begun
from adapmixed.evaluation.methods import EvaluationSettings
from adapmixed.evaluation.windows import block_of
from adapmixed.rng import SecureRandom, SeededRandom

_PROBED = 8  # positions
_IMPOSSIBLE = -1e9  # stands for log 0, which JSON cannot hold


def describe(
    settings: EvaluationSettings, *, block: int | None, stride: int | None
) -> dict[str, Any]:
    """Return the description that a result file holds: strict JSON values, private."""
    ensemble, tokens = settings.ensemble, settings.tokens
    return {
        "text": {"tokens": len(tokens), "sha256": _digest(tokens)},
        "ensemble": {
            "num_models": ensemble.num_models,
            "vocab_size": ensemble.vocab_size,
            "max_positions": ensemble.max_positions,
            "beginning": list(ensemble.beginning),
            "unverified": list(ensemble.unverified),
            "fingerprint": ensemble.fingerprint,
        },
        "block": block_of(ensemble.longest_text, block),
        "stride": stride,
        "runs": len(settings.windows),
        "queries": sum(one.queries for one in settings.windows[0]),
        "active": settings.origin.active_tokens,
        "delta": settings.delta,
        "randomness": _randomness(settings.rng),
        **({"diagnostics": True} if settings.diagnostics else {}),
        "order": list(settings.mechanisms),
        "methods": {
            name: {
                "mechanism": repr(mechanism),
                "adjacency": settings.adjacencies.get(name),
                "epsilon": settings.epsilons.get(name),
            }
            for name, mechanism in settings.mechanisms.items()
        },
        "probe": _probe(settings),
    }


def _digest(tokens: Sequence[int]) -> str:
    digest, step = hashlib.sha256(), 1 << 14  # in parts, to avoid a copy of the whole text
    for start in range(0, len(tokens), step):
        digest.update(np.asarray(tokens[start : start + step], dtype="<i8").tobytes())
    return digest.hexdigest()


def _randomness(rng: SecureRandom | SeededRandom) -> Any:
    """Return the seed of a seeded source, and nothing about a key."""
    return {"seed": rng.seed, "label": rng.label} if isinstance(rng, SeededRandom) else "system"


def _probe(settings: EvaluationSettings) -> list[float]:
    """Return each model's mean log-probability of the first tokens, the public model's last."""
    ensemble, window = settings.ensemble, settings.windows[0][0]
    stop = min(window.stop, window.start + _PROBED + 1)
    read = begun(ensemble.beginning, settings.tokens[window.start : stop])
    inputs = torch.tensor([read[:-1]], device=ensemble.device)
    sums: torch.Tensor | float = 0.0
    for where, private, public, _ in ensemble.iter_logits(
        inputs, memory_bytes=settings.memory_bytes
    ):
        targets = torch.tensor(read[1:], device=ensemble.device)[where]
        rows = torch.cat([private[:, 0], public]).double().log_softmax(-1)
        found = rows.gather(-1, targets.expand(len(rows), -1)[..., None])[..., 0]
        sums = sums + found.clamp_min(_IMPOSSIBLE).sum(-1)
    assert isinstance(sums, torch.Tensor)
    members = ensemble.ranks.gather(sums[:-1])
    if members is None:  # only the main process keeps the file
        return []
    return [float(value) for value in torch.cat([members, sums[-1:]]) / (len(read) - 1)]
