"""Print the lines of each room of the repository; fail if one is above its budget.

    python scripts/rooms.py [FOLDER]

Lines are those of tracked source files; of `docs` those of the pages, without docs/_ext. A budget
is only lowered, to what stands when a change is done. What a change may add is named beforehand.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCES = (".py", ".pyi", ".c", ".cpp", ".h", ".cu", ".cuh")
BUDGETS = {
    "python/adapmixed": 19_108,
    "python/adapmixed_lab": 5_859,
    "adapmixed_ext": 1_900,
    "csrc": 10_277,
    "benchmarks": 2_480,
    "tests": 28_850,
    "docs": 4_975,
}


def room_of(name: str) -> str | None:
    """Return the room whose lines a file counts in, None if it is no source."""
    room = next((room for room in BUDGETS if name.startswith(f"{room}/")), None)
    sources = (*SOURCES, ".md") if room == "docs" else SOURCES
    return room if name.endswith(sources) and not name.startswith("docs/_ext/") else None


def lines(root: Path) -> dict[str, int]:
    """Return the lines of each room."""
    command = ["git", "-C", str(root), "ls-files"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = dict.fromkeys(BUDGETS, 0)
    for name in done.stdout.splitlines():
        room = room_of(name)
        if room and (root / name).exists():
            counts[room] += (root / name).read_bytes().count(b"\n")
    return counts


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
    print(f"{'room':22}{'lines':>8}{'budget':>8}{'left':>8}")
    counts = lines(root)
    for room, count in counts.items():
        print(f"{room:22}{count:8}{BUDGETS[room]:8}{BUDGETS[room] - count:8}")
    above = [room for room, count in counts.items() if count > BUDGETS[room]]
    if above:
        print(f"above the budget: {', '.join(above)}")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
