"""``--release-counts`` with ``--ledger``: K counts in a ledger's whole life, as typed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from trained_demo import DEMO_ENSEMBLE

from adapmixed.cli import main
from adapmixed.data.demo import demo_base
from adapmixed.generation import PrivateGenerator
from adapmixed.privacy.ledger import read

pytestmark = pytest.mark.usefixtures("demo_ensemble", "endless")
MODELS = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]
POOL = ["--mechanism", "clipped-log-pool", "--lower=-0.5", "--upper=0.5", "--filter-epsilon", "2"]
COUNTS = ["--release-counts", "3", "--release-sigma", "60"]
ANSWER = ["--prompt", "The value", "--max-new-tokens", "2"]
LINE = "Models that have spent more than "


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def generate(path: Path, *options: str) -> int:
    return main(["generate", *MODELS, *POOL, *ANSWER, "--ledger", str(path), *options])


def counts(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(LINE)]


def recorded(path: Path) -> list[int]:
    return [one.noisy_count for one in read(path).accountant.released_counts]


def test_counts_are_released_once_and_shown_again(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(path, *COUNTS) == 0
    first = capsys.readouterr().err
    known, budget = recorded(path), read(path).description.filter_budget
    assert budget is not None and (budget.releases, budget.sigma) == (3, 60.0)
    assert read(path).charges == 2 + 3 and "released before" not in first
    words = "with noise of standard deviation 60; may be published."
    shares = ("25%", "50%", "75%")
    assert counts(first) == [
        f"{LINE}{share} of what answers may: {number}, {words}"
        for share, number in zip(shares, known, strict=True)
    ]
    for charges in (7, 9):
        assert generate(path, *COUNTS) == 0
        again = capsys.readouterr().err
        assert "3 of 3 noisy counts were released before." in again
        assert counts(again) == counts(first) and recorded(path) == known
        assert read(path).charges == charges


def test_counts_are_kept_for_a_later_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert generate(path, *COUNTS, "--keep-counts") == 0
        error = capsys.readouterr().err
        assert "0 of 3 noisy counts were released before. This run leaves the rest" in error
        assert not counts(error)
    assert recorded(path) == []
    assert generate(path, *COUNTS) == 0
    assert len(counts(capsys.readouterr().err)) == 3 == len(recorded(path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "3 noisy counts of standard deviation 60.0, got no noisy counts"),
        (["--release-counts=4", "--release-sigma=60"], "got 4 noisy counts of"),
        (["--release-counts=3", "--release-sigma=61"], "got 3 noisy counts of standard dev"),
        ([*COUNTS, "--filter-epsilon=3"], "filter_budget must be what the ledger was created"),
    ],
)
def test_another_reservation_is_refused(
    path: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(path, *COUNTS, "--keep-counts") == 0
    capsys.readouterr()
    assert generate(path, *options) == 2
    output = capsys.readouterr()
    assert words in output.err and output.out == ""
    assert read(path).charges == 2


def test_a_ledger_begun_without_counts(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(path) == 0
    assert "noisy counts" not in capsys.readouterr().err
    assert generate(path, *COUNTS) == 2
    error = capsys.readouterr().err
    assert "when the ledger was created, no noisy counts, got 3 noisy counts of" in error


def test_a_run_that_is_broken_off_leaves_them(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = PrivateGenerator.stream

    def broken(self: PrivateGenerator, *arguments: object, **options: object) -> object:
        pieces = stream(self, *arguments, **options)  # type: ignore[arg-type]
        yield next(pieces)
        raise ValueError("something else")

    with monkeypatch.context() as patched:
        patched.setattr(PrivateGenerator, "stream", broken)
        assert generate(path, *COUNTS) == 2
    error = capsys.readouterr().err
    assert "something else" in error and "0 of 3 noisy counts were released before." in error
    assert recorded(path) == [] and read(path).charges == 1
    assert generate(path, *COUNTS) == 0
    assert len(recorded(path)) == 3


KILLED = """
import os, signal, sys
from adapmixed.cli import main
from adapmixed.commands import serving

def lines(counts, sigma):
    for one in counts:  # a count that is recorded, and never shown
        os.kill(os.getpid(), signal.SIGKILL)
        yield ""

serving.count_lines = lines
main(sys.argv[1:])
"""


def test_a_count_that_a_kill_left_unseen_is_shown_by_the_next_run(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED, encoding="utf-8")
    command = ["generate", *MODELS, *POOL, *ANSWER, "--ledger", str(path), *COUNTS]
    ended = subprocess.run(
        [sys.executable, str(script), *command], capture_output=True, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL and not counts(ended.stderr)
    (unseen,) = recorded(path)
    assert generate(path, *COUNTS) == 0
    error = capsys.readouterr().err
    assert "1 of 3 noisy counts were released before." in error
    assert f"{LINE}25% of what answers may: {unseen}, " in error
    assert len(counts(error)) == 3 and recorded(path)[0] == unseen


def test_chat_releases_them_at_its_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["chat", *MODELS, *POOL, "--plain", "--max-new-tokens", "2", "--ledger", str(path)]
    for _ in range(2):
        monkeypatch.setattr("sys.stdin", io.StringIO("The value\nIf\n"))
        assert main([*command, *COUNTS]) == 0
        assert len(counts(capsys.readouterr().err)) == 3 == len(recorded(path))


def test_the_ledger_shows_them(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(path, *COUNTS, "--keep-counts") == 0
    capsys.readouterr()
    for action in ("show", "verify"):
        assert main(["ledger", action, str(path)]) == 0
        assert "counts: 0 of 3 released, standard deviation 60.0: -\n" in capsys.readouterr().out
    assert generate(path, *COUNTS) == 0
    capsys.readouterr()
    known = read(path).accountant.released_counts
    words = ", ".join(f"{one.noisy_count} above {one.threshold}" for one in known)
    for action in ("show", "verify"):
        assert main(["ledger", action, str(path)]) == 0
        line = f"counts: 3 of 3 released, standard deviation 60.0: {words}\n"
        assert line in capsys.readouterr().out
        assert main(["ledger", action, "--json", str(path)]) == 0
        shown = json.loads(capsys.readouterr().out)["counts"]
        assert (shown["reserved"], shown["sigma"]) == (3, 60.0)
        assert [one["noisy_count"] for one in shown["released"]] == recorded(path)
    assert main(["ledger", "export", str(path)]) == 0
    about, *lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert about["ledger"]["filter_budget"]["releases"] == 3
    events = [event for line in lines for event in line["events"]]
    exported = [event for event in events if event["event"] == "ReleasedCount"]
    assert [one["noisy_count"] for one in exported] == recorded(path)


def test_other_thresholds_take_counts_away(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loop of one's own has asked for another: what is left is shown, then no more."""
    assert generate(path, *COUNTS, "--keep-counts") == 0
    from adapmixed.privacy import Ledger, PerModelFilter
    from adapmixed.rng import SecureRandom

    known = read(path).description
    names = ("delta", "rule", "configuration", "filter_budget")
    with Ledger.open(path, **{name: getattr(known, name) for name in names}) as ledger:
        budget, spent = known.filter_budget, ledger.accountant.individual_spent
        assert budget is not None
        model_filter = PerModelFilter(64, budget, spent=spent)
        ledger.attach(model_filter)
        model_filter.noisy_count(0.0, rng=SecureRandom())
    capsys.readouterr()
    for _ in range(2):
        assert generate(path, *COUNTS) == 2
        error = capsys.readouterr().err
        assert len(counts(error)) == 2 and "got none left of 3" in error
        assert len(recorded(path)) == 3
