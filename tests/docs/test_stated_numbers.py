"""What pages repeat: versions of the program and of its files."""

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


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_pages_name_the_version_of_the_program(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for number in re.findall(r"adapmixed[- ]v?(\d+\.\d+\.\d+)", text):
        assert number == adapmixed.__version__
