"""Every Python and shell block of the README and the site runs, unless it is marked.

A page's blocks run in order in one folder, with stand-ins for the reader's files, and in this
process if they are Python or plain commands of ours: to import takes longer than to answer. The
README also starts the programs, as a reader types them. A block that builds, runs these tests, or
needs the network or hours says so after its language: "sh no-run". The program's own parsers read
the command lines of every shell block, and every Python block compiles and finds its imports.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import (
    CHECKED,
    ROOT,
    SHOWN,
    Block,
    all_blocks,
    blocks,
    indented_commands,
    is_printed,
    name_of,
    pages,
    shell_lines,
)
from trained_demo import copy_trained, link_ensemble

from adapmixed import cli
from adapmixed.commands.options import mechanism_of
from adapmixed_lab import cli as laboratory

README = ROOT / "README.md"
EXACT = ("docs/theory/errata.md",)
"""Pages whose Python blocks need no files and print the text block that follows, to the letter."""

PLAIN = {
    "cat", "cd", "cp", "curl", "echo", "export", "git", "head", "kill", "ls", "mkdir", "pip",
    "source",
}  # fmt: skip
"""Programs that are not ours, so that their arguments are not checked."""

ALL = all_blocks()
PYTHON, SHELL = ([block for block in ALL if block.language == language] for language in CHECKED)


def test_a_block_says_in_one_way_what_it_is() -> None:
    for block in ALL:
        known = block.language in CHECKED + SHOWN or block.language.startswith("{")
        assert known, f"{block}: {block.language!r}"
        if block.language == "text":
            allowed = re.compile(r"measured|random=\d+(,\d+)*")
            assert all(allowed.fullmatch(mark) for mark in block.marks), f"{block}: {block.marks}"
            assert all(n <= len(block.text.splitlines()) for n in block.random_lines), block
        else:
            assert set(block.marks) <= {"no-run"}, f"{block}: {block.marks}"
            assert not block.marks or block.language in CHECKED, block
    assert not [command for page in pages() for command in indented_commands(page)]


def test_python_compiles_and_imports_what_there_is() -> None:
    for block in PYTHON:
        for node in ast.walk(ast.parse(block.text, str(block))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("adapmixed"):
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    assert hasattr(module, name.name), f"{block}: {node.module}.{name.name}"


def test_shell_blocks_parse() -> None:
    for block in SHELL:
        parsed = subprocess.run(["bash", "-n"], input=block.text, text=True)
        assert parsed.returncode == 0, block
        for line in shell_lines(block.text):
            for words in _commands(line):
                _check(words, f"{block}: {line}")
        for body in re.findall(r"^python - <<'(\w+)'\n(.*?)^\1$", block.text, re.S | re.M):
            ast.parse(body[1], str(block))


def _commands(line: str) -> Iterator[list[str]]:
    """Yield the simple commands of a line, without assignments and redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    tokens = iter(lexer)
    for token in tokens:
        if set(token) <= set("&|;()"):
            yield words
            words = []
        elif set(token) <= set("<>&"):
            if words and f" {words[-1]}{token}" in line and words[-1] in ("1", "2"):
                words.pop()  # the number of a stream
            next(tokens)
        elif words or not re.match(r"^\w+=", token):
            words.append(token)
    yield words


def _check(words: list[str], where: str) -> None:
    if not words or words[0] in PLAIN:
        return
    program, *rest = words
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in rest:
            assert "=" in target or re.search(rf"^{target}:", makefile, re.MULTILINE), where
    elif program == "torchrun" or (program.startswith("python") and "-m" in rest):
        module = rest[rest.index("-m") + 1]
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file() or (
            importlib.util.find_spec(module.split(".")[0]) is not None
        ), where
        if module in ("adapmixed", "adapmixed_lab"):
            _parse(module.replace("_", "-"), rest[rest.index("-m") + 2 :], where)
    elif program in ("python", "bash"):
        assert not rest or rest[0] in ("-", "-c") or (ROOT / rest[0]).is_file(), where
    else:
        assert program in ("adapmixed", "adapmixed-lab"), f"{where}: unknown program {program}"
        _parse(program, rest, where)


def _parse(program: str, words: list[str], where: str) -> None:
    parser = (laboratory if program == "adapmixed-lab" else cli)._parser()
    try:
        arguments = parser.parse_args(words)
    except SystemExit as end:
        assert end.code == 0, where  # the parser's message is on standard error
        return
    if getattr(arguments, "command", "") == "plan" or getattr(arguments, "plan", None):
        return
    texts = getattr(arguments, "mechanism", None) or []
    assert texts or getattr(arguments, "command", "") not in ("generate", "chat"), where
    for text in [texts] if isinstance(texts, str) else texts:
        mechanism_of(
            text,
            delta=arguments.delta or 1e-5,
            epsilon=arguments.epsilon,
            queries=1,
            way=arguments.adjacency or "zero_out",
        )


