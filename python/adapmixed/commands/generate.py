"""``adapmixed generate``: continue prompts privately."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapmixed.commands.options import add_options, option
from adapmixed.commands.serving import add_serving_options, opened, shape_of, show
from adapmixed.limits import check_optional_count


@dataclass
class GenerateOptions:
    """The options of this command alone."""

    prompt: list[str] | None = option("prompt to continue; may be repeated", metavar="TEXT")
    prompts: Path | None = option("UTF-8 file with one prompt per line")
    chat: bool = option("take the prompt as a user's message, in the chat template")
    batch: int | None = option("prompts answered together (default: as --memory allows)")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "generate",
        allow_abbrev=False,  # --n of other libraries is no short form of --no-create
        help="continue prompts privately",
        description="Continue prompts token by token. Every released token is one query. The text "
        "goes to standard output, its guarantee to standard error. Several prompts are answered in "
        "batches and printed as JSON lines.",
    )
    add_options(parser, GenerateOptions)
    add_serving_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate, and write the text as it is released."""
    prompts = _prompts(arguments)
    check_optional_count("--batch", arguments.batch)
    queries = max(arguments.max_new_tokens, 1) * len(prompts)
    options = shape_of(arguments)
    with opened(arguments, queries) as generator:
        is_main = generator.ensemble.ranks.is_main
        if arguments.chat:
            message = {"role": "user", "content": prompts[0]}
            show(generator.chat([message], **options), is_main)
        elif len(prompts) == 1:
            show((piece for (piece,) in generator.stream(prompts, **options)), is_main)
        else:
            shape = {"temperature": arguments.temperature, "top_k": arguments.top_k}
            limits = (arguments.max_new_tokens, arguments.batch)
            for batch in generator.batches(prompts, *limits, **shape):
                texts = generator.generate(batch, **options)
                for prompt, text in zip(batch, texts, strict=True) if is_main else ():
                    line = {"prompt": prompt, "text": text}
                    print(json.dumps(line, ensure_ascii=False), flush=True)
    return 0


def _prompts(arguments: argparse.Namespace) -> list[str]:
    from adapmixed.data.text import text_lines

    prompts = list(arguments.prompt or ())
    if arguments.prompts is not None:
        lines = "".join(text_lines(arguments.prompts)).split("\n")
        while lines and not lines[-1].strip():
            lines.pop()
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                raise ValueError(
                    f"--prompts must have a prompt in every line, line {number} of "
                    f"{arguments.prompts} is blank"
                )
        prompts += lines
    if not prompts:
        raise ValueError("--prompt or --prompts must give at least one prompt, got none")
    if arguments.chat and len(prompts) > 1:
        raise ValueError(f"--chat takes one prompt, got {len(prompts)}")
    return prompts
