"""Measure what a published ε costs in perplexity, and how many shards it takes.

    python -m benchmarks.headline --base FOLDER --keep WORK --out PREFIX --figure PNG
    python -m benchmarks.headline --quick     # the built-in base and few members, no meaning

The text is the change logs of the installed Debian packages. A document is one signed entry, cut to
`LONGEST` characters at the end of a line. The same `DOCUMENTS` documents are divided among 100, 300
and 1 000 shards, with another key for each seed. Members are those of `adapmixed train`'s defaults.
`evaluate` scores every ensemble on a part of other documents, which is the same for all ensembles
of a seed. Members speak about `ACTIVE` tokens; in the references without protection about all.

Settings are the planner's chosen ones. They look at no text and no member. The references without
protection are the mean of the members, the log pools of several κ, and one adapter trained once on
all documents; the best of them is known with hindsight. Shares are of its gain in log-perplexity.
Intervals are from the least to the largest of the seeds. PMixED and AdaPMixED answer with the
fewest shards alone; the ε of AdaPMixED is known afterwards.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import math
import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from adapmixed import AdaPMixED, Ensemble, PublicOnly, Unprotected, UnprotectedPool
from adapmixed.data import demo_base
from adapmixed.data.corpus import Corpus
from adapmixed.evaluation import Evaluation, evaluate
from adapmixed.mechanisms import Mechanism, planned
from adapmixed.privacy.planner import (
    CHOSEN_SCALE,
    CHOSEN_SHAPE,
    SHARDS,
    Plan,
    chosen,
    kept_share,
    plan,
)
from adapmixed.rng import SeededRandom
from adapmixed.text import token_stream
from adapmixed.training import FinetuneConfig, TrainingRun, train_ensemble
from adapmixed.training.settings import HEAD
from adapmixed.training.shards import TrainingFolder, create_key
from benchmarks.harness import Report, headline, machine

FOLDER = Path("/usr/share/doc")
DOCUMENTS, LONGEST, PART = 3_500, 200, 512
DELTA, ACTIVE = 1e-5, 8_192
QUERIES, ADJACENCIES, EPSILONS = (1_024, 99_840), ("zero_out", "replace_one"), (1.0, 3.0, 8.0)
CONFIG = FinetuneConfig(**HEAD, target_modules=("lm_head",))
REFERENCES: dict[str, Mechanism] = {
    "public": PublicOnly(), "mean": Unprotected(),
    **{f"pool, κ = {scale:g}": UnprotectedPool(scale) for scale in (1.0, 2.0, 4.0)},
}  # fmt: skip
TITLES = {"clipped-log-pool": "ClippedLogPool", "clipped-mixing": "ClippedMixing"}
STYLES: dict[str, dict[str, Any]] = {
    "clipped-log-pool": {"linestyle": "-", "marker": "o"},
    "clipped-mixing": {"linestyle": (0, (4, 1.6)), "marker": "s"},
}
Row = dict[str, Any]
Key = tuple[int, str]
"""The number of shards and the name of a mechanism."""

_BEGINS = re.compile(r"^\S+ \([^()\s]+\) [^;]+; ", re.MULTILINE)
_SIGNED = re.compile(r"^ -- .+? +<[^>]*>  .*$", re.MULTILINE)


def documents(folder: Path = FOLDER) -> list[str]:
    """Return the signed entries of all change logs, each once, in the order of a hash."""
    entries = set()
    for path in folder.glob("*/changelog.Debian.gz"):
        entries |= set(_entries(path))
    return sorted(entries, key=lambda text: hashlib.blake2b(text.encode()).digest())


def _entries(path: Path) -> Iterator[str]:
    """Yield the entries of one change log, without their first line and their signature."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            log = file.read()
    except (OSError, EOFError):
        return  # a dangling link, or no gzip file
    starts = [match.start() for match in _BEGINS.finditer(log)]
    for start, stop in itertools.pairwise([*starts, len(log)]):
        entry = log[start:stop]
        signed = _SIGNED.search(entry)
        if signed is None:
            continue
        lines = (line.strip() for line in entry[: signed.start()].split("\n")[1:])
        text = "\n".join(filter(None, lines))
        if len(text) > LONGEST:
            text = text[:LONGEST].rpartition("\n")[0]
        if text:
            yield text


