"""Compare settings of training on two texts: what `adapmixed train`'s defaults were chosen by.

    python -m benchmarks.training [--base FOLDER] [--models N] [--out PREFIX]
    python -m benchmarks.training --quick     # few members of two settings, no meaning

The texts are change logs, as in `benchmarks.headline`, and the paragraphs of Python's language
reference that Python carries. The first `DOCUMENTS`, at most nine tenths, are divided among N
members of the output layer, and `PART` tokens of the others are scored. Perplexities are of the
members' mean and of ClippedLogPool with a = 0, b = 4, κ = 2, both about all tokens. There is one
training of each setting: differences of a few per cent mean nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from transformers import AutoTokenizer

from adapmixed import ClippedLogPool, PublicOnly, Unprotected
from adapmixed.data import demo_base
from adapmixed.evaluation import evaluate
from adapmixed.mechanisms import Mechanism
from adapmixed.rng import SeededRandom
from adapmixed.text import token_stream
from adapmixed.training import FinetuneConfig
from adapmixed.training.settings import HEAD
from benchmarks.harness import Report, headline, machine
from benchmarks.headline import DELTA, DOCUMENTS, PART, documents, trained

SETTINGS: dict[str, dict[str, Any]] = {
    "2 epochs alone": {"steps": 1}, "8 steps": {"steps": 8}, "16 steps": {"steps": 16},
    "32 steps": {"steps": 32}, "64 steps": {"steps": 64},
    "32 steps, rank 16": {"rank": 16, "alpha": 128.0}, "32 steps, shared A": {"shared_a": True},
}  # fmt: skip
MECHANISMS: dict[str, Mechanism] = {
    "public": PublicOnly(), "mean": Unprotected(), "pool": ClippedLogPool(0.0, 4.0, 2.0)
}  # fmt: skip


def paragraphs() -> list[str]:
    """Return the paragraphs of Python's language reference in the order of a hash."""
    texts = {part for topic in topics.values() for part in topic.split("\n\n") if part.strip()}
    return sorted(texts, key=lambda text: hashlib.blake2b(text.encode()).digest())


def scores(
    base: str,
    texts: list[str],
    scored: list[int],
    models: int,
    setting: dict[str, Any],
    workers: int,
) -> dict[str, float]:
    """Train members with a setting; return the perplexity of each mechanism."""
    config = FinetuneConfig(**(HEAD | setting), target_modules=("lm_head",))
    with tempfile.TemporaryDirectory() as folder:
        evaluations = evaluate(
            trained(base, texts, Path(folder, "members"), models, config, 0, workers), scored,
            MECHANISMS, delta=DELTA, rng=SeededRandom(0), active=None, block=config.block_size,
        )  # fmt: skip
    return {evaluation.name: evaluation.perplexity for evaluation in evaluations}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default=str(demo_base()), help="default: the built-in base")
    parser.add_argument("--models", type=int, default=300, help="members (default: 300)")
    parser.add_argument("--workers", type=int, default=2, help="processes that train")
    parser.add_argument("--quick", action="store_true", help="few members, no meaning")
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    options = parser.parse_args()
    about, report = machine(), Report()
    name = "the built-in base" if options.base == str(demo_base()) else Path(options.base).name
    models = 4 if options.quick else options.models
    report.say(f"{headline(about)}\n\n{name}, N = {models}")
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    for text, texts in (("change logs", documents()), ("Python's reference", paragraphs())):
        count = 32 if options.quick else min(DOCUMENTS, 9 * len(texts) // 10)
        size = len(token_stream(tokenizer, texts[:count]))
        scored = token_stream(tokenizer, texts[count:])[:PART]
        report.say(f"\n{text}: {size // models} tokens a member, {len(scored)} scored")
        report.say(f"  {'':20}{'public':>8}{'mean':>8}{'pool':>8}")
        for setting in list(SETTINGS)[:2] if options.quick else SETTINGS:
            row = scores(
                options.base, texts[:count], scored, models, SETTINGS[setting], options.workers
            )
            report.say(f"  {setting:20}" + "".join(f"{row[key]:8.1f}" for key in MECHANISMS))
            report.tables.setdefault("rows", []).append({"text": text, "setting": setting, **row})
    if options.out:
        report.write(options.out, machine=about, quick=options.quick, base=name)


if __name__ == "__main__":
    main()
