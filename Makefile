# The commands of the README: `make demo` and `make test` set everything up on a machine that has
# Python 3.10+, a C++17 compiler, make and git. `make help` lists the rest.

.NOTPARALLEL:
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

# Settings, each may be given on the command line or in the environment.
VENV ?= .venv
HSGD_TORCH ?= torch==2.13.0
TORCH ?=
HSGD_MPI ?= openmpi
SANITIZE ?=
PYTEST_ARGS ?=
CHAOS_FAULTS ?= 1000
SOAK_ARGS ?=
SIMULATE_ARGS ?= --limit-s 1200
FRAMEWORKS_ARGS ?=
PYTEST_WORKERS ?= 3
CHECK_BUDGET_S ?= 80
MUTATE ?= ../shared/tools/mutate.py
MUTANTS ?= 10
MUTANTS_S ?= 600
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; \
  then command -v $$p; break; fi; done)

BIN := $(abspath $(VENV))/bin
PYTEST = $(BIN)/pytest --numprocesses $(PYTEST_WORKERS) --dist loadfile --durations 20
NEAR := not (chaos or torch or bench or suites or gpu)
SHORT := not long and $(NEAR)
PIP := $(BIN)/python -m pip --disable-pip-version-check
CHANGED := $(BIN)/python tests/changed.py
CPP := $(shell find hsgd/csrc io/csrc tests benchmarks/native examples -name '*.[ch]' -o -name '*.[ch]pp')
SOURCES := setup.py pyproject.toml hsgd/launch_hook.py hsgd/jobs/launch/mpi_compiler.py $(shell find hsgd/csrc io/csrc -type f)
# The native libraries are built for the MPI of the environment and for the other one, which lies
# here; MPICH also has the standard ABI.
OTHER_MPI := $(if $(HSGD_MPI),$(if $(filter mpich,$(HSGD_MPI)),openmpi,mpich))
OTHER := $(if $(OTHER_MPI),build/mpi/$(OTHER_MPI)/.made)
# The stamp changes its name with the choice of torch and MPI.
BASE := $(VENV)/.base-$(shell echo '$(HSGD_TORCH) $(HSGD_MPI)' | cksum | cut -d ' ' -f 1)

export PATH := $(BIN):$(PATH)
export PYTHONNOUSERSITE := 1
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
# Modules are compiled when they are imported first, not all of them when they are installed.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.PHONY: help demo test test-long check bench simulate mutants lint format stub typecheck native-test sanitized-test aarch64-test aarch64-short-test pytest chaos soak test-torch test-torch-version test-bench test-gpu sanitized-test-gpu suites test-all docs worked-changes notebooks frameworks prepare prepare-test prepare-test-long wheels release clean distclean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Settings: PYTHON=, VENV=$(VENV), HSGD_TORCH='$(HSGD_TORCH)', HSGD_MPI=$(HSGD_MPI) (openmpi,"
	@echo "mpich, or empty for the mpicc on PATH), SANITIZE=thread|address|undefined (native tests),"
	@echo "PYTEST_WORKERS=$(PYTEST_WORKERS), PYTEST_ARGS, CHECK_BUDGET_S=$(CHECK_BUDGET_S), MUTANTS=$(MUTANTS), MUTATE=$(MUTATE), CHAOS_FAULTS=$(CHAOS_FAULTS), SOAK_ARGS, FRAMEWORKS_ARGS, SIMULATE_ARGS='$(SIMULATE_ARGS)'. Horovod wheels are kept in \$$HSGD_CACHE (default ~/.cache/hsgd)."

demo: $(VENV)/.demo $(VENV)/.horovod ## train ResNet-18: Horovod, its plugins hsgd-mpi and hsgd, DDP over gloo and over hsgd in turns
	$(BIN)/python examples/gain/compare.py --output demo --target-accuracy 70 </dev/null

test: export WERROR := 1
test: prepare-test lint typecheck native-test pytest ## lint, types, native tests, the quick Python tests

test-long: export WERROR := 1
test-long: prepare-test-long sanitized-test aarch64-short-test $(VENV)/.horovod ## sanitizers, aarch64, and the Python tests that take long
	$(BIN)/python setup.py --quiet fault_points
	$(PYTEST) -m 'long and $(NEAR)' $(PYTEST_ARGS)
	[ ! -e '$(MUTATE)' ] || [ -n "$$(git status --porcelain -uno)" ] || \
	  timeout --signal INT $(MUTANTS_S) $(MAKE) --no-print-directory mutants CHECK_BUDGET_S=30 || [ $$? = 124 ]

