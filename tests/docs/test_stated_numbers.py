"""What pages repeat: versions of the program and of its files, costs, and an error message."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
from doc_pages import DOCS, ROOT, name_of, pages

import adapmixed

FORMATS = {
    "`ensemble.json`": "adapmixed.ensemble.manifest",
    "`shard.json`, `run.json`": "adapmixed.ensemble.member_record",
    "result file": "adapmixed.evaluation.result_file",
    "`report.json`": "adapmixed.report.view",
    "ledger": "adapmixed.privacy.ledger.records",
    "keys": "adapmixed.serving.keys",
    "used tokens of keys (`LEDGER.usage`)": "adapmixed.serving.usage",
    "plan": "adapmixed.commands.plan",
    "audit": "adapmixed_lab.audit.table",
    "experiment": "adapmixed_lab.reproduce.result",
    "`guarantee.json`": "adapmixed_lab.dp_sgd.training",
}
"""First cells of the table of file formats, and the modules whose FORMAT_VERSION it states."""


def version_of(module: str) -> int:
    return int(import_module(module).FORMAT_VERSION)


def test_each_format_is_named_once() -> None:
    found = set()
    for package in ("adapmixed", "adapmixed_lab"):
        folder = ROOT / "python" / package
        for source in folder.rglob("*.py"):
            if re.search(r"^FORMAT_VERSION = ", source.read_text(encoding="utf-8"), re.MULTILINE):
                module = source.relative_to(folder.parent).with_suffix("")
                found.add(".".join(module.parts))
    assert found == set(FORMATS.values())


def test_the_page_of_file_formats_states_the_versions_of_the_code() -> None:
    page = (DOCS / "reference" / "file-formats.md").read_text(encoding="utf-8")
    table = page[page.index("| file |") : page.index("\n\n", page.index("| file |"))]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    stated = {row[0]: int(row[2]) for row in rows}
    assert stated == {name: version_of(module) for name, module in FORMATS.items()}


def test_the_examples_of_file_formats_have_these_versions() -> None:
    page = (DOCS / "reference" / "file-formats.md").read_text(encoding="utf-8")
    ensemble = version_of(FORMATS["`ensemble.json`"])
    (example,) = re.findall(r'\{"format_version": (\d+), "base_model"', page)
    (entry,) = re.findall(r"^\| `format_version` \| (\d+) \| required", page, re.MULTILINE)
    assert int(example) == int(entry) == ensemble
    (report,) = re.findall(r'\{"format_version": (\d+), "methods"', page)
    assert int(report) == version_of(FORMATS["`report.json`"])


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_pages_name_the_version_of_the_program(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for number in re.findall(r"adapmixed[- ]v?(\d+\.\d+\.\d+)", text):
        assert number == adapmixed.__version__
    if page.name == "cite.md":
        entry = text[text.index("@misc{adapmixed,") :].split("\n}", 1)[0]
        (number,) = re.findall(r"note = \{Version ([^}]+)\}", entry)
        assert number == adapmixed.__version__


def results(name: str) -> str:
    return (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")


def test_the_costs_of_the_readme_stand_in_the_named_results() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("## What it costs") : readme.index("## What it does not")]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    assert "benchmarks/results/cpu-trunk-avx512.txt" in rows[0][0]
    assert "benchmarks/results/cpu-avx512.txt" in rows[0][0]

    trunk = results("cpu-trunk-avx512.txt")
    trunk = trunk[trunk.index("token: 1 queries") : trunk.index("token: 8 queries")]
    for row, kind in zip(rows[2:5], ("head", "last:1", r"deep \(c_attn\)"), strict=True):
        measured = re.search(rf"^  {kind} +([\d.]+ ms) .*? ([\d.]+)x   cache", trunk, re.MULTILINE)
        assert measured is not None, kind
        assert row[1] == measured[1]
        assert row[2].split(" times")[0] == measured[2]

    operators = results("cpu-avx512.txt")
    parts = {}
    for inputs in ("near", "far", "shared"):
        start = operators.index(f"speed: order 18, radius 3.6, {inputs} inputs")
        parts[inputs] = operators[start : operators.index("how many times", start)]

    def measured_in(inputs: str, program: str) -> tuple[float, float]:
        """Return the median in milliseconds and its ratio to ours."""
        line = re.search(
            rf"^  {re.escape(program)} +([\d.]+) ms .*?\] +([\d.]+)x", parts[inputs], re.MULTILINE
        )
        assert line is not None, program
        return float(line[1]), float(line[2])

    ours, _ = measured_in("near", "ours: project + leave_one_out")
    loop, _ = measured_in("near", "published algorithm, loop over models")
    newton = "smart (Newton), compiled, order constant"
    torch, times = measured_in("near", newton)
    other = sorted(measured_in(inputs, newton)[1] for inputs in ("far", "shared"))
    assert rows[5][1] == f"{ours:.2g} ms"
    assert rows[5][2].startswith(f"{loop:.0f} ms: our float32 version")
    assert rows[6][2].startswith(f"{torch:.0f} ms: the fastest torch program")
    assert f"{times:.0f} times as long" in rows[6][2]
    assert rows[6][2].endswith(f"other inputs tried {other[0]:.2g} and {other[1]:.2g} times")


def test_the_page_of_training_quotes_the_error_of_another_member() -> None:
    page = " ".join((DOCS / "how-to" / "train.md").read_text(encoding="utf-8").split())
    source = (ROOT / "python" / "adapmixed" / "training" / "retrain.py").read_text(encoding="utf-8")
    found = [page]
    for words in (
        "retrain must name the only member whose shard has changed, got ",
        ", but ",
        " would have to be trained again too",
    ):
        assert words in source
        found = found[-1].split(words, 1)
        assert len(found) == 2, words
