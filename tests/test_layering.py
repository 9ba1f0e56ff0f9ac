"""The allowed imports between packages, which go one way, read from every module's statements."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from adapmixed_lab.cli import PACKAGES as PACKAGES_OF_THE_LAB

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "adapmixed_ext": ROOT / "adapmixed_ext",
    "adapmixed": ROOT / "python" / "adapmixed",
    "adapmixed_lab": ROOT / "python" / "adapmixed_lab",
}

# Part -> parts it may import. A part is a module or package directly below `adapmixed`; a module
# of a part may always import its own part. "ext" is adapmixed_ext, "lab" adapmixed_lab, of which
# the library imports `PAGE` alone, inside a function.
BELOW_GENERATION = {"ext", "limits", "errors", "ranks", "ensemble", "mechanisms", "privacy", "rng"}
BELOW_REPORT = BELOW_GENERATION | {"generation", "evaluation", "data", "training", "files"}
BELOW_COMMANDS = BELOW_REPORT | {"report", "workers", "serving", "vllm"}
IMPORTS: dict[str, set[str]] = {
    "ext": {"limits"},
    "limits": set(),
    "errors": set(),
    "rng": set(),
    "files": set(),
    "workers": set(),
    "ranks": {"ext", "errors"},
    "privacy": {"limits", "errors", "files"},
    "mechanisms": {"limits", "ext", "privacy"},  # of privacy, costs and events only: see below
    "ensemble": {"limits", "ext", "ranks", "files"},
    "data": set(),
    "training": {"limits", "ext", "ranks", "ensemble", "data", "rng", "files", "workers"},
    "generation": BELOW_GENERATION,
    "serving": BELOW_GENERATION | {"generation", "files"},
    "vllm": BELOW_GENERATION | {"files", "serving"},
    "evaluation": BELOW_GENERATION | {"generation", "files"},
    "report": BELOW_REPORT,
    "commands": BELOW_COMMANDS,
    "cli": BELOW_COMMANDS | {"commands"},
    "__main__": {"cli"},
    "lab": BELOW_COMMANDS | {"commands", "cli"},
}
PAGE = ("adapmixed.commands.options", "adapmixed_lab.figures.html")
"""The module that draws the report's page when it is asked for, and what it draws it with."""
PRIVACY_FOR_MECHANISMS = {
    f"adapmixed.privacy{name}"
    for name in (
        "",  # its events
        ".costs.clipped_log_pool",
        ".costs.clipped_mixing",
        ".conversions",
        ".events",
        ".planner",  # a plan becomes a mechanism
        ".costs.pmixed",
    )
}

# Parts whose foreign imports are part of the contract.
FOREIGN = {
    "privacy": {"numpy", "dp_accounting"},
    "limits": set(),
    "errors": set(),
    "rng": {"torch"},
    "ranks": {"torch"},
    "mechanisms": {"torch", "numpy"},
    "ext": {"torch"},
    "files": set(),
    "__main__": set(),
    "cli": set(),
}

