"""The options of the plugin, which every process of vLLM gets in --additional-config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from adapmixed.limits import DEFAULT_ACTIVE, check_active, check_count, check_flag
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant

KEY = "adapmixed"
"""Name of the plugin's entry in --additional-config."""

VERSION = "0.32.0"
"""The version of vLLM that the plugin is tested with."""

SCHEDULER = "adapmixed.vllm.scheduler.ChargingScheduler"
WORKER = "adapmixed.vllm.worker.PrivateWorker"
PARAMS = "adapmixed.vllm.params:PrivateParams"
GATE = "adapmixed.vllm.gate.Gate"


@dataclass(frozen=True)
class Options:
    """The options of the plugin.

    Attributes:
        ensemble: the ensemble's folder.
        ledger: path of the ledger, which the scheduler's process writes.
        lower: a of ClippedLogPool.
        upper: b of ClippedLogPool.
        scale: κ of ClippedLogPool.
        queries: number of tokens that the guarantee is planned for.
        delta: δ of the guarantee.
        adjacency: neighbours of the guarantee, "zero_out" or "replace_one".
        block: number of tokens of a request that are charged together.
        tokens: max_tokens of a request that has none.
        max_tokens: largest max_tokens of a request.
        waiting: number of answers that may wait for a place in the batch.
        keys: file of the clients' keys; None for a server without keys.
        behind_proxy: whether a proxy encrypts what clients send.
        active: K ≥ 2, number of the likeliest public tokens about which members speak; None for
            all.
        gate: whether requests must come through `Gate`. False for vLLM's Python class `LLM`.

    Raises:
        ValueError: an option is not valid.
    """

    ensemble: str
    ledger: str
    lower: float
    upper: float
    scale: float
    queries: int
    delta: float = 1e-5
    adjacency: str = "zero_out"
    block: int = 16
    tokens: int = 256
    max_tokens: int = 1024
    waiting: int = 256
    keys: str | None = None
    behind_proxy: bool = False
    active: int | None = DEFAULT_ACTIVE
    gate: bool = True

    def __post_init__(self) -> None:
        for name in ("ensemble", "ledger"):
            value = getattr(self, name)
            if not isinstance(value, str) or not Path(value).is_absolute():
                raise ValueError(f"{name} must be an absolute path, got {value!r}")
        for name in ("block", "tokens", "max_tokens", "waiting"):
            check_count(name, getattr(self, name))
        check_active(self.active)
        for name in ("behind_proxy", "gate"):
            check_flag(name, getattr(self, name))
        if self.queries is None:
            raise ValueError("queries must be given: vLLM serves planned mechanisms alone")
        Accountant(self.delta, adjacency=self.adjacency).bind(self.mechanism, num_models=1)

    @property
    def mechanism(self) -> ClippedLogPool:
        """The mechanism that answers."""
        return ClippedLogPool(self.lower, self.upper, self.scale, self.queries)

    @staticmethod
    def of(mechanism: Any, **others: Any) -> Options:
        """Return the options with a mechanism's settings.

        Raises:
            ValueError: the mechanism cannot be charged in advance, or an option is not valid.
        """
        mechanism.cost_ahead(1, 1)
        names = "lower", "upper", "scale", "queries"
        settings = {name: getattr(mechanism, name) for name in names}
        return Options(**settings, **others)

    def written(self) -> dict[str, Any]:
        """Return the value of --additional-config."""
        return {KEY: asdict(self)}


def read_options(additional_config: Any) -> Options:
    """Return the options in a value of --additional-config.

    Raises:
        ValueError: there are none, one is unknown or missing, or one is not valid.
    """
    given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if not isinstance(given, Mapping):
        raise ValueError(
            f"--additional-config must hold {KEY!r}: 'adapmixed vllm-config' prints the command"
        )
    known = {field.name for field in fields(Options)}
    unknown = sorted(map(str, given.keys() - known))
    if unknown:
        raise ValueError(f"--additional-config: {KEY!r} has no option {unknown[0]!r}")
    try:
        return Options(**given)
    except TypeError as error:
        raise ValueError(f"--additional-config: {KEY!r} lacks options: {error}") from error
    except ValueError as error:
        raise ValueError(f"--additional-config: {error}") from error