def trained(
    base: str,
    texts: list[str],
    folder: Path,
    models: int,
    config: FinetuneConfig,
    seed: int,
    workers: int,
) -> Ensemble:
    """Return a folder's ensemble, trained if missing; the corpus lies in the parent folder."""
    corpus = folder.with_name("corpus.jsonl")
    rows = [json.dumps({"id": str(at), "text": text}) for at, text in enumerate(texts)]
    corpus.write_text("\n".join(rows), encoding="utf-8")
    create_key(TrainingFolder(folder, 0).key_file, f"key {seed}")
    run = TrainingRun(
        base, Corpus(str(corpus), id_column="id"), folder, models, config, seed=seed,
        share_shards=True,
    )  # fmt: skip
    train_ensemble(run, workers=workers)
    return Ensemble.from_pretrained(base, folder)


class Bench:
    """A base, the text, and a folder with all that was computed."""

    def __init__(
        self, base: str, keep: Path, seeds: int, models: Sequence[int], count: int
    ) -> None:
        """Divide the documents: the first `count` are trained on, others are scored.

        Raises:
            ValueError: if there are too few.
        """
        self.base, self.keep, self.seeds, self.models = base, keep, seeds, models
        texts = documents()
        tokenizer = AutoTokenizer.from_pretrained(base)
        self.tokens = token_stream(tokenizer, texts[count:])[: seeds * PART]
        if len(self.tokens) < seeds * PART:
            raise ValueError(
                f"{FOLDER}/*/changelog.Debian.gz must hold more than {count} signed entries, got "
                f"{len(texts)}: Debian and Ubuntu have these files with most packages"
            )
        self.texts = texts[:count]

    def scores(
        self, models: int, seed: int, mechanisms: Mapping[str, Mechanism], workers: int
    ) -> list[Evaluation]:
        """Return what an ensemble's mechanisms score on the seed's part of the text."""
        part = self.tokens[seed * PART :][:PART]
        division = 0 if models == 1 else seed
        folder = self.keep / f"{models}-{division}"
        ensemble = trained(self.base, self.texts, folder, models, CONFIG, division, workers)
        scores = []
        for kind, active in (("references", None), ("mechanisms", ACTIVE)):
            names = [name for name in mechanisms if (name in REFERENCES) == (active is None)]
            if names:
                scores += evaluate(
                    ensemble, part, {name: mechanisms[name] for name in names}, delta=DELTA,
                    rng=SeededRandom(seed), active=active,
                    block=CONFIG.block_size, result=self.keep / f"{kind}-{models}-{seed}.json",
                )  # fmt: skip
        return scores


def plans(models: int) -> dict[str, Plan]:
    """Return the planner's chosen settings for every question, by a name."""
    picks = {}
    for queries, adjacency, epsilon in itertools.product(QUERIES, ADJACENCIES, EPSILONS):
        for pick in plan(
            epsilon, DELTA, models, queries, adjacency,
            shapes=(CHOSEN_SHAPE,), scales=(CHOSEN_SCALE,),
        ):  # fmt: skip
            picks[f"{pick.mechanism} {queries} {adjacency} {epsilon:g}"] = pick
    return picks


