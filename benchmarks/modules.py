"""Does another build of the compiled module answer alike, and as fast as the installed one?

    python -m benchmarks.modules NAME=PATH...                 # 100 models, 50 257 tokens
    python -m benchmarks.modules NAME=PATH... --out PREFIX    # also PREFIX.txt and PREFIX.json
    python -m benchmarks.modules NAME=PATH... --quick         # tiny sizes: does everything run?

A PATH is a `_C*.so` for this Python, of another compiler or out of a wheel. On each instruction set
of this machine, every operator runs with every module on the same inputs. The answers are compared
in every bit. With AVX-512 and AVX2 the modules are timed, too. They take turns in one run.
A ratio is the median over the turns of a module's time divided by the installed module's, so that
other load on the machine falls on both.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.machinery import ExtensionFileLoader
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import _C
from adapmixed_ext._registry import Backend, backends
from benchmarks.harness import Query, Report, headline, machine
from benchmarks.inputs import KINDS, make_query

INSTALLED = "installed"
INSTRUCTION_SETS = ("avx512", "avx2", "scalar")
ORDER, RADIUS = 18.0, 0.5
SAMPLES = 32  # draws of one timed call: one takes less than the clock should be trusted with


class FixedRandom:
    """A source that gives every call the same randomness."""

    def reserve(self) -> tuple[Tensor, int]:
        """Return the key and the counter."""
        return torch.arange(32, dtype=torch.uint8), 1


def load(name: str, path: Path) -> Any:
    """Import a compiled module under a name of its own."""
    loader = ExtensionFileLoader(f"{name}._C", str(path))
    spec = importlib.util.spec_from_file_location(f"{name}._C", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def operators(query: Query) -> dict[str, Callable[[], Any]]:
    """Return every operator as a call on this query, by name."""
    projection = adapmixed_ext.project(*query, order=ORDER, radius=RADIUS)
    pool = {"lower": -0.25, "upper": 1.0, "scale": 2.0}
    mixed = adapmixed_ext.mixture(*query, projection)

    def draw() -> Tensor:
        for _ in range(SAMPLES):
            token = adapmixed_ext.sample(mixed, query[1], rng=FixedRandom())
        return token

    return {
        "project": lambda: adapmixed_ext.project(*query, order=ORDER, radius=RADIUS),
        "leave_one_out": lambda: adapmixed_ext.leave_one_out(*query, projection, orders=ORDER),
        "log_pool": lambda: adapmixed_ext.log_pool(*query, **pool),
        "mixture": lambda: adapmixed_ext.mixture(*query, projection),
        "clip_project": lambda: adapmixed_ext.clip_project(
            *query, lower=0.5, upper=2.0, orders=[ORDER]
        ),
        f"sample, {SAMPLES} draws": draw,
    }


def tensors(answer: Any) -> list[Tensor]:
    """Return the tensors of one answer."""
    if isinstance(answer, Tensor):
        return [answer]
    fields = getattr(answer, "_fields", None) or vars(answer)
    return [t for t in (getattr(answer, name) for name in fields) if isinstance(t, Tensor)]


def take_turns(calls: Mapping[str, Callable[[], Any]], runs: int) -> tuple[float, dict[str, float]]:
    """Time the calls in turn.

    Returns:
        The median seconds of the installed module, and for each other module the median over the
        turns of its time divided by the installed module's in the same turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(runs):
        names = list(calls)
        for name in names if turn % 2 else reversed(names):
            calls[name]()
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    base = seconds.pop(INSTALLED)
    ratios = {name: statistics.median(map(truediv, times, base)) for name, times in seconds.items()}
    return statistics.median(base), ratios


def compare(modules: Mapping[str, Any], models: int, vocab: int, runs: int, report: Report) -> bool:
    """Time all modules on all inputs; return whether every answer agreed in every bit."""
    places = {
        name: Backend(module.cpu, lambda like, memory: torch.get_num_threads(), True)
        for name, module in modules.items()
    }

    def on(name: str, call: Callable[[], Any]) -> Any:
        backends["cpu"] = places[name]
        return call()

    same = True
    report.say(f"  {'':32}{'ms':>9}" + "".join(f"{name:>12}" for name in list(modules)[1:]))
    for isa in INSTRUCTION_SETS:
        if not all(module.use_instruction_set(isa) for module in modules.values()):
            report.say(f"  {isa}: not every module has it on this machine")
            continue
        for kind in KINDS:
            for operator, call in operators(make_query(models, vocab, kind=kind)).items():
                answers = {name: tensors(on(name, call)) for name in modules}
                differing = [
                    name
                    for name, answer in answers.items()
                    if not all(map(torch.equal, answer, answers[INSTALLED]))
                ]
                same = same and not differing
                if differing:
                    report.say(f"  {isa}, {kind}, {operator}: other bits of {', '.join(differing)}")
                if isa == "scalar":
                    continue  # nobody waits for it on a machine that has another
                base, ratios = take_turns({name: partial(on, name, call) for name in modules}, runs)
                report.say(
                    f"  {isa + ', ' + kind + ', ' + operator:32}{1e3 * base:9.3f}"
                    + "".join(f"{ratio:11.2f}x" for ratio in ratios.values())
                )
                report.tables.setdefault("modules", []).append(
                    {
                        "instruction_set": isa, "kind": kind, "operator": operator,
                        "installed": base, "runs": runs, "ratios": ratios, "differing": differing,
                    }
                )  # fmt: skip
    return same


def main() -> int:
    """Compare the modules of the command line; exit status 1 if an answer differs."""
    parser = argparse.ArgumentParser(description="compare builds of the compiled module")
    parser.add_argument("modules", nargs="*", metavar="NAME=PATH", help="other builds")
    parser.add_argument("--out", help="prefix of the .txt and the .json")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    modules = {INSTALLED: _C}
    for given in parsed.modules:
        name, _, path = given.partition("=")
        modules[name] = load(name, Path(path))
    about = machine()
    report = Report()
    report.say(headline(about))
    for name, module in modules.items():
        report.say(f"{name}: compiled by {module.compiler}")
    models, vocab, runs = (4, 300, 2) if parsed.quick else (100, 50257, 41)
    report.say(f"{models} models, {vocab} tokens, fp32, medians of {runs} calls\n")
    same = compare(modules, models, vocab, runs, report)
    report.say(f"\n  {'all answers agree in every bit' if same else 'SOME ANSWERS DIFFER'}")
    if parsed.out:
        content = {"machine": about, "quick": parsed.quick, "same": same, "tables": report.tables}
        Path(f"{parsed.out}.txt").write_text("\n".join(report.lines) + "\n", encoding="utf-8")
        Path(f"{parsed.out}.json").write_text(
            json.dumps(content, indent=1) + "\n", encoding="utf-8"
        )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
