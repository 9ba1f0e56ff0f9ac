"""Plans keep within the budget and waste little of it; the inverse questions agree with them."""

import json
import math
import re
import subprocess
import sys
import time
from decimal import ROUND_FLOOR
from unittest.mock import Mock

import pytest

from adapmixed.cli import main
from adapmixed.commands import plan as plan_command
from adapmixed.mechanisms import PMixED
from adapmixed.privacy import (
    Accountant,
    BoundedRangeAnswer,
    ClippedAnswer,
    GaussianScreening,
    RenyiBound,
    accounted_box,
    c_alpha,
    clipped_mixing_pair,
    composed_epsilon,
    planner,
    sound_bound,
    zcdp_to_dp,
)
from adapmixed.privacy.dominating import law_error
from adapmixed.privacy.guarantee import format_epsilon
from adapmixed.privacy.planner import (
    adapmixed_beforehand,
    epsilon_of,
    models_for,
    plan,
    queries_for,
)
from adapmixed.privacy.replace_one import replace_one_epsilon
from adapmixed.privacy.rounding import four_digits

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
    bound = sound_bound(pmixed.settings["order"], pmixed.settings["radius"], 64)
    event = RenyiBound(pmixed.settings["order"], bound, 64, 508, "zero_out", budget=508)
    assert Accountant(DELTA).add(event).epsilon().epsilon <= 1.0


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_a_ball_is_planned_inward(adjacency):
    """ε left for the ball is rounded down: at no setting is the target passed by an ulp."""
    for step in range(60):
        common = (0.8 + 0.37 * step, 10.0 ** -(3 + step % 7), 2 + 7 * step, 1 + 131 * step)
        found = planner._pmixed(*common, adjacency)
        assert found is None or 0.999 * common[0] < found.epsilon <= common[0], common


@pytest.mark.parametrize("target", [1.0, 2.3])
def test_the_advice_for_replace_one_keeps_the_budget(target, capsys):
    """As it is printed: half of ε, and a δ whose digits are rounded down."""
    command = ["plan", f"--epsilon={target}", "--models=64", "--queries=508"]
    assert main([*command, "--adjacency=replace_one"]) == 0
    printed = capsys.readouterr().out
    inner = re.search(r"^pmixed: .*half the epsilon and delta = (\S+)\.$", printed, re.MULTILINE)
    order = re.search(r"^pmixed .*order=(\S+)", printed, re.MULTILINE)
    assert inner is not None and order is not None, printed
    mechanism = PMixED(target / 2, float(inner[1]), 508, float(order[1]))
    spent = 508 * sound_bound(mechanism.order, mechanism.radius(64), 64) * (1 + 2.0**-50)
    found = replace_one_epsilon(mechanism.order, spent, DELTA)
    assert 0.99 * target < found <= target


@pytest.mark.parametrize(
    ("target", "models", "queries", "shape"),
    [(3.0, 100, 508, 2.0), (4.0, 64, 508, 4.0), (8.0, 100, 99_840, 1.0), (0.1, 64, 508, 8.0)],
)
def test_no_larger_box_fits(target, models, queries, shape):
    found = planner._clipped_mixing(target, DELTA, models, queries, "zero_out", shape)
    assert found.epsilon <= target
    size = -math.log(found.settings["lower"]) * (1 + 2 * planner._FIT)
    box = {"lower": math.exp(-size), "upper": math.exp(size * shape)}
    assert epsilon_of(DELTA, models, queries, "zero_out", **box) > target


def test_a_box_beyond_what_its_widening_covers_is_planned_with_the_rounding():
    found = planner._clipped_mixing(1.0, DELTA, 1000, 508, "zero_out", 8.0)
    box = found.settings["lower"], found.settings["upper"]
    error = law_error(*box, 1000)
    assert box[1] / box[0] > 150 and error > 0
    pair = clipped_mixing_pair(*accounted_box(*box), 1000, "zero_out")
    bare = composed_epsilon(pair, 508, DELTA, points=planner.FINE)
    assert bare + 2 * 508 * error <= found.epsilon <= 1.0


@pytest.mark.parametrize("power", [0.05, 0.5, 1.0, 7.0, 60.0])
@pytest.mark.parametrize("start", [1e-9, 0.1, 2.9999, 20.0])
def test_the_search_closes_in(power, start):
    """Whatever the cost looks like: steep, flat, with a step, infinite from somewhere on."""
    costs = {
        "power": lambda size: size**power,
        "step": lambda size: (size / 3) ** power * (1.0 if size <= 3.0 else 50.0),
        "infinite": lambda size: size**power if size <= 3.0 else math.inf,
        "flat, then steep": lambda size: 3.0**power * (0.2 if size <= 3.0 else size),
    }
    for name, cost in costs.items():
        for target in (cost(3.0), cost(3.0) * 1.0001):
            counted = Mock(side_effect=cost)
            found = planner._largest(counted, target, 20.0, start)
            assert cost(found) <= target < cost(found * (1 + planner._FIT)), name
            assert counted.call_count < 80, name
    assert planner._largest(lambda size: 1.0, 1.0, 20.0, start) == 20.0
    assert planner._largest(lambda size: 2.0, 1.0, 20.0, start) == 0.0


