"""Checks of a release without making one: version, packages, and who may upload."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import yaml

import adapmixed

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# The README promises it: everything else needs an extra.
LIBRARY = {"torch", "numpy", "transformers", "peft", "safetensors", "dp-accounting", "tqdm"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def read_yaml(name: str) -> dict[Any, Any]:
    content = yaml.safe_load(read(name))
    assert isinstance(content, dict)
    return content


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "adapmixed.__version__"}
    # setuptools reads a literal without importing the package.
    line = f'\n__version__ = "{adapmixed.__version__}"\n'
    assert line in read("python/adapmixed/__init__.py")
    latest = re.search(r"^## (\S+) \((.+)\)", read("CHANGELOG.md"), re.MULTILINE)
    assert latest is not None and latest[1] == adapmixed.__version__

    citation = read_yaml("CITATION.cff")
    released = str(citation["date-released"])
    assert citation["version"] == adapmixed.__version__
    assert latest[2] in ("unreleased", released)
    entries = read("docs/references.bib")
    entry = entries[entries.index("@misc{adapmixed,") :].split("\n}", 1)[0]
    day = date.fromisoformat(released)
    for field in (f"year = {{{day.year}}}", f"month = {day:%b}".lower(), f"date = {{{released}}}"):
        assert field in entry


def test_the_library_needs_these_packages_alone() -> None:
    names = {re.split(r"[^\w-]", line)[0] for line in PROJECT["project"]["dependencies"]}
    assert names == LIBRARY


def test_the_workflow_uploads_from_a_tag_alone() -> None:
    workflow = read_yaml(".github/workflows/release.yml")
    # YAML 1.1 reads the key "on" as true.
    assert workflow[True]["push"] == {"tags": ["v*"]}
    assert workflow["permissions"] == {"contents": "read"}
    publish = workflow["jobs"]["publish"]
    assert publish["if"] == "github.ref_type == 'tag'"
    assert set(publish["needs"]) == {"sdist", "wheels"}
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "pypi"
    # The job may upload, so what it runs is pinned to a commit: a tag or a branch can move.
    upload = publish["steps"][-1]["uses"]
    assert re.fullmatch(r"pypa/gh-action-pypi-publish@[0-9a-f]{40}", upload)
    others = [job for name, job in workflow["jobs"].items() if name != "publish"]
    assert not any("permissions" in job or "environment" in job for job in others)
    assert "secrets." not in read(".github/workflows/release.yml")


def test_every_package_is_in_the_wheel() -> None:
    """`packages` lists folders by hand, so a new one must be added."""
    packages = set()
    for package, folder in (
        ("adapmixed_ext", ROOT / "adapmixed_ext"),
        ("adapmixed", ROOT / "python" / "adapmixed"),
        ("adapmixed_lab", ROOT / "python" / "adapmixed_lab"),
    ):
        for init in folder.rglob("__init__.py"):
            packages.add(".".join((package, *init.parent.relative_to(folder).parts)))
    assert packages == set(PROJECT["tool"]["setuptools"]["packages"])
