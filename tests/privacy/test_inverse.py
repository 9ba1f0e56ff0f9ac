"""The inverse functions agree with the functions that they invert, also as a command."""

import math

import pytest

from adapmixed.cli import main
from adapmixed.privacy.planner import epsilon_of, models_for, queries_for

DELTA = 1e-5


@pytest.mark.parametrize(
    "settings",
    [{"lower": 0.7788, "upper": 1.6}, {"lower": -0.25, "upper": 0.5, "scale": 2.0}],
)
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.slow
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
    assert queries_for(1.0, DELTA, 64, lower=1.0, upper=1.0) == 2**40
    assert models_for(1e-3, DELTA, 10**12, lower=0.1, upper=10.0) is None
    assert models_for(50.0, DELTA, 1, lower=0.9, upper=1.1) == 2


SPAN = 2 * 1.25 / 64
ONE = SPAN + 2 * math.log(1 - math.sqrt(DELTA * -math.expm1(-SPAN)))  # exact for one answer

POOL, ASKED = ["--lower=-0.25", "--upper=1", "--scale=2"], ["--epsilon=3", "--tokens=9"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--epsilon=1", "--models=64", *POOL], "186 tokens to 64 models within ε = 1 at"),
        (["--epsilon=1", "--tokens=186", *POOL], "64 models for 186 tokens within ε = 1 at"),
        (["--models=64", "--tokens=1", *POOL], "for 1 token to 64 models at"),
        (["--models=64", "--tokens=99840", "--lower=0", "--upper=4"],
         "clipped-mixing lower=0.0 upper=4.0: ε = inf for 99840 tokens"),
        (["--epsilon=1e-3", "--tokens=100000000000", *POOL], "more than 65536 models for"),
        (["--epsilon=1", "--models=64", "--lower=1", "--upper=1"], f"{2**40} tokens or more"),
    ],
)  # fmt: skip
def test_what_is_left_out_is_the_answer(capsys, arguments, said):
    assert main(["plan", *arguments]) == 0
    printed = capsys.readouterr().out
    assert said in printed
    if "--tokens=1" in arguments:
        epsilon = float(printed.split("ε = ")[1].split()[0])
        assert epsilon == pytest.approx(1.01 * ONE, rel=0.01) and epsilon > ONE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon=1", "--models=2"], "got no --tokens"),
        (["--epsilon=1", "--models=2", "--tokens=3", "--scale=2"], "got no --lower"),
        (["--epsilon=1", "--models=2", "--lower=0.5"], "together, got --lower without --upper"),
        (["--epsilon=1", "--lower=0.5", "--upper=2"], "one must be left out"),
        (["--epsilon=1", "--models=2", "--tokens=3", *POOL], "one must be left out"),
        ([*ASKED, "--models=3", "--save=x"], "--save needs --ensemble"),
        ([*ASKED, "--ensemble=none"], "none does not"),
        ([*ASKED, "--ensemble=none", "--models=3"], "--models must not be given with --ensemble"),
        ([*ASKED, "--all"], "--all needs --epsilon, --tokens and --ensemble or --models"),
        ([*ASKED, "--models=3", "--save=no/folder"], "--save must name a file in an existing fold"),
    ],
)
def test_questions_without_an_answer(capsys, arguments, message):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
