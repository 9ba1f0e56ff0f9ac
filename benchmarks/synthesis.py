"""Measure how like private texts the synthetic ones are, at a published ε, against other rules.

    python scripts/real_models.py                                # makes the model's folder
    python -m benchmarks.synthesis --base FOLDER --keep WORK --out PREFIX [--speed]

The records are entries of change logs of the installed Debian packages (`benchmarks.headline`, cut
there) of more than `SHORTEST` characters, cut to `RECORD` tokens and dealt to batches by a hash.
From each all rules draw a text of `TOKENS` tokens for every ε and seed, from the same prompts and
from the public model's `TOP` likeliest tokens. The entries that no batch holds are the reference.

- public: the prompt without a record.
- ours: ClippedLogPool with the planner's settings, which clips log-ratios to [0, b].
- symmetric clip: the rule of InvisibleInk (arXiv 2507.02974). It clips raw logits to [−C, C]
  around the public ones; C spends the zCDP that ε buys.
- AdaPMixED: every member is as far from the public row as a ball of radius ε allows, and answers
  as it is inside it. Once the text's data-dependent ε would be above the ε of the others, the
  public model answers. That ε is ex post and must not be published.

MAUVE compares the last hidden states behind the texts, by the same base, with those behind as many
tokens of the reference, as a mean over clusterings. Differences are those to ours at the same ε and
to the public model. All have 95 % intervals by resampling batches and entries. WORK keeps
each batch: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from adapmixed import Accountant, AdaPMixED, ClippedLogPool
from adapmixed.ensemble.prompts import PromptEnsemble
from adapmixed.generation.generator import charged
from adapmixed.mechanisms import Mechanism, PublicOnly, shaped
from adapmixed.mechanisms.rows import ShapedLogits
from adapmixed.privacy.conversions import zcdp_to_dp
from adapmixed.privacy.events import BY_HAND
from adapmixed.privacy.planner import largest_within, recommended
from adapmixed.rng import SeededRandom
from adapmixed.text import plain_ids
from adapmixed_lab.baselines import InvisibleInk
from adapmixed_lab.figures.synthesis import Features, Reader, centred, mauve, until
from benchmarks.harness import Neighbours, Report, headline, machine
from benchmarks.headline import documents
from benchmarks.timing import Call, Contestant, Device, interleave

DESCRIBE = "an entry of the change log of a Debian package"
SHORTEST, RECORD, TOKENS, TOP, ACTIVE = 150, 64, 48, 100, 8_192
DELTA, EPSILONS, SEEDS = 1e-6, (3.0, 10.0), 3
ORDER = 16.0  # of AdaPMixED, whose ball has the radius ε
MEMORY, RESAMPLES, RUNS, PUBLIC = 12 << 30, 100, 15, "public"
Draw = Callable[[ShapedLogits], Tensor]  # to a token for the one row of a text, (1,) int64


def released(
    mechanism: Mechanism, payer: Accountant, rows: ShapedLogits, rng: SeededRandom
) -> Tensor:
    """Return a token of a mechanism, which is charged."""
    return charged(rows, mechanism, payer, rng, BY_HAND)


def planned(mechanism: Mechanism, rng: SeededRandom) -> Draw:
    """Return a rule whose cost is fixed for the whole text."""
    payer = Accountant(DELTA)
    return lambda rows: released(mechanism, payer, rows, rng)


def beside_public(epsilon: float, rng: SeededRandom) -> Draw:
    """Return AdaPMixED while its ε of the text is at most this one, then the public model."""
    mechanism = AdaPMixED(ORDER, epsilon / ORDER, screen=None)
    payer = Accountant(DELTA)

    def draw(rows: ShapedLogits) -> Tensor:
        if (payer.guarantee().epsilon or 0.0) <= epsilon:
            tokens = released(mechanism, payer, rows, rng)  # nobody sees the one that is too much
            if (payer.guarantee().epsilon or 0.0) <= epsilon:
                return tokens
        return released(PublicOnly(), Accountant(DELTA), rows, rng)

    return draw


def rules(models: int) -> dict[str, Callable[[SeededRandom], Draw]]:
    """Return all rules by name, for every ε; each makes the draws of one text."""
    makers: dict[str, Callable[[SeededRandom], Draw]] = {}
    for epsilon in EPSILONS:
        plan = recommended(epsilon, DELTA, models, TOKENS, mechanism="clipped-log-pool")
        rho = largest_within(lambda total: zcdp_to_dp(total, DELTA), epsilon, 100.0) / TOKENS
        pool = ClippedLogPool(**plan.settings, queries=TOKENS)
        ink = InvisibleInk(min(32.0, models * math.sqrt(2 * rho)), queries=TOKENS)
        makers |= {
            f"ours, {epsilon:g}": partial(planned, pool),
            f"symmetric clip, {epsilon:g}": partial(planned, ink),
            f"AdaPMixED, {epsilon:g}": partial(beside_public, epsilon),
        }
    return makers


def texts_of(ensemble: PromptEnsemble, draws: Sequence[Draw]) -> list[list[int]]:
    """Return the tokens of a text for each of these draws, from the same prompts."""
    ids, ends = torch.tensor([list(ensemble.opening)] * len(draws)), ensemble.end_tokens
    decoder = ensemble.decoder(ids, memory_bytes=MEMORY, new_tokens=TOKENS, active=ACTIVE)
    texts: list[list[int]] = [[] for _ in draws]
    going = list(range(len(draws)))
    while going:
        private, public, tokens = decoder.logits
        last: list[int] = []
        for row, at in enumerate(going):
            part = slice(row, row + 1)
            rows = shaped(
                private[:, part].float(), public[part].float(), top_k=TOP, active=ACTIVE,
                tokens=None if tokens is None else tokens[part],
            )  # fmt: skip
            last.append(int(draws[at](rows)))
            texts[at].append(last[-1])
        ended = torch.tensor(
            [t in ends or len(texts[at]) == TOKENS for t, at in zip(last, going, strict=True)]
        )
        going = [at for at, over in zip(going, ended.tolist(), strict=True) if not over]
        if going and bool(ended.any()):
            decoder.drop(ended)
        if going:
            decoder.append(torch.tensor(last)[~ended])
    return texts


class Bench:
    """The records of all batches, the entries that no batch holds, and the file of the texts.

    Raises:
        ValueError: there are too few entries.
    """

    def __init__(self, base: str, keep: Path, models: int, count: int) -> None:
        entries = [text for text in documents() if len(text) > SHORTEST]
        dealt = models * count
        if len(entries) < dealt + count:
            raise ValueError(f"--texts must be <= {len(entries) // (models + 1)}, got {count}")
        self.base, self.models, self.count = base, models, count
        self.records = [entries[at : at + models] for at in range(0, dealt, models)]
        self.reference = entries[dealt:]
        self.file = keep / f"{models}.jsonl"

    def ensemble(self, records: int) -> PromptEnsemble:
        """Return an ensemble of so many prompts."""
        return PromptEnsemble(
            self.base, DESCRIBE, records=records, longest=RECORD, dtype=torch.bfloat16
        )

    def draw(self) -> None:
        """Draw the texts of all batches that are not kept yet."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        ensemble, public, makers = self.ensemble(self.models), self.ensemble(1), rules(self.models)
        for batch in range(len(self.kept()), self.count):
            seeds = range(SEEDS * batch, SEEDS * (batch + 1))
            draws = [make(SeededRandom(seed)) for make in makers.values() for seed in seeds]
            texts = texts_of(ensemble.filled(self.records[batch]), draws)
            texts += texts_of(public, [planned(PublicOnly(), SeededRandom(seed)) for seed in seeds])
            names = [PUBLIC, *makers]
            texts = texts[-SEEDS:] + texts[:-SEEDS]
            row = {name: texts[at * SEEDS :][:SEEDS] for at, name in enumerate(names)}
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{batch + 1} of {self.count} batches", file=sys.stderr, flush=True)

    def kept(self) -> list[dict[str, list[list[int]]]]:
        """Return the texts of each batch that was drawn, by rule and seed."""
        if not self.file.exists():
            return []
        lines = self.file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines[: self.count]]


