"""The event of a noisy count under a per-model filter; no mechanism emits it."""

from __future__ import annotations

from dataclasses import dataclass

from adapmixed.privacy.checks import check_count, check_real


@dataclass(frozen=True)
class ReleasedCount:
    """A noisy count of models that was released under a filter (`PerModelFilter.noisy_count`).

    It is one of those that the filter's budget reserves, and costs nothing besides. Public.

    Args:
        num_models: N >= 1.
        threshold: public, >= 0; counted are the models whose answers have spent more.
        sigma: > 0, standard deviation of the noise.
        noisy_count: what was released; may be negative.
    """

    num_models: int
    threshold: float
    sigma: float
    noisy_count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_models", check_count("num_models", self.num_models, 1))
        threshold = check_real("threshold", self.threshold, infinite=True)
        object.__setattr__(self, "threshold", threshold)
        object.__setattr__(self, "sigma", check_real("sigma", self.sigma))
        if self.sigma == 0:
            raise ValueError("sigma must be > 0, got 0.0")
        if type(self.noisy_count) is not int:
            raise ValueError(f"noisy_count must be an integer, got {self.noisy_count!r}")