check: export WERROR := 1
check: $(VENV)/.dev $(VENV)/.horovod ## lint, types, native and unit tests of what changed, under two minutes
	$(CHANGED) python | xargs -r $(BIN)/ruff check
	$(CHANGED) python | xargs -r $(BIN)/ruff format --check
	$(CHANGED) cpp | xargs -r $(BIN)/clang-format --dry-run -Werror
	$(MAKE) --no-print-directory typecheck
	[ -z "$$($(CHANGED) native)" ] || $(BIN)/python setup.py --quiet native_test
	for program in $$($(CHANGED) native); do echo "$$program"; timeout 300 "build/native-test/$$program"; done
	$(CHANGED) pytest | xargs -r $(PYTEST) --no-loadscope-reorder --budget $(CHECK_BUDGET_S) \
	  -m '$(NEAR)' $(PYTEST_ARGS)

mutants: $(VENV)/.dev ## break MUTANTS places, one at a time; list what `make check` does not notice
	$(BIN)/python '$(MUTATE)' --kind py --count $(MUTANTS) --seed 1 --limit-s 300 \
	  --exclude '/__init__\.py$$|^hsgd/tools/cli/|\.pyi$$' --json build/mutants.json \
	  --py-tests "$(CHANGED) pytest | { grep -vE 'test_(architecture|sources)' || true; } | \
	  xargs -r $(PYTEST) -x -q --no-loadscope-reorder --budget $(CHECK_BUDGET_S) -m '$(NEAR)'"

bench: $(VENV)/.dev $(VENV)/.horovod ## measure allreduce against MPI, gloo, Horovod and DeepSpeed
	$(BIN)/python benchmarks/allreduce.py

frameworks: $(VENV)/.dev ## programs of accelerate, Lightning, PyG, torchrec, ... over gloo and over hsgd
	$(BIN)/python benchmarks/frameworks.py $(FRAMEWORKS_ARGS)

simulate: $(VENV)/.dev ## collectives on up to 1,024 simulated nodes; JSON and plot (needs SimGrid)
	$(BIN)/python setup.py --quiet simulation
	$(BIN)/python benchmarks/simulate.py --json build/simulation/simulate.json \
	  --png build/simulation/simulate.png $(SIMULATE_ARGS)

lint: $(VENV)/.dev ## check style: ruff and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/.dev ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

stub: $(VENV)/.dev ## write hsgd/_native.pyi from the native module
	$(BIN)/python -m nanobind.stubgen -q -m hsgd._native -o hsgd/_native.pyi
	$(BIN)/ruff format -q hsgd/_native.pyi

