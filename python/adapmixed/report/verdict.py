"""Say which share of the gain without protection each mechanism keeps, and at which ε."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapmixed.report.view import covered, format_against, format_kept, show_epsilon

if TYPE_CHECKING:
    from adapmixed.evaluation import Evaluation


def kept_entries(methods: Sequence[Sequence["Evaluation"]]) -> list[dict[str, object] | None]:
    """Return the entry "kept" of every method.

    Args:
        methods: the evaluations of each, one per run.

    Returns:
        {"of", "share", "error"} for each: the name of the best method without protection whose gain
        can be told from zero, and the result of :func:`adapmixed.evaluation.result.gain_kept`.
        Share and error are None if there is none. None for the public model, and without something
        to compare.
    """
    from adapmixed.evaluation.result import gain_kept

    public = next((runs for runs in methods if runs[0].guarantee.kind == "public"), None)
    free = [runs for runs in methods if runs[0].guarantee.kind == "none"]
    if public is None or not free:
        return [None] * len(methods)
    told = [runs for runs in free if gain_kept(runs, public, runs) is not None]
    best = min(told or free, key=lambda runs: math.fsum(math.log(one.perplexity) for one in runs))
    found: list[dict[str, object] | None] = []
    for runs in methods:
        share, error = gain_kept(runs, public, best) or (None, None)
        kept: dict[str, object] = {"of": best[0].name, "share": share, "error": error}
        found.append(None if runs is public else kept)
    return found


def verdict(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for every mechanism with an ε.

    Args:
        entries: "methods" or "runs" of a report.
    """
    rated = [one for one in entries if one["kind"] in ("fixed", "data-dependent, ex-post")]
    rated = [one for one in rated if one.get("kept") is not None]
    if not rated:
        return []
    (best,) = (one for one in entries if one["name"] == rated[0]["kept"]["of"])
    if best["kept"]["share"] is None:
        return [_no_share(best)]
    return [_sentence(one, best) for one in rated]


def _sentence(one: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    words = format_kept(one["kept"])
    if (one["kept"]["share"] or 0.0) <= 0:  # no share: its perplexity is infinite
        words = f"nothing ({words})"
    cost = show_epsilon(float(one.get("epsilon_mean", one["epsilon"])))
    private = "" if one["kind"] == "fixed" else " (a private number)"
    return (
        f"{one['name']} keeps {words} of what {_called(best)} gains, at ε = {cost}{private} for "
        f"{covered(one)}."
    )


def _no_share(best: Mapping[str, Any]) -> str:
    """Return why no share of the gain can be stated."""
    from adapmixed.evaluation.result import BLOCK, LEAST_BLOCKS

    found = best["difference"]
    start = "No share of the gain is stated:"
    if found is not None and found["low"] is None:
        return f"{start} that takes {BLOCK * LEAST_BLOCKS} scored tokens."
    change = "" if found is None else f" (perplexity {format_against(None, found)})"
    if found is None or found["mean"] >= 0:
        return f"{start} on this text {_called(best)} gains nothing over the public model{change}."
    return f"{start} on this text the gain of {_called(best)} cannot be told from zero{change}."


def _called(best: Mapping[str, Any]) -> str:
    return "the unprotected ensemble" if best["name"] == "unprotected" else f"'{best['name']}'"
