"""The pieces of benchmarks.headline: authors, members, scores, choice and intervals."""

import gzip
import json
import math
import sys
from pathlib import Path

import pytest
import torch

import adapmixed_ext as ops
from adapmixed.data import Document, demo_base
from adapmixed.ensemble.public_model import load_base
from adapmixed.training.finetune import train_adapter

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # benchmarks are not installed, and pytest may be started anywhere

from benchmarks import authors, frontier, headline  # noqa: E402

LOG = """\
some-tool (1.2-3) unstable; urgency=medium

  [ Somebody Else ]
  * Say what is wrong
    on two lines.

  * Second.

 -- Ada Lovelace <ada@example.org>  Mon, 01 Jan 2024 00:00:00 +0000

some-tool (1.2-2) unstable; urgency=low, binary-only=yes

  * First.

 -- "Grace Hopper" <grace@example.org>  Sun, 31 Dec 2023 00:00:00 +0000

some-tool (1.2-1) unstable; urgency=low

  * Nobody has signed this.
"""


def test_change_logs_give_the_signed_entries_by_author(tmp_path: Path) -> None:
    def read(most: int) -> dict[str, list[str]]:
        found = authors.authors(most, tmp_path)
        return {one.name: [document.text for document in one.documents] for one in found}

    assert read(99) == {}
    for package in ("tool", "libtool"):  # built from the same source
        (tmp_path / package).mkdir()
        (tmp_path / package / "changelog.Debian.gz").write_bytes(gzip.compress(LOG.encode()))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "changelog.Debian.gz").write_bytes(b"no gzip")
    whole = "[ Somebody Else ]\n* Say what is wrong\non two lines.\n* Second."
    assert read(99) == {"Ada Lovelace": [whole], "Grace Hopper": ["* First."]}
    cut = "[ Somebody Else ]"  # at a line's end
    assert read(30) == {"Ada Lovelace": [cut], "Grace Hopper": ["* First."]}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> headline.Bench:
    words = "an array of the values that are given by name and returned in their order".split()

    def author(number: int) -> authors.Author:
        texts = [
            " ".join(words[(number + 3 * i + j * j) % 15] for j in range(400)) for i in range(6)
        ]
        return authors.Author(str(number), [Document(str(i), text) for i, text in enumerate(texts)])

    monkeypatch.setattr(headline, "authors", lambda _: [author(number) for number in range(5)])
    return headline.Bench(str(demo_base()), tmp_path, 3, 1)


def test_members_are_those_of_plain_training(bench: headline.Bench) -> None:
    found = bench.author(1)
    model, _ = load_base(str(demo_base()), torch.float32)
    for fold, adapter in enumerate(found):
        tokens = bench.text.shard(1, fold)
        own = set(bench.text.members[1][fold].flatten().tolist())
        assert len(tokens) == 2 * headline.BLOCK and own
        plain = train_adapter(model, tokens, headline.CONFIG, seed=fold, shard=1)
        layer = plain.model.get_base_model().get_output_embeddings()
        torch.testing.assert_close(adapter.b, layer.lora_B["default"].weight.detach())
    assert not torch.equal(found[0].b, found[1].b)


def test_logits_are_those_of_the_base_and_its_adapters(bench: headline.Bench) -> None:
    positions = bench.positions(2)
    assert positions.groups.bincount().tolist() == [headline.BLOCK - 1] * 3
    private, public = bench._logits_of(2, positions.states)
    model, _ = load_base(str(demo_base()), torch.float32)
    ids = bench.text.members[0][2]
    with torch.no_grad():
        expected = model(ids).logits[0]
    at = int((positions.groups == 0).nonzero()[0])
    place = (expected - public[at]).abs().amax(-1).argmin()
    torch.testing.assert_close(public[at], expected[place], rtol=0, atol=1e-4)
    assert positions.targets[at] == ids[0, place + 1]
    one = bench.author(0)[2]
    added = one.scale * one.b @ (one.a @ positions.states[at])
    torch.testing.assert_close(private[0, at], public[at] + added, rtol=0, atol=1e-4)


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


def test_what_varies_between_authors_cancels_in_a_comparison() -> None:
    groups = torch.arange(40).remainder(4).expand(3, -1)
    public = groups.double() + torch.arange(3)[:, None]
    found = headline.Estimates(groups, draws=50)
    found.add("public", public)
    found.add("unprotected", public - 0.5)
    found.add("some", torch.full((3, 8), 0.25), {"unprotected": 1.0})
    found.add("of one", torch.full((1, 9), -0.25), {"public": 1.0}, first=2)
    for name in ("some", "of one"):
        assert found.change(name) == pytest.approx([math.exp(-0.25) - 1] * 3, abs=1e-5)
    rest, factors = headline.explained(public[:, :8] / 2 + 1, torch.stack([public], dim=-1))
    found.add("half", rest, {"public": factors[0]})
    torch.testing.assert_close(found.losses["half"], found.losses["public"] / 2 + 1)
    assert found.perplexity("public") == pytest.approx(math.exp(2.5))
    assert float(found.losses["public"].std()) > 0.1


@pytest.mark.parametrize("adjacency", headline.ADJACENCIES)
def test_settings_keep_their_epsilon_and_hardly_less(adjacency: str) -> None:
    question = frontier.Question(1024, adjacency, 1.0)
    width = frontier.widest(question, 100, 1e-5)
    lower, upper, scale = frontier.rule(width)
    assert (lower, scale) == (0.0, pytest.approx(2.0))
    common = (1e-5, 100, 1024, adjacency)
    cost = frontier.epsilon_of(*common, lower=lower, upper=upper, scale=scale)
    assert 0.999 < cost <= 1.0


@pytest.mark.slow
def test_a_small_run_reports_every_epsilon_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sum(one.size() >= authors.LEAST for one in authors.authors(2 * authors.LEAST)) < 4:
        pytest.skip("this machine has no change logs below /usr/share/doc")
    command = ["headline", "--quick", "--workers", "1", "--blocks", "2"]
    command += ["--keep", str(tmp_path / "kept"), "--out", str(tmp_path / "found")]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(headline, "QUESTIONS", headline.QUESTIONS[::5])
    monkeypatch.setattr(headline, "MAIN", (3.0, 8.0))
    contents = []
    for _ in range(2):
        headline.main()
        contents.append(json.loads((tmp_path / "found.json").read_text())["tables"])
    first, second = contents
    assert first == second
    rows = first["rows"]
    pools = [row for row in rows if row["method"] == "ClippedLogPool"]
    assert len(pools) == len(headline.QUESTIONS)
    assert {row["epsilon"] for row in rows if row["method"] == "PMixED"} == set(headline.MAIN)
    assert all(low <= value <= high for value, low, high in (row["change"] for row in pools))