typecheck: $(VENV)/.dev ## mypy --strict, on an installed copy: at the root io/ looks like the standard library's
	rm -rf build/installed
	$(BIN)/python setup.py --quiet build_py --build-lib build/installed
	cd build/installed && $(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p hsgd

native-test: $(VENV)/.dev ## build and run tests/native/*/test_*.cpp
	$(BIN)/python setup.py --quiet native_test --sanitize='$(SANITIZE)'
	ls build/native-test/test_* | xargs -P 3 -I PROGRAM bash -c \
	  'said=$$(timeout 300 PROGRAM 2>&1); code=$$?; printf "PROGRAM\n%s\n" "$$said"; exit $$code'

aarch64-test: $(VENV)/.dev ## the native tests of aarch64 under qemu-user; some six minutes
	.ci/emulated $(BIN)/python

aarch64-short-test: $(VENV)/.dev
	.ci/emulated $(BIN)/python --short

sanitized-test: ## the native tests under the address and the thread sanitizer
	for sanitizer in address thread; do $(MAKE) --no-print-directory native-test SANITIZE=$$sanitizer; done

pytest: $(VENV)/.dev ## the quick Python tests, with several processes and nodes
	$(BIN)/python setup.py --quiet fault_points
	$(PYTEST) -m '$(SHORT)' $(PYTEST_ARGS)

chaos: $(VENV)/.dev $(VENV)/.horovod ## faults at every point, and every layout of ranks
	$(PYTEST) -m chaos $(PYTEST_ARGS)
	PYTHONPATH=$(abspath tests) $(BIN)/python -m campaigns chaos --faults $(CHAOS_FAULTS) --seed $$RANDOM --json build/chaos.json
	PYTHONPATH=$(abspath tests) $(BIN)/python -m campaigns chaos --under nodes --if-possible --faults $$(($(CHAOS_FAULTS) / 4)) --seed $$RANDOM --json build/chaos-nodes.json
	PYTHONPATH=$(abspath tests) $(BIN)/python -m campaigns chaos --under mpirun --if-possible --faults $$(($(CHAOS_FAULTS) / 4)) --seed $$RANDOM --json build/chaos-mpi.json

soak: $(VENV)/.dev ## millions of calls, thousands of communicators, an hour of training: memory must stay flat
	PYTHONPATH=$(abspath tests) $(BIN)/python -m campaigns soak --json build/soak.json $(SOAK_ARGS)

ifeq ($(TORCH),)
test-torch: $(VENV)/.dev $(VENV)/.horovod ## long training and jobs of torch, torch's own tests; TORCH=2.15.0: with that torch
	$(PYTEST) -m torch $(PYTEST_ARGS)
	for size in 3 4; do $(BIN)/python tests/c10d/suite/torch_suite.py --size $$size; done
else
# In a copy with an environment of its own: what is built here stays linked to the MPI of $(VENV).
test-torch: COPY := build/torch-$(TORCH)
test-torch: prepare
	mkdir -p $(COPY)
	git ls-files -z | tar --null --files-from=- -cf - | tar -xf - -C $(COPY)
	$(MAKE) -C $(COPY) TORCH= VENV='$(abspath .venv-torch-$(TORCH))' HSGD_TORCH='torch==$(TORCH)' test-torch-version
endif

# Without Horovod, which is built for one torch.
test-torch-version: $(VENV)/.dev
	$(PYTEST) -m '$(NEAR)' --ignore tests/torch/test_training.py $(PYTEST_ARGS) \
	  tests/c10d tests/operators tests/torch tests/launch/test_as_horovod.py
	$(BIN)/python tests/c10d/suite/torch_suite.py --size 3

test-bench: $(VENV)/.dev $(VENV)/.horovod ## a short run of each benchmark
	$(PYTEST) -m bench $(PYTEST_ARGS)

test-gpu: $(VENV)/.dev ## CUDA tensors of ranks that share a real GPU; fails where there is none
	$(BIN)/python tests/gpu/places.py
	$(BIN)/pytest -m gpu $(PYTEST_ARGS) tests/gpu

sanitized-test-gpu: $(VENV)/.dev ## some programs of test-gpu under compute-sanitizer
	PYTHONPATH=tests/support:tests/c10d $(BIN)/python tests/gpu/sanitize.py

suites: $(VENV)/.dev $(VENV)/.horovod ## the test suites of others, through hsgd
	$(PYTEST) -m suites $(PYTEST_ARGS)

test-all: test test-long chaos test-torch test-bench suites ## all of the six

wheels: $(VENV)/.release build/mpi/openmpi/.made build/mpi/mpich/.made ## wheels for manylinux_2_28, one per Python that is here, tried without a compiler
	$(BIN)/python .ci/wheels/build.py --out dist

release: $(VENV)/.release build/mpi/openmpi/.made build/mpi/mpich/.made ## the same and the source distribution, also tried, with their metadata checked
	rm -rf dist
	$(BIN)/python .ci/wheels/build.py --out dist --source
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/conda/render.py

docs: $(VENV)/.dev ## the site, in build/site: pages, reference from the sources, links checked
	rm -rf build/site build/installed
	$(BIN)/python setup.py --quiet build_py --build-lib build/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

worked-changes: $(VENV)/.dev ## build and test the worked change of the pages, in a copy
	$(BIN)/python tests/worked_changes.py

notebooks: $(VENV)/.dev ## run the notebooks of docs/ and keep what they print
	$(BIN)/jupyter-nbconvert --to notebook --execute --inplace docs/notebooks/*.ipynb

prepare:
	@[ -n '$(PYTHON)' ] || { echo 'no Python 3.10 or newer on PATH; install one, or give PYTHON=/path/to/python3' >&2; exit 1; }
	@.ci/prepare '$(PYTHON)'

prepare-test prepare-test-long:
	@[ -z '$(PYTHON)' ] || .ci/prepare '$(PYTHON)' $(@:prepare-%=--%)

$(BASE): | prepare
	[ -x $(BIN)/python ] || '$(PYTHON)' -m venv $(VENV)
	$(PIP) install --no-compile 'setuptools>=77,<81' wheel 'nanobind>=2.4' '$(HSGD_TORCH)' $(HSGD_MPI)
	rm -f $(VENV)/.base-*
	touch $@

build/mpi/%/.made: | $(BASE)
	$(PIP) install --no-compile --ignore-installed --no-deps --no-warn-script-location --prefix build/mpi/$* $*
	touch $@

$(VENV)/.demo: $(BASE) $(SOURCES)
	$(PIP) install --no-compile --no-build-isolation -e '.[demo]'
	touch $@

$(VENV)/.dev: $(BASE) $(OTHER) $(SOURCES)
	$(PIP) install --no-compile --no-build-isolation -e '.[dev]'
	touch $@ $(VENV)/.demo

$(VENV)/.release: $(VENV)/.dev
	$(PIP) install --no-compile --no-build-isolation -e '.[dev,release]'
	touch $@

$(VENV)/.horovod: $(BASE) hsgd/jobs/launch/horovod_wheel.py hsgd/jobs/launch/mpi_compiler.py
	$(BIN)/python hsgd/jobs/launch/horovod_wheel.py --install
	touch $@

clean: ## remove what was built, not the environment or the cache
	rm -rf build demo .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	rm -f hsgd/*.so hsgd/_build.json $(VENV)/.demo $(VENV)/.dev

distclean: clean ## remove the environments as well
	rm -rf $(VENV) .venv-torch-*