def best_leakage(inner, delta, models, queries):
    """β of the best of 20 000 orders."""
    best = 0.0
    for step in range(20_000):
        order = 1 + math.exp(-3 + 12 * step / 20_000)
        left = (inner - c_alpha(order, delta)) / queries
        if left > 0:
            best = max(
                best, math.log1p(models * math.expm1((order - 1) * left)) / (order - 1) / order
            )
    return best


@pytest.mark.parametrize("target", [0.02, 0.1, 0.15, 1.0, 8.0])
def test_the_best_order_of_a_ball_is_found(target):
    found = planner._pmixed(target, DELTA, 64, 508, "zero_out")
    assert found is not None and found.epsilon <= target
    best = best_leakage(target, DELTA, 64, 508)
    assert best * (1 - 1e-5) < found.settings["target_leakage"] < best * (1 + 1e-6)


def test_a_ball_is_found_at_a_small_budget(capsys):
    command = ["plan", "--epsilon=0.3", "--models=64", "--queries=508", "--adjacency=replace_one"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "no fixed guarantee" not in printed
    row = re.search(r"^pmixed +order=(\S+) radius=(\S+) ", printed, re.MULTILINE)
    assert row is not None, printed
    order, radius = map(float, row.groups())
    assert radius / order > 7.5e-5  # order 100 has 7.19e-5
    spent = 508 * sound_bound(order, radius, 64) * (1 + 2.0**-50)
    assert 0.29 < replace_one_epsilon(order, spent, DELTA) <= 0.3


def test_settings_are_shown_inward():
    shown = plan_command._values({"lower": 0.77791, "upper": 1.60699, "scale": 1.99999})
    assert shown == "lower=0.778 upper=1.606 scale=1.999"
    shown = plan_command._values({"lower": -0.250999, "radius": 1.23456e-5, "target_leakage": 7.0})
    assert shown == "lower=-0.2509 radius=1.234e-05 beta=7"
    assert plan_command._values({"order": 1.107}) == "order=1.107"  # no inward: as it was planned


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
    assert epsilon_of(DELTA, 64, queries + 1, adjacency, **settings) > 1.0
    models = models_for(1.0, DELTA, queries, adjacency, **settings)
    assert models is not None and 64 >= models >= 60
    assert epsilon_of(DELTA, models, queries, adjacency, **settings) <= 1.0
    assert epsilon_of(DELTA, models - 1, queries, adjacency, **settings) > 1.0


def test_large_answers_are_exact():
    pool = {"lower": -0.25, "upper": 1.0, "scale": 2.0}
    queries = queries_for(4.0, DELTA, 1000, **pool)
    assert queries > 400_000
    assert epsilon_of(DELTA, 1000, queries, "zero_out", **pool) <= 4.0
    assert epsilon_of(DELTA, 1000, queries + 1, "zero_out", **pool) > 4.0
    models = models_for(0.1, DELTA, queries, **pool)
    assert models is not None and models > 20_000
    assert epsilon_of(DELTA, models, queries, "zero_out", **pool) <= 0.1
    assert epsilon_of(DELTA, models - 1, queries, "zero_out", **pool) > 0.1


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
    # Settings that are copied from the table, four digits of them, keep the budget.
    rows = [line for line in output.splitlines() if line.startswith("clipped-")]
    rows = [row for row in rows if "lower=" in row]
    assert len(rows) == 7
    for row in rows:
        given = dict(word.split("=") for word in row.split() if "=" in word)
        settings = {name: float(value) for name, value in given.items()}
        assert 1.98 < epsilon_of(DELTA, 100, 1000, "replace_one", **settings) <= 2.0, row
    content = json.loads(path.read_text(encoding="utf-8"))
    assert (content["format_version"], content["kind"]) == (1, "plan")
    assert all(entry["epsilon"] <= 2 for entry in content["plans"]) and len(content["plans"]) == 8
    assert content["adapmixed"]["worst_case_epsilon"] == "inf"
    assert "must not be published" in output and "the rest are alternatives" in output
    # What is said of ε(n): an accountant opened for all 1000 has charged them with the first 10.
    assert "ε(10)" in output and "(queries=1000) states ε(1000) from the first answer" in output
    pool = next(one for one in content["plans"] if one["mechanism"] == "clipped-log-pool")
    event = BoundedRangeAnswer(**pool["settings"], num_models=100, queries=10, budget=1000)
    stated = Accountant(DELTA, adjacency="replace_one").add(event).epsilon().epsilon
    over_time = {one["queries"]: one["epsilon"] for one in pool["over_time"]}
    assert over_time[10] < stated == pytest.approx(over_time[1000], rel=1e-12)
    assert main(["plan", "--epsilon", "-1", "--models", "3", "--queries", "9"]) == 2
    assert "epsilon must be finite and >= 0, got -1.0" in capsys.readouterr().err


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("beta", [0.0, 1e-3, 0.2])
def test_adapmixed_beforehand_is_its_fixed_loss(adjacency, beta):
    bound = sound_bound(18.0, 18.0 * beta, 100)
    found = adapmixed_beforehand(8.0, DELTA, 100, 1000, adjacency, target_leakage=beta)

    def stated(leakage):
        bound = sound_bound(18.0, 18.0 * leakage, 100)
        total = Accountant(DELTA).add(RenyiBound(18.0, bound, 100, 1000, "zero_out", budget=1000))
        return total.add(GaussianScreening(100, 1000, 1e-4, 1e-2)).epsilon().epsilon

    once = 1000 * (bound + 18 * 1e-8) + c_alpha(18.0, DELTA)
    assert found.epsilon >= once - 1e-9
    if adjacency == "zero_out":
        assert found.epsilon == pytest.approx(stated(beta), rel=1e-12)
        assert stated(found.largest_leakage) <= 8.0 < stated(found.largest_leakage * 1.001)
    elif beta < 0.2:
        # Two zero-outs of ε/2, with the share of δ that leaves (1 + e^(ε/2)) δ' at most δ.
        share = DELTA / (1 + math.exp(found.epsilon / 2))
        spent = 1000 * (bound + 18 * 1e-8)
        assert spent + c_alpha(18.0, share) == pytest.approx(found.epsilon / 2, rel=1e-9)
        assert found.largest_leakage < adapmixed_beforehand(8.0, DELTA, 100, 1000).largest_leakage


def test_adapmixed_beforehand_as_the_documentation_says():
    """docs/privacy.md, section 12, "Planning"."""
    found = adapmixed_beforehand(1.0, DELTA, 64, 508)
    assert format_epsilon(found.epsilon) == "1705"
    assert four_digits(found.largest_leakage, ROUND_FLOOR) == "0.002559"


def test_adapmixed_beforehand_where_nothing_bounds_it():
    assert adapmixed_beforehand(1.0, DELTA, 64, 508, "add_remove") is None
    assert adapmixed_beforehand(0.4, DELTA, 64, 508).largest_leakage is None  # c_18 is 0.45
    with pytest.raises(ValueError, match="adjacency must be one of"):
        adapmixed_beforehand(1.0, DELTA, 64, 508, "swap")
    with pytest.raises(ValueError, match="order must be"):
        adapmixed_beforehand(1.0, DELTA, 64, 508, order=1.0)


ONE = zcdp_to_dp((2 * 1.25 / 64) ** 2 / 8, DELTA)[0]
POOL = ["--lower=-0.25", "--upper=1", "--scale=2"]


@pytest.mark.parametrize(
    ("arguments", "asked", "answer", "said"),
    [
        (["--epsilon=1", "--models=64", *POOL], "queries", 160, "160 queries to 64 models within"),
        (["--epsilon=1", "--queries=160", *POOL], "models", 64, "64 models for 160 queries within"),
        (["--models=64", "--queries=1", *POOL], "epsilon", ONE, "1 query to 64 models at"),
        (["--models=9", "--queries=9", "--lower=0", "--upper=9"], "epsilon", "inf", "ε = inf"),
        (["--epsilon=1e-3", "--queries=100000000000", *POOL], "models", None, "more than"),
        (["--epsilon=1", "--models=64", "--lower=1", "--upper=1"], "queries", 10**9, "or more"),
    ],
)
def test_what_is_left_out_is_the_answer(capsys, tmp_path, arguments, asked, answer, said):
    path = tmp_path / "answer.json"
    assert main(["plan", *arguments, "--json", str(path)]) == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    assert (written["format_version"], written["kind"]) == (1, "plan")
    found = written[asked]
    assert found == (pytest.approx(answer, rel=1e-6) if isinstance(answer, float) else answer)
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon=1", "--models=2"], "got no --queries"),
        (["--epsilon=1", "--models=2", "--queries=3", "--scale=2"], "got no --lower"),
        (
            ["--epsilon=1", "--models=2", "--lower=0.5"],
            "--lower and --upper must be given together",
        ),
        (["--epsilon=1", "--lower=0.5", "--upper=2"], "one must be left out"),
        (["--epsilon=1", "--models=2", "--queries=3", *POOL], "one must be left out"),
    ],
)
def test_questions_without_an_answer(capsys, arguments, message):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
