"""The domain of every promise: its limits, each with its reason, and the checks of arguments.

Up to these limits a stated error is enough for every operator, and no use beyond them is known.
They are checked at the public doors; inside, nothing checks its caller again.
docs/reference/limits.md shows the table.

Each check returns the value in its plain type, or raises a ValueError that names the argument, its
value and what is allowed.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any

MOST_MODELS = 65_536
"""Members N. Sums over members keep their stated error up to here."""

MOST_TOKENS = 2**20
"""Tokens V, from 1, which a top-k of 1 leaves. Known vocabularies have at most 2^18 or so."""

LEAST_ORDER, MOST_ORDER = 1 + 1e-8, 1_024.0
"""Rényi order α of operators and mechanisms. Doubles resolve α − 1 from 1e-8 on. At 1 024 the
conversion to δ = 1e-15 costs 0.03. Pure accounting takes any order above 1."""

MOST_ORDERS = 8
"""Orders of one call of an operator, and of AdaPMixED's realised losses, over which δ is split."""

MOST_EXPONENT = 600.0
"""(α − 1) R of a ball of radius R: sums up to e^600 are doubles, with room for V and N. PMixED
derives its radius, and takes 600/(α − 1) if that is smaller."""

LEAST_PUBLIC = -70.0
"""Log of the least public probability of a token about which members speak. No such token is ever
drawn: 2^20 of them have 4e-25 in all. They are the tail, and keep their public probability in each
member's row."""

LEAST_DELTA, MOST_DELTA = 1e-15, 0.1
"""δ. At 0.1 one shard of ten may be revealed; an FFT that composes losses has errors near 1e-15."""

MOST_QUERIES = 2**40
"""Answers T of a plan. What T sums lose by rounding stays far below ε."""

MOST_RANGE, MOST_DEPTH = 64.0, 330.0
"""b − a of clipped log-ratios, and κ (b − a): with `LEAST_PUBLIC`, every p ≥ e^-400 is a double."""

MOST_BOX = 1e6
"""C/c of a box with c > 0, and C of one with c = 0. A ratio of a million is hardly a limit."""

LEAST_ACTIVE, DEFAULT_ACTIVE = 2, 32_768
"""K of an active vocabulary. docs/concepts/what-privacy-costs.md says what the default costs."""

LEAST_SIGMA = 1e-6
"""σ of the screening's noise. At 1e-6, with the paper's weight and N = 100, it costs α nats."""

LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 100.0
"""Temperature. At the ends a draw is all but sure, or all but uniform."""


def check_models(value: Any, name: str = "num_models", least: int = 1) -> int:
    """Return a number of members N."""
    return check_count(name, value, least, MOST_MODELS)


def check_order(value: Any, name: str = "order") -> float:
    """Return a Rényi order α of an operator or mechanism."""
    return check_number(name, value, above=1.0, least=LEAST_ORDER, most=MOST_ORDER)


def check_orders(value: Any) -> list[float]:
    """Return Rényi orders as a list; a tensor of one number is none."""
    several = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    if isinstance(value, numbers.Real):
        values: list[Any] = [value]
    elif several and getattr(value, "ndim", 1) != 0:
        values = list(value)
    else:
        raise ValueError(f"orders must be a number or a sequence of numbers, got {value!r}")
    if not 1 <= len(values) <= MOST_ORDERS:
        raise ValueError(f"orders must be 1 to {MOST_ORDERS} orders, got {len(values)}")
    return [check_order(x, "orders") for x in values]


def check_radius(value: Any, order: float) -> float:
    """Return the radius R ≥ 0 of a ball, in nats, for a checked order."""
    return check_number("radius", value, least=0.0, most=MOST_EXPONENT / (order - 1))


def check_leakage(value: Any, order: float) -> float:
    """Return the target leakage β ≥ 0 of a ball of radius β·order, for a checked order."""
    leakage = check_number("target_leakage", value, least=0.0, infinite=True)
    most = MOST_EXPONENT / (order - 1)
    if leakage * order > most:  # the radius is checked, which rounding may put above the limit
        raise ValueError(f"target_leakage must be <= {most / order!r}, got {value}")
    return leakage


def check_delta(value: Any) -> float:
    """Return a δ."""
    return check_number("delta", value, least=LEAST_DELTA, most=MOST_DELTA)


def check_queries(value: Any, name: str = "queries", least: int = 1) -> int:
    """Return a number of answers T."""
    return check_count(name, value, least, MOST_QUERIES)


def check_optional_queries(value: Any, name: str = "queries") -> int | None:
    """Return a number of answers T, or None."""
    return None if value is None else check_queries(value, name)


def check_clip(lower: Any, upper: Any) -> tuple[float, float]:
    """Return the clip range (a, b) of log p_i/q, a ≤ 0 ≤ b."""
    low = check_number("lower (a log-ratio)", lower, least=-MOST_RANGE, most=0.0)
    high = check_number("upper (a log-ratio)", upper, least=0.0, most=MOST_RANGE)
    if high - low > MOST_RANGE:
        raise ValueError(f"upper - lower must be <= {MOST_RANGE:g}, got {upper} - {lower}")
    return low, high