def _other_pages() -> list[object]:
    """Return the pages whose blocks run with stand-ins; all but the README are slow."""
    found: list[object] = []
    for page in pages():
        if name_of(page) not in EXACT and any(block.runs for block in blocks(page)):
            slow = () if page == README else (pytest.mark.slow,)
            found.append(pytest.param(page, marks=slow, id=name_of(page)))
    return found


@pytest.mark.parametrize("page", _other_pages())
def test_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_ensemble: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _stand_ins(page, demo_ensemble)
    names: dict[str, object] = {"__name__": "page"}
    try:
        for block, shown in _with_outputs(page):
            shell = block.language == "sh"
            printed = _run_shell(block, tmp_path) if shell else _execute(block, names)
            assert shown is None or is_printed(shown, printed), (
                f"{shown} is not what {block} printed:\n{printed}"
            )
    finally:  # a server must not outlive the test
        for pid in tmp_path.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)


def _run_shell(block: Block, folder: Path) -> str:
    """Run a shell block, here if each line is a plain command; return what it printed."""
    lines = shell_lines(block.text)
    if not all(re.fullmatch(r"adapmixed[^<>|&;$]*", line) for line in lines):
        return _run(f"exec 2>&1\n{block.text}", folder, str(block))
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        for line in lines:
            program, *words = shlex.split(line, comments=True)
            status = (laboratory if program == "adapmixed-lab" else cli).main(words)
            assert status == 0, f"{block}:\n{printed.getvalue()}"
    return _checked(printed.getvalue(), str(block))


@pytest.mark.parametrize("name", EXACT)
def test_a_page_prints_what_it_shows(name: str) -> None:
    names: dict[str, object] = {"__name__": "page"}
    for block, shown in _with_outputs(ROOT / name):
        printed = _execute(block, names)
        assert shown is None or printed == shown.text, block


def _with_outputs(page: Path) -> Iterator[tuple[Block, Block | None]]:
    """Yield each block that runs with the text block after it, or None."""
    every = blocks(page)
    for at, block in enumerate(every):
        if block.runs:
            after = every[at + 1] if at + 1 < len(every) else None
            yield block, after if after is not None and after.language == "text" else None


def _execute(block: Block, names: dict[str, object]) -> str:
    """Run a Python block among these names; return what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), names)
    return printed.getvalue()


def _stand_ins(page: Path, ensemble: Path) -> None:
    """Put what a page's reader has into the folder: texts, a public model and an ensemble."""
    if page.name == "tutorial.md":  # it makes them
        return
    from adapmixed.data import demo_base, held_out_documents, private_documents

    rows = [{"user": doc.identifier, "text": doc.text} for doc in private_documents()[:200]]
    Path("notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    links = {"base": Path(demo_base())}
    if page.name == "evaluate.md":  # makes the files of all how-to pages of the demonstration's
        links = {"report/ensemble": ensemble}
    else:
        held_out = "\n\n".join(doc.text for doc in held_out_documents())
        Path("held-out.txt").write_text(held_out)
    if page.name == "README.md":
        links["report/ensemble"] = ensemble
    elif page.name == "reproduce-the-paper.md":
        links["benchmarks"] = ROOT / "benchmarks"
        copy_trained(Path("reproduction"))
    elif page.name not in ("evaluate.md", "train.md"):  # these make my-ensemble
        link_ensemble(Path("my-ensemble"))
    for name, target in links.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(target)


def _run(script: str, folder: Path, where: str) -> str:
    """Run a script offline in a folder; return what it printed."""
    command = ["bash", "-euo", "pipefail"]
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        command, input=script, cwd=folder, text=True, capture_output=True, env=environment
    )
    assert done.returncode == 0, f"{where}:\n{done.stdout}{done.stderr}"
    _checked(done.stderr, where)
    return _checked(done.stdout, where)


def _checked(printed: str, where: str) -> str:
    assert "%|" not in printed, f"{where}: a progress bar off a terminal"
    return printed


@pytest.mark.slow
def test_the_readme_runs_after_the_demonstration(tmp_path: Path) -> None:
    copy_trained(tmp_path / "report")
    (asked,) = (block for block in blocks(README) if block.runs)
    script = f"adapmixed demo --out report\npython - <<'END'\n{asked.text}END\n"
    printed = _run(script, tmp_path, name_of(README))
    shown = next(block for block in blocks(README) if block.language == "text")
    assert is_printed(shown, printed), f"{shown}:\n{printed}"
