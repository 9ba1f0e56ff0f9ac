"""What `adapmixed plan` advises: which settings it chooses, and a constant N where it buys more."""

import json
import math
from dataclasses import replace

import pytest

from adapmixed.cli import main
from adapmixed.commands import plan as plan_command
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant, BoundedRangeAnswer
from adapmixed.privacy.planner import _choose, epsilon_of, models_for, plan, queries_for

DELTA = 1e-5
QUESTION = (1.0, DELTA, 64, 508)
FEW = {"shapes": (4.0,), "scales": (1.0, 2.0)}


def pools(adjacency, **options):
    found = plan(*QUESTION, adjacency, **FEW, **options)
    return [one for one in found if one.mechanism == "clipped-log-pool"]


def test_a_constant_n_buys_under_add_remove_what_zero_out_does():
    listed = pools("add_remove", constant_models=True)
    assert ["num_models" in one.settings for one in listed] == [False, False, True, True]
    assert [one.chosen for one in listed] == [False, False, False, True]
    counted = pools("add_remove")
    assert listed[:2] == [counted[0], replace(counted[1], chosen=False)]
    for one, known, emptied in zip(counted, listed[2:], pools("zero_out"), strict=True):
        assert known.settings == {**emptied.settings, "num_models": 64}
        assert known.over_time == emptied.over_time
        assert known.settings["upper"] > one.settings["upper"]
    for adjacency in ("zero_out", "replace_one"):  # the same either way: listed once
        assert pools(adjacency, constant_models=True) == pools(adjacency)
    with pytest.raises(ValueError, match="constant_models must be True or False, got 1"):
        plan(*QUESTION, "add_remove", constant_models=1)


def test_an_accountant_states_the_constant_n_that_was_planned():
    one = pools("add_remove", constant_models=True)[-1]
    settings = dict(one.settings)
    ClippedLogPool(**settings, queries=508)
    event = BoundedRangeAnswer(**settings, queries=1, budget=508, constant_models=True)
    stated = Accountant(DELTA, adjacency="add_remove").add(event).epsilon()
    assert stated.epsilon == one.epsilon <= 1.0
    assert "num_models, by which the pool is divided, is a public constant" in str(stated)


def test_inverse_questions_of_a_constant_n():
    pool = {"lower": -0.25, "upper": 0.5, "scale": 2.0}
    known = {**pool, "constant_models": True}
    assert queries_for(1.0, DELTA, 64, "add_remove", **known) == queries_for(
        1.0, DELTA, 64, "zero_out", **pool
    )
    models = models_for(1.0, DELTA, 508, "add_remove", **known)
    assert models == models_for(1.0, DELTA, 508, "zero_out", **pool)
    assert models < models_for(1.0, DELTA, 508, "add_remove", **pool)
    for way in ("zero_out", "replace_one"):
        assert epsilon_of(DELTA, 64, 508, way, **known) == epsilon_of(DELTA, 64, 508, way, **pool)
    with pytest.raises(ValueError, match="constant_models must be False without scale, got True"):
        epsilon_of(DELTA, 64, 508, "add_remove", lower=0.5, upper=2.0, constant_models=True)


def test_the_command_lists_both(capsys, tmp_path):
    path = tmp_path / "plans.json"
    asked = ["--epsilon=1", "--models=64", "--queries=508", "--adjacency=add_remove"]
    assert main(["plan", *asked, "--json", str(path)]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if line.startswith("clipped-log-pool")]
    known = [row for row in rows if "num_models=64" in row]
    assert (len(known), len(rows)) == (4, 8)
    assert "num_models=64: a public constant, however many models are there" in said
    written = json.loads(path.read_text(encoding="utf-8"))["plans"]
    assert sum(one["settings"].get("num_models") == 64 for one in written) == 4


def test_the_command_answers_for_a_constant_n(capsys):
    given = ["plan", "--models=64", "--queries=508", "--lower=-0.25", "--upper=1", "--scale=2"]
    assert main([*given, "--adjacency=add_remove", "--constant-models"]) == 0
    assert "constant_models=True: ε = 1.882 for" in capsys.readouterr().out
    assert main([*given, "--adjacency=add_remove"]) == 0
    assert ": ε = 4.088 for" in capsys.readouterr().out
    assert main([*given[:-1], "--constant-models"]) == 2
    assert main(["plan", "--epsilon=1", *given[1:3], "--constant-models"]) == 2
    assert "--lower" in capsys.readouterr().err


def test_the_command_answers_for_a_box_from_zero(capsys):
    given = ["plan", "--lower=0", "--upper=4", "--models=64", "--queries=99840"]
    assert main(given) == 0
    assert "clipped-mixing lower=0.0 upper=4.0: ε = inf for 99840" in capsys.readouterr().out


@pytest.mark.parametrize("adjacency", ["zero_out", "add_remove"])
def test_one_of_each_clipped_mechanism_is_chosen(adjacency):
    """By shape and κ alone, whatever else is listed; under add/remove with N a constant."""
    shapes, scales = (1.0, 8.0, 5.0, 4.5), (8.0, 3.5, 1.0)
    options = {"shapes": shapes, "scales": scales, "constant_models": True}
    found = plan(*QUESTION, adjacency, **options)
    box, pool = (one for one in found if one.chosen)
    shape = -math.log(box.settings["upper"]) / math.log(box.settings["lower"])
    assert box.mechanism == "clipped-mixing" and shape == pytest.approx(4.5)
    assert pool.mechanism == "clipped-log-pool" and pool.settings["scale"] == 3.5
    assert ("num_models" in pool.settings) == (adjacency == "add_remove")
    # Nothing wider of the same shape and κ fits.
    wider = {name: value * 1.001 for name, value in box.settings.items()}
    wider["lower"] = box.settings["lower"] ** 1.001
    assert epsilon_of(*QUESTION[1:], adjacency, **wider) > 1.0 >= box.epsilon
    wider = {**pool.settings, "upper": pool.settings["upper"] * 1.002}
    known = wider.pop("num_models", None) is not None
    assert epsilon_of(*QUESTION[1:], adjacency, **wider, constant_models=known) > 1.0
    assert pool.epsilon <= 1.0


def test_a_box_of_the_public_answer_alone_is_not_chosen():
    (one,) = [one for one in plan(*QUESTION, **FEW) if one.mechanism == "clipped-mixing"]
    assert _choose([one], (4.0,), 4.0)[0].chosen
    (nothing,) = _choose([replace(one, settings={"lower": 1.0, "upper": 1.0})], (4.0,), 4.0)
    assert not nothing.chosen
    assert "clipped-mixing: nothing fits" in plan_command._chosen_words([nothing])
    assert _choose([], (), 4.0) == []


def test_the_command_names_its_choice_and_the_rule(capsys, tmp_path):
    path = tmp_path / "plans.json"
    asked = ["plan", "--epsilon=1", "--models=64", "--queries=508", "--json", str(path)]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "  clipped-mixing lower=0.775 upper=2.772: the widest box of shape log upper = 4" in said
    clip = "scale=4 lower=-0.1754 upper=0.1754"
    assert f"  clipped-log-pool {clip}: the widest clip at scale = 4" in said
    assert "from the built-in demo" in said and "the rest are alternatives" in said
    written = json.loads(path.read_text(encoding="utf-8"))["plans"]
    chosen = [one for one in written if one["chosen"]]
    assert [one["mechanism"] for one in chosen] == ["clipped-mixing", "clipped-log-pool"]
    assert chosen[1]["settings"]["scale"] == 4.0 and len(written) == 9
