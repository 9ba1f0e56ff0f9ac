"""Measure what a fixed ε costs in perplexity, on text by 100 authors.

    python -m benchmarks.headline --base FOLDER --keep WORK --out PREFIX --figure PNG
    python -m benchmarks.headline --quick     # the built-in base and few members, no meaning

The text is the change logs of the installed Debian packages (`benchmarks.authors`). Each author's
documents are divided into three folds. For every fold an ensemble is trained on the others with its
own seed, one member for each author, and answers that fold. So the three ensembles differ in their
text and in their seeds. Members are those of `adapmixed train`'s defaults.

ClippedLogPool has a = 0, κ = 2 and the largest b that keeps ε. ClippedMixing and PMixED have the
planner's settings. None of these looks at text or at a member: a setting chosen by the scores of
private members, even on public text, would depend on them. AdaPMixED has the paper's setting; its
ε is known afterwards. The best pool is that of least perplexity, found with hindsight among one
that was chosen on text of authors who have no member, and the settings of all ε. One adapter is
trained on all text of the last of the three ensembles.

ClippedMixing and PMixED answer some of the positions only. What a regression on the losses of the
public model, the unprotected ensemble and ClippedLogPool leaves there is added to what it gives at
all positions. Intervals come from a bootstrap over authors and ensembles, with all methods compared
at the same positions; that of one adapter is over authors alone.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from adapmixed.data import Document, demo_base
from adapmixed.ensemble.public_model import load_base
from adapmixed.ensemble.vocabulary import beginning_of
from adapmixed.mechanisms import AdaPMixED, Mechanism
from adapmixed.mechanisms.planned import planned
from adapmixed.mechanisms.rows import shaped
from adapmixed.privacy import Accountant
from adapmixed.privacy.planner import Plan
from adapmixed.rng import SeededRandom
from adapmixed.training.blocks import token_stream
from adapmixed.training.config import FinetuneConfig
from adapmixed.training.finetune import train_adapter
from adapmixed.training.pool import _keep_freed_memory
from adapmixed.training.presets import HEAD
from benchmarks.authors import LEAST, authors, divide
from benchmarks.frontier import Question, Scorer, Setting, plans, rule, widest
from benchmarks.harness import Report, headline, machine

DELTA = 1e-5
BLOCK = HEAD["block_size"]
CHARACTERS = 2_400
"""Characters of an author that are read for each block of a fold."""
QUERIES = (1_024, 99_840)
ADJACENCIES = ("zero_out", "replace_one")
EPSILONS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
MAIN = (1.0, 3.0, 8.0)
"""The ε at which all mechanisms are measured."""
QUESTIONS = [Question(*one) for one in itertools.product(QUERIES, ADJACENCIES, EPSILONS)]
FREE: list[Setting] = [
    (lower, upper, scale)
    for (lower, upper), scale in itertools.product(
        ((-8.0, 8.0), (0.0, 8.0), (0.0, 2.0), (0.0, 1.0)), (1.0, 2.0, 4.0, 8.0)
    )
]
"""Pools without protection; hardly any mean log-ratio is beyond ±8."""
FOLDS = 3
CONFIG = FinetuneConfig(**HEAD, target_modules=("lm_head",))
ANSWERS, CHOOSING, PLANNED = 1_024, 320, 96
"""Positions that every ensemble answers, those of other authors' text on which settings are chosen,
and those among the first that the planner's mechanisms answer."""
ADAPMIXED = AdaPMixED.preset("wikitext-103")
WHOLE = replace(CONFIG, batch_size=4, epochs=1)
METHODS, MARKS = ("ClippedLogPool", "ClippedMixing", "PMixED"), ("o", "s", "^")
DASHES = ("-", (0, (4, 1.6)))
_ROWS = 8  # positions of one call
_TASK = 64  # positions of one task