def measure(bench: Bench, workers: int) -> list[Row]:
    """Train and score all ensembles; return a row for each mechanism and number of shards."""
    least = min(bench.models)
    picks = {(models, name): p for models in bench.models for name, p in plans(models).items()}
    losses: dict[Key, list[float]] = {}
    spent: list[float | None] = []
    for seed, models in itertools.product(range(bench.seeds), (1, *bench.models)):
        mechanisms = dict(REFERENCES)
        for (shards, name), pick in picks.items():
            if shards == models and (pick.mechanism in TITLES or models == least):
                mechanisms[name] = planned(pick)
        if models == least:
            mechanisms["adapmixed"] = AdaPMixED.preset("wikitext-103")
        for score in bench.scores(models, seed, mechanisms, workers):
            losses.setdefault((models, score.name), []).append(math.log(score.perplexity))
            if score.name == "adapmixed":
                spent.append(score.guarantee.epsilon)
    public = losses[1, "public"]
    best = min(
        (key for key in losses if key[1] in REFERENCES),
        key=lambda key: statistics.fmean(losses[key]),
    )
    gain = statistics.fmean(public) - statistics.fmean(losses[best])
    rows: list[Row] = []
    for (models, name), values in losses.items():
        lowered = [before - after for before, after in zip(public, values, strict=True)]
        changes = [
            math.expm1(-drop) for drop in (statistics.fmean(lowered), max(lowered), min(lowered))
        ]
        row: Row = {
            "models": models, "name": name, "best": (models, name) == best,
            "perplexity": math.exp(statistics.fmean(values)), "change": changes,
            "share": statistics.fmean(lowered) / gain,
        }  # fmt: skip
        if (models, name) in picks:
            pick = picks[models, name]
            row |= {"queries": pick.queries, "adjacency": pick.adjacency, "settings": pick.settings}
            row |= {"mechanism": pick.mechanism, "epsilon": float(name.split()[-1])}
        elif name == "adapmixed":
            row["epsilon"] = spent
        if name != "public" or models == 1:
            rows.append(row)
    return rows


def say(rows: Sequence[Row], report: Report) -> None:
    """Report the rows."""
    report.say(f"{'N':>6}  {'':42}{'perplexity':>10} {'change, and of the seeds':>27} {'share':>6}")
    for row in rows:
        words = " ".join(f"{value:.4g}" for value in row.get("settings", {}).values())
        if row["name"] == "adapmixed":
            words = "ε " + " ".join(f"{epsilon:.4g}" for epsilon in row["epsilon"])
        elif row["best"]:
            words = "the best without protection"
        report.say(
            f"{row['models']:6}  {row['name']:42}{row['perplexity']:10.2f} "
            "{:+8.1%} [{:+6.1%}, {:+6.1%}]".format(*row["change"])
            + f" {row['share']:6.0%}  {words}"
        )
    report.tables["rows"] = list(rows)


