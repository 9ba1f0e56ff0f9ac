"""EVALUATION ONLY: answer tasks of the lm-evaluation-harness with a private mixture.

    lm = MixtureLM(ensemble, mechanism, accountant=Accountant(1e-5), rng=SeededRandom(0))
    results = lm_eval.simple_evaluate(model=lm, tasks=["lambada_openai"])
    print(lm.guarantee)

Log-likelihoods and the likeliest token reveal the mixture's probabilities, which are private. So
the harness' report is for the operator only, and no guarantee covers it. The accountant's guarantee
is that of *drawing* a token for each of these queries instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Never

from adapmixed.ensemble.ensemble import DEFAULT_MEMORY_BYTES
from adapmixed.evaluation.loop import scored_parts
from adapmixed.limits import DEFAULT_ACTIVE
from adapmixed.mechanisms import Mechanism, Origin
from adapmixed.privacy import Accountant, Guarantee
from adapmixed.text import begun, text_ids
from adapmixed_ext.types import RandomSource

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:  # pragma: no cover - name the extra, whichever module is missing
    raise ImportError(
        "adapmixed.evaluation.lm_eval needs the lm-evaluation-harness: pip install "
        f"'adapmixed[lm-eval]' ({error})"
    ) from error

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble

_Scored = tuple[list[int], list[int]]  # context, continuation


class MixtureLM(TemplateLM):  # type: ignore[misc]
    """A model for the harness; every scored token is one query of the mechanism.

    The harness requests all continuations of its tasks at once, and likewise all whole texts. If
    the mechanism's plan does not cover the requests, :class:`BudgetSpentError` is raised before
    anything is answered or charged.

    Args:
        ensemble: the models. It needs a tokenizer, and this process must hold all members.
        mechanism: answers the queries.
        accountant: is bound to mechanism and ensemble, and charged for every scored token.
        rng: the source of the mechanism's noise; no token is drawn.
        memory_bytes: limit in bytes for one chunk's logits and activations.
        active: as in `PrivateGenerator`.

    Raises:
        ValueError: if the ensemble has no tokenizer or is spread over several processes.
        ValueError: if the accountant is bound to something else, or has a ledger while `rng` is
            seeded.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        mechanism: Mechanism,
        *,
        accountant: Accountant,
        rng: RandomSource,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        active: int | None = DEFAULT_ACTIVE,
    ) -> None:
        super().__init__()
        if ensemble.tokenizer is None:
            raise ValueError("ensemble must have a tokenizer, but its base has none")
        if not ensemble.ranks.single:
            raise ValueError(f"ensemble must be in one process, got {ensemble.ranks.world}")
        self.tokenizer = ensemble.tokenizer
        self._ensemble, self._mechanism, self._rng = ensemble, mechanism, rng
        self._accountant = accountant
        accountant.check_seeded(getattr(rng, "seeded", True))
        self._origin = origin = Origin.of(ensemble, active)
        accountant.bind(mechanism, ensemble.num_models, origin)
        self._memory_bytes = memory_bytes

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of drawing a token for every scored one; it does not cover the scores."""
        return self._accountant.guarantee()

    @property
    def eot_token_id(self) -> int:
        """The token that replaces an empty context: BOS, else the end of a text."""
        tokens = text_ids(self.tokenizer, "")
        if not tokens:
            raise ValueError("the base's tokenizer must have BOS or an end-of-text token")
        return tokens[-1]

    @property
    def max_length(self) -> int:
        """The number of tokens of a window, with the scored ones."""
        return (self._ensemble.longest_text or 2048) + 1

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **settings: Any
    ) -> list[int]:
        """Return the token ids of a text, by default with what the tokenizer begins a text with."""
        ids = list(self.tokenizer(string, add_special_tokens=False)["input_ids"])
        return ids if add_special_tokens is False else begun(self._ensemble.beginning, ids)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihoods of whole texts in nats, over windows that do not overlap."""
        texts: list[list[_Scored]] = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            texts.append([make_disjoint_window(window) for window in windows])
        self._check([part for parts in texts for part in parts])
        return [sum(self._score(*part)[0] for part in parts) for parts in texts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Never:
        """Raise ValueError, because the harness decodes greedily, which is not private."""
        raise ValueError(
            "generation tasks are not supported, because the harness decodes greedily: use "
            "PrivateGenerator, which draws and charges every token"
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **settings: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood in nats, whether every token is the likeliest) of each request."""
        pairs = [(context, continuation) for _, context, continuation in requests]
        self._check(pairs)
        return [self._score(*pair) for pair in pairs]

    def _check(self, pairs: Sequence[_Scored]) -> None:
        """Raise ValueError for bad requests before the models run."""
        for context, continuation in pairs:
            if not context or not continuation or len(continuation) >= self.max_length:
                raise ValueError(
                    f"a continuation must have 1 to {self.max_length - 1} tokens after a context "
                    f"of at least one, got {len(continuation)} after {len(context)}"
                )
        queries = sum(len(continuation) for _, continuation in pairs)
        self._accountant.check_left(self._mechanism, queries)

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        beginning, active = list(self._ensemble.beginning), self._origin.active_tokens
        if context == [self.prefix_token_id]:
            context = beginning or context
        text = [*context, *continuation][-self.max_length :]
        parts = scored_parts(
            self._ensemble, text, len(continuation), memory_bytes=self._memory_bytes, active=active
        )
        total, greedy = 0.0, True
        for rows, targets in parts:
            ticket = self._mechanism.propose_rows(
                rows, targets=targets, rng=self._rng, origin=self._origin
            )
            self._accountant.charge(ticket)
            answer = ticket.release()
            assert answer.log_prob is not None  # targets were given
            total += float(answer.log_prob.sum())
            greedy = greedy and bool((ticket._distribution.likeliest() == targets).all())
        return total, greedy
