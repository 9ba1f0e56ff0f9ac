"""Measure perplexity over fixed ε, and find where it is that of the unprotected ensemble.

    python -m benchmarks.headline --out benchmarks/results/headline   # half an hour
    python -m benchmarks.headline --quick                             # small, no meaning

Members adapt the output layer of the built-in base, with the demonstration's settings:

- builtin: the language reference. Each of five ensembles of 64 members is trained without a fifth
  of the topics, and answers about these;
- authors: 100 installed distributions, one shard for each (`benchmarks.authors`). They answer text
  of the same authors that was held out and, as a control, text of other authors.

The text is read in blocks of 256 tokens. For every ε the clips and κ with the best perplexity are
chosen on some blocks, and reported on others. The rule of thumb (`frontier.rule`) was found on the
blocks of both corpora on which settings are chosen. The planner looks at no text at all. "Kept" is
the share of the unprotected ensemble's gain in log-perplexity. ClippedMixing with the planner's box
("mixing") takes more time and answers some of the blocks. The rule's pool answers the same ones,
and the difference is added to the rule's loss on all blocks. The figure shows the better one of
the best pool and ClippedMixing.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.data import Document, demo_base
from adapmixed.data.builtin import HELD_OUT_KEY, topic_documents
from adapmixed.ensemble import Ensemble
from adapmixed.training.blocks import token_stream
from adapmixed.training.demo import CONFIG, NUM_MODELS
from adapmixed.training.member import MemberSettings
from adapmixed.training.partition import assign_shards
from adapmixed.training.pool import train_members
from adapmixed.training.progress import Progress
from adapmixed.training.shards import Spool
from benchmarks.authors import authors, divide
from benchmarks.frontier import (
    BoxScorer,
    Question,
    Scorer,
    Setting,
    Shape,
    choose,
    crossing,
    planned,
    planned_box,
    rule,
    setting,
    widest,
)
from benchmarks.harness import Report, headline, machine

DELTA = 1e-5
BLOCK = 256
QUERIES = (1_024, 99_840)
ADJACENCIES = ("zero_out", "replace_one")
EPSILONS = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
QUESTIONS = [Question(*one) for one in itertools.product(QUERIES, ADJACENCIES, EPSILONS)]
LOWER = (0.0, -0.03, -0.06, -0.125, -0.25, -0.5, -1.0)
UPPER = (0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0)
SHAPES: list[Shape] = list(itertools.product(LOWER, UPPER))
FOLDS = 5
KEY = hashlib.sha256(b"adapmixed demonstration shards").digest()  # that of training.demo


@dataclass(frozen=True)
class Part:
    """An ensemble's shards, and the text that it answers.

    Attributes:
        shards: the documents of every member.
        text: documents that no shard holds.
        control: documents of other authors; empty if there are none.
    """

    shards: list[list[Document]]
    text: list[Document]
    control: list[Document]


class Shards(Spool):
    """Shards in memory."""

    documents: list[list[Document]]

    def read(self, shard: int) -> list[Document]:
        return sorted(self.documents[shard], key=lambda document: document.identifier)


@dataclass
class Losses:
    """Mean losses of every setting, and then of the unprotected and the public model.

    Attributes:
        values: (settings + 2, blocks) float64, mean nats of the queries of each block.
        settings: the settings.
    """

    values: Tensor
    settings: list[Setting]

    def mean(self) -> dict[Setting, float]:
        """Return the mean loss by setting."""
        return dict(zip(self.settings, self.values.mean(1)[:-2].tolist(), strict=True))

    def perplexity(self, of: Setting | int) -> float:
        """Return the perplexity of a setting, of the unprotected (-2) or the public model (-1)."""
        return math.exp(float(self.row(of).mean()))

    def kept(self, of: Setting) -> float:
        """Return the share of the unprotected ensemble's gain in log-perplexity that is kept."""
        public, unprotected = (float(self.values[at].mean()) for at in (-1, -2))
        return (public - float(self.row(of).mean())) / (public - unprotected)

    def error(self, of: Setting | int) -> float:
        """Return the standard error of the change against the public model, as a share."""
        change = self.row(of) - self.values[-1]
        return float(change.std()) / math.sqrt(max(1, len(change))) if len(change) > 1 else 0.0

    def row(self, of: Setting | int) -> Tensor:
        """Return the losses of a setting, of the unprotected (-2) or the public model (-1)."""
        return self.values[of if isinstance(of, int) else self.settings.index(of)]


