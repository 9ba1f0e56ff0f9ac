"""The pieces of benchmarks.headline: authors, shares of the text, scores, choice and crossing."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import adapmixed_ext as ops
from adapmixed.data import Document
from adapmixed.data.builtin import is_held_out, topic_documents

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # benchmarks are not installed, and pytest may be started anywhere

from benchmarks import authors, frontier, headline  # noqa: E402

SOURCE = '''
"""A module about nothing in particular, whose docstring is long enough."""

class Thing:
    """A thing, which is described here in more than forty characters."""

    def act(self):
        """Act on something."""

def short():
    """Too short."""

if True:
    def hidden():
        """A function below an if statement, which is no document of its own."""
'''


def test_a_document_is_what_a_file_says_about_one_thing() -> None:
    found = {one.identifier: one.text for one in authors.documents(SOURCE, "a/b.py")}
    assert set(found) == {"a/b.py:", "a/b.py:Thing"}
    assert found["a/b.py:Thing"].endswith("\n\nAct on something.")
    assert list(authors.documents("def broken(", "a.py")) == []


def test_authors_without_enough_text_get_no_shard() -> None:
    def author(name: str, size: int) -> authors.Author:
        return authors.Author(name, [Document(name, "x" * size)])

    much, little = authors.LEAST, authors.LEAST - 1
    found = [author("a", little), author("b", much), author("c", much), author("d", much)]
    members, others = authors.divide(found, 2)
    assert [one.name for one in members] == ["b", "c"]
    assert [one.name for one in others] == ["a", "d"]
    with pytest.raises(ValueError, match="4 installed distributions must have .* got 3"):
        authors.divide(found, 4)


def test_folds_cover_all_topics_once_and_the_first_is_that_of_the_demonstration() -> None:
    topics = topic_documents()
    assert {fold for fold in map(headline.fold_of, topics)} == set(range(headline.FOLDS))
    assert all((headline.fold_of(topic) == 0) == is_held_out(topic) for topic in topics)
    held_out: list[str] = []
    for part in headline.builtin(8, headline.FOLDS):
        trained = {one.identifier for shard in part.shards for one in shard}
        mine = {one.identifier for one in part.text}
        assert not trained & mine and trained | mine == set(topics)
        held_out += mine
    assert sorted(held_out) == sorted(topics)


def test_settings_are_chosen_on_other_blocks_than_they_are_reported_on() -> None:
    reported, chosen = headline.share([5, 0, 9], 6, 8)
    assert sum(map(len, reported)) == 6 and sum(map(len, chosen)) == 8
    for mine, other, count in zip(reported, chosen, (5, 0, 9), strict=True):
        assert sorted([*mine, *other]) == list(range(count))
    fewer, same = headline.share([5, 0, 9], 4, 8)
    assert same == chosen
    assert all(set(one) <= set(all_) for one, all_ in zip(fewer, reported, strict=True))
    with pytest.raises(ValueError, match="must have 15 blocks, got 14"):
        headline.share([5, 9], 14, 1)


def test_scores_are_those_of_the_operators() -> None:
    generator = torch.Generator().manual_seed(0)
    private = 3 * torch.randn(7, 5, 60, generator=generator)
    public = 2 * torch.randn(5, 60, generator=generator)
    private[2, :, 3] = -torch.inf
    targets = torch.tensor([0, 3, 59, 17, 3])
    settings = [(-0.25, 1.0, 4.0), (0.0, 0.5, 9.0), (-0.25, 2.0, 4.0), (-1.0, 0.0, 0.5)]
    found = frontier.Scorer(settings).losses(private, public, targets)
    for losses, (lower, upper, scale) in zip(found, settings, strict=False):
        pool = ops.log_pool(private, public, lower=lower, upper=upper, scale=scale)
        expected = -ops.log_prob(private, public, pool, targets)
        torch.testing.assert_close(losses.double(), expected, rtol=0, atol=1e-5)
    rows = torch.arange(5)
    mean = private.softmax(-1).mean(0)[rows, targets]
    torch.testing.assert_close(found[-2], -mean.log())
    torch.testing.assert_close(found[-1], -public.log_softmax(-1)[rows, targets])


def test_scores_of_boxes_are_those_of_the_clipped_mixture() -> None:
    generator = torch.Generator().manual_seed(1)
    private = torch.randn(6, 4, 50, generator=generator)
    public = torch.randn(4, 50, generator=generator)
    targets = torch.tensor([1, 49, 7, 7])
    boxes = [(1.0, 1.0), (0.0, 1e9), (0.8, 1.2)]
    found = frontier.BoxScorer(boxes).losses(private, public, targets)
    q = public.double().softmax(-1)[range(4), targets]
    mean = private.double().softmax(-1).mean(0)[range(4), targets]
    torch.testing.assert_close(found[0].exp(), 1 / q, rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1].exp(), 1 / mean, rtol=1e-5, atol=0)
    assert bool((-found[2] <= q.log() + math.log(1.2) + 1e-6).all())
    assert bool((-found[2] >= q.log() + math.log(0.8) - 1e-6).all())


def test_what_varies_between_blocks_cancels_in_a_difference() -> None:
    blocks = torch.tensor([1.0, 9.0, 2.0, 5.0], dtype=torch.float64)
    ((mean, error),) = headline.difference((blocks - 0.25)[None], blocks[None])
    assert (mean, error) == (-0.25, 0.0)


@pytest.mark.parametrize("adjacency", headline.ADJACENCIES)
def test_settings_keep_their_epsilon_and_hardly_less(adjacency: str) -> None:
    question = frontier.Question(1024, adjacency, 1.0)
    width = frontier.widest(question, 100, 1e-5)
    for lower, upper, scale in (
        *(frontier.setting(shape, width) for shape in headline.SHAPES),
        frontier.rule(width),
        frontier.planned(question, 100, 1e-5),
    ):
        cost = frontier.epsilon_of(
            1e-5, 100, 1024, adjacency, lower=lower, upper=upper, scale=scale
        )
        assert 0.999 < cost <= 1.0


def test_the_least_loss_of_a_width_is_chosen() -> None:
    shapes = [(0.0, 1.0), (-0.25, 1.0), (-0.5, 0.5)]
    losses = {
        frontier.setting(shape, 2.0): loss for shape, loss in zip(shapes, (3, 1, 2), strict=True)
    }
    assert frontier.choose(losses, shapes, 2.0) == frontier.setting((-0.25, 1.0), 2.0)


def test_a_crossing_is_between_two_points_or_nowhere() -> None:
    points = [(4.0, 40.0), (1.0, 80.0), (2.0, 60.0)]
    assert frontier.crossing(points, 60.0) == 2.0
    found = frontier.crossing(points, math.sqrt(60.0 * 40.0))
    assert found == pytest.approx(math.sqrt(8.0))
    assert frontier.crossing(points, 90.0) == 1.0
    assert frontier.crossing(points, 39.9) is None


@pytest.mark.slow
def test_a_small_run_reports_every_epsilon_and_continues(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")])}
    command = [sys.executable, "-m", "benchmarks.headline", "--quick", "--corpora", "builtin"]
    command += ["--keep", str(tmp_path / "kept"), "--out", str(tmp_path / "found")]
    contents = []
    for _ in range(2):
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
        contents.append(json.loads((tmp_path / "found.json").read_text())["tables"])
    first, second = contents
    assert first == second
    assert len(first["frontier"]) == len(headline.QUESTIONS)
    levels = {row["text"]: row for row in first["levels"]}
    for row in first["frontier"]:
        assert levels["reported"]["unprotected"] < row["perplexity"] < levels["reported"]["public"]
