"""EVALUATION ONLY: tasks of the lm-evaluation-harness answered by a private mixture.

    lm = MixtureLM(ensemble, mechanism, accountant=Accountant(1e-5), rng=SeededRandom(0))
    results = lm_eval.simple_evaluate(model=lm, tasks=["lambada_openai"])
    print(lm.guarantee)

Log-likelihoods and the likeliest token are functions of the mixture's probabilities, which are
private: what the harness reports is for the operator, and no guarantee covers it. The accountant
says what *answering* these queries, a drawn token each, would have cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Never

import torch

from adapmixed.generation.loop import DEFAULT_MEMORY_BYTES, check_source
from adapmixed.mechanisms import Mechanism, Origin, shaped
from adapmixed.privacy import Accountant, Guarantee
from adapmixed_ext.types import RandomSource

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:  # pragma: no cover - said in words, whatever is missing
    raise ImportError(
        "adapmixed.evaluation.lm_eval needs the lm-evaluation-harness: pip install "
        f"'adapmixed[lm-eval]' ({error})"
    ) from error

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble

_POSITIONS_PER_CALL = 64
_Scored = tuple[list[int], list[int]]  # context, continuation


class MixtureLM(TemplateLM):  # type: ignore[misc]
    """A model of the harness: every scored token is one query of the mechanism.

    The harness asks for all continuations of its tasks at once, and so for all whole texts. If that
    is more than what is left of the mechanism's plan, :class:`BudgetSpentError` is raised: nothing
    is answered and nothing charged.

    Args:
        ensemble: the models; it must have a tokenizer, and one process must have all members.
        mechanism: how a query is answered.
        accountant: bound to mechanism and ensemble, and charged with every scored token.
        rng: of the mechanism's noise; no token is drawn.
        memory_bytes: budget of one chunk's logits and activations.

    Raises:
        ValueError: the ensemble has no tokenizer, or is spread over several processes; or the
            accountant is bound to something else, or has a ledger and rng is seeded.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        mechanism: Mechanism,
        *,
        accountant: Accountant,
        rng: RandomSource,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        super().__init__()
        if ensemble.tokenizer is None:
            raise ValueError("ensemble must have a tokenizer: its base has none")
        if not ensemble.ranks.alone:
            raise ValueError(f"ensemble must be in one process, got {ensemble.ranks.world}")
        self.tokenizer = ensemble.tokenizer
        self._ensemble, self._mechanism, self._rng = ensemble, mechanism, rng
        self._accountant = accountant
        check_source(accountant, rng)
        accountant.bind(mechanism, ensemble.num_models, ensemble.fingerprint)
        self._memory_bytes = memory_bytes

    @property
    def guarantee(self) -> Guarantee:
        """What drawing a token for every scored one would have cost; not of the scores."""
        return self._accountant.guarantee()

    @property
    def eot_token_id(self) -> int:
        """The token that stands before an empty context."""
        token = self.tokenizer.eos_token_id
        if token is None:
            raise ValueError("the base's tokenizer must have an end-of-text token, it has none")
        return int(token)

    @property
    def max_length(self) -> int:
        """Tokens of a window, the scored ones included."""
        return (self._ensemble.max_positions or 2048) + 1

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **settings: Any
    ) -> list[int]:
        """Return the token ids of a text, without special tokens unless asked for."""
        return list(
            self.tokenizer(string, add_special_tokens=bool(add_special_tokens))["input_ids"]
        )

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log-likelihoods of whole texts in windows that do not overlap, in nats."""
        texts: list[list[_Scored]] = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            texts.append([make_disjoint_window(window) for window in windows])
        self._check([part for parts in texts for part in parts])
        return [sum(self._score(*part)[0] for part in parts) for parts in texts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Never:
        """Raise ValueError: the harness decodes greedily, which is no private answer."""
        raise ValueError(
            "generation tasks must be answered by PrivateGenerator, which draws and charges every "
            "token: the harness decodes greedily"
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **settings: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood in nats, whether all tokens are likeliest) of continuations."""
        asked = [(context, continuation) for _, context, continuation in requests]
        self._check(asked)
        return [self._score(*one) for one in asked]

    def _check(self, asked: Sequence[_Scored]) -> None:
        """Raise for bad requests before the models run for the first of them."""
        for context, continuation in asked:
            if not context or not continuation or len(continuation) >= self.max_length:
                raise ValueError(
                    f"a continuation must have 1 to {self.max_length - 1} tokens after a context "
                    f"of at least one, got {len(continuation)} after {len(context)}"
                )
        queries = sum(len(continuation) for _, continuation in asked)
        self._accountant.check_left(self._mechanism, queries)

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        tokens = [*context, *continuation][-self.max_length :]
        inputs = torch.tensor([tokens[:-1]], device=self._ensemble.device)
        labels = torch.tensor(tokens[1:], device=self._ensemble.device)
        first = len(tokens) - 1 - len(continuation)
        total, greedy = 0.0, True
        for where, private, public in self._ensemble.iter_logits(
            inputs, memory_bytes=self._memory_bytes
        ):
            targets = labels[where]
            for start in range(max(0, first - where.start), len(targets), _POSITIONS_PER_CALL):
                part = slice(start, start + _POSITIONS_PER_CALL)
                proposal = self._mechanism.propose_rows(
                    shaped(private[:, 0, part], public[0, part]),
                    targets=targets[part],
                    rng=self._rng,
                    origin=Origin.of(self._ensemble),
                )
                self._accountant.charge(proposal)
                answer = proposal.release()
                assert answer.log_prob is not None  # targets were given
                total += float(answer.log_prob.sum())
                greedy = greedy and bool(
                    (proposal._distribution.likeliest() == targets[part]).all()
                )
        return total, greedy
