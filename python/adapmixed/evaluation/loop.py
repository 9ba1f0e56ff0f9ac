"""Evaluate mechanisms on a text; all of them answer the logits of one forward pass."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from adapmixed.evaluation.configuration import describe
from adapmixed.evaluation.methods import EvaluationSettings
from adapmixed.evaluation.result import Evaluation, Runs
from adapmixed.evaluation.result_file import ResultFile, check_result
from adapmixed.evaluation.session import Session
from adapmixed.evaluation.windows import plan_runs
from adapmixed.generation.loop import DEFAULT_MEMORY_BYTES
from adapmixed.limits import DEFAULT_ACTIVE, check_active, check_number
from adapmixed.mechanisms import Mechanism
from adapmixed.ranks import Ranks
from adapmixed.rng import SecureRandom, SeededRandom

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble

SAVE_SECONDS = 10.0
"""Least number of seconds between two writes of a result file, which end a window."""


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
    diagnostics: bool = False,
    active: int | None = DEFAULT_ACTIVE,
) -> list[Evaluation]:
    """Answer every position of a token stream with every mechanism.

    By default the stream is cut into blocks that do not overlap, and the first token of a block is
    not scored, as in the authors' program. With a stride it is cut into overlapping windows, so
    that every token but the first one is scored once. Every scored token is one query. The models
    run once, chunk by chunk within the memory limit, and all mechanisms answer the same logits. If
    an argument raises, nothing was answered.

    Args:
        ensemble: the models.
        tokens: the token stream, at least two tokens.
        mechanisms: the mechanisms by the name to report.
        delta: δ of the guarantees.
        rng: the source of randomness; a seeded one makes the evaluation repeatable. Every mechanism
            draws from its own child, so its result does not depend on the other mechanisms. With a
            seed, mechanisms of one kind draw the same noise, so that their settings compare.
        block: tokens per block, >= 2; None for 512, or for the model's window if that is shorter.
        stride: in [1, block − 1]. Windows of `block` tokens begin every `stride` tokens, and each
            scores the tokens after the window before it. So a scored token has at least
            block − stride tokens of context, if the stream has that many before it. None for blocks
            that do not overlap.
        queries: number of tokens to score; None for the whole stream.
        epsilon: ε of every shard's budget, as in `Accountant`; None for no budget. A mapping gives
            it for some mechanisms by name.
        adjacency: neighbouring relation of the guarantees, "zero_out" or "replace_one"; None for
            "zero_out". A mapping gives it for some mechanisms by name.
        memory_bytes: limit in bytes for one chunk's logits and activations.
        progress: called with (queries done, queries in all), also before the first answer.
        result: a private file for the state, from which `read_result` restores the results; None to
            keep nothing.
        resume: whether to continue from that file if it exists. With a seed, the same memory limit
            and the same number of threads, the result equals that of an uninterrupted run in every
            bit. Without a seed the rest is answered with new randomness.
        save_seconds: least number of seconds between two writes of the file, >= 0; a write ends a
            window. If the process ends, later answers are lost.
        diagnostics: whether to add a :class:`Diagnosis` of every mechanism. It is private; nothing
            else changes.
        active: K ≥ 2, number of the public model's likeliest tokens about which members speak;
            None, or V and more, for all.

    Returns:
        one :class:`Evaluation` per mechanism, in their order. Among several processes, only the
        main one gets them; the others get an empty list.

    Raises:
        ValueError: if there are no mechanisms, or too few tokens for one query.
        ValueError: if `block`, `stride` or `queries` is out of range.
        ValueError: if an accountant with these settings does not take a mechanism.
        ValueError: if the result file exists without `resume`, belongs to another evaluation, is
            being written by another process or is corrupted.
    """
    runs = evaluate_runs(
        ensemble, tokens, mechanisms, runs=1, delta=delta, rng=rng, block=block, stride=stride,
        queries=queries, epsilon=epsilon, adjacency=adjacency,
        memory_bytes=memory_bytes, progress=progress, result=result, resume=resume,
        save_seconds=save_seconds, diagnostics=diagnostics, active=active,
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
    diagnostics: bool = False,
    active: int | None = DEFAULT_ACTIVE,
) -> list[Runs]:
    """Evaluate several runs on disjoint parts of a token stream, as in the paper's Table 1.

    Every run answers its own part, made of as many whole blocks as its queries need. In every run
    each mechanism has its own accountant and its own randomness. A guarantee covers one run, as if
    the ensemble were used for that run alone. It does not cover all runs *together*, whose costs
    add up.

    The arguments that are not listed here are those of :func:`evaluate`.

    Args:
        runs: number of runs, >= 1; one run answers as :func:`evaluate` does.
        queries: number of queries of each run; None for as many as an even division of the whole
            blocks allows.
        progress: called with (queries done, queries in all), counted over all runs.

    Returns:
        one :class:`Runs` per mechanism, in their order.

    Raises:
        ValueError: as :func:`evaluate`, or if `runs` is below 1 or more than the text allows.
    """
    if not mechanisms:
        raise ValueError("mechanisms must name at least one mechanism, got none")
    check_number("save_seconds", save_seconds, least=0.0, infinite=True)
    check_active(active)
    if ensemble.ranks.alone or result is None:  # else told to all ranks at the first write
        check_result(result, resume=resume)
    windows, total = plan_runs(
        tokens, ensemble.longest_text, block, queries, runs=runs, stride=stride
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
                "the settings of the evaluation": (windows, memory_bytes, active),
                "whether a result file is kept": result is not None,
            }
        )
    settings = EvaluationSettings(
        ensemble, tokens, windows, dict(mechanisms), delta, epsilons, adjacencies, rng,
        memory_bytes, active, diagnostics,
    )  # fmt: skip
    for one in settings.methods(0):  # raises before the models run if no accountant takes one
        one.tally.accountant.check_left(one.mechanism, total)
    session = Session(settings, progress)
    if result is None:
        session.tell()
        while not session.complete:
            session.step()
        return session.results()
    description = describe(settings, block=block, stride=stride)
    file = ResultFile(result, description)
    _answer_and_keep(session, file, resume, save_seconds, ranks)
    return session.results()


def _answer_and_keep(
    session: Session, file: ResultFile, resume: bool, seconds: float, ranks: Ranks
) -> None:
    """Answer all windows; the main process keeps the file and tells the others where to start."""

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
        session.tell()
        while not session.complete:
            session.step()
            if ranks.is_main and (session.complete or time.monotonic() - saved >= seconds):
                file.save(session.state(), complete=session.complete)
                saved = time.monotonic()


def _by_name(argument: str, given: Any, mechanisms: Mapping[str, Mechanism]) -> dict[str, Any]:
    """Expand an option given for all mechanisms, or for some by name, into a dict."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(mechanisms, given)
    if given.keys() - mechanisms.keys():
        unknown = sorted(given.keys() - mechanisms.keys())
        raise ValueError(f"{argument} must name mechanisms of this evaluation, got {unknown!r}")
    return dict(given)
