"""The second check of each request's parameters, which vLLM's front process calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

from adapmixed.vllm.parameters import check_parameters


class PrivateParams(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that changes nothing. It is there for `validate_params`."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError, which vLLM answers with status 400, for a parameter that is refused."""
        check_parameters(sampling_params)

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """Return True."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Do nothing."""
