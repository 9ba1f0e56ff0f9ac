# Two commands: `make demo` answers private queries with the built-in models, `make test` runs the
# whole suite. Both make .venv on first use and re-install when a compiled source has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
COMPILED := CMakeLists.txt setup.py pyproject.toml constraints.txt \
            $(shell find csrc -type f) $(wildcard adapmixed_ext/_C.pyi)
# CUDA kernels are built only where there is a GPU to run them.
export ADAPMIXED_CUDA ?= $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo AUTO || echo OFF)

# The requirements of one extra, without building the package again for them.
extra = $$($(BIN)/python -c "import tomllib; \
  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'])")

.PHONY: demo test bench lint clean

demo: $(VENV)/.installed
	$(BIN)/adapmixed demo --out report

test: $(VENV)/.test
	$(BIN)/python -m pytest -q

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.operators

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cpp')

clean:
	rm -rf build dist *.egg-info adapmixed_ext/_C*.so $(VENV)/.installed

$(VENV)/.created:
	@command -v $${CXX:-c++} >/dev/null || { echo "adapmixed needs a C++ compiler: install g++ or set CXX"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "adapmixed needs Python 3.11 or newer: set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "could not create $(VENV): install the venv module of $(PYTHON)"; exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.created $(COMPILED)
	@command -v $${CXX:-c++} >/dev/null || { echo "adapmixed needs a C++ compiler: install g++ or set CXX"; exit 1; }
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	$(PIP) install -c constraints.txt $(call extra,test)
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) install -c constraints.txt $(call extra,dev)
	@touch $@
