"""Imports go downwards alone, heavy packages load late, and no two classes have one name."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import adapmixed
import adapmixed_ext
from adapmixed import privacy
from adapmixed_lab.cli import PACKAGES as PACKAGES_OF_THE_LAB

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [ROOT / "adapmixed_ext", ROOT / "python" / "adapmixed", ROOT / "python" / "adapmixed_lab"]
MODULES = {
    ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in FOLDERS
    for path in folder.rglob("*.py")
}
# Parts below `adapmixed`, bottom up: each imports those before it, and of these lines one another
# not. "ext" is adapmixed_ext, "lab" adapmixed_lab.
ORDER = [
    {"limits", "errors", "rng", "files", "workers"}, {"ext"}, {"ranks", "privacy", "text"},
    {"mechanisms", "ensemble", "data"}, {"training", "generation"},
    {"serving", "evaluation", "synthesis"}, {"vllm"}, {"commands"}, {"cli"},
    {"__main__", "lab"},
]  # fmt: skip
PAGES = ("adapmixed_lab.figures.html", "adapmixed_lab.figures.synthesis")
"""The library imports these of the laboratory, when a report's page is asked for."""
FOREIGN = {
    "privacy": {"numpy", "dp_accounting"}, "ext": {"torch", "numpy"},
    "mechanisms": {"torch", "numpy"}, "rng": {"torch"}, "ranks": {"torch"}, "limits": set(),
    "errors": set(), "files": set(), "cli": set(), "__main__": set(),
}  # fmt: skip


def imports() -> Iterator[tuple[str, str, bool, bool]]:
    """Yield (module, what it imports, whether for types alone, whether at its own import)."""
    for module, path in MODULES.items():
        package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        todo: list[tuple[ast.AST, bool, bool]] = [(ast.parse(path.read_text("utf-8")), False, True)]
        while todo:
            node, types, early = todo.pop()
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield module, alias.name, types, early
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) + 1 - node.level] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                for alias in node.names:
                    name = f"{base}.{alias.name}"
                    yield module, name if name in MODULES else base, types, early
            elif isinstance(node, ast.Call) and [*map(type, node.args)] == [ast.Constant]:
                prefixes = {"import_module": "", "laboratory": "adapmixed_lab."}
                if (prefix := prefixes.get(ast.unparse(node.func).split(".")[-1])) is not None:
                    yield module, f"{prefix}{node.args[0].value}", types, early
            types |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            early &= not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            todo += [(child, types, early) for child in ast.iter_child_nodes(node)]


def part(module: str) -> str | None:
    names = module.split(".")
    if names[0] in ("adapmixed_ext", "adapmixed_lab"):
        return names[0].removeprefix("adapmixed_")
    return names[1] if names[0] == "adapmixed" and len(names) > 1 else None


def test_imports_go_downwards() -> None:
    levels = {name: level for level, names in enumerate(ORDER) for name in names}
    for module, target, types, early in imports():
        here, there, where = part(module), part(target), f"{module} imports {target}"
        if target.split(".")[0] not in ("adapmixed", "adapmixed_ext", "adapmixed_lab"):
            foreign = target.split(".")[0] not in sys.stdlib_module_names
            if here in FOREIGN and foreign:
                assert target.split(".")[0] in FOREIGN[here], where
            assert here == "lab" or target.split(".")[0] not in PACKAGES_OF_THE_LAB, where
            inside = here == "vllm" and module.count(".") > 1
            assert target.split(".")[0] != "vllm" or inside or not early or types, where
        elif here is None:  # adapmixed/__init__.py: a lazy front door to everything
            assert types or not early, where
        elif target in PAGES and here == "commands":
            assert not early, where
        elif there not in (here, None) and not types:
            assert levels[there] < levels[here], where


def test_no_cycles() -> None:
    """Imports inside functions count; type-only imports do not, as they are not executed."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for module, target, types, _ in imports():
        if target in MODULES and "." in target and not types and target != module:
            graph[module].add(target)
    tuple(TopologicalSorter(graph).static_order())  # a circle raises CycleError


def test_no_two_classes_have_one_name() -> None:
    nodes = (node for p in MODULES.values() for node in ast.walk(ast.parse(p.read_text("utf-8"))))
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(names).items() if count > 1] == []


HELP = (
    "from adapmixed.cli import main\ntry: main({})\nexcept SystemExit as end: assert not end.code"
)


@pytest.mark.parametrize(
    "statement,light",
    [
        ("import adapmixed; dir(adapmixed); adapmixed.__version__; import adapmixed.rng", True),
        (HELP.format(["evaluate", "--help"]), True),
        (HELP.format(["serve", "--help"]), True),
        ("import adapmixed_lab.cli", True),
        ("from adapmixed import Accountant, Guarantee", False),
    ],
)
def test_what_a_user_waits_for(statement: str, light: bool) -> None:
    program = (
        f"import sys\nbefore = set(sys.modules)\n{statement}\n"
        "print(*{m.split('.')[0] for m in set(sys.modules) - before})"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    loaded = set(done.stdout.splitlines()[-1].split())
    heavy = {"torch", "transformers", "tokenizers", "peft", "safetensors", "adapmixed_ext"}
    heavy |= {"dp_accounting", "matplotlib", "opacus", "datasets", "scipy", "starlette", "uvicorn"}
    assert not loaded & (heavy | ({"numpy", "prometheus_client", "tqdm"} if light else set()))
    assert loaded & {"adapmixed", "adapmixed_lab"}


def test_every_public_name_is_there() -> None:
    assert set(adapmixed.__all__) <= set(dir(adapmixed)) and len(adapmixed.__all__) <= 14
    assert len(privacy.__all__) <= 16 and len(adapmixed_ext.__all__) <= 16
    for name in adapmixed.__all__:
        assert getattr(adapmixed, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Mixture'"):
        _ = adapmixed.Mixture
