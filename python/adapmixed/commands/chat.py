"""``adapmixed chat``: hold a private conversation on the terminal.

Answer each line that is typed, until /quit or the end of the input. /new starts a new conversation.
The public model's chat template is used. If it has none, --plain continues every line by itself.
Every released token is charged.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from adapmixed.commands.generate import add_serving_options, opened, shape_of, show
from adapmixed.commands.options import add_options, as_typed, check_alone, option
from adapmixed.limits import check_count

# These words end the conversation, as the end of the input does.
_LEAVE = ("/quit", "/exit")


@dataclass
class ChatOptions:
    """The options of this command alone."""

    plain: bool = option("continue every line by itself, without a chat template")
    turns: int = option("most answers; fixed guarantees are planned for them", 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser, ChatOptions)
    add_serving_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read lines and write answers."""
    from adapmixed.errors import BudgetSpentError

    check_alone("chat")
    check_count("--turns", arguments.turns)
    prompt = "> " if sys.stdin.isatty() else ""
    with opened(arguments, max(arguments.max_new_tokens, 1) * arguments.turns) as generator:
        if not arguments.plain:
            generator.check_chat()
        messages, answered = list[dict[str, str]](), 0
        while answered < arguments.turns:
            try:
                line = input(prompt)
            except EOFError:
                break
            if line.strip() in _LEAVE:
                break
            if line.strip() == "/new":
                messages = []
            if line.strip() in ("", "/new"):
                continue
            conversation = [*messages, {"role": "user", "content": line}]
            try:
                pieces = (
                    (piece for (piece,) in generator.stream(line, **shape_of(arguments)))
                    if arguments.plain
                    else generator.chat(conversation, **shape_of(arguments))
                )
            except BudgetSpentError:
                raise  # no later line can be answered
            except ValueError as error:  # nothing was charged, for instance if the window is full
                print(f"adapmixed chat: {as_typed(str(error), arguments.options)}", file=sys.stderr)
                continue
            messages = [*conversation, {"role": "assistant", "content": show(pieces)}]
            answered += 1
    return 0
