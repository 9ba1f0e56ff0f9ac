"""Evaluations: all mechanisms answer the logits of one forward pass."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from adapmixed.evaluation.configuration import describe
from adapmixed.evaluation.methods import Method, Settings
from adapmixed.evaluation.result import Evaluation, Runs
from adapmixed.evaluation.result_file import ResultFile
from adapmixed.evaluation.session import Session
from adapmixed.evaluation.windows import plan_runs
from adapmixed.generation.loop import DEFAULT_MEMORY_BYTES
from adapmixed.mechanisms import Mechanism, Origin
from adapmixed.ranks import Ranks
from adapmixed.rng import SecureRandom, SeededRandom

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble

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
    epsilon: float | None | Mapping[str, float | None] = None,
    adjacency: str | None | Mapping[str, str | None] = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int, int], None] | None = None,
    result: str | os.PathLike[str] | None = None,
    resume: bool = False,
    save_seconds: float = SAVE_SECONDS,
    about: Mapping[str, object] | None = None,
    diagnostics: bool = False,
) -> list[Evaluation]:
    """Answer every position of a token stream with every mechanism.

    The stream is cut into non-overlapping blocks whose first token is not scored (the authors'
    convention). With a stride it is cut into windows that overlap, so that every token but the
    first of the stream is scored once. Every scored token is one query. The models run once, chunk
    by chunk under the memory budget, and all mechanisms answer the same logits.

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
            context if there are so many. None: blocks do not overlap.
        queries: stop after this many; default: the whole stream.
        epsilon: of every shard's own budget, as of `Accountant`; a mapping gives those of some
            mechanisms by name; None: no budget.
        adjacency: which neighbours the guarantees are asked for, "zero_out" or "replace_one"; a
            mapping gives those of some mechanisms by name; None: "zero_out".
        memory_bytes: budget of one chunk's logits and activations.
        progress: called with (queries done, queries in all).
        result: a file to keep the state in, for the operator, from which `read_result` gives what
            is returned here; None: nothing is kept.
        resume: go on from that file if there is one. With a seed, the same memory budget and the
            same number of threads, the result is the same in every bit as without a break. Without
            a seed the rest is answered with new randomness.
        save_seconds: ≥ 0, how often the file is written, at the end of a window. Answers since then
            are lost with the process.
        about: kept in that file beside the results, JSON values; what a report of them shows:
            "config", "environment" and "training" of :func:`adapmixed.report.build_report`.
        diagnostics: find a :class:`Diagnosis` of every mechanism, too: the utility theorem,
            weights, charges of single models, screened queries. Private, for the operator; nothing
            else changes.

    Returns:
        one :class:`Evaluation` per mechanism, in their order; of several processes on the main
        one, on the others none.

    Raises:
        ValueError: no mechanisms, block, stride or queries out of range, too few tokens for one
            query, a mechanism that no accountant of these settings takes, or a result file that
            exists without `resume`, is of another evaluation, is written by another process or is
            corrupted. Nothing was answered.
    """
    runs = _evaluate(
        ensemble, tokens, mechanisms, runs=1, delta=delta, rng=rng, block=block, stride=stride,
        queries=queries, epsilon=epsilon, adjacency=adjacency,
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
    epsilon: float | None | Mapping[str, float | None] = None,
    adjacency: str | None | Mapping[str, str | None] = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int, int], None] | None = None,
    result: str | os.PathLike[str] | None = None,
    resume: bool = False,
    save_seconds: float = SAVE_SECONDS,
    about: Mapping[str, object] | None = None,
    diagnostics: bool = False,
) -> list[Runs]:
    """Evaluate several runs over disjoint stretches of a token stream, as in the paper's Table 1.

    Run r answers the r-th stretch, which begins and ends with whole blocks. Every mechanism has an
    accountant and randomness of its own in every run. A guarantee is that of one run, one service
    life of the ensemble. It does not cover all runs *together*, whose costs add.

    Args:
        runs: ≥ 1; one run is what :func:`evaluate` answers.
        queries: of each run; default: as many as whole blocks shared out evenly hold.
        progress: called with (queries done, queries in all), of all runs.

    Other arguments and errors as :func:`evaluate`.

    Returns:
        one :class:`Runs` per mechanism, in their order.

    Raises:
        ValueError: besides, runs < 1 or more than the text offers.
    """
    return _evaluate(
        ensemble, tokens, mechanisms, runs=runs, delta=delta, rng=rng, block=block, stride=stride,
        queries=queries, epsilon=epsilon, adjacency=adjacency,
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
    epsilon: float | None | Mapping[str, float | None],
    adjacency: str | None | Mapping[str, str | None],
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
    epsilons = _by_name("epsilon", epsilon, mechanisms)
    adjacencies = _by_name("adjacency", adjacency, mechanisms)
    ranks = ensemble.ranks
    if not ranks.alone:
        ranks.agree(
            {
                "the mechanisms": dict(mechanisms),
                "the budgets": epsilons,
                "the tokens": list(tokens),
                "the settings of the evaluation": (windows, memory_bytes),
                "whether a result file is kept": result is not None,
            }
        )
    settings = Settings(
        dict(mechanisms), delta, epsilons, adjacencies, Origin.of(ensemble), ensemble.num_models,
        diagnostics, ranks,
    )  # fmt: skip

    def methods(run: int) -> list[Method]:
        source = rng if run == 0 else rng.child(f"run {run}")
        return [Method(name, settings, source.child(name)) for name in mechanisms]

    for one in methods(0):  # raises for what no accountant takes before the models run
        one.tally.accountant.check_left(one.mechanism, total)
    session = Session(ensemble, tokens, windows, methods, memory_bytes, progress)
    if result is None:
        while not session.complete:
            session.step()
        return session.results()
    description = describe(
        ensemble, tokens, windows, settings, rng, memory_bytes,
        block=block, stride=stride,
    )  # fmt: skip
    file = ResultFile(result, description, about or {})
    _answer_and_keep(session, file, resume, save_seconds, ranks)
    return session.results()


def _answer_and_keep(
    session: Session, file: ResultFile, resume: bool, seconds: float, ranks: Ranks
) -> None:
    """Answer everything; the main process keeps the file and tells the others where to go on."""

    def begin() -> torch.Tensor:
        state = file.begin(resume=resume)
        if state is not None:
            session.restore(state)
        else:
            file.save(session.state(), complete=False)  # raises if it cannot be written
        return torch.tensor(session.place)

    with file.held() if ranks.is_main else nullcontext():
        place = ranks.tell(begin, (2,), torch.int64, torch.device("cpu"))
        if not ranks.is_main:
            session.follow(*place.tolist())
        saved = time.monotonic()
        while not session.complete:
            session.step()
            if ranks.is_main and (session.complete or time.monotonic() - saved >= seconds):
                file.save(session.state(), complete=session.complete)
                saved = time.monotonic()


def _by_name(argument: str, given: Any, mechanisms: Mapping[str, Mechanism]) -> dict[str, Any]:
    """Expand an option that was given for all mechanisms, or for some by name."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(mechanisms, given)
    if given.keys() - mechanisms.keys():
        unknown = sorted(given.keys() - mechanisms.keys())
        raise ValueError(f"{argument} must name mechanisms of this evaluation, got {unknown!r}")
    return dict(given)
