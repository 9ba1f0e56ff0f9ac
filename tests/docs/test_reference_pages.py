"""The reference pages show every public name, command and option, and every mechanism's keys."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator

import doc_pages  # noqa: F401  (puts the site's extensions on the path)
import pytest
from command_line import attributes, commands, mechanisms, parser_of
from doc_pages import DOCS

from adapmixed.commands.mechanisms import keys_of, kinds

PYTHON = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
DOCUMENTED = re.findall(r"^\.\. auto(?:class|function|exception|data):: ([\w.]+)", PYTHON, re.M)
DOCUMENTED += [
    f"{module}.{name}"
    for module in re.findall(r"^\.\. automodule:: ([\w.]+)", PYTHON, re.M)
    for name in getattr(importlib.import_module(module), "__all__", ())
    if f"{module}.{name}" not in DOCUMENTED
]
MODULES = ("adapmixed", "adapmixed_ext", "adapmixed.privacy", "adapmixed.training")


def _found(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(module: str) -> None:
    documented = [_found(name) for name in DOCUMENTED]
    home = importlib.import_module(module)
    missing = [
        name for name in home.__all__ if not any(getattr(home, name) is one for one in documented)
    ]
    assert not missing


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield one
                yield from _leaves(one)


@pytest.mark.parametrize("program", ["adapmixed", "adapmixed-lab"])
def test_every_command_and_option_is_shown(program: str) -> None:
    text = commands(program)
    leaves = list(_leaves(parser_of(program)))
    assert len(leaves) >= 3
    for parser in leaves:
        assert sum(bool(action.option_strings) for action in parser._actions) <= 26, parser.prog
        # Options of other programs are known by name, but are not accepted.
        assert not {"--top-p", "--num-beams", "--greedy"} & set(parser._option_string_actions)
        (section,) = re.findall(
            rf"^###+ {parser.prog}\n(.*?)(?=^###|\Z)", text, re.MULTILINE | re.DOTALL
        )
        for action in parser._actions:
            if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
                continue
            for option in action.option_strings:
                assert action.help and option in section, f"{parser.prog} {option}"


def test_every_key_of_every_mechanism_is_shown_with_its_meaning() -> None:
    text = mechanisms()
    for name, kind in kinds().items():
        assert f"### {name}\n" in text
        described = attributes(kind) | {"preset": "of this page"}
        for key in keys_of(name):
            assert f"| `{key}` |" in text
            assert described.get(key), f"{name}: {key} has no description in its class"