@dataclass(frozen=True)
class Text:
    """The blocks of all authors; each begins with the tokenizer's first k tokens.

    Attributes:
        members: blocks by author and fold, each (blocks, k + BLOCK) int64.
        others: (blocks, k + BLOCK) int64, of authors who have no member.
        beginning: the k tokens.
    """

    members: list[list[Tensor]]
    others: Tensor
    beginning: tuple[int, ...]

    @staticmethod
    def read(tokenizer: Any, models: int, blocks: int) -> Text:
        """Read the text of the authors who are installed here.

        Args:
            tokenizer: the base's.
            models: the number of authors who get a member.
            blocks: the largest number of blocks of an author and fold.
        """
        beginning = beginning_of(tokenizer)

        def cut(documents: Sequence[Document]) -> Tensor:
            tokens = token_stream(tokenizer, [document.text for document in documents])
            count = min(blocks, len(tokens) // BLOCK)
            found = torch.tensor(tokens[: count * BLOCK], dtype=torch.int64).view(count, BLOCK)
            first = torch.tensor(beginning, dtype=torch.int64).expand(count, -1)
            return torch.cat([first, found], dim=1)

        members, others = divide(authors(max(2 * LEAST, CHARACTERS * blocks)), models)
        return Text(
            [[cut(fold) for fold in author.folds(FOLDS)] for author in members],
            torch.cat([cut(author.documents) for author in others])[: models * blocks // 5],
            beginning,
        )

    def shard(self, author: int, fold: int) -> list[int]:
        """Return the tokens on which a fold's ensemble trains an author's member."""
        parts = [part for at, part in enumerate(self.members[author]) if at != fold]
        return [int(one) for one in torch.cat(parts)[:, len(self.beginning) :].flatten()]


@dataclass(frozen=True)
class Adapter:
    """An adapter of the output layer, which adds scale · (h Aᵀ) Bᵀ to the logits of h."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class Positions:
    """Positions that are scored, in random order.

    Attributes:
        states: (n, d) hidden states.
        targets: (n,) int64, the next tokens.
        groups: (n,) int64, the author or block; what is alike in a group is one for the bootstrap.
    """

    states: Tensor
    targets: Tensor
    groups: Tensor

    def part(self, start: int, stop: int) -> Positions:
        """Return some of the positions."""
        where = slice(start, stop)
        return Positions(self.states[where], self.targets[where], self.groups[where])


class Bench:
    """The base, the text, and a folder with all that was computed.

    The layers below the output layer and the public logits depend on the text alone. They are the
    same for every seed, fold and epoch, so a block is answered once.
    """

    def __init__(self, base: str, folder: Path, models: int, blocks: int) -> None:
        """Load the base and read the text, unless the folder has it."""
        self.folder = folder
        self.name = "the built-in base" if base == str(demo_base()) else Path(base).name
        self.model, tokenizer = load_base(base, torch.float32)
        self.text: Text = kept(folder / "text.pt", lambda: Text.read(tokenizer, models, blocks))
        self.settings: list[Setting] = []
        self.plans: list[Plan] = []
        self._positions: dict[int | None, Positions] = {}
        self._members: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[bytes, Tensor] = {}
        self._logits: dict[bytes, Tensor] | None = None
        self._remember(self.model.eval().get_decoder(), self.model.get_output_embeddings())

    def _remember(self, trunk: Any, head: Any) -> None:
        """Let the layers answer a block once; copies of the model share what is known."""
        compute, answer = trunk.forward, head.forward

        @torch.no_grad()
        def states(input_ids: Tensor, **_: Any) -> BaseModelOutputWithPastAndCrossAttentions:
            for ids in input_ids:
                if (key := ids.numpy().tobytes()) not in self._states:
                    found = compute(input_ids=ids[None], use_cache=False)
                    self._states[key] = found.last_hidden_state[0]
            found = torch.stack([self._states[ids.numpy().tobytes()] for ids in input_ids])
            return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=found)

        def logits(states: Tensor) -> Tensor:
            if self._logits is None:
                found: Tensor = answer(states)
                return found
            parts, size = [], BLOCK + len(self.text.beginning)
            for block in torch.split(states.detach().flatten(0, -2), size):
                if (key := block[-1].numpy().tobytes()) not in self._logits:
                    with torch.no_grad():
                        self._logits[key] = answer(block)
                parts.append(self._logits[key])
            return torch.cat(parts).view(*states.shape[:-1], -1)

        trunk.forward, head.forward = states, logits

    def states(self, name: str, blocks: Tensor) -> Tensor:
        """Return the hidden states of blocks, (blocks, t, d)."""
        trunk = self.model.get_decoder()

        def compute() -> tuple[Tensor, Tensor]:
            parts = [trunk.forward(ids[None]).last_hidden_state for ids in blocks]
            return blocks, torch.cat(parts)

        found: Tensor = kept(self.folder / f"states-{name}.pt", compute)[1]
        self._states |= {ids.numpy().tobytes(): one for ids, one in zip(blocks, found, strict=True)}
        return found

    def author(self, at: int) -> list[Adapter]:
        """Return an author's members, one for each fold's ensemble."""
        self.states(f"{at:03}", torch.cat(self.text.members[at]))
        self._logits = {}
        try:
            return [
                self._train(self.text.shard(at, fold), CONFIG, fold, at) for fold in range(FOLDS)
            ]
        finally:
            self._logits = None

    def planning(self, question: Question) -> list[Plan]:
        """Return the planner's plans for a question."""
        return plans(question, len(self.text.members), DELTA)

    def positions(self, fold: int | None) -> Positions:
        """Return `ANSWERS` positions of a fold's text, or `CHOOSING` of other authors' for None.

        They are in random order, and about as many in each block.
        """
        if fold in self._positions:
            return self._positions[fold]
        if fold is None:
            parts, count = [(self.states("others", self.text.others), self.text.others)], CHOOSING
        else:
            parts, count = [], ANSWERS
            for at, author in enumerate(self.text.members):
                known = self.states(f"{at:03}", torch.cat(author))
                parts.append((torch.split(known, list(map(len, author)))[fold], author[fold]))
        each = -(-count // sum(len(blocks) for _, blocks in parts))
        draw, first = torch.Generator().manual_seed(fold or 0), len(self.text.beginning)
        states, targets, groups = [], [], []
        for group, (known_, blocks) in enumerate(parts):
            for row, ids in zip(known_, blocks, strict=True):
                at_ = first + torch.randperm(BLOCK - 1, generator=draw)[:each]
                states.append(row[at_])
                targets.append(ids[at_ + 1])
                groups.append(torch.full_like(at_, group))
        order = torch.randperm(sum(map(len, targets)), generator=draw)[:count]
        found = Positions(*(torch.cat(one)[order] for one in (states, targets, groups)))
        self._positions[fold] = found
        return found

    def score(self, fold: int, text: int | None, start: int) -> Tensor:
        """Return the losses of `settings`, of the unprotected and of the public model.

        Args:
            fold: the fold whose ensemble answers.
            text: the fold that is answered; None for other authors' text.
            start: the first of `_TASK` positions.

        Returns:
            (settings + 2, positions) in nats.
        """
        scorer = Scorer(self.settings)
        found = []
        for part in self._parts(text, start, start + _TASK):
            logits = self._logits_of(fold, part.states)
            found.append(scorer.losses(*logits, part.targets))
        return torch.cat(found, dim=1).double()

    @torch.no_grad()
    def alone(self, fold: int) -> Tensor:
        """Return the losses of one adapter that is trained on all text of a fold's ensemble, less
        those of the public model."""
        for at, author in enumerate(self.text.members):
            self.states(f"{at:03}", torch.cat(author))
        tokens = [one for at in range(len(self.text.members)) for one in self.text.shard(at, fold)]
        with torch.enable_grad():
            whole = self._train(tokens, WHOLE, fold, 0)
        found = []
        for part in self._parts(fold, 0, ANSWERS):
            public = self.model.get_output_embeddings()(part.states)
            logits = public + whole.scale * (part.states @ whole.a.T) @ whole.b.T
            gain = logits.log_softmax(-1) - public.log_softmax(-1)
            found.append(-gain.gather(1, part.targets[:, None])[:, 0])
        return torch.cat(found).double()

    def answer(self, fold: int) -> Tensor:
        """Return the losses of the planner's mechanisms, (mechanisms, positions) in nats."""
        accountants = [Accountant(DELTA, adjacency=one.adjacency) for one in self.plans]
        found = []
        for part in self._parts(fold, 0, PLANNED):
            logits = self._logits_of(fold, part.states)
            found.append(
                torch.stack(
                    [
                        answered(planned(one), accountant, *logits, part.targets)
                        for one, accountant in zip(self.plans, accountants, strict=True)
                    ]
                )  # fmt: skip
            )
        return torch.cat(found, dim=1)

    def adapmixed(self, fold: int) -> tuple[Tensor, float]:
        """Return the losses of AdaPMixED less the unprotected, and ε of these answers."""
        accountant, found, mean = Accountant(DELTA), [], Scorer([])
        for part in self._parts(fold, 0, ANSWERS):
            logits = self._logits_of(fold, part.states)
            loss = answered(ADAPMIXED, accountant, *logits, part.targets)
            found.append(loss - mean.losses(*logits, part.targets)[0])
        return torch.cat(found), float(accountant.guarantee().epsilon or math.inf)

    def _parts(self, text: int | None, start: int, stop: int) -> list[Positions]:
        found = self.positions(text).part(start, stop)
        return [found.part(at, at + _ROWS) for at in range(0, len(found.targets), _ROWS)]

    def _logits_of(self, fold: int, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return (private, public) logits of the fold's ensemble, (N, B, V) and (B, V)."""
        if fold not in self._members:
            members = [
                kept(self.folder / f"author-{at:03}.pt", partial(self.author, at))[fold]
                for at in range(len(self.text.members))
            ]
            stacked = (
                torch.stack([one.a for one in members]),
                torch.stack([one.scale * one.b.T for one in members]),
            )
            self._members = {fold: stacked}
        a, b = self._members[fold]
        with torch.no_grad():
            public = self.model.get_output_embeddings()(states)
            low = torch.einsum("nrd,bd->nbr", a, states)
            return torch.baddbmm(public.expand(len(a), -1, -1), low, b), public

    def _train(self, tokens: list[int], config: FinetuneConfig, seed: int, shard: int) -> Adapter:
        found = train_adapter(
            self.model, tokens, config, seed=seed, shard=shard, beginning=self.text.beginning
        )
        layer = found.model.get_base_model().get_output_embeddings()
        (name,) = layer.active_adapters
        a, b = (one[name].weight.detach().clone() for one in (layer.lora_A, layer.lora_B))
        return Adapter(a, b, layer.scaling[name])


def kept(file: Path, compute: Callable[[], Any]) -> Any:
    """Return what a file holds, or compute it and write a file that is whole if it exists."""
    if not file.exists():
        partial_file = file.with_suffix(".new")
        torch.save(compute(), partial_file)
        partial_file.rename(file)
    return torch.load(file, weights_only=False)


def answered(
    mechanism: Mechanism, accountant: Accountant, private: Tensor, public: Tensor, targets: Tensor
) -> Tensor:
    """Return the losses of a mechanism's answers after they are charged, (B,) in nats."""
    proposal = mechanism.propose_rows(
        shaped(private, public), targets=targets, rng=SeededRandom(accountant.queries)
    )
    accountant.charge(proposal)
    found = proposal.release().log_prob
    assert found is not None
    return -found


def run(
    tasks: dict[str, tuple[str, tuple[Any, ...]]], bench: Bench, workers: int
) -> dict[str, Any]:
    """Compute methods of the bench in several processes; return their results.

    Args:
        tasks: (name of a method, arguments) by the name of the file that keeps the result.
        bench: the bench.
        workers: the number of processes.
    """
    global _bench
    _bench = bench
    missing = [name for name in tasks if not (bench.folder / f"{name}.pt").exists()]
    began = time.monotonic()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, initializer=_keep_freed_memory) as pool:
        futures = [pool.submit(_compute, name, *tasks[name]) for name in missing]
        for number, future in enumerate(as_completed(futures)):
            seconds = time.monotonic() - began
            line = f"{future.result()}: {number + 1} of {len(missing)}, {seconds:.0f} s"
            print(line, file=sys.stderr, flush=True)
    return {name: torch.load(bench.folder / f"{name}.pt", weights_only=False) for name in tasks}


_bench: Bench | None = None


def _compute(name: str, method: str, arguments: tuple[Any, ...]) -> str:
    assert _bench is not None
    kept(_bench.folder / f"{name}.pt", partial(getattr(_bench, method), *arguments))
    return name


class Estimates:
    """Mean losses of methods over all ensembles, and how they vary.

    Row 0 is the estimate. The other rows are those of a bootstrap, for which authors and ensembles
    are drawn with replacement, the same for all methods.
    """

    def __init__(self, groups: Tensor, draws: int = 1_000) -> None:
        """Draw the weights.

        Args:
            groups: (ensembles, n) int64, the authors of the positions.
            draws: the rows of the bootstrap.
        """
        self._groups, self.size, (folds, _) = groups, groups.numel(), groups.shape
        count = int(groups.max()) + 1
        generator = torch.Generator().manual_seed(0)
        self._weights = []
        for size in (folds, count):
            picked = torch.randint(size, (draws, size), generator=generator)
            drawn = torch.zeros(draws, size, dtype=torch.float64)
            drawn.scatter_add_(1, picked, torch.ones_like(drawn))
            self._weights.append(torch.cat([torch.ones_like(drawn[:1]), drawn]))
        self.losses: dict[Any, Tensor] = {}

    def add(
        self, name: Any, losses: Tensor, known: dict[Any, float] | None = None, first: int = 0
    ) -> None:
        """Add the losses of a method.

        Args:
            name: the method.
            losses: (ensembles, m) at the first m positions, less those of known methods there.
            known: the factors of these methods, which answered all positions; None if none.
            first: the first of the ensembles; they are those from here to the last.
        """
        of_folds, of_authors = self._weights
        groups = self._groups[first:, : losses.shape[1]]
        weights = of_authors[:, groups] * of_folds[:, first:, None]
        mean = (weights * losses).sum((1, 2)) / weights.sum((1, 2))
        for other, factor in (known or {}).items():
            mean = mean + factor * self.losses[other]
        self.losses[name] = mean

    def perplexity(self, name: Any) -> float:
        """Return the perplexity of a method."""
        return math.exp(float(self.losses[name][0]))

    def change(self, name: Any) -> list[float]:
        """Return the change of perplexity against the public model, and its 95 % interval."""
        values = (self.losses[name] - self.losses["public"]).exp() - 1
        ends = values[1:].nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
        return [round(float(value), 5) for value in (values[0], *ends)]


def explained(losses: Tensor, known: Tensor) -> tuple[Tensor, list[float]]:
    """Return what known losses leave unexplained of a method's, and their factors.

    Args:
        losses: (ensembles, m) of the method.
        known: (ensembles, n, k) of k methods at n >= m positions.
    """
    at = known[:, : losses.shape[1]]
    columns = torch.cat([torch.ones_like(at[..., :1]), at], dim=-1).flatten(0, 1)
    factors = torch.linalg.lstsq(columns, losses.flatten()[:, None]).solution[1:, 0]
    return losses - at @ factors, factors.tolist()


def measure(bench: Bench, report: Report, workers: int) -> None:
    """Train, choose, measure and report."""
    models = len(bench.text.members)
    run({f"author-{at:03}": ("author", (at,)) for at in range(models)}, bench, workers)
    widths = {question: widest(question, models, DELTA) for question in QUESTIONS}
    pools = {question: rule(width) for question, width in widths.items()}
    tried = scored(bench, None, FREE, workers)
    losses = dict(zip(bench.settings, tried.mean((0, 2)).tolist(), strict=False))
    free = min(losses, key=lambda one: losses[one])
    asked = [question for question in QUESTIONS if question.epsilon in MAIN]
    found = run(
        {f"plans-{at}": ("planning", (one,)) for at, one in enumerate(asked)}, bench, workers
    )
    bench.plans = [
        one for plans in found.values() for one in plans if one.mechanism != "clipped-log-pool"
    ]
    chosen = list(dict.fromkeys([free, *pools.values()]))
    values = scored(bench, 0, chosen, workers)
    groups = torch.stack([bench.positions(fold).groups for fold in range(FOLDS)])
    estimates = Estimates(groups)
    names = [*chosen, "unprotected", "public"]
    for at, name in enumerate(names):
        estimates.add(name, values[:, at])
    free = min(chosen, key=estimates.perplexity)

    def of_folds(method: str) -> list[Any]:
        tasks = {f"{method}-{fold}": (method, (fold,)) for fold in range(FOLDS)}
        return list(run(tasks, bench, workers).values())

    answers = torch.stack(of_folds("answer"), dim=1)
    for plan, losses_of in zip(bench.plans, answers, strict=True):
        epsilon = min(MAIN, key=lambda one: abs(one - plan.epsilon))  # it was made for
        question = Question(plan.queries, plan.adjacency, epsilon)
        controls = ["public", "unprotected", pools[question]]
        known = torch.stack([values[:, names.index(one)] for one in controls], dim=-1)
        rest, factors = explained(losses_of, known)
        estimates.add((plan.mechanism, question), rest, dict(zip(controls, factors, strict=True)))
    adaptive = of_folds("adapmixed")
    estimates.add("adapmixed", torch.stack([one for one, _ in adaptive]), {"unprotected": 1.0})
    last = FOLDS - 1  # one adapter takes about as long as all members: it has one ensemble's text
    (alone,) = run({f"alone-{last}": ("alone", (last,))}, bench, workers).values()
    estimates.add("alone", alone[None], {"public": 1.0}, first=last)
    tables(bench, estimates, pools, free, [epsilon for _, epsilon in adaptive], report)


def scored(bench: Bench, text: int | None, settings: list[Setting], workers: int) -> Tensor:
    """Return the losses of all folds' ensembles, (folds, settings + 2, positions).

    Args:
        bench: the bench.
        text: 0 for text of each fold, None for text of other authors.
        settings: the pools.
        workers: the number of processes.
    """
    bench.settings = settings
    digest = hashlib.sha256(repr((settings, ANSWERS, CHOOSING)).encode()).hexdigest()[:8]
    folds = []
    for fold in range(FOLDS):
        of = fold if text is not None else None
        starts = range(0, len(bench.positions(of).targets), _TASK)
        folds.append({f"losses-{digest}-{fold}-{at}": ("score", (fold, of, at)) for at in starts})
    found = run({name: task for one in folds for name, task in one.items()}, bench, workers)
    return torch.stack([torch.cat([found[name] for name in one], dim=1) for one in folds])


def tables(
    bench: Bench, found: Estimates, pools: dict[Question, Setting], free: Setting,
    adaptive: list[float], report: Report,
) -> None:  # fmt: skip
    """Report all figures."""
    models = len(bench.text.members)
    sizes = sorted(sum(map(len, author)) * BLOCK // FOLDS * 2 for author in bench.text.members)
    report.say(
        f"{bench.name}: {models} members, {FOLDS} ensembles, {found.size} positions, δ = {DELTA:g}"
        f"\nA member learns about {sizes[0]} to {sizes[-1]} tokens, the median is "
        f"{sizes[models // 2]}.\n\n"
        f"{'':40}{'ε':>10} {'perplexity':>10} {'change, 95 %':>24}"
        f"  {'a':>5} {'b':>5} {'κ':>5}"
    )

    def row(method: str, name: Any, **more: Any) -> None:
        entry = {
            "method": method, "perplexity": round(found.perplexity(name), 3),
            "change": found.change(name), **more,
        }  # fmt: skip
        report.tables.setdefault("rows", []).append(entry)
        question = f"{method:15}{more.get('queries', ''):>7} {more.get('adjacency', ''):12}"
        spent = more.get("epsilon", "")
        epsilon = "–".join(f"{one:g}" for one in spent) if isinstance(spent, list) else str(spent)
        line = (
            f"  {question:38}{epsilon:>10} {entry['perplexity']:10.2f} "
            "{:+8.1%} [{:+6.1%}, {:+6.1%}]".format(*entry["change"])
        )
        if "setting" in more:
            line += "  {:5.2f} {:5.2f} {:5.2f}".format(*more["setting"])
        report.say(line)

    row("public", "public")
    row("unprotected", "unprotected")
    row("best pool", free)
    row("one adapter", "alone")
    row(
        "AdaPMixED", "adapmixed", queries=ANSWERS, adjacency="zero_out",
        epsilon=[round(min(adaptive), 3), round(max(adaptive), 3)], kind="data-dependent, ex-post",
    )  # fmt: skip
    for question, one in pools.items():
        asked = dict(vars(question), kind="fixed")
        row("ClippedLogPool", one, **asked, setting=one)
        for method, title in (("clipped-mixing", "ClippedMixing"), ("pmixed", "PMixED")):
            if (method, question) in found.losses:
                row(title, (method, question), **asked)


def draw(rows: Sequence[dict[str, Any]], base: str, file: Path) -> None:
    """Draw perplexity over ε, with a panel for each number of answers."""
    from adapmixed_lab.figures.style import COLOURS, GREY, MARKERS, canvas, number_axis

    level = {row["method"]: row["perplexity"] for row in rows if "queries" not in row}
    below = {"one adapter": level.pop("one adapter")}  # far from all others
    with canvas(4.6, 1, len(QUERIES)) as (figure, panels):
        for axes, queries in zip(panels, QUERIES, strict=True):
            ticks = list(EPSILONS)
            for value in level.values():
                axes.axhline(value, color=GREY, linestyle=(0, (1, 2)), linewidth=1.1)
            for (method, colour, mark), (adjacency, dash) in itertools.product(
                zip(METHODS, COLOURS, MARKS, strict=False), zip(ADJACENCIES, DASHES, strict=True)
            ):
                mine = [
                    row for row in rows
                    if (row["method"], row.get("queries"), row.get("adjacency"))
                    == (method, queries, adjacency)
                ]  # fmt: skip
                if not mine:
                    continue
                epsilons = [row["epsilon"] for row in mine]
                axes.plot(
                    epsilons, [row["perplexity"] for row in mine], color=colour, linestyle=dash,
                    linewidth=1.5, marker=mark, markersize=5.5, clip_on=False,
                    markerfacecolor=colour if adjacency == "zero_out" else "white",
                    label=f"{method}, {adjacency.replace('_', '-')}",
                )  # fmt: skip
                if method == METHODS[0]:
                    low, high = (
                        [level["public"] * (1 + row["change"][at]) for row in mine] for at in (1, 2)
                    )
                    axes.fill_between(epsilons, low, high, color=colour, alpha=0.15, linewidth=0)
            for row in rows:
                if row["method"] == "AdaPMixED" and row["queries"] == queries:
                    ticks += [round(one) for one in row["epsilon"][1:] if one > max(EPSILONS)]
                    axes.plot(
                        row["epsilon"], [row["perplexity"]] * len(row["epsilon"]), color="black",
                        linestyle="none", marker=MARKERS[row["kind"]], markersize=6,
                        label="AdaPMixED, ε known afterwards",
                    )  # fmt: skip
            axes.set_xscale("log")
            axes.set_xticks(ticks)
            number_axis(axes.xaxis)
            axes.minorticks_off()
            axes.set(title=f"{queries:,} answers".replace(",", "\u2009"), xlabel="ε at δ = 1e-5")
        low, high = (
            pick(axes.get_ylim()[at] for axes in panels) for at, pick in ((0, min), (1, max))
        )
        for axes in panels:
            axes.set_ylim(low, high)
        place = -math.inf
        for method, value in sorted((level | below).items(), key=lambda one: one[1]):
            place = max(value, place + (high - low) * 0.05, low)  # labels keep apart
            panels[-1].annotate(
                f" {method} {value:.1f}{' ↓' if value < low else ''}", (1.0, place),
                xycoords=("axes fraction", "data"), va="center", fontsize=8.5, color=GREY,
                annotation_clip=False,
            )  # fmt: skip
        panels[0].set_ylabel("perplexity (lower is better)")
        figure.suptitle(f"{base}, text by 100 authors", fontsize=11, ha="left", x=0.01)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.savefig(file, dpi=150, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default=str(demo_base()), help="default: the built-in base")
    parser.add_argument("--blocks", type=int, default=8, help="of each author and fold, at most")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="continue from here")
    parser.add_argument("--quick", action="store_true", help="four members, no meaning")
    parser.add_argument("--figure", type=Path, metavar="PNG")
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about, report = machine(), Report()
    report.say(f"{headline(about)}\n")
    with tempfile.TemporaryDirectory() as folder:
        models = 4 if options.quick else 100
        of = f"{Path(options.base).name}-{models}x{options.blocks}"  # results of other sizes differ
        keep = (options.keep or Path(folder)) / of
        keep.mkdir(parents=True, exist_ok=True)
        bench = Bench(options.base, keep, models, options.blocks)
        measure(bench, report, options.workers)
    if options.figure:
        draw(report.tables["rows"], bench.name, options.figure)
    if options.out:
        report.write(options.out, machine=about, quick=options.quick, base=bench.name)


if __name__ == "__main__":
    main()