# The order inside adapmixed_ext, bottom up.
EXT_ORDER = [
    "_C", "types", "_registry", "_tensors", "inputs", "low_rank", "_project", "_clip", "_log_pool",
    "_mixture", "_leave_one_out", "_screen", "_renyi", "_sample", "__init__",
]  # fmt: skip
# The reference imports none of these, and none of these imports it.
REFERENCE_ORDER = [
    f"reference.{name}"
    for name in (
        "_renyi", "_project", "_clip", "_mixture", "_log_pool", "_sample", "_leave_one_out",
        "_screen", "_low_rank",
    )
] + ["reference"]  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One imported module, and the way it is imported."""

    target: str
    line: int
    for_types: bool  # under TYPE_CHECKING: never executed
    at_import: bool  # executed when the importing module is


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _resolve(module: str, path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - (node.level - 1)]
    return ".".join([*base, *((node.module or "").split(".") if node.module else [])])


@cache
def imports(module: str) -> tuple[Import, ...]:
    """Return every import statement of a module, wherever it stands."""
    path = modules()[module]
    found: list[Import] = []

    def visit(node: ast.AST, for_types: bool, at_import: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append(Import(alias.name, node.lineno, for_types, at_import))
        elif isinstance(node, ast.ImportFrom):
            base = _resolve(module, path, node)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                submodule = name in modules() or name == "adapmixed_ext._C"
                target = name if submodule else base
                found.append(Import(target, node.lineno, for_types, at_import))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                visit(child, True, at_import)
            for child in node.orelse:
                visit(child, for_types, at_import)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                visit(child, for_types, at_import and not inside)

    visit(ast.parse(path.read_text(encoding="utf-8"), str(path)), False, True)
    return tuple(found)


def part(module: str) -> str | None:
    """Return the part of a module; None for the root package and for foreign modules."""
    if module.split(".")[0] in ("adapmixed_ext", "adapmixed_lab"):
        return module.split(".")[0].removeprefix("adapmixed_")
    parts = module.split(".")
    return parts[1] if parts[0] == "adapmixed" and len(parts) > 1 else None


def ours(target: str) -> bool:
    return target.split(".")[0] in PACKAGES


def all_imports() -> Iterator[tuple[str, Import, str]]:
    """Yield (module, one of its imports, where it stands)."""
    for module, path in modules().items():
        for used in imports(module):
            yield module, used, f"{path}:{used.line} imports {used.target}"


def test_doors() -> None:
    for module, used, where in all_imports():
        here, there = part(module), part(used.target)
        if not ours(used.target):
            continue
        if here is None:  # adapmixed/__init__.py: a lazy front door to everything
            assert used.for_types or not used.at_import, where
            continue
        if there is None:  # `from adapmixed import __version__`
            assert here in ("cli", "commands", "ranks", "report", "__main__"), where
            continue
        if (module, used.target) == PAGE:
            assert not used.at_import, where
            continue
        assert there == here or there in IMPORTS[here], where
        if here == "mechanisms" and there == "privacy":
            assert used.target in PRIVACY_FOR_MECHANISMS, where


def test_foreign_imports() -> None:
    for module, used, where in all_imports():
        top = used.target.split(".")[0]
        if part(module) in FOREIGN and not ours(used.target):
            assert top in sys.stdlib_module_names or top in FOREIGN[part(module) or ""], where


def test_vllm_is_imported_inside_vllm_alone() -> None:
    inside = {f"adapmixed.vllm.{name}" for name in ("engine", "executor", "self_test")}
    for module, used, where in all_imports():
        if used.at_import and not used.for_types and module not in inside:
            assert used.target.split(".")[0] != "vllm" and used.target not in inside, where


def test_the_library_needs_no_package_of_the_laboratory() -> None:
    for module in (m for m in modules() if part(m) != "lab"):
        for used in imports(module):
            where = f"{modules()[module]}:{used.line} imports {used.target}"
            assert used.target.split(".")[0] not in PACKAGES_OF_THE_LAB, where


def test_order_inside_the_operators() -> None:
    for module in (m for m in modules() if part(m) == "ext"):
        name = module.partition(".")[2] or "__init__"
        order = REFERENCE_ORDER if name.split(".")[0] == "reference" else EXT_ORDER
        for used in imports(module):
            if part(used.target) != "ext":
                continue
            below = used.target.partition(".")[2]
            where = f"{module}:{used.line} imports {used.target}"
            assert below in order, where
            assert order.index(below) < order.index(name), where


def test_no_cycles() -> None:
    """Imports inside functions count; type-only imports do not, as they are not executed."""
    graph = {
        module: {
            i.target
            for i in imports(module)
            if i.target in modules() and not i.for_types and i.target not in PACKAGES
        }
        - {module}
        for module in modules()
    }
    # A package's __init__ imports its own modules, which are reached through it, so only the
    # modules' own imports count.
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


HELP = """
from adapmixed.cli import main
try:
    main({arguments})
except SystemExit as ended:
    assert not ended.code
"""


def loaded_after(statement: str) -> set[str]:
    """Return the top-level packages that a statement loads in a new interpreter."""
    # An editable install may import packages of its own at the start.
    program = (
        f"import sys\nbefore = set(sys.modules)\n{statement}\n"
        "print(*{m.split('.')[0] for m in set(sys.modules) - before})"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    return set(output.splitlines()[-1].split())


@pytest.mark.parametrize(
    "statement,light",
    [
        ("import adapmixed; dir(adapmixed); adapmixed.__version__; import adapmixed.rng", True),
        (HELP.format(arguments=["evaluate", "--help"]), True),
        (HELP.format(arguments=["serve", "--help"]), True),
        ("import adapmixed_lab.cli", True),
        ("from adapmixed import Accountant, Guarantee", False),
        ("from adapmixed.evaluation import read_result", False),
    ],
)
def test_what_a_user_waits_for(statement: str, light: bool) -> None:
    loaded = loaded_after(statement)
    heavy = {"torch", "transformers", "tokenizers", "peft", "safetensors", "adapmixed_ext"}
    heavy |= {"dp_accounting", "matplotlib", "opacus", "datasets", "scipy", "starlette", "uvicorn"}
    if light:
        heavy |= {"numpy", "prometheus_client", "tqdm"}
    assert not loaded & heavy
    assert loaded & {"adapmixed", "adapmixed_lab"}


@pytest.mark.slow
def test_operators_and_mechanisms_do_not_load_models() -> None:
    loaded = loaded_after("import adapmixed_ext, adapmixed.mechanisms, adapmixed.generation")
    assert "torch" in loaded
    assert not loaded & {"adapmixed_lab", "transformers", "peft", "matplotlib"}


def test_every_public_name_is_there() -> None:
    import adapmixed

    assert set(adapmixed.__all__) <= set(dir(adapmixed))
    for name in adapmixed.__all__:
        assert getattr(adapmixed, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Mixture'"):
        _ = adapmixed.Mixture
