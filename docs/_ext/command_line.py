"""Write the command-line reference from the parsers, when the site is built.

A page holds a comment `<!-- commands: adapmixed -->`, `<!-- commands: adapmixed-lab -->` or
`<!-- mechanisms -->`. The build replaces it by Markdown made here, so that no copy of the options
can go stale.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

MARK = re.compile(r"^<!-- (?:commands: (adapmixed|adapmixed-lab)|(mechanisms)) -->$", re.MULTILINE)
_WIDTH = 88
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|$])")


def filled(text: str) -> str:
    """Return a page with its comments replaced."""
    return MARK.sub(lambda mark: mechanisms() if mark[2] else commands(mark[1]), text)


def parser_of(program: str) -> argparse.ArgumentParser:
    """Return the parser of `adapmixed` or `adapmixed-lab`."""
    from adapmixed import cli
    from adapmixed_lab import cli as laboratory

    parser: argparse.ArgumentParser = (cli if program == "adapmixed" else laboratory)._parser()
    return parser


def commands(program: str) -> str:
    """Return a section for each command of a program, with usage and options."""
    return "\n\n".join(_sections(parser_of(program), 3))


def _sections(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield _section(command, level)
                yield from _sections(command, level + 1)


def _section(parser: argparse.ArgumentParser, level: int) -> str:
    # argparse wraps at the width of the terminal that the build runs in.
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=_WIDTH)
    lines = parser.format_usage().rstrip().splitlines()
    usage = "\n".join(line[len("usage: ") :] for line in lines)
    parts = [
        f"{'#' * level} {parser.prog}",
        _escaped(parser.description or ""),
        f"```text\n{usage}\n```",
    ]
    for group in parser._action_groups:
        items = [_item(parser, action) for action in group._group_actions if _shown(action)]
        if not items:
            continue
        if group.title not in ("options", "positional arguments"):
            parts.append(f"*{_escaped(group.title or '')}*")
        parts += items
    return "\n\n".join(part for part in parts if part)


def _shown(action: argparse.Action) -> bool:
    hidden = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    return not hidden and action.help is not argparse.SUPPRESS


def _item(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return one option as a definition."""
    formatter = parser._get_formatter()
    names = formatter._format_action_invocation(action)
    text = formatter._expand_help(action) if action.help else ""
    notes = []
    if action.required and action.option_strings:
        notes.append("required")
    if action.choices is not None and "{" not in names:
        notes.append("one of " + ", ".join(f"`{choice}`" for choice in action.choices))
    if _has_default(action) and not _says(text, action.default):
        notes.append(f"default `{action.default}`")
    explained = "; ".join(part for part in (_escaped(text), *notes) if part)
    return f"`{names}`\n: {explained or '—'}"


def _has_default(action: argparse.Action) -> bool:
    default = action.default
    unset = default is None or default == argparse.SUPPRESS or default in ((), [])
    return bool(action.option_strings) and not unset and action.nargs != 0


def _says(text: str, default: object) -> bool:
    """Return whether a help text ends with the default, as in "seed of the draws (default: 0)"."""
    match = re.search(r"\((?:default: )?([^()]*)\)\s*$", text)
    if match is None:
        return False
    if isinstance(default, int | float):
        try:
            return float(match[1].replace(",", "").replace(" ", "")) == default
        except ValueError:
            return False
    return str(default) in match[1]


def mechanisms() -> str:
    """Return a section for each mechanism: its statement, and its keys with defaults."""
    from adapmixed.commands.options import keys_of, kinds

    parts = []
    for name, kind in kinds().items():
        parts += [f"### {name}", _escaped(_first(kind))]
        described = attributes(kind) | {"preset": "name of a preset of settings"}
        rows = [
            f"| `{key}` | {_default(value)} | {_escaped(described.get(key, ''))} |"
            for key, value in keys_of(name).items()
        ]
        if rows:
            parts.append("\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts)


def _first(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def _default(value: Any) -> str:
    if value == "...":
        return "must be given"
    if value is None or value == ():
        return "`none`"
    return _escaped(value) if isinstance(value, str) and " " in value else f"`{value}`"


def attributes(kind: type) -> dict[str, str]:
    """Return what a class's docstring says about each of its fields."""
    described: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        section = re.search(r"^(?:Attributes|Args):\n((?:[ ]+.*\n?|\n)+)", text, re.MULTILINE)
        if section is None or not dataclasses.is_dataclass(base):
            continue
        entries = re.split(r"^ {4}(?=\S)", section[1], flags=re.MULTILINE)
        for entry in entries:
            names, colon, words = entry.partition(": ")
            if colon:
                for name in names.split(","):
                    described[name.strip()] = " ".join(words.split())
    return described


def _escaped(text: str) -> str:
    """Return plain text as Markdown that shows it; names in backticks stay code."""
    parts = re.split(r"(``.+?``|`[^`]+`)", " ".join(text.split()))
    return "".join(
        part if index % 2 else _SPECIAL.sub(r"\\\1", part) for index, part in enumerate(parts)
    )


def _fill(app: Any, name: str, source: list[str]) -> None:
    source[0] = filled(source[0])


def setup(app: Any) -> dict[str, Any]:
    """Fill pages when they are read; their parsers are always asked again."""
    app.connect("source-read", _fill)
    app.connect("env-get-outdated", _outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _outdated(app: Any, env: Any, added: Any, changed: Any, removed: Any) -> list[str]:
    return [name for name in ("reference/command-line",) if name in env.found_docs]
