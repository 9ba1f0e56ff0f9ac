"""The contents of the sdist and of a wheel made from it; the wheel works in another place."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import adapmixed

pytestmark = pytest.mark.slow  # they compile the module

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "adapmixed_ext": ROOT / "adapmixed_ext",
    "adapmixed": ROOT / "python" / "adapmixed",
    "adapmixed_lab": ROOT / "python" / "adapmixed_lab",
}

SMOKE = """
import pathlib, sys, torch
import adapmixed, adapmixed_ext
from adapmixed.data import demo_base
home = pathlib.Path(sys.argv[1]).resolve()
for module in (adapmixed, adapmixed_ext):
    assert home in pathlib.Path(module.__file__).resolve().parents, module.__file__
assert demo_base().is_dir()
assert adapmixed_ext.build_info()["cuda"] is False  # nobody asked for it
torch.manual_seed(0)
public = torch.randn(2, 1000)
private = public + 0.5 * torch.randn(5, 2, 1000)
projection = adapmixed_ext.project(private, public, order=18, radius=0.5)
mixed = adapmixed_ext.mixture(private, public, projection)
loss = adapmixed_ext.leave_one_out(private, public, projection, orders=18)
assert 0 < float(projection.weight.min()) < 1
assert float((mixed.sum(-1) - 1).abs().max()) < 1e-12
assert 0 < float(loss.min()) < float(loss.max()) < 0.5
print("ok")
"""


def _run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    # Variables of the test run must not reach the build.
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "ADAPMIXED_CUDA")}
    done = subprocess.run(command, cwd=cwd, env=clean | (env or {}), capture_output=True, text=True)
    output = done.stdout + done.stderr
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} failed:\n{output}")
    return output


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist and, from the unpacked sdist, a wheel, both with build isolation.

    The compiler does not optimise, which takes most of the time and changes no file's name.
    """
    folder = tmp_path_factory.mktemp("dist")
    fast = {"CMAKE_ARGS": "-DCMAKE_CXX_FLAGS_RELEASE=-O0"}
    _run(sys.executable, "-m", "build", "--outdir", str(folder), ".", cwd=ROOT, env=fast)
    return folder


def _wheel(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def _tracked(folder: Path) -> set[str]:
    """Return the files below a folder that git knows, or all of them without git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "."], cwd=folder, capture_output=True, text=True
    )
    if listed.returncode == 0 and listed.stdout:
        names = [name for name in listed.stdout.split("\0") if name]
        return {name for name in names if (folder / name).exists()}
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }


def test_the_wheel_contains_the_packages_and_nothing_else(distributions: Path) -> None:
    expected = {
        f"{package}/{name}" for package, folder in PACKAGES.items() for name in _tracked(folder)
    }
    with zipfile.ZipFile(_wheel(distributions)) as wheel:
        names = {n for n in wheel.namelist() if ".dist-info/" not in n}
    compiled = {n for n in names if n.startswith("adapmixed_ext/_C.") and n.endswith(".so")}
    assert len(compiled) == 1
    assert names - compiled == expected
    assert {"adapmixed/py.typed", "adapmixed_ext/py.typed"} <= names
    assert any(n.startswith("adapmixed/assets/demo/base/model") for n in names)


def test_torch_is_no_build_requirement() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    requires = text.split("[build-system]")[1].split("build-backend")[0]
    assert "torch" not in requires


def test_the_compiled_module_links_no_torch(distributions: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(_wheel(distributions)) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(".so"))
        wheel.extract(name, tmp_path)
    assert b"libtorch" not in (tmp_path / name).read_bytes()
    assert b"libc10" not in (tmp_path / name).read_bytes()


# -P and PYTHONPATH keep the repository and an editable install out of the way.
def test_the_wheel_works_elsewhere(distributions: Path, tmp_path: Path) -> None:
    site = str(tmp_path / "site")
    install = ["-m", "pip", "install", "-q", "--no-deps", "--target", site]
    _run(sys.executable, *install, str(_wheel(distributions)), cwd=tmp_path)
    output = _run(sys.executable, "-P", "-c", SMOKE, site, cwd=tmp_path, env={"PYTHONPATH": site})
    assert output.strip().endswith("ok")


def test_the_sdist_carries_sources_and_no_binaries(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    assert {"CMakeLists.txt", "csrc/common/operators.h", "README.md"} <= names
    assert {f"csrc/project/{name}" for name in ("search.h", "cpu.cpp", "cuda.cu")} <= names
    assert {"tests/kernels/test_operators.py", "constraints.txt", "LICENSE"} <= names
    assert {"scripts/test_wheels.py", "tests/conftest.py", "CITATION.cff"} <= names
    assert sdist.name == f"adapmixed-{adapmixed.__version__}.tar.gz"
    assert not any(n.endswith((".so", ".pyc")) for n in names)


def test_cuda_on_fails_in_words_without_a_compiler(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ADAPMIXED_CUDA=ON but no CUDA compiler was found"):
        _run(
            sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", str(tmp_path), str(ROOT),
            cwd=tmp_path, env={"ADAPMIXED_CUDA": "ON", "CUDACXX": str(tmp_path / "nvcc")},
        )  # fmt: skip
