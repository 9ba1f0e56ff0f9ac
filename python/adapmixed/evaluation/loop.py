"""Evaluations: all mechanisms answer the logits of one forward pass."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from adapmixed.charging import check_budget
from adapmixed.decoding import DEFAULT_MEMORY_BYTES
from adapmixed.evaluation.configuration import describe
from adapmixed.evaluation.methods import Method, Settings
from adapmixed.evaluation.result import Evaluation, Runs
from adapmixed.evaluation.result_file import ResultFile
from adapmixed.evaluation.session import Session
from adapmixed.evaluation.windows import plan_runs
from adapmixed.mechanisms import Mechanism
from adapmixed.privacy import PerModelFilter
from adapmixed.ranks import Ranks
from adapmixed.rng import SecureRandom, SeededRandom

if TYPE_CHECKING:
    from adapmixed.models import Ensemble

SAVE_SECONDS = 10.0
"""How often a result file is written, at the end of a window."""


def evaluate(
    ensemble: "Ensemble",
    tokens: Sequence[int],
    mechanisms: Mapping[str, Mechanism],
    *,
    delta: float,
    rng: SecureRandom | SeededRandom,
    block: int | None = None,
    stride: int | None = None,
    queries: int | None = None,
    rule: str | Mapping[str, str] = "per_model",
    adjacency: str | None | Mapping[str, str | None] = None,
    model_filters: Mapping[str, PerModelFilter] | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int, int], None] | None = None,
    result: str | os.PathLike[str] | None = None,
    resume: bool = False,
    save_seconds: float = SAVE_SECONDS,
    about: Mapping[str, object] | None = None,
    diagnostics: bool = False,
) -> list[Evaluation]:
    """Answers every position of a token stream with every mechanism.

    The stream is cut into non-overlapping blocks whose first token is not scored (the authors'
    convention), or, with a stride, into windows that overlap, so that every token but the first of
    the stream is scored once. Every scored token is one query. The models run once, chunk by chunk
    under the memory budget, and all mechanisms answer the same logits.

    Args:
        ensemble: the models.
        tokens: the stream; at least two tokens.
        mechanisms: by the name to report.
        delta: δ of the guarantees.
        rng: seeded for a repeatable evaluation; every mechanism draws from a child of its own, so
            that its result does not depend on the others.
        block: tokens per block, ≥ 2; default 512, or the model's window if that is shorter.
        stride: in [1, block − 1]: windows of `block` tokens begin every `stride` tokens, and each
            scores what the one before it has not reached, with at least block − stride tokens of
            context where there are so many. None: blocks do not overlap.
        queries: stop after this many; default: the whole stream.
        rule: the accountant's rule, "per_model" or "paper"; a mapping gives those of some
            mechanisms by name, the others have "per_model".
        adjacency: which neighbours the guarantees are asked for; a mapping gives those of some
            mechanisms by name; None: those of each mechanism.
        model_filters: filters of some mechanisms by name, which then answer and are charged as
            :func:`adapmixed.generate` with ``model_filter``; the guarantee is the filter's.
        memory_bytes: budget of one chunk's logits and activations.
        progress: called with (queries done, queries in all).
        result: a file to keep the state in, for the operator, from which `read_result` gives what
            is returned here; None: nothing is kept.
        resume: go on from that file where there is one. With a seed, the same memory budget and the
            same number of threads the result is then the same in every bit as without a break;
            without a seed the rest is answered with new randomness.
        save_seconds: ≥ 0, how often the file is written, at the end of a window: what is answered
            since is lost with the process.
        about: kept in that file beside the results, JSON values; what a report of them shows:
            "config", "environment" and "training" of :func:`adapmixed.report.build_report`.
        diagnostics: find a :class:`Diagnosis` of every mechanism, too: the utility theorem,
            weights, charges of single models, screened queries. Private, for the operator; nothing
            else changes.

    Returns:
        one :class:`Evaluation` per mechanism, in their order; of several ranks on the one that
        leads, on the others none.

    Raises:
        ValueError: no mechanisms, block, stride or queries out of range, too few tokens for one
            query, a mechanism whose events do not answer `adjacency` or have no charges for its
            filter, a result file that exists without `resume`, is that of another evaluation or
            written by another process, or corrupted.
    """
    filters = dict(model_filters or {})
    if result is not None and any(one.budget.releases for one in filters.values()):
        raise ValueError(
            "model_filters must have no releases beside a result file: counts that were released "
            "once could be released again after every resumption"
        )
    runs = _evaluate(
        ensemble, tokens, mechanisms, runs=1, delta=delta, rng=rng, block=block, stride=stride,
        queries=queries, rule=rule, adjacency=adjacency, filters=lambda run: filters,
        memory_bytes=memory_bytes, progress=progress, result=result, resume=resume,
        save_seconds=save_seconds, about=about, diagnostics=diagnostics,
    )  # fmt: skip
    return [one.evaluations[0] for one in runs]


def evaluate_runs(
    ensemble: "Ensemble",
    tokens: Sequence[int],
    mechanisms: Mapping[str, Mechanism],
    *,
    runs: int,
    queries: int | None = None,
    delta: float,
    rng: SecureRandom | SeededRandom,
    block: int | None = None,
    stride: int | None = None,
    rule: str | Mapping[str, str] = "per_model",
    adjacency: str | None | Mapping[str, str | None] = None,
    model_filters: Mapping[str, PerModelFilter] | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int, int], None] | None = None,
    result: str | os.PathLike[str] | None = None,
    resume: bool = False,
    save_seconds: float = SAVE_SECONDS,
    about: Mapping[str, object] | None = None,
    diagnostics: bool = False,
) -> list[Runs]:
    """Several runs over disjoint stretches of a token stream, as in the paper's Table 1.

    Run r answers the r-th stretch, which begins and ends with whole blocks; every mechanism has an
    accountant, a filter and randomness of its own in every run. A guarantee is that of one run, one
    service life of the ensemble; that of all runs *together* is not: their costs add.

    Args:
        runs: ≥ 1; one run is what :func:`evaluate` answers.
        queries: of each run; default: as many as whole blocks shared out evenly hold.
        model_filters: every run has a copy of them as they are, and they stay as they are.
        progress: called with (queries done, queries in all), of all runs.

    Other arguments and errors as :func:`evaluate`.

    Returns:
        one :class:`Runs` per mechanism, in their order.

    Raises:
        ValueError: besides, runs < 1 or more than the text offers; a filter with releases, which
            every run would spend again.
    """
    given = dict(model_filters or {})
    for name, one in given.items():
        if one.budget.releases:
            raise ValueError(
                f"model_filters must have no releases in runs, got {one.budget.releases} for "
                f"{name!r}"
            )

    def filters(run: int) -> dict[str, PerModelFilter]:
        return {name: PerModelFilter.from_state(one.state()) for name, one in given.items()}

    return _evaluate(
        ensemble, tokens, mechanisms, runs=runs, delta=delta, rng=rng, block=block, stride=stride,
        queries=queries, rule=rule, adjacency=adjacency, filters=filters,
        memory_bytes=memory_bytes, progress=progress, result=result, resume=resume,
        save_seconds=save_seconds, about=about, diagnostics=diagnostics,
    )  # fmt: skip


def _evaluate(
    ensemble: "Ensemble",
    tokens: Sequence[int],
    mechanisms: Mapping[str, Mechanism],
    *,
    runs: int,
    delta: float,
    rng: SecureRandom | SeededRandom,
    block: int | None,
    stride: int | None,
    queries: int | None,
    rule: str | Mapping[str, str],
    adjacency: str | None | Mapping[str, str | None],
    filters: Callable[[int], dict[str, PerModelFilter]],
    memory_bytes: int,
    progress: Callable[[int, int], None] | None,
    result: str | os.PathLike[str] | None,
    resume: bool,
    save_seconds: float,
    about: Mapping[str, object] | None,
    diagnostics: bool,
) -> list[Runs]:
    if not mechanisms:
        raise ValueError("mechanisms must name at least one mechanism, got none")
    if not (isinstance(save_seconds, int | float) and save_seconds >= 0):
        raise ValueError(f"save_seconds must be >= 0, got {save_seconds!r}")
    if resume and result is None:
        raise ValueError("resume needs the result file to go on from, got result=None")
    windows, total = plan_runs(
        tokens, ensemble.max_positions, block, queries, runs=runs, stride=stride
    )
    for mechanism in mechanisms.values():
        check_budget(mechanism, total)
    rules = _by_name("rule", rule, mechanisms)
    adjacencies = _by_name("adjacency", adjacency, mechanisms)
    _by_name("model_filters", filters(0), mechanisms)
    ranks = ensemble.ranks
    if diagnostics and not ranks.alone:
        raise ValueError(
            f"diagnostics must be False where an ensemble is spread over {ranks.world} ranks: they "
            "need the rows of all models"
        )
    if not ranks.alone:
        ranks.agree(
            {
                "the mechanisms": dict(mechanisms),
                "the filters": {name: one.budget for name, one in filters(0).items()},
                "the tokens": list(tokens),
                "the settings of the evaluation": (windows, memory_bytes),
                "whether a result file is kept": result is not None,
            }
        )
    settings = Settings(
        dict(mechanisms), delta, rules, adjacencies, ensemble.unverified, diagnostics, ranks
    )

    def methods(run: int) -> list[Method]:
        source = rng if run == 0 else rng.child(f"run {run}")
        kept = filters(run)
        return [Method(name, settings, kept.get(name), source.child(name)) for name in mechanisms]

    methods(0)  # refuses what no accountant takes before the models run
    session = Session(ensemble, tokens, windows, methods, memory_bytes, progress)
    if result is None:
        while not session.complete:
            session.step()
        return session.results()
    description = describe(
        ensemble, tokens, windows, settings, filters(0), rng, memory_bytes,
        block=block, stride=stride,
    )  # fmt: skip
    file = ResultFile(result, description, about or {})
    _answer_and_keep(session, file, resume, save_seconds, ranks)
    return session.results()


def _answer_and_keep(
    session: Session, file: ResultFile, resume: bool, seconds: float, ranks: Ranks
) -> None:
    """Of several ranks the one that leads keeps the file and tells where the others go on."""

    def begin() -> torch.Tensor:
        state = file.begin(resume=resume)
        if state is not None:
            session.restore(state)
        else:
            file.save(session.state(), complete=False)  # a file that cannot be written is refused
        return torch.tensor(session.place)

    with file.held() if ranks.leads else nullcontext():
        place = ranks.decide(begin, (2,), torch.int64, torch.device("cpu"))
        if not ranks.leads:
            session.follow(*place.tolist())
        saved = time.monotonic()
        while not session.complete:
            session.step()
            if ranks.leads and (session.complete or time.monotonic() - saved >= seconds):
                file.save(session.state(), complete=session.complete)
                saved = time.monotonic()


def _by_name(argument: str, given: Any, mechanisms: Mapping[str, Mechanism]) -> dict[str, Any]:
    """What was given for all mechanisms, or for some by name."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(mechanisms, given)
    if given.keys() - mechanisms.keys():
        unknown = sorted(given.keys() - mechanisms.keys())
        raise ValueError(f"{argument} must name mechanisms of this evaluation, got {unknown!r}")
    return dict(given)