def check_scale(value: Any, lower: float, upper: float) -> float:
    """Return the scale κ ≥ 0 of a pool, for a checked clip range."""
    scale = check_number("scale", value, least=0.0)
    if scale * (upper - lower) > MOST_DEPTH:
        raise ValueError(
            f"scale * (upper - lower) must be <= {MOST_DEPTH:g}, got {value} * {upper - lower}"
        )
    return scale


def check_box(lower: Any, upper: Any) -> tuple[float, float]:
    """Return the box (c, C) of p̄_i/q, 0 ≤ c ≤ 1 ≤ C."""
    low = check_number("lower (a ratio)", lower, least=0.0, most=1.0)
    high = check_number("upper (a ratio)", upper, least=1.0, most=MOST_BOX)
    if high > MOST_BOX * low > 0:
        raise ValueError(
            f"upper / lower must be <= {MOST_BOX:g} unless lower is 0, got {upper} / {lower}"
        )
    return low, high


def check_sigma(value: Any) -> float:
    """Return the standard deviation σ of the screening's noise."""
    return check_number("sigma", value, least=LEAST_SIGMA)


def check_temperature(value: Any) -> float:
    """Return a temperature."""
    return check_number("temperature", value, least=LEAST_TEMPERATURE, most=MOST_TEMPERATURE)


def check_active(value: Any, name: str = "active") -> int | None:
    """Return the size K of an active vocabulary, or None for all tokens, as V and more mean too."""
    return check_optional_count(name, value, LEAST_ACTIVE)


def active_tokens(active: int | None, vocab_size: int) -> int | None:
    """Return K of an active vocabulary; None if it is all tokens."""
    return None if active is None or active >= vocab_size else active


def check_vocabulary(tokens: int, name: str) -> None:
    """Raise unless rows with this name have an allowed number of tokens V."""
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{name} must have 1 to {MOST_TOKENS} tokens (V), got {tokens}")


NEIGHBOURS = ("add_remove", "zero_out")
"""Neighbours of realised losses: a member is left out of the mean, or its shard is emptied."""

QUESTIONS = ("zero_out", "replace_one")
"""Neighbours of an accountant's statement: a shard is emptied, or its records change."""


def check_count(name: str, value: Any, minimum: int = 1, most: int | None = None) -> int:
    """Return `value` as an int that is at least `minimum`, and at most `most`."""
    try:
        count = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if isinstance(value, bool) or count < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
    if most is not None and count > most:
        raise ValueError(f"{name} must be <= {most}, got {value!r}")
    return count


def check_optional_count(name: str, value: Any, minimum: int = 1) -> int | None:
    """Return `value` as an int that is at least `minimum`, or None."""
    return None if value is None else check_count(name, value, minimum)


def check_flag(name: str, value: Any) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def check_type(name: str, value: object, kind: type, words: str, *, optional: bool = False) -> None:
    """Raise unless `value` is of this type, or None if that is allowed."""
    if not (optional and value is None) and not isinstance(value, kind):
        raise ValueError(f"{name} must be {words}, got {value!r}")


def check_option(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise unless `value` is one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {tuple(allowed)!r}, got {value!r}")


def check_number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    infinite: bool = False,
) -> float:
    """Return `value` as a float that is > above, >= least and <= most.

    Args:
        name: name of the argument, for messages.
        value: number to check.
        above: exclusive lower bound.
        least: inclusive lower bound.
        most: inclusive upper bound.
        infinite: True if +inf is allowed. NaN never is.

    Raises:
        ValueError: the value is not such a number.
    """
    # A compiler follows comparisons of its symbolic floats, but not every function of math.
    if type(value) is not float and (
        isinstance(value, bool) or not isinstance(value, numbers.Real)
    ):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        value = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number that a float64 can hold, got {value}") from None
    if not value > above and above > -math.inf:
        raise ValueError(f"{name} must be > {above:.15g}, got {value}")
    if not value >= least:
        raise ValueError(f"{name} must be >= {least:.15g}, got {value}")
    if not value <= most:
        raise ValueError(f"{name} must be <= {most!r}, got {value}")
    if not infinite and not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be finite, got {value}")
    return value


def check_epsilon(value: Any) -> float:
    """Return `value` as a finite ε > 0."""
    return check_number("epsilon", value, above=0.0)


def check_question(value: Any) -> str:
    """Return `value` if it is one of `QUESTIONS`."""
    check_option("adjacency", value, QUESTIONS)
    return str(value)


def check_rng(rng: Any) -> None:
    """Raise ValueError unless `rng` is a random source."""
    if not callable(getattr(rng, "reserve", None)):
        raise ValueError(f"rng must be SecureRandom() or SeededRandom(seed), got {rng!r}")
