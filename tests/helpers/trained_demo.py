"""The demonstration's ensemble, trained once for a whole run of the tests.

A module that reads `DEMO_ENSEMBLE` says `pytestmark = pytest.mark.usefixtures("demo_ensemble")`.
"""

import fcntl
import os
from pathlib import Path

from adapmixed.training.demo import train_demo

DEMO_ENSEMBLE = Path(os.environ["ADAPMIXED_TESTS_DEMO"], "ensemble")


def trained() -> Path:
    """Trains it, unless another process of this run has done so."""
    with open(DEMO_ENSEMBLE.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return train_demo(DEMO_ENSEMBLE)