def compare(bench: Bench, report: Report) -> None:
    """Report MAUVE of each rule, and its differences to ours and to public, with intervals."""
    kept, ensemble = bench.kept(), bench.ensemble(1)
    reader, ends = Reader(bench.base, torch.float32), ensemble.end_tokens
    start = ensemble.beginning or sorted(ends)[:1]

    def features(texts: Iterable[Sequence[int]]) -> Features:
        return reader.features([[*start, *until(text, ends)[:TOKENS]] for text in texts])

    real = features(plain_ids(ensemble.tokenizer, text) for text in bench.reference)
    states = {
        name: features(text for row in kept for text in row[name]).reshape(len(kept), SEEDS, -1)
        for name in kept[0]
    }
    rng = np.random.default_rng(0)
    again: dict[str, list[float]] = {name: [] for name in states}
    for _ in range(RESAMPLES):
        batches = rng.integers(len(kept), size=len(kept))
        others = real[rng.integers(len(real), size=len(real))]
        for name, x in states.items():
            again[name].append(mauve(x[batches].reshape(-1, x.shape[-1]), others))
    size = f"{len(kept)} batches, {SEEDS} texts of each, {len(real)} entries for reference"
    report.say(f"B = {bench.models}: {size}\n")
    value = {name: mauve(x.reshape(-1, x.shape[-1]), real) for name, x in states.items()}
    report.say(f"{'MAUVE':>31}  {'95 %':18}less ours  {'95 %':17}less public  95 %")
    for name in states:
        low, high = centred(value[name], again[name])
        row: dict[str, object] = {"batch": bench.models, "name": name, "mauve": value[name]}
        row["interval"] = low, high = max(0.0, low), min(1.0, high)
        words = f"  {name:22}{value[name]:7.3f}  [{low:.3f}, {high:.3f}]"
        for other in (f"ours, {name.split(', ')[-1]}", PUBLIC):
            if other not in states or other == name:
                words += " " * 30
                continue
            less = value[name] - value[other]
            low, high = centred(less, np.subtract(again[name], again[other]).tolist())
            words += f"  {less:+10.3f}  [{low:+.3f}, {high:+.3f}]"
            row[f"less {other}"] = less, low, high
        report.say(words.rstrip())
        report.tables.setdefault("mauve", []).append(row)
    report.say()


