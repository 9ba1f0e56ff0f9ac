"""Show an evaluation's diagnostics, which are private, in report.json and on the terminal."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapmixed.report.table import aligned
from adapmixed.report.view import MISSING, Method

if TYPE_CHECKING:
    from adapmixed.evaluation import Diagnosis

UTILITY_TITLES = ("method", "gap", "mean bound", "bound")
UTILITY_WORDS = (
    "In nats per token. Gap: the method’s mean negative log-likelihood minus that of the "
    "unprotected ensemble, on the same queries. Bound: the largest (1 − λ) log(p_j/p_0) over all "
    "queries and models, which bounds the gap by the paper’s utility theorem. Mean bound: the mean "
    "over queries of each query’s largest term, which bounds the gap, too. These numbers depend on "
    "the private data and are for the operator only."
)


def diagnostics_entry(diagnosis: "Diagnosis") -> dict[str, object]:
    """Return the entry of report.json for a diagnosis, in nats and counts."""
    from adapmixed.evaluation.diagnosis import QUANTILES

    utility, weights = diagnosis.utility, diagnosis.weights
    return {
        "utility": None if utility is None else vars(utility) | {"gap": utility.gap},
        "weights": None if weights is None else vars(weights),
        "screened": diagnosis.screened,
        "charges": diagnosis.charges,
        "charged_models": diagnosis.models,
        "quantiles": QUANTILES if diagnosis.quantiles else None,
    }


def utility_of(method: Method) -> Mapping[str, Any] | None:
    """Return a method's numbers for the utility theorem, or None."""
    found: Mapping[str, Any] | None = (method.diagnostics or {}).get("utility")
    return found


def utility_cells(method: Method) -> list[str]:
    """Return the cells of a method with these numbers, in the order of `UTILITY_TITLES`."""
    utility = utility_of(method) or {}
    return [method.name, *(_nats(utility[key]) for key in ("gap", "mean_bound", "bound"))]


def utility_table(methods: Sequence[Method]) -> list[str]:
    """Return the lines of the utility table; none if no method has such numbers."""
    rows = [utility_cells(method) for method in methods if utility_of(method) is not None]
    if not rows:
        return []
    return [
        "PRIVATE, for the operator: the utility theorem (nats per token).",
        *aligned([UTILITY_TITLES, *rows], (False, True, True, True)),
        "",
        *textwrap.wrap(UTILITY_WORDS, 100),
    ]


def _nats(value: float | str | None) -> str:
    return MISSING if value is None else f"{float(value):.4g}"
