"""The domain of every promise: its limits, each with its reason, and the checks at public doors.

Up to these limits a stated error is enough for every operator, and no use beyond them is known.
Inside them nothing checks its caller again. docs/reference/limits.md shows the table.

Each check returns the value in its plain type, or raises a ValueError that names the argument, its
value and what is allowed.
"""

from __future__ import annotations

from typing import Any

from adapmixed.checks import check_count, check_number

MOST_MODELS = 65_536
"""Members N. Sums over members keep their stated error up to here."""

MOST_TOKENS = 2**20
"""Tokens V, from 1, which a top-k of 1 leaves. Known vocabularies have at most 2^18 or so."""

LEAST_ORDER, MOST_ORDER = 1 + 1e-8, 1_024.0
"""Rényi order α of operators and mechanisms. Doubles resolve α − 1 from 1e-8 on. At 1 024 the
conversion to δ = 1e-15 costs 0.03. Pure accounting takes any order above 1."""

MOST_EXPONENT = 600.0
"""(α − 1) R of a ball of radius R: sums up to e^600 are doubles, with room for V and N. PMixED
derives its radius, and takes 600/(α − 1) if that is smaller."""

LEAST_PUBLIC = -70.0
"""Log of the least public probability of a token about which members speak. No such token is ever
drawn: 2^20 of them have 4e-25 in all. They are the tail, and keep their public probability."""

LEAST_LOGIT = -1e4
"""A logit as far below the largest of its row counts as −inf: e^-10000 is no double."""

LEAST_DELTA, MOST_DELTA = 1e-15, 0.1
"""δ. At 0.1 one shard of ten may be revealed; an FFT that composes losses has errors near 1e-15."""

MOST_QUERIES = 2**40
"""Answers T of a plan. What T sums lose by rounding stays far below ε."""

MOST_RANGE, MOST_DEPTH = 64.0, 330.0
"""b − a of clipped log-ratios, and κ (b − a): with `LEAST_PUBLIC`, every p ≥ e^-400 is a double."""

MOST_BOX = 1e6
"""C/c of a box with c > 0, and C of one with c = 0. A ratio of a million is hardly a limit."""

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


def check_radius(value: Any, order: float) -> float:
    """Return the radius R ≥ 0 of a ball, in nats, for a checked order."""
    return check_number("radius", value, least=0.0, most=MOST_EXPONENT / (order - 1))


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


def check_vocabulary(tokens: int, name: str) -> None:
    """Raise unless rows with this name have an allowed number of tokens V."""
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{name} must have 1 to {MOST_TOKENS} tokens (V), got {tokens}")
