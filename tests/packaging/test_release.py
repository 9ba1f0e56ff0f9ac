"""Checks of a release without making one: version, citation, workflow, list of wheels."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import adapmixed

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# The README promises it: everything else needs an extra.
LIBRARY = {"torch", "numpy", "transformers", "peft", "safetensors", "dp-accounting", "tqdm"}
# Looked up on 24 November 2026: the machines that GitHub offers, and the actions' current majors.
# Before a release, look them up again: a runner that is gone fails only when the tag is pushed.
RUNNERS = {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"}
ACTIONS = {
    "actions/checkout": "v7",
    "actions/setup-python": "v7",
    "actions/upload-artifact": "v7",
    "actions/download-artifact": "v8",
}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def read_yaml(name: str) -> dict[Any, Any]:
    content = yaml.safe_load(read(name))
    assert isinstance(content, dict)
    return content


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    return read_yaml(".github/workflows/release.yml")


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def pythons() -> list[str]:
    """Return the versions that the classifiers name, such as "3.11"."""
    found = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line)
             for line in PROJECT["project"]["classifiers"]]  # fmt: skip
    return [match[1] for match in found if match]


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
    page = read("docs/how-to/cite.md")
    entry = page[page.index("@misc{adapmixed,") :].split("\n}", 1)[0]
    day = date.fromisoformat(released)
    for field in (f"year = {{{day.year}}}", f"month = {day:%b}".lower(), f"date = {{{released}}}"):
        assert field in entry


def test_the_citable_document_holds_every_page_of_the_theory() -> None:
    pattern = r"^THEORY := \S+ \$\(addsuffix \.md,(.*?)\)$"
    (listed,) = re.findall(pattern, read("Makefile"), re.M | re.S)
    pages = re.findall(r"^theory/(\S+)$", read("docs/index.md"), re.M)
    assert listed.replace("\\", "").split() == pages


def test_the_citation_names_the_software_and_the_papers() -> None:
    citation = read_yaml("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["title"] and citation["message"] and citation["authors"]
    readme = read("README.md")
    papers = citation["references"]
    named = {"2403.15638": "Differentially", "2410.02016": "Adaptively"}
    for paper, (number, kind) in zip(papers, named.items(), strict=True):
        assert paper["title"] == f"{kind} Private Next-Token Prediction of Large Language Models"
        names = [author["family-names"] for author in paper["authors"]]
        assert names == ["Flemings", "Razaviyayn", "Annavaram"] and paper["year"] == 2024
        assert paper["url"] == f"https://arxiv.org/abs/{number}"
        assert paper["url"] in readme


def test_the_library_needs_these_packages_alone() -> None:
    names = {re.split(r"[^\w-]", line)[0] for line in PROJECT["project"]["dependencies"]}
    assert names == LIBRARY


def test_the_workflow_uploads_from_a_tag_alone(workflow: dict[Any, Any]) -> None:
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


def test_the_workflow_builds_for_these_machines(workflow: dict[Any, Any]) -> None:
    matrix = workflow["jobs"]["wheels"]["strategy"]["matrix"]["include"]
    machines = {"manylinux-x86_64", "manylinux-aarch64", "macosx-arm64"}
    assert {entry["wheels"] for entry in matrix} == machines
    assert len({entry["runner"] for entry in matrix}) == 3
    settings = PROJECT["tool"]["cibuildwheel"]
    assert settings["build"] == [f"cp{version.replace('.', '')}-*" for version in pythons()]
    assert PROJECT["project"]["requires-python"] == f">={pythons()[0]}"
    for machine in ("x86_64", "aarch64"):
        assert settings["linux"][f"manylinux-{machine}-image"] == "manylinux_2_28"
    assert settings["macos"]["archs"] == ["arm64"]


def test_the_workflow_names_machines_and_actions_that_exist(workflow: dict[Any, Any]) -> None:
    jobs = workflow["jobs"].values()
    runners = {job["runs-on"] for job in jobs} - {"${{ matrix.runner }}"}
    matrix = workflow["jobs"]["wheels"]["strategy"]["matrix"]["include"]
    assert runners | {entry["runner"] for entry in matrix} == RUNNERS
    steps = [step for job in jobs for step in job["steps"] if "uses" in step]
    named = dict(step["uses"].split("@") for step in steps if step["uses"].startswith("actions/"))
    assert named == ACTIONS
    # One version of each, and the one that uploads.
    assert len({step["uses"] for step in steps}) == len(ACTIONS) + 1
    uploads = [step["with"] for step in steps if "actions/upload-artifact@" in step["uses"]]
    assert [one["if-no-files-found"] for one in uploads] == ["error", "error"]


def test_the_workflow_checks_the_symbols_of_its_wheels(workflow: dict[Any, Any]) -> None:
    steps = workflow["jobs"]["wheels"]["steps"]
    (check,) = (step for step in steps if "--check" in step.get("run", ""))
    assert check["if"] == "runner.os == 'Linux'"
    assert "scripts/build_wheels.py --check wheelhouse/*.whl" in check["run"]
    (built,) = (at for at, step in enumerate(steps) if "-m cibuildwheel" in step.get("run", ""))
    assert built < steps.index(check)
    assert steps.index(check) < len(steps) - 1  # before the upload
    # As in `make wheels`, a module shows its entry alone: the check fails without this.
    flags = PROJECT["tool"]["cibuildwheel"]["linux"]["environment"]["LDFLAGS"]
    (script_of_versions,) = re.findall(r"--version-script=/project/(\S+)", flags)
    assert (ROOT / script_of_versions).is_file()


def test_the_workflow_tries_the_wheels_with_the_pinned_torch(workflow: dict[Any, Any]) -> None:
    settings = PROJECT["tool"]["cibuildwheel"]
    assert "--constraint {project}/constraints.txt torch" in settings["before-test"]
    assert re.search(r"^torch==\S+$", read("constraints.txt"), re.MULTILINE)
    assert "constraints.txt" in read("MANIFEST.in")
    # The CPU build, if the repository's variable names an index that has it.
    assert settings["linux"]["environment-pass"] == ["PIP_EXTRA_INDEX_URL"]
    (step,) = (step for step in workflow["jobs"]["wheels"]["steps"] if "env" in step)
    assert step["env"] == {"PIP_EXTRA_INDEX_URL": "${{ vars.TORCH_CPU_INDEX }}"}


def test_the_workflow_tries_the_wheels_as_make_does(workflow: dict[Any, Any]) -> None:
    settings = PROJECT["tool"]["cibuildwheel"]
    named = re.findall(r"\{project\}/(\S+)", settings["test-command"])
    assert named == ["scripts/test_wheels.py"]
    # The wheels are built from the sdist, which must contain the scripts that try them.
    assert "sdist/*.tar.gz" in commands(workflow["jobs"]["wheels"])
    assert {"graft scripts", "graft tests"} <= set(read("MANIFEST.in").splitlines())
    module = script("test_wheels")
    assert settings["test-requires"] == list(module.TEST_PACKAGES)
    kernels = ROOT / "tests" / "kernels"
    assert all((kernels / name).exists() for name in module.COMPILING)
    # No other test in that folder needs the sources.
    needing = [path.name for path in kernels.glob("test_*.py") if "csrc'" in path.read_text()]
    assert sorted(needing) == sorted(module.COMPILING)


def test_make_builds_for_the_same_pythons(workflow: dict[Any, Any]) -> None:
    (listed,) = re.findall(r"^PYTHONS \?= (.*)$", read("Makefile"), re.MULTILINE)
    assert listed.split() == [f"python{version}" for version in pythons()]
    (build,) = re.findall(r"^build==\S+$", read("scripts/wheels/requirements.txt"), re.MULTILINE)
    assert build in commands(workflow["jobs"]["sdist"])


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"must hold one wheel for cp3\d+, found 0: make wheels"):
        script("test_wheels").wheel_of(tmp_path, sys.executable)


def test_every_package_is_in_the_wheel() -> None:
    """`packages` lists folders by hand, so a new one must be added."""
    found = set()
    for package, folder in (
        ("adapmixed_ext", ROOT / "adapmixed_ext"),
        ("adapmixed", ROOT / "python" / "adapmixed"),
        ("adapmixed_lab", ROOT / "python" / "adapmixed_lab"),
    ):
        for init in folder.rglob("__init__.py"):
            found.add(".".join((package, *init.parent.relative_to(folder).parts)))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_pythons_that_do_not_run_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A version manager's stub ends with an error."""
    stub = tmp_path / "python3.12"
    stub.write_text("#!/bin/sh\necho 'manager: python3.12: command not found' >&2\nexit 127\n")
    stub.chmod(0o755)
    runnable, missing = script("build_wheels").runnable, str(tmp_path / "python3.13")
    assert runnable([str(stub), sys.executable, missing], "json") == [sys.executable]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"left out {stub}: manager: python3.12: command not found"
    assert len(said) == 2 and said[1].startswith(f"left out {missing}: [Errno 2]")
    with pytest.raises(SystemExit, match="PYTHON must name at least one that runs and has json"):
        runnable([str(stub), missing], "json")
