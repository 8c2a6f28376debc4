# make demo        the main job on this machine: a few minutes, no cluster, no GPU
# make kind        a cluster on this machine, until a job has adapted (needs kind, docker, helm, kubectl)
# make check       lint, and the tests that your change reaches: one to three minutes
# make test        lint, types, and all tests that need no testbed
# make test-all    make test, then sanitizers, mutants, fuzzing, and the tests on testbeds
# make testbeds    build what make test-all needs: Kubernetes, images, guests (docs/testbeds.md)
# make test-times  the tests that compare times; for an idle machine
# make soak        what takes hours to be worth something: many schedules, long fuzzing, new examples
# make bench       every figure of docs/benchmarks.md, but for those of faults.py
# make docs        the documentation site; a broken link fails
# make dist        sdist, wheels, chart and bill of materials into dist/, checked and tried
# make locks       pin again what images install, with hashes, in release/locks/
# Needs: Python >= 3.11 with venv, a C++20 compiler; everything else goes into .venv. The testbeds
# need more: `make testbeds` says what.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CXX_SOURCES := $(shell git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.hpp' 'tests/engine/*.cpp' 'tests/engine/*.h' 'tests/engine/*.hpp' 2>/dev/null)
ENGINE_SOURCES := $(filter csrc/%,$(CXX_SOURCES)) CMakeLists.txt
# An editable install keeps a list of packages: a new or moved one asks for another install.
PACKAGES := $(wildcard $(shell git ls-files '*/__init__.py' 2>/dev/null))

# Two of everything at most: a build must not make a small machine unusable.
export CMAKE_BUILD_PARALLEL_LEVEL ?= 2
# Compiled once, Python starts in half the time, and the tests start it a thousand times.
unexport PYTHONDONTWRITEBYTECODE
# A package index that stutters must not end a run.
export PIP_RETRIES ?= 10
export PIP_DEFAULT_TIMEOUT ?= 60
export UV_HTTP_RETRIES ?= 10
export UV_HTTP_TIMEOUT ?= 60

# uv keeps what it has unpacked, so that the second environment on a machine takes seconds, not
# minutes: torch is 6 GB. It reads no pip.conf: with an index of your own set UV_DEFAULT_INDEX, or
# make INSTALL='.venv/bin/python -m pip install'.
UV      := $(BIN)/uv
INSTALL ?= $(UV) pip install --quiet --python $(BIN)/python

# A new checkout compiles only what is new where there is ccache.
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
export CCACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/pipemorph/ccache
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1
endif

.PHONY: demo kind check test test-all test-rest test-times testbeds soak bench docs dist locks \
  lint format setup check-host clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py --out demo-out

# Another cluster: make kind FIRST_JOB='--kubeconfig FILE --registry NAME' (--help says more).
kind: $(STAMP)
	$(BIN)/python examples/kubernetes/first_job.py $(FIRST_JOB)

# tests/gate/plan.py says what the parts of a run are, docs/testbeds.md how a run is judged. A part
# of it is run with .venv/bin/python -m pytest.
check test test-times: $(STAMP)
	$(BIN)/python tests/all.py $(subst test-,,$@) $(if $(BASE),--base $(BASE))

test-all: test
	$(MAKE) --no-print-directory test-rest

# What test-all adds to test. Testbeds that are missing are built beside it.
test-rest: $(STAMP)
	$(BIN)/python tests/all.py rest

testbeds: $(STAMP)
	$(BIN)/python tests/testbeds.py

soak: $(STAMP) $(VENV)/.soak-installed
	$(BIN)/python tests/soak.py

$(VENV)/.soak-installed: $(STAMP)
	$(INSTALL) --editable '.[dev,soak]'
	touch $@

bench: $(STAMP)
	$(BIN)/python benchmarks/all.py

# Environments of their own, without torch: what they install is an extra.
EXTRA := import sys, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
  print('\n'.join(p['optional-dependencies'][sys.argv[1]]))
RUNTIME := $(EXTRA); print('\n'.join(p['dependencies']))
BUILD := import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['build-system']; \
  print('\n'.join([*p['requires'], 'cmake>=3.20', 'ninja>=1.11']))
DOCS_ENV := build/docs/venv
docs: $(DOCS_ENV)/.installed
	$(DOCS_ENV)/bin/sphinx-build --color -c docs -b html -W --keep-going -q \
	  -d build/docs/doctrees . build/docs/html
	@echo "the site is in build/docs/html"

dist: build/dist/venv/.installed
	build/dist/venv/bin/python release/dist.py $(STEPS) $(if $(ARCH),--arch $(ARCH))

build/%/venv/.installed: pyproject.toml | check-host
	$(PYTHON) -m venv build/$*/venv
	$(PYTHON) -c "$(EXTRA)" $* > build/$*/requirements.txt
	build/$*/venv/bin/python -m pip install --quiet --disable-pip-version-check \
	  -r build/$*/requirements.txt
	touch $@

# No index is named in a lock: pip takes them from whichever it is configured for.
LOCK := $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
  --no-header --no-annotate --no-emit-index-url --no-emit-find-links --no-emit-build-options
locks: $(STAMP)
	$(LOCK) pyproject.toml --extra operator -o release/locks/operator.txt
	$(LOCK) pyproject.toml --extra trainer -o release/locks/trainer-torch.txt
	$(BIN)/python -c "$(RUNTIME)" trainer | grep -v '^torch\|^numpy' | \
	  $(LOCK) -c release/locks/trainer-torch.txt -o release/locks/trainer.txt -
	echo numpy | $(LOCK) -c release/locks/trainer-torch.txt -o release/locks/numpy.txt -
	$(BIN)/python -c "$(BUILD)" | $(LOCK) -o release/locks/build.txt -

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES))

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CXX_SOURCES),$(BIN)/clang-format -i $(CXX_SOURCES))

setup: $(STAMP)

# Imported once, what every rank and the operator import is compiled. uv compiles nothing, all of it
# would take minutes, and the tests' pods and guests see the environment read-only.
IMPORTED := import pipemorph_trainer.pipeline, torch._dynamo, torch.distributed.checkpoint, \
  torch.fx.experimental.symbolic_shapes, pipemorph.local, pipemorph_operator, kopf, kubernetes
# Editable: Python sources are used in place, the engine is compiled once and again when
# its sources change.
$(STAMP): pyproject.toml $(PACKAGES) $(ENGINE_SOURCES) | check-host
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(UV) || $(BIN)/python -m pip install --quiet uv
	$(INSTALL) --editable '.[dev]'
	$(BIN)/python -c '$(IMPORTED)'
	touch $@

check-host:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "found $$($(PYTHON) --version), need Python >= 3.11: set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
	  { echo "Python has no venv module: install it (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || \
	  { echo "no C++ compiler found: install one with C++20 (Debian: apt-get install g++), or set CXX" >&2; exit 1; }

clean:
	rm -rf build dist $(VENV) demo-out out
