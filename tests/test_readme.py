"""The README: its Python runs, its command lines and those of docs/evaluation.md parse."""

import re
import shlex
from pathlib import Path

import pytest
from trained_demo import DEMO_ENSEMBLE

from adapmixed import cli
from adapmixed.commands.mechanisms import mechanism_of
from adapmixed.data.demo import demo_base
from adapmixed_lab import cli as laboratory

pytestmark = pytest.mark.usefixtures("demo_ensemble")

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EVALUATION = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(
    r"^ {4}(adapmixed(?:-lab)? [a-z].*)$", README + EVALUATION, flags=re.MULTILINE
)

# What a reader has to put in, and fewer tokens. Each must occur in the README.
REPLACED = {
    '"path/or/hub-name-of-the-base"': repr(str(demo_base())),
    '"path/to/ensemble"': repr(str(DEMO_ENSEMBLE)),
    "max_new_tokens=32": "max_new_tokens=3",
}


def _runnable(block: str) -> str:
    for placeholder, value in REPLACED.items():
        block = block.replace(placeholder, value)
    return block


def test_the_placeholders_are_those_of_the_readme() -> None:
    for placeholder in REPLACED:
        assert sum(block.count(placeholder) for block in BLOCKS) == 1, placeholder


def test_there_is_something_to_check() -> None:
    assert len(BLOCKS) == README.count("```python") >= 2
    assert {shlex.split(line)[1] for line in COMMANDS} >= {"evaluate", "generate", "doctor"}


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block: str) -> None:
    exec(compile(_runnable(block), "README.md", "exec"), {"__name__": "readme"})


def test_generation_ends_with_a_guarantee(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in BLOCKS if "accountant.guarantee()" in block)
    exec(compile(_runnable(block), "README.md", "exec"), {"__name__": "readme"})
    assert "ε = " in capsys.readouterr().out


def test_operators_return_what_the_block_says() -> None:
    (block,) = (block for block in BLOCKS if "adapmixed_ext.project" in block)
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), names)
    shapes = {name: tuple(names[name].shape) for name in ("public_logits", "private_logits")}
    positions, vocab = shapes["public_logits"]
    models = shapes["private_logits"][0]
    assert shapes["private_logits"] == (models, positions, vocab)
    assert tuple(names["loss"].shape) == (models, positions, 3)
    assert float((names["probabilities"].sum(-1) - 1).abs().max()) < 1e-9


@pytest.mark.parametrize("line", COMMANDS)
def test_command_lines_parse(line: str) -> None:
    program, *words = shlex.split(line)
    parser = (laboratory if program == "adapmixed-lab" else cli)._parser()
    arguments = parser.parse_args(words)
    texts = getattr(arguments, "mechanism", None) or []
    for text in [texts] if isinstance(texts, str) else texts:
        mechanism_of(text, delta=arguments.delta, epsilon=arguments.epsilon, queries=1)