def draw(rows: Sequence[Row], base: str, file: Path) -> None:
    """Draw perplexity over ε, with a panel for each number of answers and neighbours."""
    from adapmixed_lab.figures.style import COLOURS, GREY, canvas, number_axis

    public, (best,) = rows[0], [row for row in rows if row["best"]]
    with canvas(6.4, len(ADJACENCIES), len(QUERIES)) as (figure, panels):
        for (adjacency, line), (column, queries) in itertools.product(
            zip(ADJACENCIES, panels, strict=True), enumerate(QUERIES)
        ):
            axes = line[column]
            for row, words in ((public, "public model"), (best, "best without ε")):
                axes.axhline(row["perplexity"], color=GREY, linestyle=(0, (1, 2)), linewidth=1.1)
                if column:
                    axes.annotate(
                        f" {words}\n {row['perplexity']:.1f}", (1.0, row["perplexity"]),
                        xycoords=("axes fraction", "data"), va="center", fontsize=8.5, color=GREY,
                        annotation_clip=False,
                    )  # fmt: skip
            mine = [row for row in rows if row.get("adjacency") == adjacency]
            shards = sorted({row["models"] for row in mine})
            for (mechanism, title), (colour, models) in itertools.product(
                TITLES.items(), zip(COLOURS, shards, strict=False)
            ):
                here = [
                    row for row in mine
                    if (row["models"], row.get("mechanism"), row["queries"])
                    == (models, mechanism, queries)
                ]  # fmt: skip
                epsilons = [row["epsilon"] for row in here]
                axes.plot(
                    epsilons, [row["perplexity"] for row in here], color=colour, linewidth=1.5,
                    markersize=5, label=f"{title}, {models:,} shards", **STYLES[mechanism],
                )  # fmt: skip
                ends = zip(*(row["change"][1:] for row in here), strict=True)
                low, high = ([public["perplexity"] * (1 + rise) for rise in end] for end in ends)
                axes.fill_between(epsilons, low, high, color=colour, alpha=0.12, linewidth=0)
            axes.set_xscale("log")
            axes.set_xticks(EPSILONS)
            number_axis(axes.xaxis)
            axes.minorticks_off()
            axes.set_title(f"{queries:,} answers, {adjacency.replace('_', '-')}")
        for axes in panels[-1]:
            axes.set_xlabel("ε at δ = 1e-5")
        for line in panels:
            line[0].set_ylabel("perplexity")
        low = min(axes.get_ylim()[0] for axes in panels.flat)
        high = max(axes.get_ylim()[1] for axes in panels.flat)
        for axes in panels.flat:
            axes.set_ylim(low, high)
        title = f"{base}, {DOCUMENTS:,} documents divided among the shards"
        figure.suptitle(title, fontsize=11, ha="left", x=0.01)
        entries = panels[0, 0].get_legend_handles_labels()
        figure.legend(*entries, loc="outside lower center", ncols=2, fontsize=8.5)
        figure.savefig(file, dpi=150, metadata={"Software": None})


def draw_shards(file: Path) -> None:
    """Draw the share of the gain that the planner expects, over the number of answers."""
    from adapmixed_lab.figures.style import COLOURS, canvas, number_axis

    counts = [round(10 ** (2 + step / 2)) for step in range(7)]
    epsilons = (1.0, 3.0)
    with canvas(3.0, 1, len(epsilons)) as (figure, panels):
        for axes, epsilon in zip(panels, epsilons, strict=True):
            for models, colour in zip(SHARDS, COLOURS, strict=False):
                kept = [kept_share(chosen(epsilon, DELTA, models, count)[0]) for count in counts]
                axes.plot(counts, kept, color=colour, label=f"{models:,}")
            axes.set_xscale("log")
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            number_axis(axes.xaxis)
            axes.set(title=f"ε = {epsilon:g}, zero-out", xlabel="answers")
        panels[0].set_ylabel("share of the gain")
        panels[-1].legend(title="shards")
        figure.savefig(file, dpi=150, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default=str(demo_base()), help="default: the built-in base")
    parser.add_argument("--seeds", type=int, default=3, help="ensembles of each N (default: 3)")
    parser.add_argument("--workers", type=int, default=2, help="processes that train")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="continue from here")
    parser.add_argument("--quick", action="store_true", help="few members, no meaning")
    parser.add_argument("--figure", type=Path, metavar="PNG")
    parser.add_argument(
        "--shards", type=Path, metavar="PNG", help="draw the planner's shares alone"
    )
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    options = parser.parse_args()
    if options.shards:
        draw_shards(options.shards)
        return
    about, report = machine(), Report()
    name = "the built-in base" if options.base == str(demo_base()) else Path(options.base).name
    settings = f"δ = {DELTA:g}, K = {ACTIVE}, references V, {options.seeds} seeds"
    report.say(f"{headline(about)}\n\n{name}, {settings}\n")
    with tempfile.TemporaryDirectory() as folder:
        keep = options.keep or Path(folder)
        keep.mkdir(parents=True, exist_ok=True)
        sizes = ((4, 8), 32) if options.quick else (SHARDS, DOCUMENTS)
        rows = measure(Bench(options.base, keep, options.seeds, *sizes), options.workers)
    say(rows, report)
    if options.figure:
        draw(rows, name, options.figure)
    if options.out:
        report.write(options.out, machine=about, quick=options.quick, base=name)


if __name__ == "__main__":
    main()
