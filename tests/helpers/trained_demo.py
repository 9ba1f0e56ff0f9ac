"""The demonstration's ensemble, trained once per test run.

A module that reads `DEMO_ENSEMBLE` needs `pytestmark = pytest.mark.usefixtures("demo_ensemble")`.
"""

import fcntl
import os
from pathlib import Path

from adapmixed.training.demo import train_demo

DEMO_ENSEMBLE = Path(os.environ["ADAPMIXED_TESTS_DEMO"], "ensemble")


def trained() -> Path:
    """Train the ensemble unless another process of this run has done so."""
    with open(DEMO_ENSEMBLE.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return train_demo(DEMO_ENSEMBLE)
