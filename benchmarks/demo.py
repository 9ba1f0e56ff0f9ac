"""The demonstration's ensemble, trained for one run of a benchmark."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from adapmixed.training.demo import train_demo


@cache
def demo_ensemble() -> Path:
    """Train it and return its folder, which is removed when the program ends."""
    folder = tempfile.mkdtemp(prefix="adapmixed-benchmark-")
    atexit.register(shutil.rmtree, folder)
    return train_demo(Path(folder, "ensemble"))