def builtin(models: int, folds: int) -> Iterator[Part]:
    """Yield the ensembles of the language reference; each lacks one fold of the topics."""
    topics = topic_documents()
    for fold in range(folds):
        shards: list[list[Document]] = [[] for _ in range(models)]
        text: list[Document] = []
        for topic, found in topics.items():
            if fold_of(topic) == fold:
                text += found
            else:
                (shard,) = assign_shards([topic], models, key=KEY)
                shards[shard] += found
        yield Part(shards, text, [])


def fold_of(topic: str) -> int:
    """Return the fold in which a topic is held out; fold 0 is the demonstration's."""
    digest = hashlib.blake2b(topic.encode(), digest_size=8, key=HELD_OUT_KEY).digest()
    return int(int.from_bytes(digest, "big") * FOLDS / 2**64)


def by_author(models: int) -> Iterator[Part]:
    """Yield the ensemble of the authors."""
    members, others = divide(authors(), models)
    yield Part(
        [author.training for author in members],
        [document for author in members for document in author.held_out],
        [document for author in others for document in (*author.training, *author.held_out)],
    )


def train(part: Part, folder: Path, workers: int) -> Ensemble:
    """Train a part's members with the settings of the demonstration."""
    spool = Shards(folder, "", dict.fromkeys(range(len(part.shards)), 1))
    object.__setattr__(spool, "documents", part.shards)
    paths = {index: folder / f"member-{index:03}" for index in range(len(part.shards))}
    base = str(demo_base())
    settings = MemberSettings(base, None, base, CONFIG, 0, 0.0, "cpu", torch.float32)
    progress = Progress(spool.sizes, lambda _: None, lambda *_: None)
    missing = {index: path for index, path in paths.items() if not path.exists()}
    if missing:
        train_members(missing, settings, spool, KEY, workers=workers, threads=1, progress=progress)
    return Ensemble.from_pretrained(base, list(paths.values()), adapted={"lm_head": (CONFIG.rank,)})


