"""Compare guarantees, tokens, losses and charges with an earlier version, bit for bit.

    python -m tests.differential

The earlier version is checked out in a temporary folder. It uses its own sources with the compiled
module that is installed here, which is built anew if csrc differs. The exit status is 1 if there is
a difference that `_expected` does not allow. It allows an ε that is lower by rounding, and an ε
that the earlier version did not state.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers.compiled import build_module, copy_module

BEFORE = "a45f23fb338f0893bb8870d1286b4f799f8e62ca"
"""The commit of the version to compare with."""

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

NEWLY_STATED = tuple(f"/totals/bound {queries}/replace_one" for queries in (1, 1024, 99840))
"""PMixED's ε for replace-one, which the earlier version did not state."""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="adapmixed-before-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--detach", "-q", str(tree), BEFORE], cwd=ROOT, check=True
        )
        try:
            found = [_run("before.py", tree), _run("now.py", ROOT)]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT)
    differences = list(_differences("", *found))
    unexpected = [one for one in differences if not _expected(*one)]
    for path, before, now in unexpected[:40]:
        print(f"{path}: {before} before, {now} now")
    print(f"{len(differences)} differences, {len(unexpected)} of them unexpected")
    return 1 if unexpected else 0


def _run(program: str, tree: Path) -> Any:
    if tree != ROOT:
        same = ["git", "diff", "--quiet", BEFORE, "HEAD", "--", "csrc"]
        if subprocess.run(same, cwd=ROOT).returncode:
            build_module(tree, tree / "build")
        else:
            copy_module(ROOT / "adapmixed_ext", tree / "adapmixed_ext")
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        paths = os.pathsep.join(map(str, (tree / "python", tree, HERE)))
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / program), out.name]
        subprocess.run(command, cwd=tree, env=environment, check=True)
        return json.load(out)


def _differences(path: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before.keys() | now.keys():
            yield from _differences(f"{path}/{key}", before.get(key), now.get(key))
    elif before != now:
        yield path, before, now


def _expected(path: str, before: Any, now: Any) -> bool:
    """Return True for an ε that is newly stated, or lower because sums are rounded up only once."""
    if path in NEWLY_STATED:
        return before is None and now is not None
    if not (isinstance(before, list) and isinstance(now, list) and len(before) == len(now) == 3):
        return False
    was, found = float.fromhex(before[1]), float.fromhex(now[1])
    same = before[0] == now[0] and before[2] == now[2]
    return same and was * (1 - 1e-12) <= found <= was


if __name__ == "__main__":
    sys.exit(main())
