"""Diagnostics of an evaluation in report.json and on the terminal: private, the operator's."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapmixed.report.table import aligned
from adapmixed.report.view import MISSING, Method

if TYPE_CHECKING:
    from adapmixed.evaluation import Diagnosis

UTILITY_TITLES = ("method", "gap", "mean bound", "bound")
UTILITY_WORDS = (
    "Nats a token. Gap: what the method’s mean negative log-likelihood exceeds that of the "
    "unprotected ensemble by, on the same queries. Bound: the largest (1 − λ) log(p_j/p_0) over "
    "all queries and models, which the paper’s utility theorem says the gap is at most; mean "
    "bound: the mean over queries of each one’s largest, which its proof gives, too. They depend "
    "on the private data: for the operator only."
)


def diagnostics_entry(diagnosis: "Diagnosis") -> dict[str, object]:
    """Return what report.json holds of a diagnosis: nats, counts of queries or of pairs."""
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
    """Return the utility theorem's numbers of a method; None if there are none."""
    found: Mapping[str, Any] | None = (method.diagnostics or {}).get("utility")
    return found


def utility_cells(method: Method) -> list[str]:
    """Return the cells of a method that has these numbers, as `UTILITY_TITLES`."""
    utility = utility_of(method) or {}
    return [method.name, *(_nats(utility[key]) for key in ("gap", "mean_bound", "bound"))]


def utility_table(methods: Sequence[Method]) -> list[str]:
    """Return lines; none if no method has such numbers."""
    rows = [utility_cells(method) for method in methods if utility_of(method) is not None]
    if not rows:
        return []
    return [
        "PRIVATE, for the operator: the utility theorem (nats a token).",
        *aligned([UTILITY_TITLES, *rows], (False, True, True, True)),
        "",
        *textwrap.wrap(UTILITY_WORDS, 100),
    ]


def _nats(value: float | str | None) -> str:
    return MISSING if value is None else f"{float(value):.4g}"