def blocks_of(ensemble: Ensemble, documents: Sequence[Document]) -> list[Tensor]:
    """Return whole blocks of tokens of the documents in their order."""
    tokens = token_stream(ensemble.tokenizer, [document.text for document in documents])
    return list(torch.tensor(tokens)[: len(tokens) // BLOCK * BLOCK].view(-1, BLOCK))


def share(blocks: list[int], reported: int, chosen: int) -> tuple[list[list[int]], list[list[int]]]:
    """Divide blocks at random into those that are reported and those on which settings are chosen.

    With more reported blocks, the same ones are chosen, and those reported before are among them.

    Args:
        blocks: the number of blocks of each part.
        reported: how many to report on.
        chosen: how many to choose on.

    Returns:
        (reported, chosen) blocks of each part, which are disjoint.

    Raises:
        ValueError: if there are too few blocks.
    """
    places = [(part, at) for part, count in enumerate(blocks) for at in range(count)]
    if len(places) < reported + chosen:
        raise ValueError(
            f"the text must have {reported + chosen} blocks, got {len(places)}: reduce --choose"
        )
    random.Random(0).shuffle(places)
    found: tuple[list[list[int]], list[list[int]]] = ([[] for _ in blocks], [[] for _ in blocks])
    for number, (part, at) in enumerate(places[: reported + chosen]):
        found[number < chosen][part].append(at)
    return found


@torch.no_grad()
def measure(
    ensemble: Ensemble,
    blocks: Sequence[Tensor],
    scorer: Scorer | BoxScorer,
    what: str,
    folder: Path,
) -> Tensor:
    """Return the mean losses of every block, (losses of the scorer, blocks).

    Blocks that were measured before are read from the folder.
    """
    began = time.monotonic()
    digest = hashlib.sha256(repr([scorer.settings, DELTA]).encode()).hexdigest()[:16]
    file = folder / f"losses-{digest}.pt"
    known: dict[str, Tensor] = torch.load(file) if file.exists() else {}
    before = len(known)
    for number, ids in enumerate(blocks):
        name = _digest(ids)
        if name in known:
            continue
        private, public = ensemble.logits(ids[None, :-1])
        losses = scorer.losses(private[:, 0], public[0], ids[1:])
        if len(known) == before and isinstance(scorer, Scorer):
            for at in range(0, len(scorer.settings), 1 + len(scorer.settings) // 8):
                few = private[:, 0, :4].contiguous(), public[0, :4].contiguous(), ids[1:5]
                check(*few, scorer.settings[at], losses[at, :4])
        known[name] = losses.double().mean(1)
        if number % 10 == 9 or number + 1 == len(blocks):
            torch.save(known, file)
            tell(f"{what}: block {number + 1} of {len(blocks)}, {time.monotonic() - began:.0f} s")
    return torch.stack([known[_digest(ids)] for ids in blocks], dim=1)


def _digest(ids: Tensor) -> str:
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()


def difference(boxes: Tensor, pools: Tensor) -> list[tuple[float, float]]:
    """Return the mean of the losses of boxes less those of pools, and its standard error.

    Both answered the same blocks, so most of what varies between blocks cancels.

    Args:
        boxes: (questions, blocks) mean losses.
        pools: (questions, blocks) mean losses.
    """
    found = boxes - pools
    errors = found.std(1) / math.sqrt(found.shape[1])
    return list(zip(found.mean(1).tolist(), errors.tolist(), strict=True))


def check(private: Tensor, public: Tensor, targets: Tensor, one: Setting, losses: Tensor) -> None:
    """Compare with the log-probabilities of the mechanism's operator.

    Raises:
        RuntimeError: if they differ.
    """
    lower, upper, scale = one
    pool = ops.log_pool(private, public, lower=lower, upper=upper, scale=scale).check()
    found = ops.log_prob(private, public, pool, targets)
    if not torch.allclose(-found, losses.double(), atol=1e-4):
        raise RuntimeError(f"the operator must score {one} alike, got {-found} and {losses}")


def tell(line: str) -> None:
    """Write a line of progress to standard error."""
    print(line, file=sys.stderr, flush=True)


def run(name: str, parts: Sequence[Part], report: Report, options: argparse.Namespace) -> None:
    """Train, choose, measure and report one corpus."""
    models = len(parts[0].shards)
    widths = sorted({widest(question, models, DELTA) for question in QUESTIONS})
    grid = [setting(shape, width) for width in widths for shape in SHAPES]
    with tempfile.TemporaryDirectory() as folder:
        ensembles, places = [], []
        for number, part in enumerate(parts):
            began = time.monotonic()
            place = Path(options.keep or folder, f"{name}-{models}-{number}")
            place.mkdir(parents=True, exist_ok=True)
            places.append(place)
            ensembles.append(train(part, place, options.workers))
            tell(f"{name} {number}: trained in {time.monotonic() - began:.0f} s")
        texts = [blocks_of(one, part.text) for one, part in zip(ensembles, parts, strict=True)]
        tell(f"{name}: {[len(text) for text in texts]} blocks")
        counts, count = [len(text) for text in texts], -(-options.choose // (BLOCK - 1))
        reported, chosen = share(counts, -(-options.queries // (BLOCK - 1)), count)

        def measured(
            where: Sequence[Sequence[int]], scorer: Scorer | BoxScorer, what: str
        ) -> Tensor:
            found = [
                measure(one, [text[at] for at in mine], scorer, f"{name} {what}", place)
                for one, text, mine, place in zip(ensembles, texts, where, places, strict=True)
                if mine
            ]
            return torch.cat(found, dim=1)

        tried = Losses(measured(chosen, Scorer(grid), "choosing"), grid)
        losses = tried.mean()
        best = {width: choose(losses, SHAPES, width) for width in widths}
        plans = {
            question: planned(question, models, DELTA)
            for question in QUESTIONS
            if question.adjacency == "zero_out"  # each has two bounds of its own, which cost time
        }
        settings = list(dict.fromkeys([*best.values(), *map(rule, widths), *plans.values()]))
        final = Losses(measured(reported, Scorer(settings), "reported"), settings)
        boxes = {question: planned_box(question, models, DELTA) for question in QUESTIONS}
        few, _ = share(counts, -(-options.mixing // (BLOCK - 1)), count)  # some of `reported`
        mixed = measured(few, BoxScorer(list(boxes.values())), "mixing")
        pools = Losses(measured(few, Scorer(settings), "reported"), settings)
        ruled = torch.stack([pools.row(rule(widest(one, models, DELTA))) for one in boxes])
        mixing = dict(zip(boxes, difference(mixed, ruled), strict=True))
        control = None
        if any(part.control for part in parts):
            (ensemble,), (part,) = ensembles, parts
            blocks = blocks_of(ensemble, part.control)
            random.Random(0).shuffle(blocks)
            blocks = blocks[: -(-options.choose // (BLOCK - 1))]
            found = measure(ensemble, blocks, Scorer(settings), f"{name} control", places[0])
            control = Losses(found, settings)
    tables(name, parts, models, best, plans, tried, final, control, mixing, report)


def tables(
    name: str, parts: Sequence[Part], models: int, best: dict[float, Setting],
    plans: dict[Question, Setting], tried: Losses, final: Losses, control: Losses | None,
    mixing: dict[Question, tuple[float, float]], report: Report,
) -> None:  # fmt: skip
    """Report all figures of a corpus."""
    public, unprotected = final.perplexity(-1), final.perplexity(-2)
    texts = {"reported": final, "choosing": tried} | ({"control": control} if control else {})
    report.say(f"{name}: {models} members, {len(parts)} ensemble(s), δ = {DELTA:g}")
    for text, one in texts.items():
        row = {
            "corpus": name, "text": text, "models": models,
            "queries": one.values.shape[1] * (BLOCK - 1),
            "public": one.perplexity(-1), "unprotected": one.perplexity(-2),
            "error": one.error(-2),
        }  # fmt: skip
        report.tables.setdefault("levels", []).append(row)
        report.say(
            f"  {text:9}{row['queries']:8} queries: public {row['public']:.2f}, unprotected "
            f"{row['unprotected']:.2f} ({row['unprotected'] / row['public'] - 1:+.1%} "
            f"± {row['error']:.1%})"
        )
    for queries, adjacency in itertools.product(QUERIES, ADJACENCIES):
        curve: list[tuple[float, float]] = []
        report.say()
        report.say(f"  {queries} queries, {adjacency.replace('_', '-')}")
        report.say(
            f"    {'':5} {'the best of all (a, b, κ)':45} {'the rule':>17} {'planner':>8}"
            f"{'mixing':>8} {'':5}" + (f"{'other authors':>22}" if control else "")
        )
        report.say(
            f"    {'ε':>5} {'perpl.':>8} {'change':>8} {'±':>5} {'kept':>4}  "
            f"{'a':>6} {'b':>5} {'κ':>6} "
            f"{'perpl.':>8} {'change':>8} {'change':>8}{'change':>8} {'±':>5}"
            + (f"     {'best':>8} {'rule':>8}" if control else "")
        )
        for epsilon in EPSILONS:
            question = Question(queries, adjacency, epsilon)
            more, more_error = mixing[question]
            width = widest(question, models, DELTA)
            one, ruled, plan = best[width], rule(width), plans.get(question)
            row: dict[str, Any] = {
                "corpus": name, "models": models, **vars(question), "width": width,
                "lower": one[0], "upper": one[1], "scale": one[2],
                "perplexity": final.perplexity(one), "error": final.error(one),
                "kept": final.kept(one),
                "rule_lower": ruled[0], "rule_upper": ruled[1], "rule_scale": ruled[2],
                "rule_perplexity": final.perplexity(ruled),
                "mixing_perplexity": final.perplexity(ruled) * math.exp(more),
                "mixing_error": more_error,
            }  # fmt: skip
            line = (
                f"    {epsilon:5g} {row['perplexity']:8.2f} {row['perplexity'] / public - 1:8.1%} "
                f"{row['error']:5.1%} {row['kept']:4.0%}  {one[0]:6g} {one[1]:5g} {one[2]:6.2f} "
                f"{row['rule_perplexity']:8.2f} {row['rule_perplexity'] / public - 1:8.1%} "
            )
            if plan is None:
                line += f"{'':8}"
            else:
                row["planner_perplexity"] = final.perplexity(plan)
                line += f"{row['planner_perplexity'] / public - 1:8.1%}"
            line += f"{row['mixing_perplexity'] / public - 1:8.1%} {more_error:5.1%}"
            if control is not None:
                row["control_perplexity"] = control.perplexity(one)
                row["control_rule_perplexity"] = control.perplexity(ruled)
                level = control.perplexity(-1)
                line += (
                    f"     {row['control_perplexity'] / level - 1:8.1%}"
                    f" {row['control_rule_perplexity'] / level - 1:8.1%}"
                )
            report.say(line)
            report.tables.setdefault("frontier", []).append(row)
            curve.append((epsilon, min(row["perplexity"], row["mixing_perplexity"])))
        where = crossing(curve, unprotected)
        report.tables.setdefault("reached", []).append(
            {"corpus": name, "models": models, "queries": queries, "adjacency": adjacency,
             "epsilon": where}
        )  # fmt: skip
        report.say(
            "    the unprotected perplexity is "
            + (
                f"not reached at ε = {EPSILONS[-1]:g}"
                if where is None
                else f"reached at ε = {where:.2f}"
            )
        )
    report.say()
    mean = tried.mean()
    report.tables["clips"] = [{"lower": lower, "upper": upper} for lower, upper in SHAPES]
    report.tables.setdefault("choosing", []).extend(
        {"corpus": name, "width": width,
         "losses": [round(mean[setting(shape, width)], 5) for shape in SHAPES]}
        for width in best
    )  # fmt: skip


def draw(content: dict[str, Any], file: Path) -> None:
    """Draw perplexity over ε, with a panel for each corpus."""
    from adapmixed_lab.figures.style import COLOURS, GREY, canvas, number_axis

    levels = [row for row in content["levels"] if row["text"] == "reported"]
    with canvas(4.3, 1, len(levels)) as (figure, panels):
        for axes, level in zip([panels] if len(levels) == 1 else panels, levels, strict=True):
            rows = [row for row in content["frontier"] if row["corpus"] == level["corpus"]]
            for (queries, colour), (adjacency, dash) in itertools.product(
                zip(QUERIES, COLOURS, strict=False),
                zip(ADJACENCIES, ("-", (0, (4, 1.6))), strict=True),
            ):
                mine = [
                    row for row in rows
                    if (row["queries"], row["adjacency"]) == (queries, adjacency)
                ]  # fmt: skip
                words = f"{queries:,} queries, {adjacency.replace('_', '-')}".replace(
                    ",", "\u2009", 1
                )
                axes.plot(
                    [row["epsilon"] for row in mine],
                    [min(row["perplexity"], row["mixing_perplexity"]) for row in mine],
                    color=colour, linestyle=dash, linewidth=1.6, marker="o", markersize=5,
                    markerfacecolor=colour if adjacency == "zero_out" else "white",
label=words,
                )  # fmt: skip
            for value, words in (
                (level["public"], "public model"),
                (level["unprotected"], "unprotected ensemble"),
            ):
                axes.axhline(value, color=GREY, linestyle=(0, (2, 2)), linewidth=1.1)
                axes.annotate(
                    words, (0.99, value), xycoords=("axes fraction", "data"), ha="right",
                    va="bottom", fontsize=9, color=GREY,
                )  # fmt: skip
            axes.set_xscale("log")
            axes.set_xticks(EPSILONS)
            number_axis(axes.xaxis)
            axes.minorticks_off()
            words = {"builtin": "Language reference", "authors": "Docstrings by author"}
            axes.set(
                title=f"{words[level['corpus']]}, N = {level['models']}",
                xlabel="ε at δ = 1e-5, fixed in advance",
            )
        first = figure.axes[0]
        first.set_ylabel("perplexity (lower is better)")
        figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.savefig(file, dpi=150, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["builtin", "authors"]
    parser.add_argument("--corpora", nargs="+", choices=names, default=names)
    parser.add_argument("--queries", type=int, default=QUERIES[-1], help="that are reported")
    parser.add_argument("--choose", type=int, default=5_100,
                        help="on which settings are chosen, if there are so many")  # fmt: skip
    parser.add_argument("--mixing", type=int, default=25_500, help="that ClippedMixing answers")
    parser.add_argument("--workers", type=int, default=2, help="processes that train")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="continue from here")
    parser.add_argument("--quick", action="store_true", help="few members and queries, no meaning")
    parser.add_argument("--figure", type=Path, metavar="PNG")
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    options = parser.parse_args()
    if options.quick:
        options.queries, options.choose, options.workers = 510, 255, 1
        options.mixing = 510
    torch.set_num_threads(1)
    about, report = machine(), Report()
    report.say(f"{headline(about)}\n")
    for name in options.corpora:
        if name == "builtin":
            parts = list(builtin(*((4, 1) if options.quick else (NUM_MODELS, FOLDS))))
        else:
            parts = list(by_author(4 if options.quick else 100))
        run(name, parts, report, options)
    if options.figure:
        draw(report.tables, options.figure)
    if options.out:
        report.write(options.out, machine=about, quick=options.quick)


if __name__ == "__main__":
    main()
