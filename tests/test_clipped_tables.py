"""The table of clipped mechanisms on the demonstration, for a few tokens."""

import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # benchmarks are not installed

from benchmarks import clipped_tables  # noqa: E402


@pytest.mark.slow
def test_a_table_of_a_small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipped_tables, "BOXES", clipped_tables.BOXES[:1])
    title, header, *rows = clipped_tables.table(16)
    assert title.startswith("64 models, 16 queries") and "replace-one" in header
    assert len(rows) == 2 + len(clipped_tables.POOLS) + len(clipped_tables.BOXES)
    columns = [row.split()[-4:] for row in rows]
    perplexities = [float(column[0]) for column in columns]
    assert all(1 < value < math.inf for value in perplexities)
    assert columns[0][1:] == ["0.0%", "0", "0"] and columns[1][2:] == ["-", "-"]
    for change, value in zip([float(c[1].rstrip("%")) for c in columns], perplexities, strict=True):
        assert change == pytest.approx(100 * (value / perplexities[0] - 1), abs=0.1)
    pools = columns[2 : 2 + len(clipped_tables.POOLS)]
    costs = [float(column[2]) for column in pools]
    assert costs == sorted(costs)
    assert all(float(column[3]) > 2 * cost for column, cost in zip(pools, costs, strict=True))
    assert len({column[0] for column in columns}) == len(rows)  # every setting answers differently


def test_epsilon_of_the_settings_at_full_size() -> None:
    """The known budgets of ClippedLogPool for 64 models and 508 queries, to two digits."""
    stated = [(0.63, 1.36), (0.99, 2.13), (1.26, 2.73), (1.74, 3.79), (3.36, 7.56)]
    mechanisms = list(clipped_tables.settings(508).values())[2:]
    for mechanism, pair in zip(mechanisms, stated, strict=False):
        found = clipped_tables.epsilons(mechanism, 64, 508)
        assert [float(value) for value in found] == pytest.approx(pair, abs=0.006)


def test_adapmixed_beside_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = clipped_tables.EPSILONS[:2]
    monkeypatch.setattr(clipped_tables, "EPSILONS", budgets)
    title, header, *rows, note = clipped_tables.against_adapmixed(16)
    assert "16 queries" in title and "may not be published" in note
    assert header.endswith("ε zero-out")
    columns = [row.split()[-3:] for row in rows]
    assert [column[2].endswith("*") for column in columns[:3]] == [False, True, True]
    assert not any("*" in column[2] for column in columns[3:])
    found = [float(column[2]) for column in columns[3:]]
    each = [budget for budget in budgets for _ in range(2)]  # ClippedMixing and ClippedLogPool
    assert all(0.98 * b < one <= b for one, b in zip(found, each, strict=True))
    perplexities = [float(column[0]) for column in columns]
    assert perplexities[1] == perplexities[2] < perplexities[0]  # two rules, one mechanism
    first, second = perplexities[3:5], perplexities[5:]
    assert all(tight > wide for tight, wide in zip(first, second, strict=True))
