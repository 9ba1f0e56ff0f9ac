"""``adapmixed synthesize``: write private texts like those of a corpus, without training.

Write private texts that are like given records. Each text is drawn from the prompts of a batch of
records of its own, so one ε covers all of them. A killed run goes on with the same command.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapmixed.commands.options import (
    SharedOptions,
    add_options,
    check_output,
    laboratory,
    option,
    progress_bar,
)


@dataclass
class SynthesizeOptions:
    """The options of this command alone."""

    texts: str | None = option("the records: CSV, JSON lines, Parquet, or a folder of texts")
    column: str | None = option("column with the text of a record (default: text)")
    id_column: str | None = option("column of the name that makes one record of rows")
    describe: str | None = option('what a record is, as in "a clinic\'s discharge summary"')
    epsilon: float = option("ε of all texts together", 3.0)
    delta: float = option("δ of all texts together", 1e-6)
    count: int | None = option("texts, a public number as all others here (default: 10)")
    max_tokens: int | None = option("most tokens of a text, its end included (default: 200)")
    batch: int | None = option("records of a text (default: the least with a clip 2 wide)")
    longest: int | None = option("most tokens of a record in a prompt, which is cut (default: 256)")
    plain: bool = option("prompts as plain text, without the base's chat template")
    out: Path | None = option("CSV of the texts; OUT.private has the key and the journal")
    report: Path | None = option(
        "PRIVATE: a page about texts and records, of which it plants some", metavar="FOLDER"
    )
    demo: bool = option("the built-in model and texts, in less than a minute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser, SynthesizeOptions)
    add_options(parser, SharedOptions, "base", required=False)
    add_options(parser, SharedOptions, "temperature active device dtype")
    kept, caches = "likeliest public tokens that are kept (default: 100)", "for the prompts' caches"
    add_options(parser, SharedOptions, "top_k", default=100, help=kept)
    add_options(parser, SharedOptions, "memory", default=4 << 30, help=f"{caches} (default: 4G)")


def run(arguments: argparse.Namespace) -> int:
    """Write the texts, then the guarantee."""
    names = ("base", "texts", "describe")
    for name in () if arguments.demo else (*names, "out"):
        if getattr(arguments, name) is None:
            raise ValueError(f"--{name} must be given, or --demo")
    for name in (*names, "column", "id_column") if arguments.demo else ():
        if getattr(arguments, name) is not None:
            raise ValueError(f"{name} must not be given with --demo, which has its own texts")
    check_output("--out", arguments.out)
    check_output("--report", arguments.report, folder=True)
    page = None if arguments.report is None else laboratory("figures.synthesis")
    import torch

    from adapmixed.data import Corpus, demo_base
    from adapmixed.synthesis import synthesize

    if arguments.demo:
        base: Any = demo_base()
        texts, describe, plain = Corpus("builtin"), "Python", True
        defaults = {"count": 4, "batch": 9, "max_tokens": 24, "longest": 32}
    else:
        base, describe, plain = arguments.base, arguments.describe, arguments.plain
        texts = Corpus(arguments.texts, arguments.column or "text", arguments.id_column)
        defaults = {"count": 10, "max_tokens": 200, "longest": 256}
    for name, default in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    if page is not None:
        texts = page.Canaries.among(texts, describe, min(32, arguments.count), arguments.report)
    shared = "epsilon delta count max_tokens batch longest temperature top_k active".split()
    result = synthesize(
        base,
        texts,
        describe,
        **{name: getattr(arguments, name) for name in shared},
        plain=plain,
        memory_bytes=arguments.memory,
        dtype=getattr(torch, arguments.dtype),
        device=arguments.device,
        out=arguments.out,
        progress=progress_bar("token"),
    )
    dealt = result.batches
    print(f"{result.ensemble.num_models} records for a text, {result.mechanism!r}", file=sys.stderr)
    print(
        f"{dealt.names} names: {len(dealt.left_out)} found their batch full, {dealt.empty} slots "
        f"of {len(dealt.slots)} batches are empty, {result.cut} records are longer than a prompt "
        "holds and are cut. These numbers are private.",
        file=sys.stderr,
    )
    written = {}
    try:
        for batch, text in result:
            written[batch] = text
            if arguments.out is None:
                print(f"[{batch}] {text}", flush=True)
    finally:
        result.close()
    print(result.promise)
    if page is not None:
        path = page.write_page(result, texts, written, base, arguments.report)
        print(f"wrote {path}", file=sys.stderr)
    return 0
