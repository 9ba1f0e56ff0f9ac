"""Plans keep within the budget and waste little of it; the inverse questions agree with them."""

import json
import math
import subprocess
import sys
import time

import pytest

from adapmixed.cli import main
from adapmixed.privacy import Accountant, BoundedRangeAnswer, ClippedAnswer, RenyiBound
from adapmixed.privacy.planner import epsilon_of, models_for, plan, queries_for

DELTA = 1e-5


@pytest.fixture(scope="module")
def plans():
    return {
        way: plan(1.0, DELTA, 64, 508, way, shapes=(1.0, 4.0), scales=(2.0,))
        for way in ("zero_out", "add_remove", "replace_one")
    }


def test_plans_fill_the_budget(plans):
    for adjacency, found in plans.items():
        names = [one.mechanism for one in found]
        assert names[:3] == ["clipped-mixing", "clipped-mixing", "clipped-log-pool"]
        assert ("pmixed" in names) == (adjacency != "add_remove")
        for one in found:
            assert 0.99 < one.epsilon <= 1.0
            assert (one.adjacency, one.queries, one.num_models) == (adjacency, 508, 64)
            counts, costs = zip(*one.over_time, strict=True)
            assert counts == (5, 50, 254, 508) and list(costs) == sorted(costs)
            assert costs[-1] == one.epsilon


def test_an_accountant_states_what_was_planned(plans):
    for adjacency, found in plans.items():
        mixing, pool = found[1].settings, found[2].settings
        assert math.log(mixing["upper"]) == pytest.approx(-4 * math.log(mixing["lower"]))
        events = [
            ClippedAnswer(mixing["lower"], mixing["upper"], 64, 1, budget=508),
            BoundedRangeAnswer(pool["scale"], pool["lower"], pool["upper"], 64, 1, budget=508),
        ]
        for event, one in zip(events, found[1:3], strict=True):
            stated = Accountant(DELTA, adjacency=adjacency).add(event).epsilon().epsilon
            assert stated <= 1.0 and stated == pytest.approx(one.epsilon, rel=1e-3)
    pmixed = plans["zero_out"][-1]
    from adapmixed.privacy import sound_bound

    bound = sound_bound(pmixed.settings["order"], pmixed.settings["radius"], 64)
    event = RenyiBound(pmixed.settings["order"], bound, 64, 508, "zero_out", budget=508)
    assert Accountant(DELTA).add(event).epsilon().epsilon <= 1.0


def test_wider_neighbours_buy_less(plans):
    first = {way: found[0].settings["upper"] for way, found in plans.items()}
    assert first["zero_out"] > first["add_remove"] > first["replace_one"]
    pool = {way: found[2].settings["upper"] for way, found in plans.items()}
    assert pool["zero_out"] > pool["add_remove"] == pool["replace_one"]
    assert "half the epsilon" in plans["replace_one"][-1].note
    assert plans["replace_one"][-1].settings["radius"] < plans["zero_out"][-1].settings["radius"]


@pytest.mark.parametrize(
    "settings",
    [{"lower": 0.7788, "upper": 1.6}, {"lower": -0.25, "upper": 0.5, "scale": 2.0}],
)
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_inverse_questions(settings, adjacency):
    queries = queries_for(1.0, DELTA, 64, adjacency, **settings)
    assert queries > 50
    assert epsilon_of(DELTA, 64, queries, adjacency, **settings) <= 1.0
    assert epsilon_of(DELTA, 64, math.ceil(queries * 1.001) + 1, adjacency, **settings) > 1.0
    models = models_for(1.0, DELTA, queries, adjacency, **settings)
    assert models is not None and 64 >= models >= 60
    assert epsilon_of(DELTA, models, queries, adjacency, **settings) <= 1.0
    assert epsilon_of(DELTA, models - 2, queries, adjacency, **settings) > 1.0


def test_ends_of_the_inverse_questions():
    assert queries_for(1e-3, 1e-9, 2, lower=0.1, upper=10.0) == 0
    assert queries_for(1.0, DELTA, 64, lower=1.0, upper=1.0, most=1000) == 1000
    assert models_for(1e-3, DELTA, 10**6, lower=0.1, upper=10.0, most=64) is None
    assert models_for(50.0, DELTA, 1, lower=0.9, upper=1.1) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be > 0, got 0.0"),
        ({"delta": 1.0}, r"delta must be in \(0, 1\), got 1.0"),
        ({"num_models": 0}, "num_models must be an integer >= 1"),
        ({"queries": 0}, "queries must be an integer >= 1, got 0"),
        ({"adjacency": "swap"}, "adjacency must be one of"),
        ({"shapes": (0.0,)}, "shapes must be > 0 and finite"),
        ({"scales": (math.inf,)}, "scales must be > 0 and finite"),
    ],
)
def test_errors_in_words(changes, message):
    arguments = {"epsilon": 1.0, "delta": DELTA, "num_models": 5, "queries": 10, **changes}
    with pytest.raises(ValueError, match=message):
        plan(**arguments)


def test_planning_loads_no_torch():
    code = (
        "import sys\nfrom adapmixed.cli import main\n"
        "main(['plan', '--epsilon', '1', '--models', '2', '--queries', '1'])\n"
        "assert 'torch' not in sys.modules and 'dp_accounting' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_command(capsys, tmp_path):
    path, start = tmp_path / "plans.json", time.process_time()
    arguments = ["--epsilon", "2", "--models", "100", "--queries", "1000", "--json", str(path)]
    assert main(["plan", *arguments, "--adjacency", "replace_one"]) == 0
    assert time.process_time() - start < 30
    output = capsys.readouterr().out
    assert "any change of the records in one shard" in output and "ε(1000)" in output
    for name in ("clipped-mixing", "clipped-log-pool", "pmixed"):
        assert name in output
    entries = json.loads(path.read_text(encoding="utf-8"))
    assert all(entry["epsilon"] <= 2 for entry in entries) and len(entries) == 8
    assert main(["plan", "--epsilon", "-1", "--models", "3", "--queries", "9"]) == 2
    assert "epsilon must be finite and >= 0, got -1.0" in capsys.readouterr().err
