"""The screening kernel against 70 digits, on inputs that only exact sums decide."""

from __future__ import annotations

import simulated
import torch
from screenings import far_from_public


def test_models_that_leave_the_kept_tokens() -> None:
    for seed in range(60):
        with simulated.kernels(*simulated.ORDERS[seed % len(simulated.ORDERS)]):
            fault = far_from_public(seed).fault(torch.device("cpu"))
        assert fault is None, f"seed {seed}: {fault}"
