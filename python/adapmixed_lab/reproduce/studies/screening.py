"""The study of the screening bit: does it depend on private models, noise, or the public model?

Every query is screened twice with the same noise: with the private models, and with every one of
them replaced by the public model (`screen="public"`). If the bits agree, screening has told nothing
about the private models that q and the noise do not tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.evaluation import plan
from adapmixed.generation.loop import DEFAULT_MEMORY_BYTES
from adapmixed.mechanisms import AdaPMixED
from adapmixed.privacy import Accountant, GaussianScreening
from adapmixed.rng import SeededRandom
from adapmixed_lab.reproduce.inputs import Inputs
from adapmixed_lab.reproduce.measure import Run
from adapmixed_lab.reproduce.paper import DELTA
from adapmixed_lab.reproduce.result import row

GROUP = "screening"
TITLE = "What the screening bit depends on"
NOTE = (
    "Screening: 'same bit' is the share of queries whose bit stays the same, under the same noise, "
    "if the public model replaces every private one. ε is the cost of screening alone. One setting "
    "of the preset changes at a time, and the noise is the same except for σ. In the last lines "
    "three settings change, so that the private models do decide: all weight on them, little "
    "noise, and a threshold within their spread."
)
WEIGHTS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Values of λ_s that are tried."""
FACTORS = (0.1, 0.5, 2.0, 10.0)
"""Factors of the preset's σ; the two in the middle are also factors of T and k."""
TOGETHER = ((1.0, 0.1, 0.5), (1.0, 0.01, 0.25), (1.0, 0.01, 0.125))
"""λ_s and the factors of σ and T that change together."""
BANDS = 5
"""Bands of the public model's largest probability, from 0 to 1."""
_POSITIONS = 64  # positions of one call


@dataclass
class _Counts:
    """The counts of one setting."""

    screened: int = 0
    equal: int = 0
    by_band: Tensor = field(default_factory=lambda: torch.zeros(BANDS, dtype=torch.int64))


def rows(inputs: Inputs, run: Run, queries: int) -> list[dict[str, object]]:
    """Return a line for every setting, labelled by what it changes."""
    tried = settings(AdaPMixED.preset(inputs.sources.dataset), inputs.ensemble.vocab_size)
    counts = {label: _Counts() for label in tried}
    most = max(setting.screen_top_k for setting in tried.values())
    in_band = torch.zeros(BANDS, dtype=torch.int64)
    rng = SeededRandom(run.seed).child("screening")
    windows, _ = plan(inputs.tokens, inputs.ensemble.longest_text, None, queries)
    done = 0
    for window in windows:
        ids = torch.tensor([inputs.tokens[window.start : window.stop - 1]])
        chunks = inputs.ensemble.iter_logits(
            ids.to(inputs.ensemble.device), memory_bytes=DEFAULT_MEMORY_BYTES
        )
        for _, private, public in chunks:
            for first in range(0, public.shape[1], _POSITIONS):
                part = slice(first, first + _POSITIONS)
                q = public[0, part]
                bands = _bands(q)
                in_band += torch.bincount(bands, minlength=BANDS)
                noise = ops.gaussian((len(q), most), sigma=1.0, rng=rng)
                for label, count in counts.items():
                    setting = tried[label]
                    own = setting.sigma * noise[:, : setting.screen_top_k]
                    _count(count, private[:, 0, part], q, own, setting, bands)
                done += len(q)
                if run.progress is not None:
                    run.progress(done, queries)
    return [
        row(
            "AdaPMixED's screening",
            _ours(tried[label], count, in_band, inputs.ensemble.num_models, queries),
            group=GROUP,
            label=label,
        )
        for label, count in counts.items()
    ]


def settings(preset: AdaPMixED, vocab_size: int) -> dict[str, AdaPMixED]:
    """Return label → the preset with one setting changed, or three.

    The preset itself is among the settings of λ.
    """
    preset = replace(preset, screen_top_k=min(preset.screen_top_k, vocab_size))
    found = {
        f"λ = {weight:g}": replace(preset, screen_weight=weight)
        for weight in sorted({preset.screen_weight, *WEIGHTS})
    }
    for factor in FACTORS:
        sigma = factor * preset.sigma
        found[f"σ = {sigma:g}"] = replace(preset, sigma=sigma)
    for factor in FACTORS[1:-1]:
        found[f"T = {factor * preset.threshold:g}"] = replace(
            preset, threshold=factor * preset.threshold
        )
    for factor in FACTORS[1:-1]:
        top_k = min(vocab_size, max(1, round(factor * preset.screen_top_k)))
        found[f"k = {top_k}"] = replace(preset, screen_top_k=top_k)
    for weight, noise, lower in TOGETHER:
        sigma, threshold = noise * preset.sigma, lower * preset.threshold
        found[f"λ = {weight:g}, σ = {sigma:g}, T = {threshold:g}"] = replace(
            preset, screen_weight=weight, sigma=sigma, threshold=threshold
        )
    return found


def _bands(public_logits: Tensor) -> Tensor:
    """Return (B,) int64, the band of the largest public probability."""
    largest = public_logits.double().softmax(-1).amax(-1).cpu()
    return (largest * BANDS).long().clamp(max=BANDS - 1)


def _count(
    count: _Counts, private: Tensor, q: Tensor, noise: Tensor, settings: AdaPMixED, bands: Tensor
) -> None:
    bits = []
    for weight in (settings.screen_weight, 0.0):
        screening = ops.screen(
            private, q, noise.to(q.device), weight=weight, order=settings.order,
            threshold=settings.threshold, top_k=noise.shape[1],
        )  # fmt: skip
        bits.append(screening.check().passed.cpu())
    count.screened += int((~bits[0]).sum())
    count.equal += int((bits[0] == bits[1]).sum())
    count.by_band += torch.bincount(bands[~bits[0]], minlength=BANDS)


def _ours(
    setting: AdaPMixED,
    count: _Counts,
    in_band: Tensor,
    num_models: int,
    queries: int,
) -> dict[str, object]:
    accountant = Accountant(DELTA)
    accountant.add(GaussianScreening(num_models, queries, setting.screen_weight, setting.sigma))
    guarantee = accountant.guarantee()
    shares = [
        None if of == 0 else found / of
        for found, of in zip(count.by_band.tolist(), in_band.tolist(), strict=True)
    ]
    return {
        "queries": queries,
        "runs": 1,
        "epsilon": guarantee.epsilon,
        "delta": DELTA,
        "kind": guarantee.kind,
        "guarantee": str(guarantee),
        "unit": guarantee.unit,
        "screen_weight": setting.screen_weight,
        "screened": count.screened,
        "equal_bits": count.equal / queries,
        "by_top_probability": shares,
        "queries_by_top_probability": in_band.tolist(),
        "mechanism": repr(setting),
    }