def speed(bench: Bench, report: Report) -> None:
    """Report the time of a token: ours, the mechanism's part, and plain passes of transformers."""
    ensemble = bench.ensemble(bench.models).filled(bench.records[0])
    settings = recommended(3.0, DELTA, bench.models, TOKENS, mechanism="clipped-log-pool").settings
    pool, rng, payer = ClippedLogPool(**settings), SeededRandom(0), Accountant(DELTA)
    base = AutoModelForCausalLM.from_pretrained(bench.base, dtype=torch.bfloat16).eval()
    ids = torch.tensor([list(ensemble.opening)])
    decoder = ensemble.decoder(ids, memory_bytes=MEMORY, new_tokens=2 * RUNS + 2, active=ACTIVE)
    length = decoder.window - 2 * RUNS - 2

    def answer(turn: int) -> None:
        private, public, tokens = decoder.logits
        rows = shaped(private, public, top_k=TOP, active=ACTIVE, tokens=tokens)
        charged(rows, pool, payer, rng, BY_HAND)

    def ours(turn: int) -> None:
        decoder.append(torch.tensor([100 + turn]))
        answer(turn)

    def plain(rows: int) -> Call:
        cache = DynamicCache(config=base.config)
        prompt = torch.full((rows, length), 100)
        with torch.no_grad():
            base(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)

        @torch.no_grad()
        def call(turn: int) -> None:
            token = torch.full((rows, 1), 100 + turn)
            logits = base(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1]
            logits.mean(0).softmax(-1).multinomial(1)

        return call

    calls: dict[str, Call] = {
        "ours": ours, "its mechanism": answer,
        f"plain pass of {bench.models + 1} rows": plain(bench.models + 1),
        "public model alone": plain(1),
    }  # fmt: skip
    timings = interleave(
        Device("cpu"), {name: Contestant(call, 1) for name, call in calls.items()},
        dict.fromkeys(calls, RUNS), lambda name, error: None,
    )  # fmt: skip
    report.say(f"B = {bench.models}: a token of one text, behind {length} positions, bf16")
    for name, timing in timings.items():
        ratio = timing.median / timings[f"plain pass of {bench.models + 1} rows"].median
        report.say(f"  {name:26}{1e3 * timing.median:9.1f} ms  {ratio:6.2f} of the plain pass")
        row = {"batch": bench.models, "name": name, "ratio": ratio, **asdict(timing)}
        report.tables.setdefault("token", []).append(row)
    report.say()


def main() -> None:
    """Draw what is not kept yet, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, help="folder of an instruct model")
    parser.add_argument("--keep", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--batch", type=int, nargs="+", default=[31, 127], help="records of a text")
    parser.add_argument("--texts", type=int, nargs="+", default=[120, 28], help="batches of each")
    parser.add_argument("--speed", action="store_true", help="time a token, and draw no text")
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    options = parser.parse_args()
    about, report, neighbours = machine(), Report(), Neighbours()
    report.say(f"{headline(about)}\n\n{Path(options.base).name}, T = {TOKENS}, δ = {DELTA:g}\n")
    for models, count in zip(options.batch, options.texts, strict=True):
        bench = Bench(options.base, options.keep, models, count)
        if options.speed:
            speed(bench, report)
        else:
            bench.draw()
            compare(bench, report)
    others = report.others(neighbours) if options.speed else None
    if options.out:
        report.write(options.out, machine=about, others=others)


if __name__ == "__main__":
    main()
