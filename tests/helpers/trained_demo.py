"""The demonstration's ensemble, trained once per test run.

A module that reads it needs `pytestmark = pytest.mark.usefixtures("demo_ensemble")`.
"""

import fcntl
import os
import shutil
from pathlib import Path

from adapmixed.data import demo_base
from adapmixed.training.demo import train_demo, train_whole

DEMO_ENSEMBLE = Path(os.environ["ADAPMIXED_TESTS_DEMO"], "ensemble")
MODELS = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]


def trained() -> Path:
    """Train the ensemble, here where all is imported, unless another process has done so."""
    with open(DEMO_ENSEMBLE.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return train_demo(DEMO_ENSEMBLE, workers=1)


def link_ensemble(folder: Path) -> Path:
    """Make a folder with the members, so that it has a register of its own; return it."""
    folder.mkdir()
    for path in trained().iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def copy_trained(folder: Path) -> None:
    """Copy what the demonstration trains into its folder, so that no command trains it again."""
    trained()
    with open(DEMO_ENSEMBLE.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        train_whole(DEMO_ENSEMBLE.parent, str(demo_base()))
        kept = shutil.ignore_patterns("lock")
        shutil.copytree(DEMO_ENSEMBLE.parent, folder, ignore=kept, dirs_exist_ok=True)
