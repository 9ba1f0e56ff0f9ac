"""What an evaluation found for one mechanism."""

from collections.abc import Mapping
from dataclasses import dataclass

from adapmixed.privacy import Guarantee


@dataclass(frozen=True)
class Evaluation:
    """One mechanism over the corpus.

    Attributes:
        name: as given in ``mechanisms``.
        perplexity: exp of the mean negative log-likelihood over all queries; inf if a target has
            probability 0.
        queries: number of scored tokens, each one query.
        guarantee: what the accountant states after all queries.
        screened: share of queries answered from the public model by screening (not for a mechanism
            that never reads the private models).
        seconds: time in the mechanism, without the models' forward pass.
        tokens_per_second: queries over mechanism time plus the shared forward pass.
        curve: (queries, ε) after each chunk; ε is None where there is no guarantee.
        perplexities: (queries, perplexity over the queries so far) after each chunk: under a
            per-model filter it tends to the public model's as models retire.
        breakdown: "mixing", "screening", "conversion", "total" of ε.
    """

    name: str
    perplexity: float
    queries: int
    guarantee: Guarantee
    screened: float
    seconds: float
    tokens_per_second: float
    curve: tuple[tuple[int, float | None], ...]
    perplexities: tuple[tuple[int, float], ...]
    breakdown: Mapping[str, float]
