"""The loop of an evaluation: all mechanisms answer the logits of one forward pass."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from adapmixed.decoding import DEFAULT_MEMORY_BYTES, Charge, check_budget
from adapmixed.evaluation.result import Evaluation
from adapmixed.evaluation.windows import plan
from adapmixed.mechanisms import Mechanism
from adapmixed.privacy import Accountant, PerModelFilter
from adapmixed.ranks import Ranks
from adapmixed.rng import SecureRandom, SeededRandom

if TYPE_CHECKING:
    from adapmixed.models import Ensemble

# Positions of one mechanism call: enough to share its overhead, few enough to bound its memory.
_POSITIONS_PER_CALL = 64


class _Run:
    """Running totals of one mechanism."""

    def __init__(
        self,
        name: str,
        mechanism: Mechanism,
        charge: Charge,
        rng: SecureRandom | SeededRandom,
        ranks: Ranks,
    ) -> None:
        self.rng = rng
        self.ranks = ranks
        self.name = name
        self.mechanism = mechanism
        self.charge = charge
        self.accountant = charge.accountant
        self.log_likelihood = 0.0
        self.screened = 0
        self.seconds = 0.0
        self.curve: list[tuple[int, float | None]] = []
        self.perplexities: list[tuple[int, float]] = []

    def answer(self, private: torch.Tensor, public: torch.Tensor, targets: torch.Tensor) -> None:
        start = time.perf_counter()
        proposal = self.mechanism.propose(
            private, public, targets=targets, rng=self.rng, ranks=self.ranks
        )
        answer = proposal.release(self.charge(proposal))
        if not self.ranks.leads:
            return
        assert answer.log_prob is not None  # targets were given
        self.log_likelihood += math.fsum(answer.log_prob.tolist())
        self.screened += int(answer.public.sum())
        self.seconds += time.perf_counter() - start
        done = self.accountant.queries
        self.curve.append((done, self.accountant.epsilon().epsilon))
        self.perplexities.append((done, self._perplexity(done)))

    def _perplexity(self, queries: int) -> float:
        mean = -self.log_likelihood / queries
        return math.exp(mean) if mean < 700.0 else math.inf

    def result(self, queries: int, forward_seconds: float) -> Evaluation:
        guarantee = self.accountant.epsilon()
        return Evaluation(
            name=self.name,
            perplexity=self._perplexity(queries),
            queries=queries,
            guarantee=guarantee,
            screened=0.0 if guarantee.kind == "public" else self.screened / queries,
            seconds=self.seconds,
            tokens_per_second=queries / (self.seconds + forward_seconds),
            curve=tuple(self.curve),
            perplexities=tuple(self.perplexities),
            breakdown=self.accountant.breakdown(),
        )


def evaluate(
    ensemble: "Ensemble",
    tokens: Sequence[int],
    mechanisms: Mapping[str, Mechanism],
    *,
    delta: float,
    rng: SecureRandom | SeededRandom,
    block: int | None = None,
    queries: int | None = None,
    rule: str | Mapping[str, str] = "per_model",
    adjacency: str | None = None,
    model_filters: Mapping[str, PerModelFilter] | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> list[Evaluation]:
    """Answers every position of a token stream with every mechanism.

    The stream is cut into non-overlapping blocks whose first token is not scored (the authors'
    convention); every scored token is one query. The models run once, chunk by chunk under the
    memory budget, and all mechanisms answer the same logits.

    Args:
        ensemble: the models.
        tokens: the stream; at least two tokens.
        mechanisms: by the name to report.
        delta: δ of the guarantees.
        rng: seeded for a repeatable evaluation; every mechanism draws from a child of its own, so
            that its result does not depend on the others.
        block: tokens per block, ≥ 2; default 512, or the model's window if that is shorter.
        queries: stop after this many; default: the whole stream.
        rule: the accountant's rule, "per_model" or "paper"; a mapping gives those of some
            mechanisms by name, the others have "per_model".
        adjacency: which neighbours all guarantees are asked for; None: those of each mechanism.
        model_filters: filters of some mechanisms by name, which then answer and are charged as
            :func:`adapmixed.generate` with ``model_filter``; the guarantee is the filter's.
        memory_bytes: budget of one chunk's logits and activations.
        progress: called with (queries done, queries in all).

    Returns:
        one :class:`Evaluation` per mechanism, in their order; of several ranks on the one that
        leads, on the others none.

    Raises:
        ValueError: no mechanisms, block or queries out of range, too few tokens for one query, a
            mechanism whose events do not answer `adjacency` or have no charges for its filter.
    """
    if not mechanisms:
        raise ValueError("mechanisms must name at least one mechanism, got none")
    blocks, total = plan(tokens, ensemble.max_positions, block, queries)
    for mechanism in mechanisms.values():
        check_budget(mechanism, total)
    rules = dict.fromkeys(mechanisms, rule) if isinstance(rule, str) else dict(rule)
    filters = dict(model_filters or {})
    for argument, given in (("rule", rules), ("model_filters", filters)):
        if given.keys() - mechanisms.keys():
            unknown = sorted(given.keys() - mechanisms.keys())
            raise ValueError(f"{argument} must name mechanisms of this evaluation, got {unknown!r}")

    def charge(name: str) -> Charge:
        model_filter = filters.get(name)
        accountant = Accountant(
            delta,
            rule=rules.get(name, "per_model"),
            adjacency=adjacency,
            filter_budget=None if model_filter is None else model_filter.budget,
        )
        return Charge(accountant, None, model_filter, ensemble.unverified)

    ranks = ensemble.ranks
    ranks.agree(
        {
            "the mechanisms": dict(mechanisms),
            "the filters": {name: one.budget for name, one in filters.items()},
            "the tokens": list(tokens),
            "the settings of the evaluation": (block, total, memory_bytes),
        }
    )
    runs = [_Run(name, m, charge(name), rng.child(name), ranks) for name, m in mechanisms.items()]
    forward_seconds, done = 0.0, 0
    for ids in blocks:
        scored = min(len(ids) - 1, total - done)
        if scored < 1:
            break
        inputs = torch.tensor([ids[:scored]], device=ensemble.device)
        labels = torch.tensor(ids[1 : scored + 1], device=ensemble.device)
        start = time.perf_counter()
        for where, private, public in ensemble.iter_logits(inputs, memory_bytes=memory_bytes):
            forward_seconds += time.perf_counter() - start
            targets = labels[where]
            for first in range(0, len(targets), _POSITIONS_PER_CALL):
                part = slice(first, first + _POSITIONS_PER_CALL)
                for run in runs:
                    run.answer(private[:, 0, part], public[0, part], targets[part])
                done += len(targets[part])
                if progress is not None and ranks.leads:
                    progress(done, total)
            start = time.perf_counter()
    return [run.result(total, forward_seconds) for run in runs] if ranks.leads else []
